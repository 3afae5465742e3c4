// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// linuxSending is how far the kernel's model has come with the stream that it writes: in its
// send buffer, which is as large as its RMB, and in the peer's RMBE.
//
//	send buffer:  fin <= sent <= prepared
//	peer's RMBE:  prodFin <= prod <= furthest, and peerCons <= furthest
type linuxSending struct {
	peer linkgroup.RMBE
	keys *linuxToken // of the peer's RMB

	buf                 []byte
	prepared, sent, fin place32 // written by the application, sent, delivered
	produced            uint64  // by the application
	prod, prodFin       place32 // sent, delivered
	furthest            place32 // prod at its greatest
	peerCons            place32
	space               int // that is free in the peer's RMBE

	blocked    bool
	urgent     bool // the next message ends with an urgent byte
	urgentSent bool // nothing is sent until the peer has read the urgent byte
}

func (s *linuxSending) bufSize() uint32 { return uint32(len(s.buf)) }

func (s *linuxSending) unsent() int { return s.prepared.minus(s.sent, s.bufSize()) }

// room is how many bytes the application can write.
func (s *linuxSending) room() int { return len(s.buf) - s.prepared.minus(s.fin, s.bufSize()) }

// write takes n bytes of the stream with a key from the application.
func (s *linuxSending) write(n int, key byte) {
	for range n {
		s.buf[s.prepared.count] = streamByte(key, s.produced)
		s.prepared = s.prepared.plus(s.bufSize(), 1)
		s.produced++
	}
}

// activate takes the peer's RMBE.
func (s *linuxSending) activate(peer linkgroup.RMBE, keys *linuxToken) {
	s.peer, s.keys = peer, keys
	s.space = int(peer.Size)
}

// takeSpace takes the peer's consumer cursor.
func (s *linuxSending) takeSpace(to cdc.Cursor) error {
	size := s.peer.Size
	cons := fromCursor(to)
	if cons.minus(s.peerCons, size) == 0 {
		return nil
	}
	if cons.minus(s.furthest, size) > 0 {
		return fmt.Errorf("consumer cursor %v passes what was sent, %v", to, s.furthest)
	}
	s.peerCons = cons
	s.skipConsumed()
	if s.space == int(size) {
		s.urgentSent = false
	}
	return nil
}

// skipConsumed leaves out what the peer has read though it would be sent again.
func (s *linuxSending) skipConsumed() {
	if gap := s.peerCons.minus(s.prod, s.peer.Size); gap > 0 {
		s.prod, s.sent = s.peerCons, s.sent.plus(s.bufSize(), gap)
	}
	s.space = int(s.peer.Size) - s.prod.minus(s.peerCons, s.peer.Size)
}

// next is how many of n bytes that are to be sent go in one piece, to which offset of the
// peer's RMBE, and from which offset of the send buffer.
func (s *linuxSending) next(n int) (part int, to, from uint32) {
	return min(n, int(s.peer.Size-s.prod.count)), s.prod.count, s.sent.count
}

// copyFrom returns n bytes of the send buffer from an offset, as they are now.
func (s *linuxSending) copyFrom(from uint32, n int) []byte {
	b := make([]byte, n)
	k := copy(b, s.buf[from:])
	copy(b[k:], s.buf)
	return b
}

// advance notes that n bytes were sent.
func (s *linuxSending) advance(n int) {
	s.sent = s.sent.plus(s.bufSize(), n)
	s.prod = s.prod.plus(s.peer.Size, n)
	if s.prod.minus(s.furthest, s.peer.Size) > 0 {
		s.furthest = s.prod
	}
	s.space -= n
}

// delivered notes up to where a message was delivered.
func (s *linuxSending) delivered(m linuxSent) { s.fin, s.prodFin = m.sent, m.prod }

// goBack makes what was delivered all that was sent: the link was lost.
func (s *linuxSending) goBack() {
	s.sent, s.prod = s.fin, s.prodFin
	s.skipConsumed()
}
