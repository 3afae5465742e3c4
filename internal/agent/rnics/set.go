// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// A Set has the devices of one stack: all of the node's, or a pod's own.
type Set struct {
	pool *Pool
	own  bool
	in   Namespace // of the pod; nil: it could not be opened, or the set is the node's

	// guarded by Pool.mu; only the owner of the set changes them:
	want    []Own     // the argument of the last Update
	devices []*device // one for each element of want

	given []rdma.Device // the last result of Usable; guarded by Pool.mu
}

// A User runs on the devices of a set, and stops using a device that is removed.
type User interface {
	RemoveDevice(name string)
}

// Node is the set of the node's devices. Release does nothing to it.
func (p *Pool) Node() *Set { return &Set{pool: p} }

// NewSet returns a set without devices for a pod. in is nil if the pod's namespace could not be
// opened.
func (p *Pool) NewSet(in Namespace) *Set { return &Set{pool: p, own: true, in: in} }

// Own reports whether the set has a pod's own devices.
func (s *Set) Own() bool { return s.own }

// Want is the argument of the last Update.
func (s *Set) Want() []Own { return s.pool.wantOf(s) }

func (p *Pool) wantOf(s *Set) []Own {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(s.want)
}

// list are the set's devices. Pool.mu is held.
func (s *Set) list() []*device {
	if s.own {
		return s.devices
	}
	return s.pool.node
}

// States are the set's devices at this moment. In a pod's set each has Own, even if the device is
// one of the node's.
func (s *Set) States() []State { return s.pool.statesOf(s) }

func (p *Pool) statesOf(s *Set) []State {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := statesOf(s.list())
	for i := range out {
		if s.own && out[i].Own == nil {
			own := s.want[i]
			out[i].Own = &own
		}
	}
	return out
}

// Usable are the open devices of the set, each once: a pod may ask for one device under two IDs,
// "rdma0" and the PCI address, say. If the pool opened such a device once for each ID, Usable goes on
// to return the same opening while that is open. count grows whenever any device of the pool is
// opened: while it is the same, the stack already has all of them.
func (s *Set) Usable() (open []rdma.Device, count uint64) { return s.pool.usable(s) }

func (p *Pool) usable(s *Set) (open []rdma.Device, count uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := map[string]int{} // a device's name to its index in open
	for _, d := range s.list() {
		if d.open == nil {
			continue
		}
		i, twice := at[d.open.Name()]
		switch {
		case !twice:
			at[d.open.Name()] = len(open)
			open = append(open, d.open)
		case slices.Contains(s.given, d.open):
			open[i] = d.open
		}
	}
	s.given = slices.Clone(open)
	return open, p.openCount
}

// Update makes want the devices of a pod's set. Devices that are no longer wanted are removed from
// user, if that is not nil, and then closed. A device that the pod still has under another ID stays
// with user, unless the opening that Usable returned is to be closed: then user loses the device, and
// gets the other opening with the new ones. The caller gives the new ones to its stack.
func (s *Set) Update(ctx context.Context, user User, want []Own) {
	p := s.pool
	kept := map[string]*device{}
	var gone []*device
	for i, d := range s.devices {
		had := &s.want[i]
		if slices.ContainsFunc(want, func(o Own) bool { return reflect.DeepEqual(o, *had) }) {
			kept[had.ID] = d
		} else {
			gone = append(gone, d)
		}
	}
	for _, d := range gone {
		if name := p.loses(s, d, kept); name != "" && user != nil {
			user.RemoveDevice(name)
		}
		if err := p.giveBack(d); err != nil {
			p.cfg.Log.Warn("device taken from a pod not closed in order", "device", d.name, "err", err)
		}
	}
	devices := make([]*device, len(want))
	for i := range want {
		if devices[i] = kept[want[i].ID]; devices[i] == nil {
			devices[i] = p.openForPod(ctx, s.in, want[i])
		}
	}
	p.exchange(s, want, devices)
}

// exchange gives a set other devices.
func (p *Pool) exchange(s *Set, want []Own, devices []*device) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.want, s.devices = want, devices
	p.openCount++
}

// loses is the name of the device that the user of a set loses when the set gives d back and keeps
// others; "" if the user does not have d, or one of the others is the same opening.
func (p *Pool) loses(s *Set, d *device, kept map[string]*device) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(s.given, d.open) { // nil, which a missing device has, is never there
		return ""
	}
	for _, other := range kept {
		if other.open == d.open {
			return ""
		}
	}
	return d.open.Name()
}

// Release gives a pod's own devices back, and closes the handle on its namespace.
func (s *Set) Release() error {
	devices, in := s.pool.empty(s)
	var errs []error
	for _, d := range devices {
		errs = append(errs, s.pool.giveBack(d))
	}
	if in != nil {
		errs = append(errs, in.Close())
	}
	return errors.Join(errs...)
}

// empty takes a set's devices and namespace.
func (p *Pool) empty(s *Set) ([]*device, Namespace) {
	p.mu.Lock()
	defer p.mu.Unlock()
	devices, in := s.devices, s.in
	s.devices, s.want, s.in = nil, nil, nil
	return devices, in
}

// Inside is the pod's namespace if src is the address of a device whose interface is in there, else
// nil.
func (s *Set) Inside(src netip.Addr) Namespace {
	in := s.pool.namespaceOf(s)
	if in == nil || !slices.ContainsFunc(s.States(), func(d State) bool {
		return d.Open != nil && d.InPod &&
			slices.ContainsFunc(d.Open.GIDs(), func(g rdma.GIDEntry) bool { return g.GID.Addr() == src })
	}) {
		return nil
	}
	return in
}

func (p *Pool) namespaceOf(s *Set) Namespace {
	p.mu.Lock()
	defer p.mu.Unlock()
	return s.in
}

// RailOf returns a function that tells a stack the rail of a device; each device whose rail is
// unknown gets one of its own. RailOf returns nil for the node's devices.
func (s *Set) RailOf() func(name string) int {
	if !s.own {
		return nil
	}
	return func(name string) int {
		ds := s.States()
		i := slices.IndexFunc(ds, func(d State) bool { return d.Open != nil && d.Open.Name() == name })
		if i < 0 || ds[i].Own.Rail < 0 {
			return -1 - max(i, 0)
		}
		return ds[i].Own.Rail
	}
}

// PCI is the PCI address of a pod's own device; "" if it has none, or is the node's.
func (s *Set) PCI(name string) string {
	for _, d := range s.States() {
		if d.Own != nil && d.Open != nil && d.Open.Name() == name {
			return d.Own.PCI
		}
	}
	return ""
}

// Hardware reports whether a pod's own devices include devices of the kernel.
func (s *Set) Hardware() bool { return Hardware(s.Want()) }
