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

// AddDevice gives the stack a device that was not there when it was made, or
// that is there again: it takes the place of the one of the same name, which
// must be gone. Link groups get another link over it as if its port had come
// up. Nothing happens if the stack has the device already.
func (s *Stack) AddDevice(d rdma.Device) error {
	s.lock()
	defer s.unlock()
	if s.closed {
		return errStackClosed
	}
	at := slices.IndexFunc(s.rnics, func(r *rnic) bool { return r.dev.Name() == d.Name() })
	switch {
	case at >= 0 && !s.rnics[at].dead:
		if s.rnics[at].dev == d {
			return nil
		}
		return fmt.Errorf("add device %s: another one of this name is in use: %w", d.Name(), rdma.ErrBusy)
	case at < 0 && len(s.rnics) >= linkgroup.MaxRNICs:
		return fmt.Errorf("add device %s: the stack has %d already, which is the most it can use", d.Name(), linkgroup.MaxRNICs)
	case at < 0:
		at = len(s.rnics)
	}
	r, err := s.openRNIC(at, d)
	if err != nil {
		return err
	}
	if err := s.moveIn(r); err != nil {
		return errors.Join(fmt.Errorf("add device %s: %w", d.Name(), err), r.ctx.Close())
	}
	s.wg.Go(r.watch)
	s.ready.Store(true) // the first step arms the queue
	s.portChanged(time.Now(), r, r.active())
	return nil
}

// RemoveDevice takes a device away from the stack, as if it were gone: its links
// end, and their connections go on over others or are reset. Nothing happens if
// the stack does not have the device. It may be closed then, or be used by
// others.
func (s *Stack) RemoveDevice(name string) {
	s.lock()
	defer s.unlock()
	for _, r := range s.rnics {
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
	var regions []*region
	for _, a := range s.mem.arenas {
		regions = append(regions, a.region)
	}
	for _, g := range s.groups {
		for _, m := range g.rmbs {
			regions = append(regions, m)
		}
	}
	mrs := make([]rdma.MR, len(regions))
	for i, m := range regions {
		var err error
		if mrs[i], err = m.registerToo(r); err != nil {
			return err // the context's end frees what was registered
		}
	}
	rnics := slices.Clone(s.rnics)
	if at := int(r.index); at < len(rnics) {
		s.retire(rnics[at])
		rnics[at] = r
	} else {
		rnics = append(rnics, r)
	}
	s.rnics, s.mem.rnics = rnics, rnics
	for i, m := range regions {
		m.put(r, mrs[i])
	}
	for _, g := range s.groups {
		for id, m := range g.rmbs {
			g.lg.SetRMBToken(id, r.index, m.tokens()[r.index])
		}
	}
	return nil
}

// retire keeps a device that is gone until nothing needs its memory: programs
// may still read what came last. Those that nothing needs are closed.
func (s *Stack) retire(old *rnic) {
	s.lingering = slices.DeleteFunc(s.lingering, func(l *link) bool {
		if l.rnic == old {
			l.close()
		}
		return l.rnic == old
	})
	s.retired = slices.DeleteFunc(append(s.retired, old), func(r *rnic) bool {
		return r.pd.Close() == nil && r.ctx.Close() == nil
	})
}

// registerToo registers a region with another device. The memory is there as
// long as any region with it, even of a device that is gone.
func (r *region) registerToo(n *rnic) (rdma.MR, error) {
	i := slices.IndexFunc(r.mrs, func(mr rdma.MR) bool { return mr != nil })
	invariant.Must(i >= 0, "a region of memory without a registration")
	mr, err := n.pd.RegMR(r.mrs[i], r.access)
	if err != nil {
		return nil, fmt.Errorf("register %d bytes: %w", len(r.mem), err)
	}
	return mr, nil
}

// put makes mr the region's registration with a device.
func (r *region) put(n *rnic, mr rdma.MR) {
	for len(r.mrs) <= int(n.index) {
		r.mrs = append(r.mrs, nil)
	}
	if old := r.mrs[n.index]; old != nil {
		_ = old.Close() // its device is gone
	}
	r.mrs[n.index] = mr
}
