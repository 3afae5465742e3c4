// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// child gives a namespace a macvlan child of the interface of the guest's RDMA device.
func child(t *testing.T, ns *linux.NetNS) {
	t.Helper()
	devices, err := smcnl.Devices()
	if err != nil || len(devices) == 0 {
		t.Fatalf("devices of SMC-R: %+v, %v", devices, err)
	}
	err = ns.WithFD(func(fd int) error {
		return netlink.LinkAdd(&netlink.Macvlan{
			LinkAttrs: netlink.LinkAttrs{Name: "net1", ParentIndex: int(devices[0].Ports[0].NetDev), Namespace: netlink.NsFd(fd)},
			Mode:      netlink.MACVLAN_MODE_BRIDGE,
		})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestFit(t *testing.T) {
	need(t)
	ns, _ := scratch(t)
	if err := Fit(linux.In(ns)); !errors.Is(err, ErrUnfit) {
		t.Errorf("without an interface: %v", err)
	}
	child(t, ns)
	if err := Fit(linux.In(ns)); err != nil {
		t.Errorf("with a child: %v", err)
	}
}

func mustSysctl(t *testing.T, ns *linux.NetNS, name, want string) {
	t.Helper()
	if got, err := linux.Sysctl(ns, name); err != nil || got != want {
		t.Errorf("%s is %s, %v; want %s", name, got, err, want)
	}
}

func TestChooser_attach(t *testing.T) {
	need(t)
	c := mustOpen(t, Config{})
	defer mustClose(t, c)
	ns, cookie := scratch(t)
	usual, err := linux.Sysctl(ns, sendBufferVariable)
	if err != nil {
		t.Fatal(err)
	}
	if err := linux.SetSysctl(ns, rmbeVariable, "131072"); err != nil { // somebody else's
		t.Fatal(err)
	}
	all := linux.OptionFilterConfig{Peers: []linux.OutboundRule{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}}}
	cfg := PodConfig{Filter: all, SendBufferBytes: 512 << 10, RMBEBytes: 512 << 10}
	for range 2 {
		if err := c.Attach(linux.In(ns), cfg); err != nil {
			t.Fatal(err)
		}
		mustSysctl(t, ns, sendBufferVariable, "524288")
		mustSysctl(t, ns, rmbeVariable, "131072")
	}
	if got := tcpIn(t, ns); got != isSMC {
		t.Errorf("attached: %s", got)
	}
	var ln net.Listener
	err = ns.Do(func() (err error) {
		var lc net.ListenConfig
		ln, err = lc.Listen(t.Context(), "tcp4", "0.0.0.0:7000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if left, err := c.Detach(linux.In(ns), cfg); err != nil || !left {
		t.Errorf("detached with a listener: left %t, %v", left, err)
	}
	if got := tcpIn(t, ns); got != isTCP {
		t.Errorf("detached: %s", got)
	}
	mustSysctl(t, ns, sendBufferVariable, "524288") // until nobody is left
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if left, err := Sweep(linux.In(ns), cfg); err != nil || left {
			t.Errorf("without the listener: left %t, %v", left, err)
		}
	}
	mustSysctl(t, ns, sendBufferVariable, usual)
	mustSysctl(t, ns, rmbeVariable, "131072")
	if chosen, err := c.isChosen(Choice{NetNS: cookie}); err != nil || chosen {
		t.Errorf("chosen %t, %v", chosen, err)
	}

	// A pod that is given up has nothing of ours, whoever listens.
	if err := c.Attach(linux.In(ns), cfg); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := c.Purge(linux.In(ns), cfg); err != nil {
			t.Fatal(err)
		}
	}
	mustSysctl(t, ns, sendBufferVariable, usual)
	if got := tcpIn(t, ns); got != isTCP {
		t.Errorf("given up: %s", got)
	}
}

// A pod in the node's network is its cgroup: others there stay what they are, and so do the sizes of buffers.
func TestChooser_attachCgroup(t *testing.T) {
	need(t)
	c := mustOpen(t, Config{})
	defer mustClose(t, c)
	ns, cookie := scratch(t)
	all, err := linux.OpenCgroups()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = all.Close() }()
	dir, id := newCgroup(t, cgroupRoot(t))
	g, err := all.Open(strings.TrimPrefix(dir, cgroupRoot(t)))
	if err != nil || g.ID() != id {
		t.Fatalf("%v, %v, want %d", g, err, id)
	}
	at := linux.Place{NetNS: ns, Cgroup: g}
	usual, err := linux.Sysctl(ns, sendBufferVariable)
	if err != nil {
		t.Fatal(err)
	}
	cfg := PodConfig{Filter: linux.OptionFilterConfig{Peers: []linux.OutboundRule{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}}}, SendBufferBytes: 512 << 10}
	for range 2 {
		if err := c.Attach(at, cfg); err != nil {
			t.Fatal(err)
		}
	}
	mustSysctl(t, ns, sendBufferVariable, usual)
	if chosen, err := c.Chosen(at); err != nil || !chosen {
		t.Errorf("chosen %t, %v", chosen, err)
	}
	if chosen, err := c.isChosen(Choice{NetNS: cookie}); err != nil || chosen {
		t.Errorf("the namespace is chosen: %t, %v", chosen, err)
	}
	if in, out := tcpInCgroup(t, dir, ns), tcpIn(t, ns); in != isSMC || out != isTCP {
		t.Errorf("attached: %s, and %s of another", in, out)
	}
	listens := func() net.Listener {
		var ln net.Listener
		err := ns.Do(func() (err error) {
			var lc net.ListenConfig
			ln, err = lc.Listen(t.Context(), "tcp4", "0.0.0.0:0")
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return ln
	}
	var ln net.Listener
	inCgroup(t, dir, func() { ln = listens() })
	plain := listens()
	defer func() { _ = plain.Close() }()
	if left, err := c.Detach(at, cfg); err != nil || !left {
		t.Errorf("detached with a listener: left %t, %v", left, err)
	}
	if in := tcpInCgroup(t, dir, ns); in != isTCP {
		t.Errorf("detached: %s", in)
	}
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	if left, err := Sweep(at, cfg); err != nil || left {
		t.Errorf("without the listener: left %t, %v", left, err)
	}
	// The listener of another one in this network, of SMC.
	if err := c.Choose(Choice{NetNS: cookie}); err != nil {
		t.Fatal(err)
	}
	other := listens()
	defer func() { _ = other.Close() }()
	if left, err := Sweep(at, cfg); err != nil || left {
		t.Errorf("with the listener of another one: left %t, %v", left, err)
	}
	if err := errors.Join(c.Attach(at, cfg), c.Purge(at, cfg)); err != nil {
		t.Fatal(err)
	}
	if chosen, err := c.Chosen(at); err != nil || chosen {
		t.Errorf("given up: chosen %t, %v", chosen, err)
	}
}

// Nothing is left of an attachment that fails.
func TestChooser_attachFails(t *testing.T) {
	need(t)
	c := mustOpen(t, Config{})
	defer mustClose(t, c)
	ns, cookie := scratch(t)
	if err := c.Attach(linux.In(ns), PodConfig{RMBEBytes: -1}); err == nil {
		t.Fatal("a buffer of -1 bytes was taken")
	}
	if chosen, err := c.isChosen(Choice{NetNS: cookie}); err != nil || chosen {
		t.Errorf("chosen %t, %v", chosen, err)
	}
	if got := tcpIn(t, ns); got != isTCP {
		t.Errorf("not attached: %s", got)
	}
}

// The filter that selects nothing stays for the sockets of an earlier attachment when another one fails.
func TestChooser_attachFailsAgain(t *testing.T) {
	need(t)
	c := mustOpen(t, Config{})
	defer mustClose(t, c)
	ns, _ := scratch(t)
	at := linux.In(ns)
	filtered := func(when string, want bool) {
		t.Helper()
		if is, err := linux.OptionFiltered(at); err != nil || is != want {
			t.Errorf("%s: filtered %t, %v", when, is, err)
		}
	}
	if err := c.Attach(at, PodConfig{}); err != nil {
		t.Fatal(err)
	}
	var ln net.Listener
	err := ns.Do(func() (err error) {
		var lc net.ListenConfig
		ln, err = lc.Listen(t.Context(), "tcp4", "0.0.0.0:7000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if left, err := c.Detach(at, PodConfig{}); err != nil || !left {
		t.Errorf("detached with a listener: left %t, %v", left, err)
	}
	if err := c.Attach(at, PodConfig{RMBEBytes: -1}); err == nil {
		t.Fatal("a buffer of -1 bytes was taken")
	}
	filtered("with a listener", true)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	if left, err := Sweep(at, PodConfig{}); err != nil || left {
		t.Errorf("without the listener: left %t, %v", left, err)
	}
	filtered("without the listener", false)
}

func TestUEIDs(t *testing.T) {
	need(t)
	const foreign, ours = "FOREIGN.ID", "OURS.ID"
	record := t.TempDir() + "/ueids.json"
	if err := smcnl.AddUEID(foreign); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = smcnl.RemoveUEID(foreign) }()
	before, err := smcnl.UEIDs()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := AddUEIDs([]string{foreign, ours}, record); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := smcnl.UEIDs(); err != nil || len(got) != len(before)+1 {
		t.Errorf("%q, %v; want %q and %s", got, err, before, ours)
	}
	for range 2 {
		if err := RemoveUEIDs(record); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := smcnl.UEIDs(); err != nil || len(got) != len(before) {
		t.Errorf("%q, %v; want %q", got, err, before)
	}
	// Also if none is ours there is a record.
	if err := AddUEIDs([]string{foreign}, record); err != nil {
		t.Fatal(err)
	}
	if ours, err := readRecord(record); err != nil || ours == nil || len(ours) != 0 {
		t.Errorf("record %q, %v", ours, err)
	}
	// The fifth has no room.
	if err := AddUEIDs([]string{"A1", "A2", "A3", "A4", "A5"}, record); err == nil {
		t.Error("more enterprise IDs were taken than there is room for")
	}
	if err := RemoveUEIDs(record); err != nil {
		t.Error(err)
	}
	if got, err := smcnl.UEIDs(); err != nil || len(got) != len(before) {
		t.Errorf("after too many: %q, %v; want %q", got, err, before)
	}
}

// Of what is chosen that is others' which is none of the given places.
func TestChooser_others(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.BPF)
	spec, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	newMap := func(name string) *ebpf.Map {
		m, err := ebpf.NewMap(spec.Maps[name])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.Close() })
		return m
	}
	c := &Chooser{namespaces: newMap("namespaces"), cgroups: newMap("cgroups")} // the rules alone
	ours, cookie := scratch(t)
	gone, goneCookie := scratch(t)
	if err := errors.Join(c.Choose(Choice{NetNS: cookie}), c.Choose(Choice{NetNS: goneCookie}), c.Choose(Choice{NetNS: 1 << 60}), c.Choose(Choice{Cgroup: 1 << 61}), gone.Close()); err != nil {
		t.Fatal(err)
	}
	if err := put(c.cgroups, 1<<62, notSMC); err != nil {
		t.Fatal(err)
	}
	got, err := c.Others([]linux.Place{linux.In(gone), linux.In(ours)})
	slices.SortFunc(got, func(a, b Choice) int { return cmp.Or(cmp.Compare(a.Cgroup, b.Cgroup), cmp.Compare(a.NetNS, b.NetNS)) })
	if want := []Choice{{NetNS: goneCookie}, {NetNS: 1 << 60}, {Cgroup: 1 << 61}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("others %v, %v, want %v", got, err, want)
	}
}

// Where nobody can tell, for too many sockets, a place has some: its filter is not left as it is.
func TestHasAmong(t *testing.T) {
	for name, tc := range map[string]struct {
		all  []smcnl.Socket
		err  error
		want bool
	}{
		"none":     {nil, nil, false},
		"one":      {[]smcnl.Socket{{Mode: smcnl.ModeSMCR}}, nil, true},
		"TCP":      {[]smcnl.Socket{{Mode: smcnl.ModeTCP}}, nil, false},
		"too many": {[]smcnl.Socket{{Mode: smcnl.ModeTCP}}, fmt.Errorf("list: %w", linux.ErrTooMuch), true},
		"unknown":  {nil, errors.ErrUnsupported, false},
	} {
		got, err := hasAmong(linux.Place{}, tc.all, tc.err)
		if got != tc.want || (err != nil) != (tc.err != nil && !tc.want) {
			t.Errorf("%s: %t, %v", name, got, err)
		}
	}
}
