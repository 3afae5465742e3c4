// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceinfo"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// before is a plugin that runs before smcr-cni. Its result has an interface, which it did not make.
const before = `case "$CNI_COMMAND" in
ADD) cat >/dev/null; echo '{"cniVersion":"1.1.0","interfaces":[{"name":"br0"},{"name":"eth0","sandbox":"'$CNI_NETNS'"}],"ips":[{"interface":1,"address":"10.99.9.2/24","gateway":"10.99.9.1"}],"routes":[{"dst":"10.99.9.1/32"}]}';;
*) cat >/dev/null;;
esac
`

// other is a plugin that made another interface.
const other = `case "$CNI_COMMAND" in
ADD) cat >/dev/null; echo '{"cniVersion":"1.1.0","interfaces":[{"name":"lan0","sandbox":"'$CNI_NETNS'"}],"ips":[{"interface":0,"address":"10.99.9.2/24"}],"dns":{"domain":"lan"}}';;
*) cat >/dev/null;;
esac
`

// addresses is an IPAM plugin that gives the first interface 10.97.1.2 and others 10.97.2.2, and writes down for
// which interface it was asked.
const addresses = `cat >/dev/null
net=1; [ "$CNI_IFNAME" = eth0 ] || net=2
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME" >> "$(dirname "$0")/calls"
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion":"1.1.0","ips":[{"address":"10.97.'$net'.2/24"}]}'
`

// TestWire_behindAnother: smcr-cni adds its interface to a result that has another one.
func TestWire_behindAnother(t *testing.T) {
	needWiring(t)
	path := []string{scriptIPAM(t, "ks-other", other), scriptIPAM(t, "ks-ipam", addresses)}
	n, run := newWiringNode(t, path, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[{"type":"ks-other"},
		{"type":"smcr-cni","dataDir":"$DATA","deviceID":"0000:41:10.0","ipam":{"type":"ks-ipam"}}]}`)
	rt := runtimeConf("c1", newNS(t))
	res := n.add(t, rt)
	if len(res.Interfaces) != 2 || res.Interfaces[0].Name != "lan0" || res.Interfaces[1].PciID != "0000:41:10.0" || res.DNS.Domain != "lan" {
		t.Errorf("result %+v, want both interfaces", res)
	}
	if len(res.IPs) != 2 || *res.IPs[0].Interface != 0 || *res.IPs[1].Interface != 1 {
		t.Errorf("addresses %+v", res.IPs)
	}
	n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	run.host.home(t)
}

// TestChained_namesDevice: chained after the plugin that makes the device's interface, smcr-cni only records the
// device.
func TestChained_namesDevice(t *testing.T) {
	needWiring(t)
	path := []string{scriptIPAM(t, "ks-before", before)}
	vf0 := AttachedDevice{
		ID: "0000:41:10.0", PCI: "0000:41:10.0", RDMA: []string{"rocep65s0v0"}, NetDev: "ens1v0", PF: "ens1", PFPCI: "0000:41:00.0",
		NUMANode: 1, Rail: 1, Mode: "chained",
	}
	for _, tt := range []struct {
		name, conf string
		want       []AttachedDevice
		code       uint
		text       string
	}{
		{name: "a VF", conf: `"deviceID":"0000:41:10.0"`, want: []AttachedDevice{vf0}},
		{name: "shared by pods", conf: `"deviceID":"soft0/3"`, want: []AttachedDevice{{ID: "soft0", VF: -1, NUMANode: -1, Rail: -1, Mode: "chained"}}},
		{name: "unknown", conf: `"deviceID":"0000:ff:00.1"`},
		{name: "unknown, required", conf: `"deviceID":"0000:ff:00.1","required":true`, code: CodeDevice, text: "smcrctl devices"},
		{name: "setting for another's interface", conf: `"deviceID":"0000:41:10.0","vlan":5`, code: 7, text: "vlan"},
		{name: "addresses for another's interface", conf: `"deviceID":"0000:41:10.0","ipam":{"type":"static"}`, code: 7, text: "ipam"},
		{name: "setting without a device", conf: `"trust":"on"`, code: 7, text: "deviceID"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, run := newWiringNode(t, path, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[{"type":"ks-before"},
				{"type":"smcr-cni","dataDir":"$DATA",`+tt.conf+`}]}`)
			rt := runtimeConf("c1", newNS(t))
			if tt.code != 0 {
				addFails(t, n, run, rt, tt.code, tt.text)
				return
			}
			n.add(t, rt)
			a, err := n.store.Get("c1", "eth0")
			must(t, err)
			if diff := cmp.Diff(tt.want, a.Devices, equalPrefixes); diff != "" {
				t.Error(diff)
			}
			run.host.home(t)
			n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
			n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
		})
	}
}

