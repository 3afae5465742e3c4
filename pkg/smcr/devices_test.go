// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// tableDevice is a device of which a table asks no more than name and port.
type tableDevice struct {
	rdma.Device
	name string
	port rdma.PortState
}

func (d tableDevice) Name() string        { return d.name }
func (d tableDevice) Port() rdma.PortAttr { return rdma.PortAttr{State: d.port} }

// tableContext counts how often it is closed.
type tableContext struct {
	rdma.Context
	closed int
}

func (c *tableContext) Close() error { c.closed++; return nil }

func tableRNIC(index uint8, name, addr string, links int) *rnic {
	r := &rnic{
		index: index, dev: tableDevice{name: name, port: rdma.PortActive}, ctx: &tableContext{},
		links: map[rdma.QPN]*link{},
	}
	r.gids.v2 = rdma.GIDEntry{GID: gid(addr), PrefixBits: 24}
	for n := range links {
		r.links[rdma.QPN(n)] = &link{}
	}
	return r
}

func TestDevices_pick(t *testing.T) {
	rails := map[string]int{"a0": 0, "a1": 0, "b0": 1}
	d := devices{rail: func(name string) int { return rails[name] }}
	d.put(tableRNIC(0, "a0", "192.0.2.1", 2))
	d.put(tableRNIC(1, "a1", "198.51.100.1", 1))
	d.put(tableRNIC(2, "b0", "203.0.113.1", 3))
	a0, a1 := d.list[0], d.list[1]
	var onlyB0 routes
	onlyB0[2].Found = true
	elsewhere := gid("10.0.0.1")
	for _, tc := range []struct {
		name  string
		not   uint8
		peer  rdma.GID
		bound bool
		reach *routes
		edit  func()
		want  string
	}{
		{"few links", 0, elsewhere, false, nil, func() {}, "a1"},
		{"in the peer's subnet", 0, gid("203.0.113.9"), false, nil, func() {}, "b0"},
		{"on another rail", 1 << 0, elsewhere, false, nil, func() {}, "b0"},
		{"in the peer's subnet rather than on another rail", 1 << 0, gid("198.51.100.9"), false, nil, func() {}, "a1"},
		{"with a route", 0, elsewhere, false, &onlyB0, func() {}, "b0"},
		{"bound to a subnet whose device is taken", 1 << 2, gid("203.0.113.9"), true, nil, func() {}, ""},
		{"bound to a subnet that no device is in", 0, elsewhere, true, nil, func() {}, "a1"},
		{"all taken", 7, elsewhere, false, nil, func() {}, ""},
		{"an active port", 0, elsewhere, false, nil, func() { a1.dev = tableDevice{name: "a1", port: rdma.PortDown} }, "a0"},
		{"a device that is gone", 0, elsewhere, false, nil, func() { a0.dead = true }, "b0"},
		{"a port that is down rather than none", 1 << 2, elsewhere, false, nil, func() {}, "a1"},
	} {
		tc.edit()
		got := ""
		if r := d.pick(tc.not, tc.peer, tc.bound, tc.reach); r != nil {
			got = r.dev.Name()
		}
		if got != tc.want {
			t.Errorf("%s: picked %q, want %q", tc.name, got, tc.want)
		}
	}
}

// TestDevices_first: a client of version 2 stays with what it proposed while that has a route, and otherwise,
// as in version 1 and at servers, takes the device in the peer's subnet.
func TestDevices_first(t *testing.T) {
	var d devices
	d.put(tableRNIC(0, "a", "192.0.2.1", 0))
	d.put(tableRNIC(1, "b", "198.51.100.1", 0))
	all, onlyB := routes{{Found: true}, {Found: true}}, routes{1: {Found: true}}
	client := contact{role: linkgroup.Client, gid: gid("198.51.100.9")}
	server := contact{role: linkgroup.Server, gid: gid("198.51.100.9")}
	for _, tc := range []struct {
		name  string
		c     contact
		reach *routes
		dead  bool
		want  string
	}{
		{"client", client, &all, false, "a"},
		{"client, no route from what it proposed", client, &onlyB, false, "b"},
		{"client, what it proposed is gone", client, &all, true, "b"},
		{"client of version 1", client, nil, false, "b"},
		{"server", server, &all, false, "b"},
	} {
		d.list[0].dead = tc.dead
		if r := d.first(&tc.c, tc.reach); r == nil || r.dev.Name() != tc.want {
			t.Errorf("%s: %v, want %s", tc.name, r, tc.want)
		}
	}
}

// TestDevices_offered: what is preferred for a peer is proposed while its port is active.
func TestDevices_offered(t *testing.T) {
	var d devices
	d.put(tableRNIC(0, "a", "192.0.2.1", 0))
	d.put(tableRNIC(1, "b", "198.51.100.1", 0))
	for preferred, want := range []uint8{0, 1, 0} { // there is no third
		if r := d.offered(uint8(preferred)); r.index != want {
			t.Errorf("prefers %d: %d, want %d", preferred, r.index, want)
		}
	}
	for _, r := range d.list {
		r.dev = tableDevice{name: "down", port: rdma.PortDown}
		if got := d.offered(1); got != d.list[1-r.index] && r.index == 0 || r.index == 1 && got != d.list[0] {
			t.Errorf("device %d is down as well: %d", r.index, got.index)
		}
	}
}

// A device whose place another one has is closed when nothing is registered with it.
func TestDevices_retire(t *testing.T) {
	var d devices
	old, next := tableRNIC(0, "a", "192.0.2.1", 0), tableRNIC(0, "a", "192.0.2.1", 0)
	other := tableRNIC(1, "b", "192.0.2.2", 0)
	d.put(old)
	d.put(other)
	before := d.list
	old.domains = 1
	d.put(next)
	if d.named("a") != 0 || d.named("b") != 1 || d.named("c") != -1 || d.list[0] != next || len(d.list) != 2 {
		t.Errorf("the table is %v", d.list)
	}
	if before[0] != old {
		t.Error("a list that somebody reads has changed")
	}
	if free := d.takeRetired(); len(free) > 0 {
		t.Error("closed while memory is registered with it")
	}
	old.domains = 0
	if free := d.takeRetired(); len(free) != 1 || free[0] != old || len(d.takeRetired()) != 0 {
		t.Errorf("to be closed: %v; %d are left", free, len(d.retired))
	}
	if err := d.close(); err != nil || old.ctx.(*tableContext).closed != 0 {
		t.Errorf("the end: %v; a device that is not in the table any more was closed", err)
	}
	for _, r := range []*rnic{next, other} {
		if n := r.ctx.(*tableContext).closed; n != 1 {
			t.Errorf("device %d was closed %d times", r.index, n)
		}
	}
}
