// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// needWiring is what the tests of wiring need.
func needWiring(t *testing.T) {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("go"), testenv.Program("sh"))
}

// newWiringNode is a node with two VFs and the plugins in path.
func newWiringNode(t *testing.T, path []string, list string) (*node, *runHere) {
	t.Helper()
	n := newNode(t, nil, list)
	run := &runHere{host: newFakeHost(t, n.ns, testVF(0), testVF(1)), devInfoDir: t.TempDir()}
	n.cni = libcni.NewCNIConfigWithCacheDir(path, t.TempDir(), run)
	return n, run
}

// tell writes an IPAM plugin that is a shell script, and returns its directory.
func scriptIPAM(t *testing.T, name, script string) string {
	t.Helper()
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o700))
	return dir
}

// addFails wants an ADD to fail with a code and texts, and the devices to be home.
func addFails(t *testing.T, n *node, run *runHere, rt *libcni.RuntimeConf, code uint, texts ...string) {
	t.Helper()
	err := n.ns.Do(func() error { _, err := n.cni.AddNetworkList(t.Context(), n.list, rt); return err })
	var ce *types.Error
	if !errors.As(err, &ce) || ce.Code != code {
		t.Fatalf("ADD: %v, want code %d", err, code)
	}
	for _, text := range texts {
		if !strings.Contains(ce.Msg+"; "+ce.Details, text) {
			t.Errorf("ADD: %q; %q, want it to name %q", ce.Msg, ce.Details, text)
		}
	}
	run.host.home(t)
	if as, junk, err := n.store.List(); len(as)+len(junk) != 0 || err != nil {
		t.Errorf("records %v, %v, %v are left", as, junk, err)
	}
	if left, err := filepath.Glob(filepath.Join(n.data, "locks", "*")); len(left) != 0 || err != nil {
		t.Errorf("locks %v, %v are left", left, err)
	}
}

const staticIPAM = `"ipam":{"type":"static","addresses":[{"address":"10.97.1.2/24","gateway":"10.97.1.1"},{"address":"fd97::2/64"}],
 "routes":[{"dst":"0.0.0.0/0"},{"dst":"10.96.0.0/16","gw":"10.97.1.9"}],"dns":{"nameservers":["10.97.1.53"]}}`

func TestWire_alone(t *testing.T) {
	needWiring(t)
	path := []string{buildReference(t, "ipam/static")}
	for _, v := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(v, func(t *testing.T) {
			n, run := newWiringNode(t, path, fmt.Sprintf(`{"cniVersion":%q,"name":"rocenet","plugins":[
				{"type":"smcr-cni","dataDir":"$DATA","deviceID":"0000:41:10.1","spoofchk":"on",%s}]}`, v, staticIPAM))
			pod := newNS(t)
			rt := runtimeConf("c1", pod)
			var raw types.Result
			n.do(t, func(ctx context.Context) (err error) {
				raw, err = n.cni.AddNetworkList(ctx, n.list, rt)
				return err
			})
			res, err := types100.NewResultFromResult(raw)
			must(t, err)
			wantResult(t, res, v, pod)
			a, err := n.store.Get("c1", "eth0")
			must(t, err)
			want := []AttachedDevice{{
				ID: "0000:41:10.1", PCI: "0000:41:10.1", RDMA: []string{"rocep65s0v1"}, NetDev: "ens1v1", PF: "ens1", PFPCI: "0000:41:00.0",
				VF: 1, NUMANode: 1, Rail: 1, Mode: "move", IfName: "eth0", MAC: a.Devices[0].MAC,
				IPs: []netip.Prefix{netip.MustParsePrefix("10.97.1.2/24"), netip.MustParsePrefix("fd97::2/64")},
				Routes: []AttachedRoute{
					{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.97.1.1")},
					{Dst: netip.MustParsePrefix("10.96.0.0/16"), Gateway: netip.MustParseAddr("10.97.1.9")},
				},
			}}
			if _, err := net.ParseMAC(want[0].MAC); err != nil {
				t.Errorf("MAC: %v", err)
			}
			if diff := cmp.Diff(want, a.Devices, equalPrefixes); diff != "" || a.Network != "rocenet" || a.Pod.Name != "cart-0" {
				t.Errorf("record %+v: %s", a, diff)
			}
			if !strings.Contains(run.said(), "device 0000:41:10.1: no spoofchk here") {
				t.Errorf("said %q, want the warning", run.said())
			}
			checkAddresses(t, pod)
			if v != "0.3.1" {
				checksAll(t, n, run, rt, pod)
			}
			addAgain(t, n, rt)
			for range 2 {
				n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
			}
			run.host.home(t)
		})
	}
}