// TestWire_claims: devices that the pod claimed become further interfaces.
func TestWire_claims(t *testing.T) {
	needWiring(t)
	ipamDir := scriptIPAM(t, "ks-ipam", addresses)
	n, run := newWiringNode(t, []string{scriptIPAM(t, "ks-before", before), ipamDir}, `{"cniVersion":"1.1.0","name":"podnet","plugins":[
		{"type":"ks-before"},{"type":"smcr-cni","dataDir":"$DATA","ipam":{"type":"ks-ipam"}}]}`)
	must(t, claims.NewStore(n.data).Write(claims.Claim{
		Namespace: "shop", Name: "nic", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: "u1"}},
		Devices: []claims.Device{
			{ID: "0000:41:10.1", Request: "nic", Pool: "n1", Name: "a", IfName: "roce0"},
			{ID: "soft0", Request: "nic", Pool: "n1", Name: "b", Shared: true},
			{ID: "0000:41:10.0", Request: "nic", Pool: "n1", Name: "c"},
		},
	}))
	rt := runtimeConf("c1", newNS(t))
	res := n.add(t, rt)
	var names []string
	for _, it := range res.Interfaces {
		names = append(names, it.Name)
	}
	if diff := cmp.Diff([]string{"br0", "eth0", "roce0", "smcr1"}, names); diff != "" {
		t.Error(diff)
	}
	a, err := n.store.Get("c1", "eth0")
	must(t, err)
	if len(a.IPs) != 1 || len(a.Devices) != 2 || a.Devices[0].IfName != "roce0" || a.Devices[0].Mode != "move" || len(a.Devices[1].IPs) != 1 {
		t.Errorf("record %+v", a)
	}
	if _, err := os.Stat("/sys/class/net/roce0"); err == nil {
		t.Error("the device is in the test's own namespace")
	}
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	run.host.home(t)
	calls, err := os.ReadFile(filepath.Join(ipamDir, "calls"))
	must(t, err)
	if diff := cmp.Diff("ADD c1 roce0\nADD c1 smcr1\nDEL c1 roce0\nDEL c1 smcr1\n", string(calls)); diff != "" {
		t.Errorf("calls of the IPAM plugin: %s", diff)
	}
}

