// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// portEvents bounds the port events that wait for a slow reader.
const portEvents = 16

// accusations bounds the events of queue pairs that are closed meanwhile.
const accusations = 256

// Events is the event queue of one context: see [rdma.Context]. Queue pair
// events are kept, each kind once for a queue pair, but one that accuses the peer
// takes the place of one that does not; of port events the newest.
type Events struct {
	out  chan rdma.AsyncEvent
	kick chan struct{} // capacity 1: queue has something
	done chan struct{}
	wg   sync.WaitGroup

	mu    sync.Mutex
	queue []rdma.AsyncEvent
}

// NewEvents starts the goroutine that delivers events until Close.
func NewEvents() *Events {
	e := &Events{
		out:  make(chan rdma.AsyncEvent, 1),
		kick: make(chan struct{}, 1),
		done: make(chan struct{}),
	}
	e.wg.Go(e.deliver)
	return e
}

// Out is the channel that events are delivered to.
func (e *Events) Out() <-chan rdma.AsyncEvent { return e.out }

// Post queues an event. It never waits.
func (e *Events) Post(ev rdma.AsyncEvent) {
	e.mu.Lock()
	defer e.mu.Unlock()
	port, oldest := 0, -1
	for i, o := range e.queue {
		if o.QPN != 0 || o.Kind == rdma.EventDeviceFatal {
			if o.QPN == ev.QPN && o.Kind == ev.Kind {
				if errors.Is(ev.Err, rdma.ErrPeerAccess) {
					e.queue[i] = ev
				}
				return
			}
			continue
		}
		if port++; oldest < 0 {
			oldest = i
		}
	}
	if ev.QPN == 0 && port >= portEvents {
		e.queue = append(e.queue[:oldest], e.queue[oldest+1:]...)
	}
	e.queue = append(e.queue, ev)
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// Forget drops the waiting events of a queue pair that is closed, but for some that
// accuse its peer: a user who closes a queue pair because it failed wants to know.
func (e *Events) Forget(n rdma.QPN) {
	e.mu.Lock()
	defer e.mu.Unlock()
	kept := e.queue[:0]
	for _, ev := range e.queue {
		if ev.QPN != n || len(e.queue) <= accusations && errors.Is(ev.Err, rdma.ErrPeerAccess) {
			kept = append(kept, ev)
		}
	}
	e.queue = kept
}

// Close ends the delivery and closes the channel, in which a last event may
// remain: the fatal one, if there was one. It is called once.
func (e *Events) Close() {
	close(e.done)
	e.wg.Wait()
}

func (e *Events) take() (rdma.AsyncEvent, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.queue) == 0 {
		return rdma.AsyncEvent{}, false
	}
	ev := e.queue[0]
	e.queue = append(e.queue[:0], e.queue[1:]...)
	return ev, true
}

// deliver moves events to the channel until Close.
func (e *Events) deliver() {
	defer close(e.out)
	for {
		ev, ok := e.take()
		if !ok {
			select {
			case <-e.kick:
			case <-e.done:
				e.last(rdma.AsyncEvent{})
				return
			}
			continue
		}
		select {
		case e.out <- ev:
		case <-e.done:
			e.last(ev)
			return
		}
	}
}

// last leaves the fatal event in the channel, in place of another one if need
// be, or at least ev. It is the only sender left.
func (e *Events) last(ev rdma.AsyncEvent) {
	for ok := true; ok && ev.Kind != rdma.EventDeviceFatal; {
		var next rdma.AsyncEvent
		if next, ok = e.take(); ok && (next.Kind == rdma.EventDeviceFatal || ev == rdma.AsyncEvent{}) {
			ev = next
		}
	}
	switch ev.Kind {
	case rdma.EventDeviceFatal:
		select {
		case <-e.out:
		default:
		}
		e.out <- ev
	default:
		if ev == (rdma.AsyncEvent{}) {
			return
		}
		select {
		case e.out <- ev:
		default:
		}
	}
}
