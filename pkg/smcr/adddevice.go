// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// AddDevice gives the stack a device that was not there when the stack was made, or
// that is there again: the device takes the place of the one of the same name, which
// must be gone, or that of another one that is gone where there is no free one. Link groups get another link over the device as if its port had come
// up. Nothing happens if the stack has the device already.
func (s *Stack) AddDevice(d rdma.Device) error {
	s.lock()
	defer s.unlock()
	if s.closed {
		return errStackClosed
	}
	at := s.devices.named(d.Name())
	switch {
	case at >= 0 && !s.devices.list[at].dead:
		if s.devices.list[at].dev == d {
			return nil
		}
		return fmt.Errorf("add device %s: another one of this name is in use: %w", d.Name(), rdma.ErrBusy)
	case at < 0 && len(s.devices.list) < linkgroup.MaxRNICs:
		at = len(s.devices.list)
	case at < 0:
		at = slices.IndexFunc(s.devices.list, func(r *rnic) bool { return r.dead })
	}
	if at < 0 {
		return fmt.Errorf("add device %s: the stack has %d already, which is the most it can use", d.Name(), linkgroup.MaxRNICs)
	}
	r, err := s.openRNIC(at, d)
	if err != nil {
		return err
	}
	if err := s.moveIn(r); err != nil {
		return errors.Join(fmt.Errorf("add device %s: %w", d.Name(), err), r.ctx.Close())
	}
	s.wg.Go(r.watch)
	s.marks.ready.Store(true) // the first step arms the queue
	s.portChanged(time.Now(), r, r.active())
	return nil
}

// RemoveDevice takes a device away from the stack, as if the device were gone: its links
// end, and their connections go on over other links or are reset. Nothing happens if
// the stack does not have the device. After RemoveDevice the device may be closed, or be used
// by others.
func (s *Stack) RemoveDevice(name string) {
	s.lock()
	defer s.unlock()
	for _, r := range s.devices.list {
		if r.dev.Name() == name && !s.closed {
			r.fail(time.Now(), errTakenAway)
		}
	}
}

// errTakenAway is why the links of a removed device end.
var errTakenAway = errors.New("it was taken away")

// moveIn registers the memory of the stack with a device and puts the device
// in its place. After an error nothing has changed.
func (s *Stack) moveIn(r *rnic) error {
	moves := make([]move, 0, len(s.groups.byID))
	for _, g := range s.groups.byID {
		m, err := g.prepareMove(r)
		if err != nil {
			return err // the context's end frees what was registered
		}
		moves = append(moves, m)
	}
	if at := int(r.index); at < len(s.devices.list) {
		s.lingering.closeOn(s.devices.list[at])
	}
	s.devices.put(r)
	s.preferred.forget(r.index)
	for i := range moves {
		moves[i].do()
	}
	s.closeRetired()
	return nil
}

// move is what becomes of a link group's memory when a device comes: a domain there,
// in which each region is registered.
type move struct {
	g       *group
	to      *domain
	regions []*region
	mrs     []rdma.MR
}

// prepareMove registers the memory of a group with a device, of which the group knows
// nothing yet.
func (g *group) prepareMove(r *rnic) (m move, err error) {
	m.g = g
	for _, a := range g.mem.arenas {
		m.regions = append(m.regions, a.region)
	}
	for _, rmb := range g.rmbs {
		m.regions = append(m.regions, rmb)
	}
	if len(m.regions) == 0 {
		return m, nil
	}
	if m.to, err = g.mem.newDomain(r); err != nil {
		return m, err
	}
	for _, o := range m.regions {
		mr, err := m.to.registerToo(o)
		if err != nil {
			return m, err
		}
		m.mrs = append(m.mrs, mr)
	}
	return m, nil
}

// do puts the registrations in the place of those with the device that was there before.
func (m *move) do() {
	if m.to == nil {
		return
	}
	index := m.to.rnic.index
	m.g.mem.domains[index] = m.to
	for i, o := range m.regions {
		o.forgot = o.forgot || o.at[index].domain != nil
		_ = o.at[index].close() // its device is gone
		o.at[index] = registration{m.mrs[i], m.to}
		o.at[index].countWrites(o.block)
		m.to.users++
	}
	for id, rmb := range m.g.rmbs {
		m.g.lg.SetRMBToken(id, index, rmb.tokens()[index])
	}
}

// registerToo registers a region's memory here, too. The memory is there as long as
// any region with it, even of a device that is gone.
func (d *domain) registerToo(r *region) (rdma.MR, error) {
	i := slices.IndexFunc(r.at[:], func(a registration) bool { return a.domain != nil })
	invariant.Must(i >= 0, "a region of memory without a registration")
	mr, err := d.pd.RegMR(r.at[i].mr, 0, 0, r.access)
	if err != nil {
		return nil, fmt.Errorf("register %d bytes: %w", len(r.mem), err)
	}
	return mr, nil
}