func wantResult(t *testing.T, res *types100.Result, v string, pod *linux.NetNS) {
	t.Helper()
	if len(res.Interfaces) != 1 || len(res.IPs) != 2 || len(res.Routes) != 2 || len(res.DNS.Nameservers) != 1 {
		t.Fatalf("result %+v", res)
	}
	it := *res.Interfaces[0]
	if it.Mac == "" || it.Name != "eth0" || it.Sandbox != pod.Path() {
		t.Errorf("interface %+v", it)
	}
	want := []any{1500, "0000:41:10.1"}
	if v != "1.1.0" { // which has no room for them
		want = []any{0, ""}
	}
	if diff := cmp.Diff(want, []any{it.Mtu, it.PciID}); diff != "" {
		t.Errorf("MTU and PCI address: %s", diff)
	}
	for _, ip := range res.IPs {
		if ip.Interface == nil || *ip.Interface != 0 {
			t.Errorf("address %v is not of interface 0", ip)
		}
	}
}

// checkAddresses wants what staticIPAM says in the pod.
func checkAddresses(t *testing.T, pod *linux.NetNS) {
	t.Helper()
	gw := netip.MustParseAddr("10.97.1.1")
	must(t, linux.CheckInterfaceIPs(pod, "eth0", linux.InterfaceIPs{
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.97.1.2/24"), netip.MustParsePrefix("fd97::2/64")},
		Routes: []linux.InterfaceRoute{
			{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: gw},
			{Dst: netip.MustParsePrefix("10.96.0.0/16"), Gateway: netip.MustParseAddr("10.97.1.9")},
		},
	}))
}

// checksAll wants CHECK to succeed, and to fail once something is different.
func checksAll(t *testing.T, n *node, run *runHere, rt *libcni.RuntimeConf, pod *linux.NetNS) {
	t.Helper()
	check := func() error { return n.ns.Do(func() error { return n.cni.CheckNetworkList(t.Context(), n.list, rt) }) }
	must(t, check())
	inPod := func(f func(l netlink.Link) error) {
		t.Helper()
		must(t, pod.Do(func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return f(l)
		}))
	}
	want := func(code uint, text string) {
		t.Helper()
		var ce *types.Error
		if err := check(); !errors.As(err, &ce) || ce.Code != code || !strings.Contains(err.Error(), text) {
			t.Errorf("CHECK: %v, want code %d and %q", err, code, text)
		}
	}
	run.host.checks = &vf.PropertyError{Device: "0000:41:10.1", Property: "mtu", Got: "1400", Want: "1500"}
	want(CodeWiring, "mtu is 1400, not 1500")
	run.host.checks = nil
	route := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4(10, 96, 0, 0), Mask: net.CIDRMask(16, 32)}, Gw: net.IPv4(10, 97, 1, 9)}
	inPod(func(netlink.Link) error { return netlink.RouteDel(route) })
	want(CodeWiring, "route 10.96.0.0/16 via 10.97.1.9")
	inPod(func(netlink.Link) error { return netlink.RouteAdd(route) })
	must(t, check())
	addr, err := netlink.ParseAddr("fd97::2/64")
	must(t, err)
	inPod(func(l netlink.Link) error { return netlink.AddrDel(l, addr) })
	want(CodeWiring, "address fd97::2/64 of eth0 is missing")
	inPod(func(l netlink.Link) error { addr.Flags = 2; return netlink.AddrAdd(l, addr) }) // IFA_F_NODAD
	must(t, check())
	a, err := n.store.Get("c1", "eth0")
	must(t, err)
	must(t, n.store.Delete("c1", "eth0"))
	want(CodeRecord, "no such attachment")
	must(t, n.store.Write(a))
}

