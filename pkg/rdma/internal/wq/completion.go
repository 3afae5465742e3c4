// SPDX-License-Identifier: Apache-2.0

package wq

import (
	"math/bits"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// RingSize returns the number of slots of a ring that holds n: a power of two, so that the
// low bits of an index that only grows are its place.
func RingSize(n int) int { return 1 << bits.Len(uint(n-1)) }

// Completion is a work completion and where it belongs.
type Completion struct {
	WC   rdma.WC
	Send bool // for the send CQ, otherwise the receive CQ
	Wake bool // solicited or an error: wakes a CQ that was armed for solicited only
}

// Completions holds completions until they are polled. It cannot overrun: a work
// request's place in its queue is free again only when its completion was
// polled, and the ring has a place for each.
type Completions struct {
	ring       []Completion
	head, tail uint32
	sends      int // completions of sends in the ring
}

// NewCompletions makes a ring for the work requests of a send and a receive queue.
func NewCompletions(maxSendWR, maxRecvWR int) Completions {
	return Completions{ring: make([]Completion, RingSize(maxSendWR+maxRecvWR))}
}

// Push adds a completion.
func (r *Completions) Push(c Completion) {
	invariant.Must(int(r.tail-r.head) < len(r.ring), "wq: completion ring overrun")
	r.ring[r.tail&uint32(len(r.ring)-1)] = c
	r.tail++
	if c.Send {
		r.sends++
	}
}

// Sends is the number of completions of sends that wait, and that still take a
// place in the send queue.
func (r *Completions) Sends() int { return r.sends }

// Recvs is the number of completions of receives that wait, likewise.
func (r *Completions) Recvs() int { return int(r.tail-r.head) - r.sends }

// Poll moves completions to dst, in order, and returns how many.
func (r *Completions) Poll(dst []Completion) int {
	n := 0
	for n < len(dst) && r.head != r.tail {
		c := &r.ring[r.head&uint32(len(r.ring)-1)]
		if c.Send {
			r.sends--
		}
		dst[n] = *c
		r.head++
		n++
	}
	return n
}

// Clear drops all completions.
func (r *Completions) Clear() { *r = Completions{ring: r.ring} }
