// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// sendWQE is a send work request in the queue.
type sendWQE struct {
	id     uint64
	addr   uint64
	sgl    [MaxSGE]rdma.SGE
	length uint32
	imm    uint32
	rkey   rdma.RKey
	got    uint32 // READ: bytes that came
	sges   int
	op     rdma.Opcode
	flags  rdma.SendFlags
	done   bool        // READ: all came
	status rdma.Status // not success: cannot be sent, completes so when its turn comes
}

// hasImm reports whether immediate data travels with the message.
func (w *sendWQE) hasImm() bool { return w.op == rdma.OpWriteImm || w.flags&rdma.SendImm != 0 }

// takesReceive reports whether the message takes a receive of the peer.
func (w *sendWQE) takesReceive() bool { return w.op == rdma.OpSend || w.op == rdma.OpWriteImm }

// sendQueue is the send queue of a queue pair: a ring of work requests, each with room for
// its inline bytes. An index is the number of the message, and its low bits are the place in
// the ring:
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

func newSendQueue(maxWR, inlineBytes int) sendQueue {
	n := wq.RingSize(maxWR)
	return sendQueue{ring: make([]sendWQE, n), inline: make([]byte, n*inlineBytes), inlineBytes: inlineBytes}
}

// startAt returns an empty queue with the memory of this one, whose next message has the number n.
func (s *sendQueue) startAt(n uint32) sendQueue {
	return sendQueue{ring: s.ring, inline: s.inline, inlineBytes: s.inlineBytes, head: n, cur: n, tail: n}
}

func (s *sendQueue) at(i uint32) *sendWQE { return &s.ring[i&uint32(len(s.ring)-1)] }

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

// after is the signed distance of two message numbers, which wrap.
func after(a, b uint32) int32 { return int32(a - b) }