// TestWire_sharedClaim: two pods share a claim. The claim's VF goes to the first pod, and to the second pod only
// after the first ended. A pod that the claim does not name, or not yet, starts without the VF.
func TestWire_sharedClaim(t *testing.T) {
	needWiring(t)
	ipamDir := scriptIPAM(t, "ks-ipam", addresses)
	n, run := newWiringNode(t, []string{scriptIPAM(t, "ks-before", before), ipamDir}, `{"cniVersion":"1.1.0","name":"podnet","plugins":[
		{"type":"ks-before"},{"type":"smcr-cni","dataDir":"$DATA","ipam":{"type":"ks-ipam"}}]}`)
	claim := claims.Claim{
		Namespace: "shop", Name: "nic", UID: "c-1", Pods: []records.Pod{{Namespace: "shop", Name: "cart-0", UID: "u1"}},
		Devices: []claims.Device{
			{ID: "0000:41:10.0", Request: "nic", Pool: "n1", Name: "a"}, {ID: "soft0", Request: "soft", Pool: "n1", Name: "b", Shared: true},
		},
	}
	store := claims.NewStore(n.data)
	must(t, store.Write(claim))
	first, second := runtimeConf("c1", newNS(t)), runtimeConf("c2", newNS(t))
	second.Args[len(second.Args)-1][1] = "u2"
	del := func(rt *libcni.RuntimeConf) {
		t.Helper()
		n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	}
	devices := func(id string) int {
		t.Helper()
		a, err := n.store.Get(id, "eth0")
		must(t, err)
		return len(a.Devices)
	}
	n.add(t, first)
	n.add(t, second)
	if x, y := devices("c1"), devices("c2"); x != 1 || y != 0 {
		t.Errorf("the pod of the claim has %d devices, the one that it does not name %d", x, y)
	}
	del(second)

	claim.Pods = append(claim.Pods, records.Pod{Namespace: "shop", Name: "cart-1", UID: "u2"})
	must(t, store.Write(claim))
	err := n.ns.Do(func() error { _, err := n.cni.AddNetworkList(t.Context(), n.list, second); return err })
	var ce *types.Error
	if !errors.As(err, &ce) || ce.Code != CodeDeviceBusy {
		t.Errorf("ADD of the second pod: %v, want code %d", err, CodeDeviceBusy)
	}
	if w := run.host.owners["0000:41:10.0"]; w.Owner.ContainerID != "c1" {
		t.Errorf("the VF is of container %q", w.Owner.ContainerID)
	}
	del(second)
	del(first)
	n.add(t, second) // as kubelet, which tries again
	if w := run.host.owners["0000:41:10.0"]; w.Owner.ContainerID != "c2" || devices("c2") != 1 {
		t.Errorf("the VF is of container %q, which has %d devices", w.Owner.ContainerID, devices("c2"))
	}
	del(second)
	run.host.home(t)
}

// TestWire_dhcp: the plugin dhcp finds the interface in the pod.
func TestWire_dhcp(t *testing.T) {
	needWiring(t)
	dir := scriptIPAM(t, "dhcp", `cat >/dev/null
		[ "$CNI_COMMAND" = ADD ] || exit 0
		nsenter --net="$CNI_NETNS" ip link show dev "$CNI_IFNAME" up >&2 || exit 1
		echo '{"cniVersion":"1.1.0","ips":[{"address":"10.97.1.2/24"}]}'`)
	n, run := newWiringNode(t, []string{dir}, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[
		{"type":"smcr-cni","dataDir":"$DATA","deviceID":"0000:41:10.0","ipam":{"type":"dhcp"}}]}`)
	rt := runtimeConf("c1", newNS(t))
	if res := n.add(t, rt); len(res.IPs) != 1 {
		t.Errorf("result %+v", res)
	}
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	run.host.home(t)
}

func TestDeviceInfo(t *testing.T) {
	needWiring(t)
	const conf = `{"cniVersion":"1.1.0","name":"rocenet","plugins":[
		{"type":"smcr-cni","dataDir":"$DATA","capabilities":{"deviceID":true,"CNIDeviceInfoFile":true,"mac":true}}]}`
	const written = `{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:41:10.0","rdma-device":"rocep65s0v0","pf-pci-address":"0000:41:00.0"}}`
	const copied = `{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:41:10.0","rdma-device":"mlx5_7","vhost-net":"/dev/vhost-net"}}`
	for _, tt := range []struct {
		name      string
		file      string // what the runtime put into the attachment's file
		dp        string // what the device plugin says
		rdma      []string
		wantFile  string
		wantError string
	}{
		{name: "nobody said anything", rdma: []string{"rocep65s0v0"}, wantFile: written},
		{name: "the runtime copied it", file: copied, rdma: []string{"rocep65s0v0"}, wantFile: copied},
		{name: "the device plugin has it", dp: copied, rdma: []string{"mlx5_7"}, wantFile: strings.Replace(written, "rocep65s0v0", "mlx5_7", 1)},
		{
			name: "about another device", file: `{"type":"pci","pci":{"pci-address":"0000:41:10.6"}}`, rdma: []string{"rocep65s0v0"},
			wantFile: `{"type":"pci","pci":{"pci-address":"0000:41:10.6"}}`, wantError: "is about 0000:41:10.6",
		},
		{name: "junk", file: `{"type":`, rdma: []string{"rocep65s0v0"}, wantFile: `{"type":`, wantError: "parse device-info file"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, run := newWiringNode(t, nil, conf)
			if tt.rdma[0] == "mlx5_7" { // a device whose RDMA device the host does not see
				run.host.hideRDMA = true
			}
			file := filepath.Join(deviceinfo.CNIDir, fmt.Sprintf("kube-smcr-test-%x-device.json", rand.Uint64()))
			t.Cleanup(func() { must(t, deviceinfo.Remove(file)) })
			if tt.file != "" {
				must(t, os.MkdirAll(filepath.Dir(file), 0o755))
				must(t, os.WriteFile(file, []byte(tt.file), 0o600))
			}
			if tt.dp != "" {
				must(t, os.WriteFile(filepath.Join(run.devInfoDir, "example.com-roce-0000:41:10.0-device.json"), []byte(tt.dp), 0o600))
			}
			rt := runtimeConf("c1", newNS(t))
			rt.CapabilityArgs = map[string]any{"deviceID": "0000:41:10.0", "CNIDeviceInfoFile": file, "mac": "02:00:00:00:00:07"}
			n.add(t, rt)
			got, err := os.ReadFile(file)
			must(t, err)
			if diff := cmp.Diff(tt.wantFile, string(got)); diff != "" {
				t.Error(diff)
			}
			if !strings.Contains(run.said(), tt.wantError) {
				t.Errorf("said %q, want %q", run.said(), tt.wantError)
			}
			a, err := n.store.Get("c1", "eth0")
			must(t, err)
			if diff := cmp.Diff(tt.rdma, a.Devices[0].RDMA); diff != "" {
				t.Error(diff)
			}
			if w := run.host.owners["0000:41:10.0"]; w.Settings.MAC == nil || *w.Settings.MAC != "02:00:00:00:00:07" {
				t.Errorf("settings %+v, want the runtime's MAC", w.Settings)
			}
			n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
			run.host.home(t)
			if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("device-info file after DEL: %v, want none", err)
			}
		})
	}
}

