// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// rnic is a device as a stack uses it: with a protection domain and a
// completion queue of its own. It is guarded by the stack's turn.
type rnic struct {
	s     *Stack
	index uint8 // in Config.Devices
	dev   rdma.Device
	ctx   rdma.Context
	pd    rdma.PD
	cq    rdma.CQ
	gid   rdma.GIDEntry
	links map[rdma.QPN]*link
	dead  bool // the device is gone
	wcs   [64]rdma.WC
	// taking: the completions in wcs are being dealt with.
	taking bool
	answer answerPoll
	// ready says that the completion queue called: there is something in it.
	ready atomic.Bool
}

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
	if r.gid, err = pickGID(d); err != nil {
		return nil, err
	}
	if r.ctx, err = d.Open(); err != nil {
		return nil, err
	}
	if r.pd, err = r.ctx.AllocPD(); err != nil {
		return nil, err
	}
	if r.cq, err = r.ctx.CreateCQ(completionQueueDepth(s.cfg, d)); err != nil {
		return nil, err
	}
	r.cq.OnNotify(r.completed)
	if p, ok := r.ctx.(rdma.IdlePoller); ok && s.cfg.AnswerPoll > 0 {
		p.OnIdle(r.pollAnswer)
	}
	r.ready.Store(true) // the first step arms the queue
	return r, nil
}

// active reports whether the device's port is.
func (r *rnic) active() bool { return !r.dead && r.dev.Port().State == rdma.PortActive }

// completed is called by the device when there are completions, in whatever
// goroutine found them; the work is done right there.
func (r *rnic) completed() {
	r.ready.Store(true)
	r.s.ready.Store(true)
	r.s.kick()
}

// arm asks for the next call before the queue is emptied, so that no
// completion is missed.
func (r *rnic) arm(now time.Time) {
	if r.dead || !r.ready.Swap(false) {
		return
	}
	if err := r.cq.Arm(false); err != nil {
		r.fail(now, fmt.Errorf("arm completion queue: %w", err))
	}
}

// poll takes completions; it reports whether there may be more.
func (r *rnic) poll(now time.Time) bool {
	if r.dead {
		return false
	}
	n, err := r.take(now)
	if err != nil {
		r.fail(now, fmt.Errorf("poll completion queue: %w", err))
	}
	return n == len(r.wcs)
}

// drain takes all completions that are there, also of a device that is gone.
// Their groups are flushed in the next step.
func (r *rnic) drain(now time.Time) {
	for !r.taking {
		n, err := r.take(now)
		if n == 0 || err != nil {
			break
		}
	}
	if len(r.s.touched) > 0 {
		r.s.ready.Store(true) // the step comes when the turn is given up
	}
}

func (r *rnic) take(now time.Time) (int, error) {
	r.taking = true
	defer func() { r.taking = false }()
	n, err := r.cq.Poll(r.wcs[:])
	for i := range r.wcs[:n] {
		wc := &r.wcs[i]
		if l := r.links[wc.QPN]; l != nil {
			l.handleCompletion(now, wc)
			r.s.touch(l.g)
		}
	}
	return n, err
}

// watch acts on the device's asynchronous events until it is closed.
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
	case rdma.EventQPFatal, rdma.EventPathDown:
		if l := r.links[ev.QPN]; l != nil {
			l.fail(now, fmt.Errorf("%v: %w", ev.Kind, ev.Err))
			l.g.flush(now)
		}
	case rdma.EventDeviceFatal:
		r.fail(now, ev.Err)
	case rdma.EventPortActive, rdma.EventPortDown:
		r.s.portChanged(now, r, ev.Kind == rdma.EventPortActive)
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
		r.s.touch(l.g)
	}
	r.s.flushTouched(now)
}

// pickGID returns the first RoCEv2 GID.
func pickGID(d rdma.Device) (rdma.GIDEntry, error) {
	for _, e := range d.GIDs() {
		if e.Type == rdma.GIDTypeRoCEv2 {
			return e, nil
		}
	}
	return rdma.GIDEntry{}, errors.New("no RoCE v2 GID: give its network interface an IP address")
}
