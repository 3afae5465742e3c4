// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// rnic is a device as a stack uses it: with completion queues of its own, and a
// protection domain for each link group. An rnic is guarded by the stack's turn.
type rnic struct {
	s     *Stack
	index uint8 // in Config.Devices
	dev   rdma.Device
	ctx   rdma.Context
	gids  gids
	links map[rdma.QPN]*link
	dead  bool // the device is gone

	domains int // protection domains on the device that link groups use
	ended   endedLinks

	// What arrives, and what was sent. To be woken for the completion of each of our own SENDs
	// costs as much as for a message, and for most SENDs nobody waits. So the queue sends is
	// armed only while awaiting is not 0. Else completed SENDs are found when a message
	// comes, when a timer expires, or by devices.sweep.
	recvs, sends completions
	inflight     int  // SENDs that have not completed
	awaiting     int  // links that wait for the completion of a SEND
	armed        bool // the queue sends will call

	answer answerPoll
}

// completions is a completion queue with what is taken out of it.
type completions struct {
	rdma.CQ
	slots  int // requests of a link that may complete in it before it is emptied
	links  int // for which it has room
	wcs    [64]rdma.WC
	taking bool        // the completions in wcs are being dealt with
	look   bool        // there may be something in the queue
	called atomic.Bool // the queue called: there is something in the queue
}

// Completion queues begin with room for firstLinks links. Of leftLinks that were closed
// they may still have something.
const (
	firstLinks = 32
	leftLinks  = 16
)

// sweepInterval is how long completed SENDs that nobody waits for may be
// overlooked: a quarter of linkgroup.StallTimeout, which the pace of SENDs is compared
// with. The sweep also finds a queue pair that gave up where the device tells nobody;
// giving up takes a queue pair seconds anyway.
const sweepInterval = linkgroup.StallTimeout / 4

// openRNIC opens a device for the stack.
func (s *Stack) openRNIC(index int, d rdma.Device) (_ *rnic, err error) {
	r := &rnic{s: s, index: uint8(index), dev: d, links: map[rdma.QPN]*link{}}
	defer func() {
		if err != nil {
			err = fmt.Errorf("set up device %s: %w", d.Name(), err)
			if r.ctx != nil {
				err = errors.Join(err, r.ctx.Close())
			}
		}
	}()
	if r.gids, err = pickGIDs(d, s.cfg.Versions); err != nil {
		return nil, err
	}
	if !d.Attr().PeerCompletes { // close and failover count a completed SEND as delivered
		return nil, errors.New("its sends complete before the peer has them, which SMC-R cannot use")
	}
	if r.ctx, err = d.Open(); err != nil {
		return nil, err
	}
	if err = r.openQueue(&r.recvs, linkgroup.RecvDepth); err != nil {
		return nil, err
	}
	if err = r.openQueue(&r.sends, sendRequests); err != nil {
		return nil, err
	}
	if p, ok := r.ctx.(rdma.IdlePoller); ok && s.cfg.AnswerPoll > 0 {
		p.OnIdle(r.pollAnswer)
	}
	r.recvs.called.Store(true) // the first step arms the queue
	return r, nil
}

// openQueue makes a completion queue with room for slots requests of each link. The
// queue calls in whatever goroutine found the completions, and that goroutine does the
// work.
//
// Peers decide how many links there are and what arrives on each, and nobody may be there to empty a queue meanwhile; if
// it overran, all links would end. Queues take memory, which a device may want for all of their room at once: so they grow with
// the links, or have room for one link of each connection where the device cannot change them.
func (r *rnic) openQueue(q *completions, slots int) (err error) {
	q.slots = slots
	open := func(links int) (err error) {
		q.links = r.mostLinks(q, links)
		q.CQ, err = r.ctx.CreateCQ(q.links * slots)
		return err
	}
	if err := open(firstLinks / 2); err != nil {
		return err
	}
	if err := q.grow(r.mostLinks(q, firstLinks)); errors.Is(err, rdma.ErrNotSupported) {
		cfg := &r.s.cfg
		err = errors.Join(q.Close(), open(leftLinks+min(cfg.MaxConns, cfg.MemoryBytes/(cfg.RMBESizeBytes+cfg.SendBufferBytes))))
		if err != nil {
			return err
		}
	}
	q.OnNotify(func() {
		q.called.Store(true)
		r.s.marks.ready.Store(true)
		r.s.kick()
	})
	return nil
}

// mostLinks is for how many links, links at most, the device's queues can have room.
func (r *rnic) mostLinks(q *completions, links int) int {
	return min(links, r.dev.Attr().MaxCQE/q.slots)
}

// grow gives the queue room for so many links.
func (q *completions) grow(links int) error {
	err := q.Resize(links * q.slots)
	if err == nil {
		q.links = links
	}
	return err
}