// TestWire_gcAndStatus: GC takes back the devices of forgotten pods, those of this network only. STATUS returns
// an error when no device is left.
func TestWire_gcAndStatus(t *testing.T) {
	needWiring(t)
	ipamDir := scriptIPAM(t, "ks-ipam", addresses)
	conf := func(name string) string {
		return `{"cniVersion":"1.1.0","name":"` + name + `","plugins":[{"type":"smcr-cni","dataDir":"$DATA","reportStatus":true,
			"agentSocket":"$SOCKET","pfNames":["0000:41:00.0"],"capabilities":{"deviceID":true},"ipam":{"type":"ks-ipam"}}]}`
	}
	socket := answerAll(t)
	n, run := newWiringNode(t, []string{ipamDir}, strings.ReplaceAll(conf("rocenet"), "$SOCKET", socket))
	second, err := libcni.ConfListFromBytes([]byte(strings.NewReplacer("$SOCKET", socket, "$DATA", n.data).Replace(conf("othernet"))))
	must(t, err)
	status := func() error { return n.ns.Do(func() error { return n.cni.GetStatusNetworkList(t.Context(), n.list) }) }
	must(t, status())
	with := func(id, device string) *libcni.RuntimeConf {
		rt := runtimeConf(id, newNS(t))
		rt.CapabilityArgs = map[string]any{"deviceID": device}
		return rt
	}
	n.add(t, with("c1", "0000:41:10.0"))
	must(t, status())
	n.do(t, func(ctx context.Context) error {
		_, err := n.cni.AddNetworkList(ctx, second, with("c2", "0000:41:10.1"))
		return err
	})
	var ce *types.Error
	if err := status(); !errors.As(err, &ce) || ce.Code != types.ErrPluginNotAvailable || !strings.Contains(err.Error(), "no VF is free") {
		t.Errorf("STATUS: %v, want code %d", err, types.ErrPluginNotAvailable)
	}
	gc := func(valid ...types.GCAttachment) {
		t.Helper()
		n.do(t, func(ctx context.Context) error {
			return n.cni.GCNetworkList(ctx, n.list, &libcni.GCArgs{ValidAttachments: valid})
		})
	}
	gc(types.GCAttachment{ContainerID: "c1", IfName: "eth0"})
	if len(run.host.owners) != 2 {
		t.Errorf("GC took back a device of a valid attachment or another network: %v", run.host.owners)
	}
	former := n.list
	withFields(`"later":1,"vlan":"5"`)(t, n, nil)
	gc(types.GCAttachment{ContainerID: "c9", IfName: "eth0"})
	n.list = former
	if _, ok := run.host.owners["0000:41:10.0"]; ok || len(run.host.owners) != 1 {
		t.Errorf("after GC: %v, want othernet's", run.host.owners)
	}
	must(t, status())
	calls, err := os.ReadFile(filepath.Join(ipamDir, "calls"))
	must(t, err)
	for _, verb := range []string{"GC", "STATUS"} {
		if !strings.Contains(string(calls), verb+" ") {
			t.Errorf("the IPAM plugin was not called with %s: %q", verb, calls)
		}
	}
}

