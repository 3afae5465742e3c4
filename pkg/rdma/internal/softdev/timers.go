// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"container/heap"
	"sync"
	"sync/atomic"
	"time"
)

// timers are the timeouts of a device's queue pairs: a heap of those that have one, and one
// timer of the runtime.
//
// A queue pair sets its deadline with every packet, mostly to a later time. So its place in the
// heap is by a time that is the deadline or earlier, and moves only where the deadline
// comes before that. When the time has come the heap looks at the deadline again:
//
//	deadline   268 ms    +1 ms    none     270 ms
//	place      268 ms    +1 ms    +1 ms    +1 ms, and from then on 270 ms
//
// Nothing here looks at queue pairs whose time has not come, however many there are.
type timers struct {
	epoch time.Time // times are since then

	mu    sync.Mutex
	timer *time.Timer // runs until the first one's time
	due   dueHeap
}

// timeout is a queue pair's part of it.
type timeout struct {
	deadline atomic.Int64 // of the queue pair, which its owner sets; 0: none
	at       atomic.Int64 // by which it has its place in the heap; 0: it has none
	place    int
}

func (t *timers) init() {
	t.epoch = time.Now()
	t.timer = time.NewTimer(time.Hour)
	t.timer.Stop()
}

// since returns a time since the epoch, never 0.
func (t *timers) since(at time.Time) int64 { return max(int64(at.Sub(t.epoch)), 1) }

// set sets the deadline of a queue pair; 0: none. The caller owns the queue pair.
func (t *timers) set(q *QP, at int64) {
	q.timeout.deadline.Store(at)
	if at != 0 {
		t.schedule(q, at)
	}
}

// schedule gives a queue pair a place in the heap that is not behind at.
func (t *timers) schedule(q *QP, at int64) {
	own := &q.timeout
	if a := own.at.Load(); a != 0 && a <= at {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	a := own.at.Load()
	if a != 0 && a <= at {
		return
	}
	own.at.Store(at)
	if a == 0 {
		heap.Push(&t.due, q)
	} else {
		heap.Fix(&t.due, own.place)
	}
	if own.place == 0 {
		t.timer.Reset(time.Duration(at) - time.Since(t.epoch))
	}
}

// remove takes a queue pair out, which has no deadline any more.
func (t *timers) remove(q *QP) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.timeout.at.Load() != 0 {
		heap.Remove(&t.due, q.timeout.place)
	}
}

// take appends the queue pairs whose time has come to dst, which have no place any more.
func (t *timers) take(now time.Time, dst []*QP) []*QP {
	t.mu.Lock()
	defer t.mu.Unlock()
	limit := t.since(now)
	for len(t.due) > 0 {
		at := t.due[0].timeout.at.Load()
		if at > limit {
			t.timer.Reset(time.Duration(at - limit))
			break
		}
		dst = append(dst, heap.Pop(&t.due).(*QP)) //nolint:forcetypeassert // nothing else is in there
	}
	return dst
}

// expire handles the timeouts of queue pairs that take gave.
func (t *timers) expire(now time.Time, due []*QP) {
	limit := t.since(now)
	for _, q := range due {
		if at := q.timeout.deadline.Load(); at == 0 {
			continue
		} else if at > limit {
			t.schedule(q, at)
			continue
		}
		q.Lock()
		if !q.dead {
			q.m.HandleTimeout(now)
			q.Step(now)
		}
		q.Unlock()
	}
}

// loop serves the timeouts of all queue pairs until done.
func (t *timers) loop(done <-chan struct{}) {
	var due []*QP
	for {
		select {
		case <-done:
			t.timer.Stop()
			return
		case <-t.timer.C:
			now := time.Now()
			due = t.take(now, due[:0])
			t.expire(now, due)
			clear(due)
		}
	}
}

// dueHeap has the queue pair whose time comes first at its top.
type dueHeap []*QP

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].timeout.at.Load() < h[j].timeout.at.Load() }

func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].timeout.place, h[j].timeout.place = i, j
}

// Push implements [heap.Interface].
func (h *dueHeap) Push(x any) {
	q := x.(*QP) //nolint:forcetypeassert // nothing else comes in
	q.timeout.place = len(*h)
	*h = append(*h, q)
}

// Pop implements [heap.Interface].
func (h *dueHeap) Pop() any {
	last := len(*h) - 1
	q := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	q.timeout.at.Store(0)
	return q
}
