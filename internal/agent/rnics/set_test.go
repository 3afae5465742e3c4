// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// fakeNet is a pod's namespace.
type fakeNet struct{ closed int }

func (*fakeNet) Interfaces([]int) (map[int]verbs.Interface, error) { return nil, nil }
func (*fakeNet) Route(netip.Addr, netip.Addr) (clc.Route, error)   { return clc.Route{}, nil }
func (n *fakeNet) Close() error                                    { n.closed++; return nil }

// TestSet_Update: devices that stay are not opened again. A device that goes is taken from the user before the
// device is closed.
func TestSet_Update(t *testing.T) {
	h := newHost()
	p := h.pool(t)
	in := &fakeNet{}
	s := p.NewSet(in)
	x, y := Own{Pod: "p", ID: "x", PCI: "0000:01:10.2", Mode: string(vf.ModeMove), Rail: 3}, Own{Pod: "p", ID: "y", Mode: string(vf.ModeIPVlan), Rail: -1}
	s.Update(t.Context(), h, []Own{x, y})
	before := h.first("x")
	open, first := s.Usable()
	if diff := cmp.Diff([]string{"rdma-x", "rdma-y"}, names(open)); diff != "" {
		t.Errorf("usable (-want +got)\n%s", diff)
	}
	rail := s.RailOf()
	if got := []int{rail("rdma-x"), rail("rdma-y"), rail("another")}; !slices.Equal(got, []int{3, -2, -1}) {
		t.Errorf("rails %v", got)
	}
	if s.PCI("rdma-x") != "0000:01:10.2" || s.PCI("rdma-y") != "" {
		t.Errorf("PCI addresses %q and %q", s.PCI("rdma-x"), s.PCI("rdma-y"))
	}
	s.Update(t.Context(), h, []Own{x})
	if _, count := s.Usable(); count == first || h.first("x") != before || h.count("y") != 0 || h.noted() != "lost rdma-y" {
		t.Errorf("count %d, y open %d times", count, h.count("y"))
	}
	if s.Inside(netip.MustParseAddr("192.0.2.9")) != in || s.Inside(netip.MustParseAddr("192.0.2.8")) != nil {
		t.Error("the namespace of an address is wrong")
	}
	if !s.Own() || !s.Hardware() || !slices.EqualFunc(s.Want(), []Own{x}, func(a, b Own) bool { return cmp.Equal(a, b) }) {
		t.Errorf("set of %+v", s.Want())
	}
	must(t, s.Release())
	must(t, s.Release())
	if in.closed != 1 || h.count("x") != 0 {
		t.Errorf("namespace closed %d times, device open %d times", in.closed, h.count("x"))
	}
}

// TestSet_lookUp: if only the ID of a pod's device is known, the pool asks the host for the device until the host
// knows it. Until then the device says why it cannot be used.
func TestSet_lookUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.lacks("x", errors.New("no such device on this node"))
		p := h.pool(t)
		defer p.Monitor(t.Context())()
		s := p.NewSet(nil)
		s.Update(t.Context(), nil, []Own{{Pod: "p", ID: "x", LookUp: true}})
		now := s.States()[0]
		if now.Open != nil || now.Err == nil || !strings.Contains(now.Err.Error(), "device x of pod p cannot be used: no such device on this node") {
			t.Errorf("%+v", now)
		}
		h.lacks("x", nil)
		<-time.After(lookEvery + time.Second)
		synctest.Wait()
		if now := s.States()[0]; now.Open == nil || now.Own.RDMA[0] != "rxe0" {
			t.Errorf("%+v", now)
		}
		must(t, s.Release())
	})
}

// TestSet_Usable_once: a stack takes each device once, under however many IDs the pod asked for it.
func TestSet_Usable_once(t *testing.T) {
	h := newHost()
	s := h.pool(t, "a").NewSet(nil)
	s.Update(t.Context(), h, []Own{{Pod: "p", ID: "a"}, {Pod: "p", ID: "0000:01:00.0", RDMA: []string{"a"}}, {Pod: "p", ID: "b"}})
	open, _ := s.Usable()
	if diff := cmp.Diff([]string{"rdma-a", "rdma-b"}, names(open)); diff != "" {
		t.Errorf("usable (-want +got)\n%s", diff)
	}
	must(t, s.Release())
}

// TestSet_Update_twoIDs: a pod that asked for one device under two IDs and then for one of them keeps
// what its stack runs on.
func TestSet_Update_twoIDs(t *testing.T) {
	x, y := Own{Pod: "p", ID: "x", RDMA: []string{"a"}}, Own{Pod: "p", ID: "y", RDMA: []string{"a"}}
	for _, c := range []struct {
		name         string
		node         bool // the device is one of the node's: one opening for both IDs
		keep         Own
		missing      bool // the one that the stack has goes missing before, and is back
		lost, opened string
	}{
		{name: "one opening, the first ID goes", node: true, keep: y, opened: "a"},
		{name: "one opening, the second ID goes", node: true, keep: x, opened: "a"},
		{name: "two openings, the stack's goes", keep: y, lost: "lost twin", opened: "y"},
		{name: "two openings, the other one goes", keep: x, opened: "x"},
		{name: "two openings, the stack has the second one, and that stays", keep: y, missing: true, opened: "y"},
		{name: "two openings, the stack has the second one, and that goes", keep: x, missing: true, lost: "lost twin", opened: "x"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost()
			var node []string
			if c.node {
				node = []string{"a"}
			} else {
				h.twins = []string{"x", "y"}
			}
			p := h.pool(t, node...)
			s := p.NewSet(nil)
			s.Update(t.Context(), h, []Own{x, y})
			if open, _ := s.Usable(); len(open) != 1 {
				t.Fatalf("usable %v, want one device", names(open))
			}
			if c.missing {
				d := s.devices[0]
				must(t, p.closeDevice(d, errUnplugged))
				s.Usable()
				must(t, p.openDevice(d))
				s.Usable()
			}
			s.Update(t.Context(), h, []Own{c.keep})
			if got := h.noted(); got != c.lost {
				t.Errorf("the stack: %q, want %q", got, c.lost)
			}
			if open, _ := s.Usable(); len(open) != 1 || open[0] != rdma.Device(h.first(c.opened)) {
				t.Errorf("usable %v, want the opening of %s", names(open), c.opened)
			}
			s.Update(t.Context(), h, nil)
			if got, want := h.noted(), "lost "+h.rdmaName(c.opened); got != want {
				t.Errorf("without devices: the stack %q, want %q", got, want)
			}
			must(t, s.Release())
		})
	}
}

// TestPool_Node: the node's set has no rails, PCI addresses or namespace, and stays.
func TestPool_Node(t *testing.T) {
	h := newHost()
	p := h.pool(t, "a")
	s := p.Node()
	if s.Own() || s.Hardware() || s.RailOf() != nil || s.PCI("rdma-a") != "" || s.Inside(netip.MustParseAddr("192.0.2.9")) != nil {
		t.Error("the node's set says something of a pod's")
	}
	must(t, s.Release())
	if open, _ := p.Node().Usable(); len(open) != 1 {
		t.Errorf("%d devices after Release", len(open))
	}
}
