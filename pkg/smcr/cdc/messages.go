// SPDX-License-Identifier: Apache-2.0

package cdc

import "github.com/smcr-io/kube-smcr/internal/invariant"

// sentMessages numbers the messages that we send, and keeps those whose delivery is not
// confirmed.
type sentMessages struct {
	seq     uint16 // of the last message sent
	written uint16 // §4.6.1, SS: of the last delivered message that described a write
	told    inflight
}

// add numbers the next message and counts the message as in flight: pos is the send position
// that the message announces, write tells that it describes a write.
func (s *sentMessages) add(pos uint64, write bool) uint16 {
	s.seq++
	s.told.push(sentMessage{pos: pos, seq: s.seq, write: write})
	return s.seq
}

// addValidation counts a failover validation message as in flight. The message has no number
// of its own: addValidation returns that of the last write known to be delivered.
func (s *sentMessages) addValidation() uint16 {
	s.told.push(sentMessage{validation: true})
	return s.written
}

// acknowledge notes how far the peer's RNIC has acknowledged writes (§4.6.1).
// Messages without a write do not count, since losing one loses no data; but
// the number must not fall so far behind that the peer takes the number for a future
// one.
func (s *sentMessages) acknowledge(m sentMessage) {
	if m.write || m.seq-s.written > maxSeqLag {
		s.written = m.seq
	}
}

// lose forgets all messages in flight, and reports whether one of them announced something.
func (s *sentMessages) lose() bool {
	lost := false
	for s.told.size > 0 {
		lost = !s.told.pop().validation || lost
	}
	return lost
}

// inflight is the queue of messages whose delivery is not confirmed.
type inflight struct {
	q          [MaxInflight]sentMessage
	head, size uint8
}

// sentMessage is what the delivery of a message means.
type sentMessage struct {
	pos        uint64 // the send position that the message announced
	seq        uint16
	write      bool // the message described a write
	validation bool // a failover validation message, which announced nothing
}

func (q *inflight) push(m sentMessage) {
	invariant.Must(q.size < MaxInflight, "more CDC messages in flight than MaxInflight")
	q.q[(q.head+q.size)%MaxInflight] = m
	q.size++
}

func (q *inflight) pop() sentMessage {
	invariant.Must(q.size > 0, "CDC completion without a message in flight")
	m := q.q[q.head]
	q.head = (q.head + 1) % MaxInflight
	q.size--
	return m
}

// isFull reports whether no message can be sent before one is delivered.
func (q *inflight) isFull() bool { return q.size == MaxInflight }

// receivedMessages is which messages of the peer have been taken.
type receivedMessages struct {
	seq       uint16 // of the last message accepted (§4.6.1: SR)
	replaying bool   // the peer changed its link and has not caught up
}

// isStale reports whether a message is older than the last one.
func (r *receivedMessages) isStale(seq uint16) bool { return seq != r.seq && !SeqNewer(seq, r.seq) }

// misses reports whether the message of a number has not arrived.
func (r *receivedMessages) misses(seq uint16) bool { return SeqNewer(seq, r.seq) }