// TestWire_del: DEL takes back all that is left of an attachment, whichever part was lost before.
func TestWire_del(t *testing.T) {
	needWiring(t)
	ipamDir := scriptIPAM(t, "ks-ipam", addresses)
	for _, tt := range []struct {
		name string
		lose func(t *testing.T, n *node, rt *libcni.RuntimeConf)
		code uint // of the error, if there is one
	}{
		{name: "nothing is lost", lose: func(*testing.T, *node, *libcni.RuntimeConf) {}},
		{name: "record", lose: func(t *testing.T, n *node, _ *libcni.RuntimeConf) { must(t, n.store.Delete("c1", "eth0")) }},
		{name: "path of the namespace", lose: func(_ *testing.T, _ *node, rt *libcni.RuntimeConf) { rt.NetNS = "" }},
		{name: "IPAM plugin", code: 7, lose: func(t *testing.T, n *node, _ *libcni.RuntimeConf) {
			n.cni.Path = []string{t.TempDir()}
		}},
		{name: "data directory", lose: func(t *testing.T, n *node, _ *libcni.RuntimeConf) { must(t, os.RemoveAll(n.data)) }},
		{name: "the version that knows a field", lose: withFields(`"later":1`)},
		{name: "the version that knows a value", lose: withFields(`"mode":"later"`)},
		{name: "a VLAN that there is", lose: withFields(`"vlan":5000`)},
		{name: "a VLAN that is a number", lose: withFields(`"vlan":"5"`)},
		{name: "the VLAN of a priority", lose: withFields(`"vlanQoS":3`)},
		{name: "a MAC that an interface can have", lose: withFields(`"runtimeConfig":{"mac":"01:00:5e:00:00:01"}`)},
		{name: "a device that there may be", lose: withFields(`"runtimeConfig":{"deviceID":"no device"}`)},
		{name: "a time that can be waited", lose: withFields(`"agentTimeoutMilliseconds":-1`)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, run := newWiringNode(t, []string{ipamDir}, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[
				{"type":"smcr-cni","dataDir":"$DATA","deviceID":"0000:41:10.0","ipam":{"type":"ks-ipam"}}]}`)
			rt := runtimeConf("c1", newNS(t))
			n.add(t, rt)
			must(t, os.RemoveAll(filepath.Join(ipamDir, "calls")))
			tt.lose(t, n, rt)
			err := n.ns.Do(func() error { return n.cni.DelNetworkList(t.Context(), n.list, rt) })
			var ce *types.Error
			if tt.code != 0 && (!errors.As(err, &ce) || ce.Code != tt.code) || tt.code == 0 && err != nil {
				t.Errorf("DEL: %v, want code %d", err, tt.code)
			}
			run.host.home(t)
			calls, err := os.ReadFile(filepath.Join(ipamDir, "calls"))
			if tt.code == 0 && string(calls) != "DEL c1 eth0\n" {
				t.Errorf("calls of the IPAM plugin %q, %v, want one DEL", calls, err)
			}
			if _, err := n.store.Get("c1", "eth0"); !errors.Is(err, ErrNoAttachment) {
				t.Errorf("record after DEL: %v", err)
			}
		})
	}
}

// withFields gives the network's configuration further fields, before those that it has.
func withFields(fields string) func(*testing.T, *node, *libcni.RuntimeConf) {
	return func(t *testing.T, n *node, _ *libcni.RuntimeConf) {
		t.Helper()
		var err error
		n.list, err = libcni.ConfListFromBytes(bytes.Replace(n.list.Bytes, []byte(`"type":"smcr-cni",`), []byte(`"type":"smcr-cni",`+fields+`,`), 1))
		must(t, err)
	}
}

// TestWire_delRefused: a runtime takes a pod off whose ADD was refused for a value of the configuration, by a DEL with the same value.
func TestWire_delRefused(t *testing.T) {
	needWiring(t)
	for _, fields := range []string{
		`"vlan":5000`, `"vlan":"5"`, `"vlanQoS":3`, `"mode":"later"`, `"deviceID":"no device"`, `"deviceID":5`, `"runtimeConfig":{"mac":"01:00:5e:00:00:01"}`,
		`"runtimeConfig":"x"`, `"required":"yes"`, `"agentTimeoutMilliseconds":-1`,
	} {
		t.Run(fields, func(t *testing.T) {
			n, run := newWiringNode(t, nil, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[{"type":"smcr-cni","dataDir":"$DATA",`+fields+`}]}`)
			rt := runtimeConf("c1", newNS(t))
			addFails(t, n, run, rt, 7)
			n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
			if !strings.Contains(run.said(), "which ADD refuses") {
				t.Errorf("said %q", run.said())
			}
		})
	}
}

