// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// linuxMessages is the CDC messages of a connection of the kernel's model: the numbers of
// both directions, and what a change of link makes of them.
type linuxMessages struct {
	seq      uint16      // of the last message sent
	seqFin   uint16      // one less than the last message delivered had
	unacked  []linuxSent // messages under way
	tell     bool        // a message is due
	validate bool        // the validation message is next
	moved    bool        // our link changed: old messages may still come

	peerSeq uint16
	heard   bool // a message came, which peerSeq is of
	// peerMoved: a validation message came, so that old messages may follow.
	peerMoved bool
}

// linuxSent is a message under way: the link that carries it, the positions after
// it, and its number less one.
type linuxSent struct {
	on         *linuxLink
	sent, prod place32
	seq        uint16
	validation bool
}

// takeValidation takes a validation message: that all the peer believes delivered is here.
func (s *linuxMessages) takeValidation(seq uint16) error {
	s.peerMoved = true
	if s.heard && int16(s.peerSeq-seq) < 0 || !s.heard && seq != 0 {
		return fmt.Errorf("validation of message %d after %d", seq, s.peerSeq)
	}
	return nil
}

// take takes the number of a message. It reports false for one that came late from the old
// link. The first message has number 1, unless others may be lost or there was no time.
func (s *linuxMessages) take(m cdc.Message) (bool, error) {
	if d := int16(m.Seq - s.peerSeq); s.heard && d < 0 || !s.heard && m.Seq != 1 && !s.peerMoved && !m.Flags.Abort() {
		if s.heard && (s.peerMoved || s.moved) {
			return false, nil
		}
		return false, fmt.Errorf("sequence number %d after %d", m.Seq, s.peerSeq)
	}
	s.heard, s.peerSeq = true, m.Seq
	return true, nil
}

// delivered takes the completion of a message on a link: the oldest one under way, or
// one of a link that the connection has left, which may live on while it is deleted. It
// returns the message, and whether that is one of those under way.
func (s *linuxMessages) delivered(on *linuxLink) (linuxSent, bool) {
	if len(s.unacked) == 0 || s.unacked[0].on != on {
		return linuxSent{}, false
	}
	m := s.unacked[0]
	s.unacked = s.unacked[1:]
	if !m.validation {
		s.seqFin = m.seq
	}
	return m, true
}

// areOver reports whether nothing is under way or to be said about a change of link.
func (s *linuxMessages) areOver() bool { return len(s.unacked) == 0 && !s.validate }
