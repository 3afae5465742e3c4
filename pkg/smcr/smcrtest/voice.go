// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// voice is what one end of a connection has sent, as its queue pairs see it. It
// says whether the end keeps the rules of the sender: RFC 7609 §4.6.1, §4.6.2,
// A.4.
type voice struct {
	q       *qp // that carried the last message
	seq     uint16
	ss      uint16 // of the last acknowledged message that described a write
	wrote   bool   // there was a write since the last message
	blocked bool   // the last message said that it waits for room
	unacked []said
}

// said is a message that is not acknowledged.
type said struct {
	q     *qp
	seq   uint16
	write bool
}

// speak takes a message that is posted to a queue pair. If the end had nothing under way, speak
// cannot tell whether the end moved to this link before or after the old one was lost.
func (v *voice) speak(q *qp, m cdc.Message) error {
	moved := v.q != nil && v.q != q
	lost := moved && (v.q.state == qpGone || v.q.state == qpError)
	v.q = q
	switch {
	case lost && len(v.unacked) > 0 && !m.Flags.FailoverValidation():
		return fmt.Errorf("%v is the first message after the loss of a link, and validates nothing", m)
	case lost:
		v.unacked = nil
	case moved && len(v.unacked) > 0:
		return fmt.Errorf("%v comes over another link with %d messages under way", m, len(v.unacked))
	}
	if m.Flags.FailoverValidation() {
		switch {
		case len(v.unacked) > 0: // with none under way it may have moved to another link and lost that one, too, without a message
			return fmt.Errorf("%v validates without the loss of a link", m)
		case v.wrote:
			return fmt.Errorf("%v comes after a write", m)
		case m.Seq != v.ss:
			return fmt.Errorf("%v validates another message than %d", m, v.ss)
		}
		return nil
	}
	if m.Seq != v.seq+1 {
		return fmt.Errorf("%v comes after sequence number %d", m, v.seq)
	}
	if (m.Flags.SendingDone() || m.Flags.Closed()) && !m.Flags.Abort() && v.isWriting() {
		return fmt.Errorf("%v comes before all writes are acknowledged", m) // §4.8.1, 3A
	}
	v.seq, v.blocked = m.Seq, m.Flags.WriterBlocked()
	v.unacked = append(v.unacked, said{q, m.Seq, v.wrote})
	v.wrote = false
	return nil
}

// isWriting reports whether a write is under way.
func (v *voice) isWriting() bool {
	return v.wrote || slices.ContainsFunc(v.unacked, func(s said) bool { return s.write })
}

// heard takes the acknowledgement of a message.
func (v *voice) heard(q *qp, m cdc.Message) {
	if m.Flags.FailoverValidation() || len(v.unacked) == 0 || v.unacked[0].q != q || v.unacked[0].seq != m.Seq {
		return // the message is of a link that was lost before
	}
	if v.unacked[0].write {
		v.ss = m.Seq
	}
	v.unacked = v.unacked[1:]
}

// voiceOf is the voice of one end of a path's connection, if its rules are
// looked at: the kernel's numbers are lower by one, and it moves a connection
// that is closing without validation.
func (p *path) voiceOf(side int, conn string) *voice {
	if conn == "" || p.w.cfg.Linux[p.peers[side]] {
		return nil
	}
	if p.voices[side] == nil {
		p.voices[side] = map[string]*voice{}
	}
	v := p.voices[side][conn]
	if v == nil {
		v = &voice{}
		p.voices[side][conn] = v
	}
	return v
}
