// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// devices are the devices that a stack has opened. The table owns their contexts and completion
// queues, until close or, of a device that is gone, until nothing is registered with it. It is
// guarded by the stack's turn.
//
//	AddDevice "b"         list: a, b         retired: -
//	"b" is gone           list: a, b (dead)  retired: -
//	AddDevice "b" again   list: a, b'        retired: b, if a program still reads memory of b
//	that memory is freed  list: a, b'        retired: -
type devices struct {
	list    []*rnic // by number; replaced and never changed, so it may be read without the turn
	retired []*rnic // whose places others have
	// sweepAt is when completed SENDs are looked for, though nobody waits for
	// them; zero: none are in flight.
	sweepAt time.Time
	rail    func(device string) int // Config.Rail
}

// named returns the number of the first device with a name, -1 if there is none.
func (d *devices) named(name string) int {
	return slices.IndexFunc(d.list, func(r *rnic) bool { return r.dev.Name() == name })
}

// put gives a device the place of its number. A device that had the place before is retired.
func (d *devices) put(r *rnic) {
	list := slices.Clone(d.list)
	if at := int(r.index); at < len(list) {
		d.retired = append(d.retired, list[at])
		list[at] = r
	} else {
		list = append(list, r)
	}
	d.list = list
}

// takeRetired takes those of the devices that are gone out of the table that nothing needs any more:
// programs may still read what came last over the others.
func (d *devices) takeRetired() (free []*rnic) {
	d.retired = slices.DeleteFunc(d.retired, func(r *rnic) bool {
		if r.domains > 0 {
			return false
		}
		free = append(free, r)
		return true
	})
	return free
}

// closeRetired closes devices that are gone, without the turn, which the caller holds: Close may wait
// until a device has found out the way to a peer. A stack that closes closes them with the others.
func (s *Stack) closeRetired() {
	if s.closed {
		return
	}
	for _, r := range s.devices.takeRetired() {
		s.wg.Go(func() { _ = r.ctx.Close() }) // nobody is left to hear of an error
	}
}

// close closes the devices, which ends their watchers.
func (d *devices) close() error {
	var err error
	for _, r := range slices.Concat(d.list, d.retired) {
		err = errors.Join(err, r.ctx.Close())
	}
	return err
}

// pick returns a device whose number is not in the set, or nil if there is
// none: one with an active port, in the subnet of the peer's RNIC, on another
// rail than those in the set, with few links, in this order, and with a route to
// that RNIC if reach is given. If the
// link ends at that RNIC of the peer (bound), and some of our devices are in its
// subnet, only those will do: a link across subnets would depend on both of
// them. The first link of a group may take a port that is not active: an
// interface reports its carrier up to a second late.
func (d *devices) pick(not uint8, peer rdma.GID, bound bool, reach *routes) *rnic {
	near := func(r *rnic) bool { return r.gids.onLink(peer) }
	bound = bound && slices.ContainsFunc(d.list, near)
	far := func(r *rnic) bool { return reach != nil && !reach[r.index].Found }
	rails := d.railsOf(not)
	fresh := func(r *rnic) bool { return !slices.Contains(rails, d.railOf(r)) }
	var best *rnic
	for _, r := range d.list {
		if r.dead || not>>r.index&1 != 0 || bound && !near(r) || far(r) {
			continue
		}
		if best == nil || cmp.Or(compareBool(r.active(), best.active()), compareBool(near(r), near(best)),
			compareBool(fresh(r), fresh(best)), len(best.links)-len(r.links)) > 0 {
			best = r
		}
	}
	return best
}

// offered is the device that a client proposes: one that it is told to prefer if that has an
// active port, or else the first that has one.
func (d *devices) offered(preferred uint8) *rnic {
	if int(preferred) < len(d.list) && d.list[preferred].active() {
		return d.list[preferred]
	}
	return d.list[max(0, slices.IndexFunc(d.list, (*rnic).active))]
}

// first is the device of the first link to a peer's RNIC that is reached by these routes. In version 2
// a client's is the one that it proposed: the server may know no other, and does not if it is Linux. If
// that has no route the client may take another in the server's subnet, which our own servers follow.
func (d *devices) first(c *contact, reach *routes) *rnic {
	if c.role == linkgroup.Client && reach != nil && reach[c.offered].Found && !d.list[c.offered].dead {
		return d.list[c.offered]
	}
	return d.pick(0, c.gid, c.role == linkgroup.Client, reach)
}

// railsOf are the rails of a set of devices.
func (d *devices) railsOf(set uint8) []int {
	var rails []int
	for _, r := range d.list {
		if set>>r.index&1 != 0 {
			rails = append(rails, d.railOf(r))
		}
	}
	return rails
}

// railOf is the rail of a device; without any it is a number that no other has.
func (d *devices) railOf(r *rnic) int {
	if d.rail == nil {
		return int(r.index)
	}
	return d.rail(r.dev.Name())
}

// compareBool orders false before true.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// arm asks all devices for their next call.
func (d *devices) arm(now time.Time) {
	for _, r := range d.list {
		r.arm(now)
	}
}

// poll takes completions of all devices; it reports whether there may be more.
func (d *devices) poll(now time.Time) bool {
	more := false
	for _, r := range d.list {
		more = r.poll(now) || more
	}
	return more
}

// drain takes the completions of all devices but one, of all if that is nil.
func (d *devices) drain(now time.Time, but *rnic) {
	for _, r := range d.list {
		if r != but {
			r.drain(now)
		}
	}
}

// drainSends takes the completions of our own SENDs on all devices.
func (d *devices) drainSends(now time.Time) {
	for _, r := range d.list {
		r.drainSends(now)
	}
}

// sweep has the next step look for completed SENDs. Timers, which it is called
// before, are about what is not there.
func (d *devices) sweep(now time.Time) {
	sending := false
	for _, r := range d.list {
		if r.inflight > 0 {
			r.sends.look, sending = true, true
		}
	}
	switch {
	case !sending:
		d.sweepAt = time.Time{}
	case !now.Before(d.sweepAt):
		d.sweepAt = now.Add(sweepInterval)
	}
}
