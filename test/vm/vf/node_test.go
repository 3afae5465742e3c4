// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

const (
	// patience bounds what is waited for in a guest, which is slow, and slower if
	// others work on this machine.
	patience = 2 * time.Minute

	// longPatience is for a driver that makes many calls.
	longPatience = 10 * time.Minute

	// backWithin is for what the kernel gives back after a namespace is gone, in its own time.
	backWithin = 30 * time.Second

	// pollEvery is the pause between two looks.
	pollEvery = 200 * time.Millisecond

	// dataDir is where plugin and agent meet.
	dataDir = "/run/smcr"

	vfsPerPF = 2
)

// kernels are those of the nodes: the first can have a VF with soft RoCE in a pod,
// the second has to keep it in the host.
var kernels = [...]image.Kernel{image.NetNS, image.SMC}

// module is this project.
const module = "github.com/smcr-io/kube-smcr"

// A node is a guest with VFs.
type node struct {
	*lab.Guest
	lab   *lab.Lab
	index int
	vfs   []lab.VF // of all PFs
}

// setUp makes the VFs, and soft RoCE on each: rxe0 and so on. They are up.
//
// It and sh are for cleanups too, when the test's context has ended.
func (n *node) setUp(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	// In guests that are up there is what a test before left.
	n.sh(t, fmt.Sprintf("rm -rf %[1]s /run/ipam /run/libcni; mkdir -p %[1]s; for ns in $(ls /run/netns); do ip netns del $ns; done", dataDir))
	n.vfs = nil
	for pf := range 2 {
		vfs, err := n.MakeVFs(ctx, n.PF(pf), vfsPerPF)
		if err != nil {
			t.Fatal(err)
		}
		n.vfs = append(n.vfs, vfs...)
	}
	n.sh(t, "modprobe -a ib_uverbs rdma_rxe ipvlan")
	for _, vf := range n.vfs {
		n.sh(t, fmt.Sprintf("ip link set %s mtu 4200 up", vf.NetDev))
	}
	n.addRXE(t)
}

// addRXE makes soft RoCE on each VF.
func (n *node) addRXE(t *testing.T) {
	t.Helper()
	for i, vf := range n.vfs {
		n.sh(t, fmt.Sprintf("rdma link add rxe%d type rxe netdev %s", i, vf.NetDev))
	}
	n.eventually(t, "all soft RoCE devices are active", func() error {
		out, err := n.Run(context.WithoutCancel(t.Context()), "rdma", "link")
		if active := strings.Count(out, "state ACTIVE"); err == nil && active < len(n.vfs) {
			err = fmt.Errorf("%d of %d are: %s", active, len(n.vfs), out)
		}
		return err
	})
}

// removeRXE leaves the VFs without RDMA devices.
func (n *node) removeRXE(t *testing.T) {
	t.Helper()
	for i := range n.vfs {
		n.sh(t, fmt.Sprintf("rdma link delete rxe%d", i))
	}
}

// sh runs a script, which must succeed.
func (n *node) sh(t *testing.T, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	out, err := n.Shell(ctx, script)
	if err != nil {
		t.Fatalf("%v\n%s%s", err, out, n.log(t))
	}
	return strings.TrimSpace(out)
}

// log is what the agent said last.
func (n *node) log(t *testing.T) string {
	t.Helper()
	out, err := n.Shell(context.WithoutCancel(t.Context()), "tail -n 30 /run/agent.log 2>/dev/null || true")
	if err != nil {
		return err.Error()
	}
	if out == "" {
		return ""
	}
	return fmt.Sprintf("the agent of %s says:\n%s", n.Name(), out)
}

// eventually looks until it sees what it waits for.
func (n *node) eventually(t *testing.T, what string, look func() error) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(pollEvery) { // polls what it was told
		err := look()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %s: %v\n%s", n.Name(), what, err, n.log(t))
		}
	}
}

// mode is the way of wiring that is the best on the node's kernel, for a VF with
// soft RoCE. It is what a configuration without one gets.
func (n *node) mode() string {
	if kernels[n.index] == image.NetNS {
		return "move"
	}
	return "ipvlan"
}

