// SPDX-License-Identifier: Apache-2.0

package wq

import "github.com/smcr-io/kube-smcr/pkg/rdma"

// maxEvents bounds the asynchronous events of a queue pair. It dies
// once, so that one is enough; after a reset it may die again before
// anybody looked.
const maxEvents = 4

// Events keeps the last asynchronous events of a queue pair.
type Events struct {
	ring       [maxEvents]rdma.AsyncEvent
	head, tail uint32
}

// Push adds an event, if need be in place of the oldest.
func (r *Events) Push(e rdma.AsyncEvent) {
	if r.tail-r.head == maxEvents {
		r.head++ // the oldest: the queue pair was reset since
	}
	r.ring[r.tail%maxEvents] = e
	r.tail++
}

// Pop returns the next event, if there is one.
func (r *Events) Pop() (rdma.AsyncEvent, bool) {
	if r.head == r.tail {
		return rdma.AsyncEvent{}, false
	}
	e := r.ring[r.head%maxEvents]
	r.head++
	return e, true
}