// makeRoom gives the completion queues room for another link. Links that linger make place for it if a queue cannot grow.
func (r *rnic) makeRoom() error {
	for _, q := range [...]*completions{&r.sends, &r.recvs} {
		var err error
		if need := len(r.links) + 1; need+leftLinks > q.links {
			if links := r.mostLinks(q, max(need+leftLinks, 2*q.links)); links > q.links {
				err = q.grow(links)
			}
		}
		for len(r.links) >= q.links {
			if !r.s.lingering.makePlaceOn(r) {
				return &queuePairError{r, fmt.Errorf("completion queues have room for %d links: %w", q.links, errors.Join(err, rdma.ErrNoResources))}
			}
		}
	}
	return nil
}

// active reports whether the device's port is, and has an address.
func (r *rnic) active() bool {
	return !r.dead && !r.gids.gone && r.dev.Port().State == rdma.PortActive
}

// arm asks for the next call before the queues are emptied, so that no
// completion is missed.
func (r *rnic) arm(now time.Time) {
	if r.dead {
		return
	}
	if r.recvs.called.Swap(false) {
		r.recvs.look = true
		r.sends.look = r.inflight > 0
		r.check(now, "arm completion queue", r.recvs.Arm(false))
	}
	if r.sends.called.Swap(false) {
		r.sends.look, r.armed = true, false
	}
	if r.awaiting > 0 && !r.armed {
		r.sends.look, r.armed = true, true
		r.check(now, "arm completion queue", r.sends.Arm(false))
	}
}

// check ends the use of a device that fails.
func (r *rnic) check(now time.Time, what string, err error) {
	if err != nil {
		r.fail(now, fmt.Errorf("%s: %w", what, err))
	}
}

// poll takes completions, and reports whether there may be more. Completed SENDs
// come first: a message may speak of what they carried.
func (r *rnic) poll(now time.Time) bool {
	for _, q := range [...]*completions{&r.sends, &r.recvs} {
		if r.dead || !q.look {
			continue
		}
		n, err := r.take(now, q)
		q.look = n == len(q.wcs)
		r.check(now, "poll completion queue", err)
	}
	return r.sends.look || r.recvs.look
}

// drain takes all completions that are there, also of a device that is gone.
// Their groups are flushed in the next step.
func (r *rnic) drain(now time.Time) {
	r.drainSends(now)
	r.drainQueue(now, &r.recvs)
}

// drainSends is drain for our own SENDs.
func (r *rnic) drainSends(now time.Time) {
	if r.inflight > 0 {
		r.drainQueue(now, &r.sends)
	}
}

func (r *rnic) drainQueue(now time.Time, q *completions) {
	for !q.taking {
		n, err := r.take(now, q)
		if n == 0 || err != nil {
			break
		}
	}
	if len(r.s.groups.touched) > 0 {
		r.s.marks.ready.Store(true) // the step comes when the turn is given up
	}
}

func (r *rnic) take(now time.Time, q *completions) (int, error) {
	q.taking = true
	defer func() { q.taking = false }()
	n, err := q.Poll(q.wcs[:])
	for i := range q.wcs[:n] {
		wc := &q.wcs[i]
		if l := r.links[wc.QPN]; l != nil {
			l.handleCompletion(now, wc)
			r.s.groups.touch(l.g)
		}
	}
	return n, err
}

// sweepLater has the stack's goroutine look for completed SENDs.
func (s *Stack) sweepLater(now time.Time) {
	if s.devices.sweepAt.IsZero() {
		s.devices.sweepAt = now.Add(sweepInterval)
		s.alarm.wakeAt(s.devices.sweepAt)
	}
}

// watch acts on the device's asynchronous events until the device is closed.
func (r *rnic) watch() {
	for ev := range r.ctx.Events() {
		r.s.lock()
		now := time.Now()
		r.drain(now) // what came before the event
		r.handleEvent(now, ev)
		r.s.unlock()
	}
}

func (r *rnic) handleEvent(now time.Time, ev rdma.AsyncEvent) {
	switch ev.Kind {
	case rdma.EventQPFatal, rdma.EventPathDown, rdma.EventDisconnected:
		if errors.Is(ev.Err, rdma.ErrPeerAccess) {
			r.handleTrespass(now, ev.QPN, ev.Err)
		}
		if l := r.links[ev.QPN]; l != nil {
			l.fail(now, fmt.Errorf("%v: %w", ev.Kind, ev.Err))
			l.g.flush(now)
		}
	case rdma.EventDeviceFatal:
		r.fail(now, ev.Err)
	case rdma.EventPortActive, rdma.EventPortDown, rdma.EventGIDChange:
		switch {
		case r.dead: // another device may have the number now
		case ev.Kind == rdma.EventGIDChange:
			r.readGIDs(now)
		default:
			r.s.portChanged(now, r, ev.Kind == rdma.EventPortActive)
		}
	}
}

// fail ends all links of a device that is gone.
func (r *rnic) fail(now time.Time, err error) {
	if r.dead {
		return
	}
	r.dead = true
	r.drain(now) // what was acknowledged before
	err = fmt.Errorf("device %s: %w", r.dev.Name(), err)
	for _, l := range r.links {
		l.fail(now, err)
		r.s.groups.touch(l.g)
	}
	r.s.groups.flushTouched(now, unbounded)
}
