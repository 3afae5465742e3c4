// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Completion is a work completion and where it belongs.
type Completion struct {
	WC   rdma.WC
	Send bool // for the send CQ, otherwise the receive CQ
	Wake bool // solicited or an error: wakes a CQ that was armed for solicited only
}

// TxPacket is a packet to be sent: Hdr[:HdrLen], the pieces Payload[:Segs],
// Pad zero bytes and the ICRC, which is the sender's to compute. The pieces
// are registered memory, or the queue pair's own for inline data: send before
// calling another method of the queue pair, and before the owner of the
// memory may unmap it.
//
// All packets of a message but the first and the last have the same UDPLen,
// so that runs of them can leave with one UDP_SEGMENT send.
type TxPacket struct {
	Hdr        [MaxHeaderLen]byte
	HdrLen     int
	Payload    [MaxSGE][]byte
	Segs       int
	PayloadLen int
	Pad        int
}

// UDPLen returns the length of the UDP payload, ICRC included.
func (t *TxPacket) UDPLen() int { return t.HdrLen + t.PayloadLen + t.Pad + ICRCLen }

// wcRing holds completions until they are polled. It cannot overrun: a work
// request's place in its queue is free again only when its completion was
// polled, and the ring has a place for each.
type wcRing struct {
	ring       []Completion
	head, tail uint32
	sends      int // completions of sends in the ring
}

func (r *wcRing) push(c Completion) {
	invariant.Must(int(r.tail-r.head) < len(r.ring), "rocev2: completion ring overrun")
	r.ring[r.tail&uint32(len(r.ring)-1)] = c
	r.tail++
	if c.Send {
		r.sends++
	}
}

func (r *wcRing) recvs() int { return int(r.tail-r.head) - r.sends }

func (r *wcRing) poll(dst []Completion) int {
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

// eventRing keeps the last events.
type eventRing struct {
	ring       [maxEvents]rdma.AsyncEvent
	head, tail uint32
}

func (r *eventRing) push(e rdma.AsyncEvent) {
	if r.tail-r.head == maxEvents {
		r.head++ // the oldest: the queue pair was reset since
	}
	r.ring[r.tail%maxEvents] = e
	r.tail++
}

func (r *eventRing) pop() (rdma.AsyncEvent, bool) {
	if r.head == r.tail {
		return rdma.AsyncEvent{}, false
	}
	e := r.ring[r.head%maxEvents]
	r.head++
	return e, true
}
