// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// TestLink_linkLocal: a link-local address is the one of the interface that its zone
// names, and no other one, however many there are, also if another one has the same.
func TestLink_linkLocal(t *testing.T) {
	v := newVethPair(t, 1500)
	for i := range 3 {
		name := fmt.Sprintf("w%d", i)
		ip(t, "-n", v.a, "link", "add", name, "type", "veth", "peer", "name", name, "netns", v.b)
		ip(t, "-n", v.a, "link", "set", name, "up")
		ip(t, "-n", v.b, "link", "set", name, "up")
	}
	at := func(ns, host, dev string) netip.Addr {
		ip(t, "-n", ns, "addr", "add", host+"/64", "dev", dev, "nodad")
		return netip.MustParseAddr(host + "%" + dev)
	}
	peers := []netip.Addr{at(v.b, "fe80::b", "v1"), at(v.b, "fe80::b0", "w0"), at(v.b, "fe80::b", "w1"), at(v.b, "fe80::b2", "w2")}
	own := []netip.Addr{at(v.a, "fe80::a", "v0"), at(v.a, "fe80::a0", "w0"), at(v.a, "fe80::a", "w1"), at(v.a, "fe80::a2", "w2")}
	for round := range 15 {
		for i, addr := range own {
			d := active(t, v.a, soft.Config{Addr: addr})
			if g := d.GIDs()[0]; g.NetDev != addr.Zone() || g.GID != rdma.GIDFromAddr(addr) {
				t.Fatalf("%v: GID %v of %s", addr, g.GID, g.NetDev)
			}
			if round == 0 {
				peer := active(t, v.b, soft.Config{Addr: peers[i]})
				x, y := rdmatest.Pair(t, d, peer, rdmatest.Options{})
				x.Send(t, x.Write(1, y, 0, 5000))
				rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
				if err := peer.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	inNS(t, v.a, func() {
		for text, want := range map[string]string{"fe80::a": "say on which one, as in fe80::a%eth0", "fe80::a%w2": "interface w2 does not have the address fe80::a"} {
			d, err := soft.Open(soft.Config{Name: "x", Addr: netip.MustParseAddr(text)})
			if err == nil {
				_ = d.Close()
			}
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("open %s: %v, want %q", text, err, want)
			}
		}
	})
}

// TestLink follows an interface and its address.
func TestLink(t *testing.T) {
	v := newVethPair(t, 1500)
	a := active(t, v.a, soft.Config{Addr: v.a4})
	c, err := a.Open()
	if err != nil {
		t.Fatal(err)
	}
	if p, g := a.Port(), a.GIDs()[0]; p.State != rdma.PortActive || p.ActiveMTU != rdma.MTU1024 || g.NetDev != "v0" || g.MAC == (rdma.MAC{}) {
		t.Errorf("port %+v, GID %+v", p, g)
	}
	for _, step := range []struct {
		name string
		down []string
		up   []string
	}{
		{"carrier", []string{"-n", v.b, "link", "set", "v1", "down"}, []string{"-n", v.b, "link", "set", "v1", "up"}},
		{"interface", []string{"-n", v.a, "link", "set", "v0", "down"}, []string{"-n", v.a, "link", "set", "v0", "up"}},
		{"address", []string{"-n", v.a, "addr", "del", v.a4.String() + "/24", "dev", "v0"}, []string{"-n", v.a, "addr", "add", v.a4.String() + "/24", "dev", "v0"}},
		{"deleted", []string{"-n", v.a, "link", "del", "v0"}, nil},
	} {
		ip(t, step.down...)
		rdmatest.AwaitEvent(t, c, rdma.EventPortDown)
		if s := a.Port().State; s != rdma.PortDown {
			t.Errorf("%s: port is %v", step.name, s)
		}
		if step.up != nil {
			ip(t, step.up...)
			rdmatest.AwaitEvent(t, c, rdma.EventPortActive)
		}
	}
}

// TestLink_addressOnLoopback: in a routed fabric the address is on loopback, and packets have to fit the interface that they
// leave by.
func TestLink_addressOnLoopback(t *testing.T) {
	v := newVethPair(t, 1500)
	for ns, dev := range map[string]string{v.a: "v0", v.b: "v1"} { // looks for neighbours have no other source that is not tentative yet
		ip(t, "-n", ns, "addr", "add", "fe80::"+ns[len(ns)-1:]+"/64", "dev", dev, "nodad")
	}
	for _, f := range []struct {
		family, len, a, b string
		viaA, viaB        netip.Addr
	}{
		{"-4", "/32", "10.92.0.1", "10.92.0.2", v.a4, v.b4},
		{"-6", "/128", "fd92::1", "fd92::2", v.a6, v.b6},
	} {
		for ns, addr := range map[string]string{v.a: f.a, v.b: f.b} {
			add := []string{"-n", ns, "addr", "add", addr + f.len, "dev", "lo"}
			if f.family == "-6" {
				add = append(add, "nodad") // else it can be no source for a moment
			}
			ip(t, add...)
		}
		ip(t, "-n", v.a, f.family, "route", "add", f.b+f.len, "via", f.viaB.String(), "dev", "v0", "src", f.a)
		ip(t, "-n", v.b, f.family, "route", "add", f.a+f.len, "via", f.viaA.String(), "dev", "v1", "src", f.b)
		a := active(t, v.a, soft.Config{Addr: netip.MustParseAddr(f.a), MTU: rdma.MTU4096})
		b := active(t, v.b, soft.Config{Addr: netip.MustParseAddr(f.b)})
		for _, d := range []*soft.Device{a, b} {
			awaitMTU(t, d, rdma.MTU1024) // the carrier of the interface may come a moment later
		}
		x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
		for i, n := range []int{4096, 300_000} {
			x.Send(t, x.Write(uint64(i), y, 0, n))
			rdmatest.AwaitOne(t, x.SendCQ, uint64(i), rdma.StatusSuccess)
		}
		if s := a.Stats(); s.TxErrors != 0 {
			t.Errorf("%+v", s)
		}
	}
}

// TestLink_otherInterfaces: interfaces that may be the way of packets come, change and go.
func TestLink_otherInterfaces(t *testing.T) {
	v := newVethPair(t, 1500)
	addr := netip.MustParseAddr("10.92.0.1")
	ip(t, "-n", v.a, "addr", "add", addr.String()+"/32", "dev", "lo")
	ip(t, "-n", v.a, "link", "add", "w0", "mtu", "600", "type", "veth", "peer", "name", "w1", "mtu", "9000", "netns", v.b)
	ip(t, "-n", v.b, "link", "set", "w1", "up")
	d := active(t, v.a, soft.Config{Addr: addr})
	said := active(t, v.a, soft.Config{Addr: addr, Port: 4792, MTU: rdma.MTU4096})
	for _, step := range []struct {
		ip         string
		want, told rdma.MTU
	}{
		{"link set v0 mtu 9000", rdma.MTU4096, rdma.MTU4096},
		{"link set w0 up", rdma.MTU512, rdma.MTU4096},
		{"link set w0 mtu 2200", rdma.MTU2048, rdma.MTU4096},
		{"link set v0 mtu 1500", rdma.MTU1024, rdma.MTU2048},
		{"link set v0 down", rdma.MTU2048, rdma.MTU2048},
		{"link del w0", rdma.MTU4096, rdma.MTU4096},
	} {
		ip(t, append([]string{"-n", v.a}, strings.Fields(step.ip)...)...)
		awaitMTU(t, d, step.want)
		awaitMTU(t, said, step.told)
	}
}

func awaitMTU(t *testing.T, d *soft.Device, want rdma.MTU) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); d.Port().ActiveMTU != want; <-time.After(time.Millisecond) { // polls the port
		if time.Now().After(end) {
			t.Fatalf("%s: path MTU %v, want %v", d.Name(), d.Port().ActiveMTU, want)
		}
	}
}
