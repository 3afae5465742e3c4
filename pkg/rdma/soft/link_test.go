// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

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
		run(t, "ip", "-n", v.a, "link", "add", name, "type", "veth", "peer", "name", name, "netns", v.b)
		run(t, "ip", "-n", v.a, "link", "set", name, "up")
		run(t, "ip", "-n", v.b, "link", "set", name, "up")
	}
	at := func(ns, host, dev string) netip.Addr {
		run(t, "ip", "-n", ns, "addr", "add", host+"/64", "dev", dev, "nodad")
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
		run(t, "ip", step.down...)
		rdmatest.AwaitEvent(t, c, rdma.EventPortDown)
		if s := a.Port().State; s != rdma.PortDown {
			t.Errorf("%s: port is %v", step.name, s)
		}
		if step.up != nil {
			run(t, "ip", step.up...)
			rdmatest.AwaitEvent(t, c, rdma.EventPortActive)
		}
	}
}
