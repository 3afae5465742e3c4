// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"cmp"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// resizing is both machines of §10.6: our receive buffers change when the peer asks, and the peer's change when we ask.
//
// Our receive buffers are numbered in two sets: set 0 has the numbers from 0 on, set 1 those from pool on. Buffers of a new size
// are the other set, and are posted behind those of the old size, which are dropped as messages come in them. A further
// request of the peer waits until all of the old set are dropped; the peer asks for nothing else until it has the answer.
type resizing struct {
	pool      int    // receive buffers of a set
	recvBytes uint32 // of ours, as the peer knows it: the new size counts when its ChRcvBufAck goes
	next      uint32 // the size that ChRcvBufAck tells
	set       int    // of both sets, the one that is posted again
	old       int    // receive buffers of the other one that are not dropped
	unused    int    // and those among them that no message has taken
	request   uint32 // of the peer, which waits for old ones to go; 0: none
	ackDue    bool

	want     uint32 // what the program would have of the peer; 0: nothing
	asked    uint32 // ChRcvBuf that is not acknowledged; 0: none
	askedSeq uint32
	before   uint32 // size before it
	noMore   bool   // an increase was declined: never ask again
	noLess   bool
}

// isBusy reports whether the peer waits for an answer.
func (r *resizing) isBusy() bool { return r.request > 0 || r.ackDue }

// forAdverts is the size that a buffer must exceed to be advertised: of messages that may come before it is used.
func (r *resizing) forAdverts() uint32 {
	if r.ackDue {
		return max(r.recvBytes, r.next)
	}
	return r.recvBytes
}

// isShort reports whether a buffer is advertised that a message of n bytes may not fit into. The peer sends none before
// it has the answer to its request for more.
func (k *sink) isShort(n uint32) bool {
	for i := range k.adv {
		if k.reads.at(i).Len <= n {
			return true
		}
	}
	return false
}

// ResizePeer asks the peer for receive buffers of n bytes (§10.6). It may decline, and then is not asked again for more,
// or for less. Messages are never longer than [Config.SendBytes], either.
func (s *Socket) ResizePeer(now time.Time, n uint32) error {
	if n < bsdh.MinBuffer || n > bsdh.MaxBytes {
		return fmt.Errorf("resize: %w: receive buffers of %d bytes, want %d to %d", ErrInvalid, n, bsdh.MinBuffer, uint32(bsdh.MaxBytes))
	}
	if s.state > StateOpen {
		return fmt.Errorf("resize: %w", ErrState)
	}
	s.size.want = n
	s.flush(now)
	return nil
}

// stepResize answers the peer's request, or sends ours. Who owes an answer does not ask: then two requests that cross can
// be told from others by what they acknowledge (§10.6.1).
func (s *Socket) stepResize() bool {
	r := &s.size
	switch {
	case r.request > 0 && r.old == 0:
		if s.snk.held.n > 2*s.cfg.RecvBuffers {
			return false // so much is unread that payload of two sets of receive buffers would not find a place in held
		}
		s.resize()
		return true
	case r.ackDue:
		if r.next > r.recvBytes && (r.unused > 0 || s.snk.isShort(r.next)) || !s.maySend(false) {
			return false
		}
		r.recvBytes, r.ackDue = r.next, false
		return s.send(bsdh.Message{MID: bsdh.ChRcvBufAck, Bytes: r.recvBytes}, 0)
	case r.want == 0 || r.asked > 0 || r.isBusy():
		return false
	case r.want == s.peer.recvBytes || r.want > s.peer.recvBytes && r.noMore || r.want < s.peer.recvBytes && r.noLess:
		r.want = 0
		return false
	case !s.maySend(false):
		return false
	}
	r.asked, r.before, r.want = r.want, s.peer.recvBytes, 0
	s.send(bsdh.Message{MID: bsdh.ChRcvBuf, Bytes: r.asked}, 0)
	r.askedSeq = s.credits.sent
	s.peer.recvBytes = min(s.peer.recvBytes, r.asked) // a smaller size counts at once, a larger one with ChRcvBufAck
	return true
}

// takeRequest takes the peer's ChRcvBuf. acked says whether the peer had ours when it sent its own; if not, the two crossed, and that of
// the accepting peer counts. void reports that ours is the one that does not count.
func (r *resizing) takeRequest(n uint32, role Role, acked bool) (void bool, err error) {
	if r.isBusy() {
		return false, violation(UnexpectedMessage, "a second ChRcvBuf before the answer")
	}
	if r.asked > 0 && !acked {
		if role == Accepting {
			return false, nil
		}
		r.want, r.asked, void = cmp.Or(r.want, r.asked), 0, true
	}
	r.request = max(n, 1)
	return void, nil
}

// resize gives the peer the size that it asks for, within our bounds: a peer that asks for less gets at least what it asks for, and
// at most what it had; a peer that asks for more gets at least what it had. A set of the new size is posted at once: the old buffers
// leave the queue only when messages come (§10.6.2).
func (s *Socket) resize() {
	r := &s.size
	n := max(r.request, bsdh.MinBuffer)
	if n < r.recvBytes {
		n = min(max(n, s.cfg.MinRecvBytes), r.recvBytes)
	} else {
		n = max(min(n, s.cfg.MaxRecvBytes), r.recvBytes)
	}
	r.request, r.next, r.ackDue = 0, n, true
	if n == r.recvBytes || s.snk.done {
		r.next = r.recvBytes
		return
	}
	r.set ^= 1
	r.old, r.unused = s.cfg.RecvBuffers, s.credits.posted
	s.credits.posted += s.cfg.RecvBuffers
	s.credits.tell()
	s.out.put(Output{Kind: OutPost, Buffer: r.set * s.cfg.RecvBuffers, Len: n})
}

// isOld reports whether a receive buffer is of the set that goes.
func (r *resizing) isOld(buffer int) bool { return r.old > 0 && buffer/r.pool != r.set }

// used counts a receive buffer that a message took.
func (r *resizing) used(buffer int) {
	if r.isOld(buffer) {
		r.unused--
	}
}

// takeAnswer takes the peer's ChRcvBufAck.
func (r *resizing) takeAnswer(n uint32) error {
	least, most := r.before, uint32(bsdh.MaxBytes)
	if r.asked < r.before {
		least, most = r.asked, r.before
	}
	switch {
	case r.asked == 0:
		return violation(UnexpectedMessage, "ChRcvBufAck without ChRcvBuf")
	case n < least || n > most:
		return violation(BadSize, "ChRcvBufAck of %d bytes, had %d, asked for %d", n, r.before, r.asked)
	case n == r.before && r.asked > r.before:
		r.noMore = true
	case n == r.before:
		r.noLess = true
	}
	r.asked = 0
	return nil
}
