// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

// lost: a VF comes back though what DEL would go by is lost, and not from a pod
// that meanwhile has it.
func (n *node) lost(t *testing.T) {
	vf := n.vfs[0]
	conf := n.conf(t, "lost", map[string]any{"mac": "02:00:00:00:00:78"})
	for _, c := range []struct{ name, lose, call string }{
		{"the namespace", "ip netns del lost", "del"},
		{"the journal", "rm " + dataDir + "/devices/*.json", "del"},
		{"the record", "rm -r " + dataDir + "/attachments", "del"},
		{"the result", "rm -r /run/libcni", "del"},
		{"namespace and journal", "ip netns del lost; rm " + dataDir + "/devices/*.json", "del"},
		{"the call", "rm -r /run/libcni", "gc"},
		{"call, namespace and journal", "rm -r /run/libcni; ip netns del lost; rm " + dataDir + "/devices/*.json", "gc"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n.unchanged(t)
			p := n.addPod(t, "lost")
			p.must("add", conf, "net1", vf.PCI)
			n.sh(t, c.lose)
			p.must(c.call, conf, "net1", vf.PCI)
			p.must("del", conf, "net1", vf.PCI) // once more, and the address that GC has no say in
		})
	}
	t.Run("another pod has it", func(t *testing.T) {
		n.unchanged(t)
		first, second := n.addPod(t, "first"), n.addPod(t, "second")
		first.must("add", conf, "net1", vf.PCI)
		first.must("del", conf, "net1", vf.PCI)
		second.add(conf, "net1", vf.PCI)
		first.must("del", conf, "net1", vf.PCI)
		second.must("check", conf, "net1", vf.PCI)
	})
	t.Run("its next sandbox gets it", func(t *testing.T) {
		n.unchanged(t)
		first, second := n.addPod(t, "first"), n.addPod(t, "second")
		second.of = first.of
		first.must("add", conf, "net1", vf.PCI)
		second.add(conf, "net1", vf.PCI)
		first.must("del", conf, "net1", vf.PCI) // at last
		second.must("check", conf, "net1", vf.PCI)
	})
	t.Run("no MAC is assigned", func(t *testing.T) {
		n.unchanged(t)
		n.choseMAC(t, vf)
		// Where the PF has assigned one, the driver takes no other.
		n.sh(t, fmt.Sprintf(`own=$(cat /sys/class/net/%[1]s/address)
			ip link set %[1]s down
			ip link set %[1]s address 02:00:00:00:00:79
			ip link set %[1]s address $own up`, vf.NetDev))
	})
	t.Run("another PF", func(t *testing.T) {
		n.unchanged(t)
		conf := n.conf(t, "another", map[string]any{"pfNames": []string{"pf0"}})
		p := n.addPod(t, "another")
		for i := range vfsPerPF {
			p.add(conf, fmt.Sprintf("net%d", i), n.vfs[i].PCI)
		}
		if c := p.call("add", conf, "net9", n.vfs[vfsPerPF].PCI); c.Error == nil || !strings.Contains(c.Error.Error(), "pf1") {
			t.Errorf("ADD of a VF of another PF: %v", c.Error)
		}
	})
}

// killed: the plugin is killed after each of its steps, and the next call leaves
// the host as it was. The ways to bring it back take turns.
func (n *node) killed(t *testing.T) {
	recoveries := map[string]string{
		"add": "del,gc,del-without-netns,del-without-journal",
		"del": "del,del-without-netns", // GC does not know which DELs were not completed
	}
	mode := n.mode()
	fields := map[string]any{
		"type": "smcr-cni-crash", "mode": mode, "vlan": 7, "trust": "on", "spoofchk": "off",
		"capabilities": map[string]bool{"deviceID": true, "mac": true},
	}
	if mode == "move" {
		fields["mtu"] = 2000 // which an interface that is up loses its carrier by, for a while
		// Soft RoCE that dies and comes back with each step would be most of the time.
		n.removeRXE(t)
		t.Cleanup(func() { n.addRXE(t) })
	}
	conf := n.conf(t, "killed", fields)
	for _, command := range []string{"add", "del"} {
		crashes := drive[[]report.Crash](
			t, n, "crash", "-conf", conf, "-devices", n.devices(), "-data-dir", dataDir,
			"-container", "killed-"+command, "-command", command, "-recover", recoveries[command],
		)
		if len(crashes) < minSteps {
			t.Errorf("%s: %s in mode %s has only %d steps", n.Name(), command, mode, len(crashes))
		}
		steps := make([]string, 0, len(crashes))
		for _, c := range crashes {
			steps = append(steps, c.Step)
			if c.Error != "" || len(c.Differences) > 0 {
				t.Errorf("%s: %s in mode %s was killed after step %d, %s; %s: %q, and differs:\n%s", n.Name(), command, mode, c.After, c.Step,
					c.Recovery, c.Error, strings.Join(c.Differences, "\n"))
			}
		}
		t.Logf("%s: %s in mode %s was killed after each of: %s", n.Name(), command, mode, strings.Join(steps, ", "))
	}
}