// TestWire_takenBack: an agent that has heard of a pod by an ADD that is taken back hears of its end before the device leaves the pod.
func TestWire_takenBack(t *testing.T) {
	needWiring(t)
	var mu sync.Mutex
	var got []string
	log := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, what)
	}
	socket := agentThat(t, func(e Event) string {
		log(e.Verb + " " + e.ContainerID + " " + e.IfName)
		if e.Verb == "ADD" {
			return "503 Service Unavailable"
		}
		return "204 No Content"
	})
	n, run := newWiringNode(t, nil, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[
		{"type":"smcr-cni","dataDir":"$DATA","deviceID":"0000:41:10.0","required":true,"agentSocket":"`+socket+`"}]}`)
	run.host.detaches = func() { log("detach") }
	addFails(t, n, run, runtimeConf("c1", newNS(t)), types.ErrTryAgainLater, "503")
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff([]string{"ADD c1 eth0", "DEL c1 eth0", "detach"}, got); diff != "" {
		t.Errorf("what happened (-want +got):\n%s", diff)
	}
}

// TestHasInterface: whose interface it is decides who makes it.
func TestHasInterface(t *testing.T) {
	for _, tt := range []struct {
		name, prev string
		want       bool
	}{
		{"no result", `null`, false},
		{"empty result", `{}`, false},
		{"in the pod", `{"interfaces":[{"name":"eth0","sandbox":"/x"}]}`, true},
		{"in the host", `{"interfaces":[{"name":"eth0"}]}`, false},
		{"another one", `{"interfaces":[{"name":"eth1","sandbox":"/x"}]}`, false},
		{"only addresses", `{"ips":[{"address":"10.1.1.1/24"}]}`, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := ParseNetConf([]byte(`{"cniVersion":"1.0.0","name":"n","type":"smcr-cni","prevResult":` + tt.prev + `}`))
			must(t, err)
			if got := c.hasInterface("eth0"); got != tt.want {
				t.Errorf("%v, want %v", got, tt.want)
			}
		})
	}
}

var _ Host = vf.Host{} // the machine itself

// answerAll is an agent that accepts every request.
func answerAll(t *testing.T) string {
	t.Helper()
	return agentThat(t, func(Event) string { return "204 No Content" })
}

// agentThat is an agent that answers each request with a status.
func agentThat(t *testing.T, status func(Event) string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.sock")
	l, err := net.Listen("unix", path)
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b := make([]byte, maxAnswerBytes)
			n, _ := c.Read(b) // the request comes in one piece
			var e Event
			_, body, _ := bytes.Cut(b[:n], []byte("\r\n\r\n"))
			if err := json.Unmarshal(body, &e); err != nil {
				t.Errorf("request %q: %v", b[:n], err)
			}
			_, _ = io.WriteString(c, "HTTP/1.1 "+status(e)+"\r\n\r\n")
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { must(t, l.Close()); <-done })
	return path
}
