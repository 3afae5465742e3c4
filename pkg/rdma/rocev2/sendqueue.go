// SPDX-License-Identifier: Apache-2.0

package rocev2

import "github.com/smcr-io/kube-smcr/pkg/rdma"

// sendWQE is a send work request in the queue.
type sendWQE struct {
	id          uint64
	addr        uint64
	first, last uint64 // PSNs
	sgl         [MaxSGE]rdma.SGE
	length      uint32
	imm         uint32
	rkey        rdma.RKey
	sges        int
	op          rdma.Opcode
	flags       rdma.SendFlags
	status      rdma.Status // not success: cannot be sent, completes so when its turn comes
}

// sendQueue is the send queue of a queue pair: a ring of work requests, each with room for
// its inline bytes. The indexes only grow; their low bits are the place in the ring.
//
//	head ------ cur -------- tail
//	      sent      to be sent    the next work request posted
//
// The work request at cur may be sent in part.
type sendQueue struct {
	ring            []sendWQE
	inline          []byte
	inlineBytes     int // of each work request
	head, cur, tail uint32
}

// newSendQueue makes a send queue of a number of places that is a power of two.
func newSendQueue(places, inlineBytes int) sendQueue {
	return sendQueue{
		ring:        make([]sendWQE, places),
		inline:      make([]byte, places*inlineBytes),
		inlineBytes: inlineBytes,
	}
}

// cleared returns an empty queue that keeps the memory of this one.
func (s *sendQueue) cleared() sendQueue {
	return sendQueue{ring: s.ring, inline: s.inline, inlineBytes: s.inlineBytes}
}

// at returns the work request of index i.
func (s *sendQueue) at(i uint32) *sendWQE { return &s.ring[i&uint32(len(s.ring)-1)] }

// inlineOf returns the room for the inline bytes of the work request of index i.
func (s *sendQueue) inlineOf(i uint32) []byte {
	k := (int(i) & (len(s.ring) - 1)) * s.inlineBytes
	return s.inline[k : k+s.inlineBytes]
}

// size is the number of work requests that are not complete.
func (s *sendQueue) size() int { return int(s.tail - s.head) }

// isEmpty reports whether all work requests are complete.
func (s *sendQueue) isEmpty() bool { return s.head == s.tail }

// isSent reports whether nothing is left to be sent.
func (s *sendQueue) isSent() bool { return s.cur == s.tail }

// retire takes the oldest work request out of the queue, and reports whether that one was
// the next to be sent.
func (s *sendQueue) retire() bool {
	next := s.cur == s.head
	if next {
		s.cur++
	}
	s.head++
	return next
}

// stop takes all work requests out of the queue.
func (s *sendQueue) stop() { s.head, s.cur = s.tail, s.tail }

// seek makes cur the work request that has the PSN; tail if none has it yet.
func (s *sendQueue) seek(psn uint64) {
	for s.cur != s.head && (s.isSent() || s.at(s.cur).first > psn) {
		s.cur--
	}
	s.skip(psn)
}

// skip moves cur beyond the work requests that end before the PSN.
func (s *sendQueue) skip(psn uint64) {
	for !s.isSent() && s.at(s.cur).last < psn {
		s.cur++
	}
}