// igbvfClose is igbvf's warning about an interface that is set down while the driver is
// being reset, as it is when its PF comes or goes.
var igbvfClose = regexp.MustCompile(`WARNING: .* igbvf_close`)

// pfGoesDown: the PF of a VF goes down while ADD is at work, early or late, or before
// DEL. Whatever they say, the VF is as it was when the PF is back.
//
// In a kernel whose pods get the interface itself this cannot be tried: see docs/vf.md.
func (n *node) pfGoesDown(t *testing.T) {
	// An IPAM plugin works beside the kernel, so what it does comes in the middle.
	n.sh(t, `cat >/run/bin/pf-down <<'END'
#!/bin/sh
if [ "$CNI_COMMAND" = ADD ] && [ -e /run/pf-down ]; then sleep $(cat /run/pf-down); ip link set pf0 down; fi
exec /run/bin/host-local
END
chmod +x /run/bin/pf-down`)
	t.Cleanup(func() { n.lab.ForgiveComplaints(igbvfClose) })
	vf := n.vfs[0]
	conf := n.conf(t, "pfdown", map[string]any{
		"vlan": 7, "mac": "02:00:00:00:00:7b",
		"ipam": map[string]any{"type": "pf-down", "dataDir": "/run/ipam", "ranges": [][]map[string]string{{{"subnet": "10.1.0.0/24"}}}},
	})
	add := func(t *testing.T, p *pod) {
		t.Helper()
		switch c := p.call("add", conf, "net1", vf.PCI); {
		case c.Error == nil:
			t.Log("ADD succeeds")
		case c.Error.Code == 0:
			t.Errorf("an error without a code: %v", c.Error)
		default:
			t.Log(c.Error)
		}
	}
	for _, delay := range []string{"0", "0.05", "0.1", "0.2", "0.5"} {
		t.Run("after "+delay, func(t *testing.T) {
			n.unchanged(t)
			p := n.addPod(t, "pfdown")
			n.sh(t, "echo "+delay+" >/run/pf-down")
			add(t, p)
			n.sh(t, "rm /run/pf-down; "+pfUp)
			p.must("del", conf, "net1", vf.PCI)
		})
	}
	t.Run("before DEL", func(t *testing.T) {
		n.unchanged(t)
		p := n.addPod(t, "pfdown")
		p.must("add", conf, "net1", vf.PCI)
		n.sh(t, "ip link set pf0 down")
		if c := p.call("del", conf, "net1", vf.PCI); c.Error != nil {
			t.Log(c.Error)
		}
		n.sh(t, pfUp)
		p.must("del", conf, "net1", vf.PCI)
	})
}

// minSteps is fewer than a call has that wires a VF or takes it back.
const minSteps = 8

// devices are the VFs as the driver takes them.
func (n *node) devices() string {
	var ids []string
	for _, vf := range n.vfs {
		ids = append(ids, vf.PCI)
	}
	return strings.Join(ids, ",")
}

// churnPods is how many pods each node has: a hundred in sum. To make soft RoCE in
// a pod again takes longer than to make an ipvlan interface.
var churnPods = [...]int{25, 75}

// churnParallel is how many a node has at a time: one for each VF.
const churnParallel = 4

// churn: many pods, some with a rival that wants their VF; what they leave is what
// was there.
func (s *suite) churn(t *testing.T) {
	s.both(t, func(t *testing.T, n *node) {
		c := drive[report.Churn](
			t, n, "churn", "-conf", n.conf(t, "churn", nil), "-container", "churn", "-data-dir", dataDir,
			"-devices", n.devices(), "-pods", fmt.Sprint(churnPods[n.index]), "-parallel", fmt.Sprint(churnParallel), "-rivals", "5",
		)
		for _, e := range append(c.Errors, c.Differences...) {
			t.Errorf("%s, mode %s: %s", n.Name(), n.mode(), e)
		}
		t.Logf("%s, mode %s: %d pods, ADD takes %.2f s, at most %.2f; DEL %.2f s, at most %.2f", n.Name(), n.mode(), len(c.Del),
			report.Quantile(c.Add, 0.5), report.Quantile(c.Add, 1), report.Quantile(c.Del, 0.5), report.Quantile(c.Del, 1))
	})
}

// reboot: nothing of what pods had is left; DEL of such a pod says so, and pods
// get VFs again.
func (n *node) reboot(t *testing.T) {
	conf := n.conf(t, "reboot", map[string]any{"mac": "02:00:00:00:00:7a"})
	before := n.addPod(t, "before")
	before.must("add", conf, "net1", n.vfs[0].PCI)
	if err := n.Reset(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.setUp(t)
	n.unchanged(t)
	before.must("del", conf, "net1", n.vfs[0].PCI)
	after := n.addPod(t, "after")
	after.add(conf, "net1", n.vfs[0].PCI)
	after.must("check", conf, "net1", n.vfs[0].PCI)
}