// conf writes the configuration of a network whose plugin is ours alone, as that
// of Multus, with these fields besides, and returns its path. It is always the same
// network, so that no two pods have one address.
func (n *node) conf(t *testing.T, name string, fields map[string]any) string {
	t.Helper()
	first, last := 10+100*n.index, 99+100*n.index
	plugin := map[string]any{
		"type": "smcr-cni", "dataDir": dataDir, "agentTimeoutMilliseconds": 1000, "capabilities": map[string]bool{"deviceID": true},
		"ipam": map[string]any{
			"type": "host-local", "dataDir": "/run/ipam",
			"ranges": [][]map[string]string{{{
				"subnet": "10.1.0.0/24", "rangeStart": fmt.Sprintf("10.1.0.%d", first), "rangeEnd": fmt.Sprintf("10.1.0.%d", last),
			}}},
		},
	}
	maps.Copy(plugin, fields)
	text, err := json.MarshalIndent(map[string]any{"cniVersion": "1.1.0", "name": "vf", "plugins": []any{plugin}}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	file := fmt.Sprintf("%s-%s.conflist", name, n.Name())
	if err := os.WriteFile(filepath.Join(n.lab.Share(), file), text, 0o600); err != nil {
		t.Fatal(err)
	}
	return "/host/" + file
}

// drive runs the driver and decodes what it says.
func drive[T any](t *testing.T, n *node, args ...string) T {
	t.Helper()
	var result T
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), longPatience)
	defer cancel()
	out, err := n.Run(ctx, append([]string{"driver"}, args...)...)
	if err == nil {
		err = json.Unmarshal([]byte(out), &result)
	}
	if err != nil {
		t.Errorf("driver %s: %v", strings.Join(args, " "), err)
	}
	return result
}

// host is the state of the node that must be the same afterwards.
func (n *node) host(t *testing.T) report.Host {
	t.Helper()
	return drive[report.Host](t, n, "host", "-data-dir", dataDir)
}

// unchanged fails the test unless the host is as before when it ends.
func (n *node) unchanged(t *testing.T) {
	t.Helper()
	before := n.host(t)
	t.Cleanup(func() {
		// Carriers and what depends on them come back a moment later.
		n.eventuallySame(t, before)
	})
}

func (n *node) eventuallySame(t *testing.T, before report.Host) {
	t.Helper()
	for end := time.Now().Add(backWithin); ; time.Sleep(pollEvery) { // polls the state of the host
		differences := before.Differences(n.host(t))
		if len(differences) == 0 {
			return
		}
		if t.Failed() || time.Now().After(end) {
			for _, d := range differences {
				t.Errorf("%s afterwards: %s", n.Name(), d)
			}
			return
		}
	}
}

// A pod is a network namespace with interfaces of a network each.
type pod struct {
	*node
	t    *testing.T
	name string // of its sandbox
	of   string // the pod that the sandbox is of
}

// addPod makes the namespace, and removes it with the test.
func (n *node) addPod(t *testing.T, name string) *pod {
	t.Helper()
	n.sh(t, "ip netns add "+name+"; ip -n "+name+" link set lo up")
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		if _, err := n.Shell(ctx, "[ ! -e /run/netns/"+name+" ] || ip netns del "+name); err != nil {
			t.Error(err)
		}
	})
	return &pod{node: n, t: t, name: name, of: name}
}

// call makes a call for an interface of the pod.
func (p *pod) call(command, conf, ifName, device string) report.Call {
	p.t.Helper()
	return drive[report.Call](
		p.t, p.node, "call", "-conf", conf, "-container", p.name, "-pod", p.of, "-if", ifName, "-device", device, command,
	)
}

// must makes a call that must succeed.
func (p *pod) must(command, conf, ifName, device string) report.Call {
	p.t.Helper()
	c := p.call(command, conf, ifName, device)
	if c.Error != nil {
		p.t.Fatalf("%s of %s of %s: %v", command, device, p.name, c.Error)
	}
	return c
}

// add gives the pod a device until the test ends, and returns its address.
func (p *pod) add(conf, ifName, device string) (address string) {
	p.t.Helper()
	c := p.must("add", conf, ifName, device)
	p.t.Cleanup(func() { p.del(conf, ifName, device) })
	var result types100.Result
	if err := json.Unmarshal(c.Result, &result); err != nil || len(result.IPs) == 0 {
		p.t.Fatalf("the result of ADD has no address: %s, %v", c.Result, err)
	}
	return result.IPs[0].Address.IP.String()
}

// del takes the device from the pod, also when the test's context has ended.
func (p *pod) del(conf, ifName, device string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.t.Context()), patience)
	defer cancel()
	out, err := p.Run(ctx, "driver", "call", "-conf", conf, "-container", p.name, "-if", ifName, "-device", device, "del")
	var c report.Call
	if err == nil {
		err = json.Unmarshal([]byte(out), &c)
	}
	if err == nil && c.Error != nil {
		err = c.Error
	}
	if err != nil {
		p.t.Errorf("DEL of %s of %s: %v", device, p.name, err)
	}
}

// sh runs a script in the pod's namespace, which must succeed.
func (p *pod) sh(script string) string {
	p.t.Helper()
	out, err := p.try(script)
	if err != nil {
		p.t.Fatalf("%v\n%s%s", err, out, p.log(p.t))
	}
	return out
}

func (p *pod) try(script string) (string, error) {
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	out, err := p.Run(ctx, "ip", "netns", "exec", p.name, "bash", "-euc", script)
	return strings.TrimSpace(out), err
}