// addAgain wants a second ADD of the attachment refused, and the first one's
// work untouched.
func addAgain(t *testing.T, n *node, rt *libcni.RuntimeConf) {
	t.Helper()
	err := n.ns.Do(func() error { _, err := n.cni.AddNetworkList(t.Context(), n.list, rt); return err })
	var ce *types.Error
	if !errors.As(err, &ce) || ce.Code != CodeDeviceBusy || !strings.Contains(ce.Msg, "call DEL") {
		t.Errorf("second ADD: %v, want code %d", err, CodeDeviceBusy)
	}
	if _, err := n.store.Get("c1", "eth0"); err != nil {
		t.Errorf("second ADD took the record: %v", err)
	}
}

// TestWire_atOnce: of two ADDs for one attachment one wins, and the other one
// takes nothing back.
func TestWire_atOnce(t *testing.T) {
	needWiring(t)
	n, run := newWiringNode(t, []string{buildReference(t, "ipam/host-local")}, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[
		{"type":"smcr-cni","dataDir":"$DATA","deviceID":"0000:41:10.1","ipam":{"type":"host-local","dataDir":"$IPAM","subnet":"10.97.1.0/24"}}]}`)
	pod := newNS(t)
	rt := runtimeConf("c1", pod)
	errs := make(chan error, 2)
	for range cap(errs) {
		go func() {
			errs <- n.ns.Do(func() error { _, err := n.cni.AddNetworkList(context.Background(), n.list, rt); return err })
		}()
	}
	failed := 0
	for range cap(errs) {
		if err := <-errs; err != nil {
			failed++
			var ce *types.Error
			if !errors.As(err, &ce) || ce.Code != CodeDeviceBusy {
				t.Errorf("ADD: %v, want code %d", err, CodeDeviceBusy)
			}
		}
	}
	if failed != 1 {
		t.Errorf("%d of two ADDs failed, want 1", failed)
	}
	n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	run.host.home(t)
	addOther(t, n, "c2") // the device and the address are free again
}

func addOther(t *testing.T, n *node, id string) {
	t.Helper()
	rt := runtimeConf(id, newNS(t))
	n.add(t, rt)
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
}

// failingIPAM fails as CNI says, or as DEL is wanted notes that it was called.
const failingIPAM = `cat >/dev/null
case "$CNI_COMMAND" in
ADD) echo '{"cniVersion":"1.1.0","code":113,"msg":"no address is left","details":"10.97.1.0/30 is full"}'; exit 1;;
DEL) echo "$CNI_CONTAINERID $CNI_IFNAME" >> "$(dirname "$0")/deleted";;
esac
`

func TestWire_badInput(t *testing.T) {
	needWiring(t)
	ipamDir := scriptIPAM(t, "ks-fail", failingIPAM)
	junk := scriptIPAM(t, "ks-junk", "cat >/dev/null\necho hello\n")
	mute := scriptIPAM(t, "ks-mute", "cat >/dev/null\necho oops >&2\nexit 3\n")
	far := scriptIPAM(t, "ks-far", `cat >/dev/null
		[ "$CNI_COMMAND" = ADD ] && echo '{"ips":[{"address":"10.97.1.2/24"}],"routes":[{"dst":"10.0.0.0/8","gw":"192.0.2.1"}]}'; exit 0`)
	file := filepath.Join(t.TempDir(), "netns")
	must(t, os.WriteFile(file, nil, 0o600))
	for _, tt := range []struct {
		name, conf string
		netns      string
		change     func(t *testing.T, n *node, run *runHere, pod *linux.NetNS)
		code       uint
		texts      []string
	}{
		{name: "no such device", conf: `"deviceID":"0000:ff:00.1"`, code: CodeDevice, texts: []string{"0000:ff:00.1", "no such device", "smcrctl devices"}},
		{name: "device is a PF", conf: `"deviceID":"0000:41:10.0"`, code: CodeDevice, texts: []string{"physical function", "sriov_numvfs"}, change: attachFails(vf.ErrIsPF)},
		{name: "bound to vfio", conf: `"deviceID":"0000:41:10.0"`, code: CodeDevice, texts: []string{"vfio", "bind the device"}, change: attachFails(vf.ErrVFIO)},
		{name: "of another pod", conf: `"deviceID":"0000:41:10.0"`, code: CodeDeviceBusy, texts: []string{"belongs to interface net1 of container other", "GC"}, change: attachFails(
			&vf.BusyError{Device: "0000:41:10.0", Owner: vf.Owner{ContainerID: "other", IfName: "net1"}})},
		{name: "not back", conf: `"deviceID":"0000:41:10.0"`, code: CodeDeviceBusy, texts: []string{"network namespace"}, change: attachFails(vf.ErrNotReturned)},
		{name: "needed by the host", conf: `"deviceID":"0000:41:10.0"`, code: CodeDevice, texts: []string{"in use by the host"}, change: attachFails(vf.ErrInUse)},
		{name: "PF down", conf: `"deviceID":"0000:41:10.0"`, code: CodeDevice, texts: []string{"set the interface of its PF up"}, change: attachFails(vf.ErrPFDown)},
		{name: "name in use", conf: `"deviceID":"0000:41:10.0"`, code: CodeInterface, texts: []string{"name", "choose another"}, change: attachFails(vf.ErrNameTaken)},
		{name: "setting", conf: `"deviceID":"0000:41:10.0"`, code: CodeSetting, texts: []string{"requiredSettings"}, change: attachFails(vf.ErrSetting)},
		{name: "pod gone", conf: `"deviceID":"0000:41:10.0"`, code: types.ErrUnknownContainer, texts: []string{"ended"}, change: attachFails(linux.ErrGone)},
		{name: "descriptors are short", conf: `"deviceID":"0000:41:10.0"`, code: types.ErrTryAgainLater, texts: []string{"short of"}, change: attachFails(unix.ENFILE)},
		{name: "kernel hangs", conf: `"deviceID":"0000:41:10.0"`, code: types.ErrTryAgainLater, change: attachFails(context.DeadlineExceeded)},
		{name: "VF of another PF", conf: `"deviceID":"0000:41:10.0","pfNames":["ens7"]`, code: CodeDevice, texts: []string{"pfNames", `"ens1"`, "ens7"}},
		{name: "shared device alone", conf: `"deviceID":"eth1/17"`, code: 7, texts: []string{"deviceID", "eth1", "macvlan"}},
		{name: "netns is a file", conf: `"deviceID":"0000:41:10.0"`, netns: file, code: types.ErrInvalidNetNS, texts: []string{"CNI_NETNS", "not a namespace"}},
		{name: "netns is of another kind", conf: `"deviceID":"0000:41:10.0"`, netns: "/proc/self/ns/uts", code: types.ErrInvalidNetNS, texts: []string{"another kind"}},
		{name: "no netns", conf: `"deviceID":"0000:41:10.0"`, netns: "/none/at/all", code: types.ErrUnknownContainer, texts: []string{"/none/at/all"}},
		{name: "no IPAM plugin", conf: `"deviceID":"0000:41:10.0","ipam":{"type":"ks-none"}`, code: 7, texts: []string{"ipam.type", "ks-none", "CNI_PATH"}},
		{name: "IPAM plugin is a path", conf: `"deviceID":"0000:41:10.0","ipam":{"type":"../sh"}`, code: 7, texts: []string{"ipam.type", "path"}},
		{name: "IPAM fails", conf: `"deviceID":"0000:41:10.0","ipam":{"type":"ks-fail"}`, code: 113, texts: []string{"ks-fail", "no address is left", "10.97.1.0/30"}},
		{name: "IPAM says nonsense", conf: `"deviceID":"0000:41:10.0","ipam":{"type":"ks-junk"}`, code: types.ErrInternal, texts: []string{"ks-junk", "hello"}},
		{name: "IPAM dies", conf: `"deviceID":"0000:41:10.0","ipam":{"type":"ks-mute"}`, code: types.ErrInternal, texts: []string{"exit status 3", "oops"}},
		{name: "route cannot be set", conf: `"deviceID":"0000:41:10.0","ipam":{"type":"ks-far"}`, code: CodeInterface, texts: []string{"10.0.0.0/8 via 192.0.2.1", "ipam"}},
		{name: "agent required", conf: `"deviceID":"0000:41:10.0","required":true`, code: types.ErrTryAgainLater, texts: []string{"required"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, run := newWiringNode(t, []string{ipamDir, junk, mute, far},
				fmt.Sprintf(`{"cniVersion":"1.1.0","name":"rocenet","plugins":[{"type":"smcr-cni","dataDir":"$DATA",%s}]}`, tt.conf))
			pod := newNS(t)
			if tt.change != nil {
				tt.change(t, n, run, pod)
			}
			rt := runtimeConf("c1", pod)
			if tt.netns != "" {
				rt.NetNS = tt.netns
			}
			addFails(t, n, run, rt, tt.code, tt.texts...)
		})
	}
	if b, err := os.ReadFile(filepath.Join(ipamDir, "deleted")); err != nil || string(b) != "c1 eth0\n" {
		t.Errorf("IPAM DEL after its ADD failed: %q, %v, want one", b, err)
	}
}

func attachFails(err error) func(*testing.T, *node, *runHere, *linux.NetNS) {
	return func(_ *testing.T, _ *node, run *runHere, _ *linux.NetNS) {
		run.host.attach = fmt.Errorf("attach device: %w", err)
	}
}

func TestWire_fullDisk(t *testing.T) {
	needWiring(t)
	for _, tt := range []struct{ name, ballast string }{
		{"for the lock", "ballast"},
		{"for the record", "attachments/ballast"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, run := newWiringNode(t, nil, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[
				{"type":"smcr-cni","dataDir":"$DATA","deviceID":"0000:41:10.0"}]}`)
			full := fullDir(t)
			if tt.name == "for the record" {
				records := n.store.Dir()
				must(t, errors.Join(os.Mkdir(records, 0o700), unix.Mount(filepath.Join(full, "attachments"), records, "", unix.MS_BIND, "")))
				t.Cleanup(func() { must(t, unix.Unmount(records, unix.MNT_DETACH)) })
			} else {
				n.data = full
				n.list = replaceDataDir(t, n.list, full)
				n.store = NewStore(full)
			}
			addFails(t, n, run, runtimeConf("c1", newNS(t)), CodeStoreFull, "free space in dataDir", "no space left")
			n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, runtimeConf("c1", newNS(t))) })
		})
	}
}

