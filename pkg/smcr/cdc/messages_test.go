// SPDX-License-Identifier: Apache-2.0

package cdc

import "testing"

func TestSentMessages(t *testing.T) {
	var s sentMessages
	for i := range uint16(MaxInflight) {
		if s.told.isFull() {
			t.Fatalf("full with %d messages", i)
		}
		if n := s.add(uint64(i), i == 1); n != i+1 {
			t.Errorf("message %d has number %d", i, n)
		}
	}
	if !s.told.isFull() {
		t.Fatalf("not full with %d messages", s.told.size)
	}
	for i, written := range []uint16{0, 2, 2} { // message 2 described a write
		m := s.told.pop()
		if s.acknowledge(m); m.seq != uint16(i+1) || s.written != written {
			t.Errorf("delivered %d: the last write is %d, want %d", m.seq, s.written, written)
		}
	}
	if n := s.addValidation(); n != 2 || s.seq != MaxInflight {
		t.Errorf("validation names %d, the last number is %d", n, s.seq)
	}
	if !s.lose() || s.told.size != 0 {
		t.Errorf("lost messages that announced something, %d are left", s.told.size)
	}
	if s.addValidation(); s.lose() {
		t.Error("a lost validation announced something")
	}
}

// Without writes, the number of the last message with a write follows at a distance, so that the peer does not take
// the number for one of a message to come.
func TestSentMessages_lag(t *testing.T) {
	var s sentMessages
	for range 3 * maxSeqLag {
		s.add(0, false)
		s.acknowledge(s.told.pop())
		if lag := s.seq - s.written; lag > maxSeqLag {
			t.Fatalf("the last write is %d messages behind", lag)
		}
	}
	if s.written == 0 {
		t.Error("the last write did not follow")
	}
}

func TestReceivedMessages(t *testing.T) {
	r := receivedMessages{seq: 0xffff}
	for seq, stale := range map[uint16]bool{0xfffe: true, 0xffff: false, 0: false, 5: false} {
		if got := r.isStale(seq); got != stale {
			t.Errorf("isStale(%d) = %t after 0xffff", seq, got)
		}
	}
	if r.misses(0xffff) || r.misses(0xfffe) || !r.misses(0) {
		t.Error("want to miss what is after 0xffff only")
	}
}