// TestWire_delFullDisk: DEL makes a file for its lock, and works all the same if there is no room for one.
func TestWire_delFullDisk(t *testing.T) {
	needWiring(t)
	n, run := newWiringNode(t, nil, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[
		{"type":"smcr-cni","dataDir":"$DATA","deviceID":"0000:41:10.0"}]}`)
	dir := t.TempDir()
	must(t, unix.Mount("ks-full", dir, "tmpfs", 0, "nr_inodes=20,mode=0755"))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	n.data, n.list, n.store = dir, replaceDataDir(t, n.list, dir), NewStore(dir)
	rt := runtimeConf("c1", newNS(t))
	n.do(t, func(ctx context.Context) error { _, err := n.cni.AddNetworkList(ctx, n.list, rt); return err })
	for i := 0; ; i++ {
		if err := os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o600); errors.Is(err, unix.ENOSPC) {
			break
		} else if err != nil || i > 20 {
			t.Fatalf("%d files: %v", i, err)
		}
	}
	n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
	if _, err := n.store.Get("c1", "eth0"); !errors.Is(err, ErrNoAttachment) {
		t.Errorf("record after DEL: %v", err)
	}
	run.host.home(t)
}

func replaceDataDir(t *testing.T, list *libcni.NetworkConfigList, dir string) *libcni.NetworkConfigList {
	t.Helper()
	var m map[string]any
	must(t, json.Unmarshal(list.Bytes, &m))
	m["plugins"].([]any)[0].(map[string]any)["dataDir"] = dir
	b, err := json.Marshal(m)
	must(t, err)
	out, err := libcni.ConfListFromBytes(b)
	must(t, err)
	return out
}
