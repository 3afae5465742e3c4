// SPDX-License-Identifier: Apache-2.0

package cdc

import "testing"

func TestSendRing(t *testing.T) {
	s := sendRing{buffer: 150}
	if s.produce(50); s.window() != 0 || !s.awaitsWindow() {
		t.Errorf("window of %d bytes before the peer's RMBE is known", s.window())
	}
	s.ring = Ring{Size: 100}
	s.produce(150)
	if s.unsent() != 150 || s.room(150) != 100 || s.room(30) != 30 || !s.isFull() || s.awaitsWindow() {
		t.Errorf("150 bytes for an RMBE of 100: %+v", s)
	}
	s.announce(60)
	if s.blocked || s.window() != 40 || s.cursor() != (Cursor{Count: 60}) {
		t.Errorf("60 announced: blocked %t, window %d, cursor %v", s.blocked, s.window(), s.cursor())
	}
	s.announce(40)
	if !s.blocked || !s.awaitsWindow() || s.cursor() != (Cursor{Wrap: 1}) {
		t.Errorf("100 announced: blocked %t, cursor %v", s.blocked, s.cursor())
	}
	pos, err := s.position(Cursor{Count: 80})
	if err != nil || pos != 80 {
		t.Fatalf("consumer cursor 80: position %d, %v", pos, err)
	}
	s.consume(pos)
	if s.window() != 80 || s.awaitsWindow() || s.delivered() != 80 {
		t.Errorf("80 consumed: window %d, delivered %d", s.window(), s.delivered())
	}
	if !s.complete(60) || s.complete(60) || s.isFull() || s.delivered() != 80 {
		t.Errorf("60 completed: %+v", s)
	}
}

// The link is lost with 60 of 90 bytes completed and 80 consumed. The peer was told of 90
// and hears of no less.
func TestSendRing_goBack(t *testing.T) {
	s := sendRing{ring: Ring{Size: 100}, buffer: 150}
	s.produce(95)
	s.announce(90)
	s.complete(60)
	s.consume(80)
	if !s.goBack() || s.sent != 80 || s.completed != 80 || !s.isRepeating() {
		t.Errorf("went back to %d, completed %d, want 80", s.sent, s.completed)
	}
	if s.cursor() != (Cursor{Count: 90}) {
		t.Errorf("cursor %v, want 90 as before", s.cursor())
	}
	s.consume(85) // the write that was on the lost link has arrived
	if s.sent != 85 {
		t.Errorf("%d sent after 85 were consumed", s.sent)
	}
	s.announce(10)
	if s.isRepeating() || s.sent != 95 || s.announcedTo != 95 {
		t.Errorf("repeated, with new data: %+v", s)
	}
	if s.complete(85); s.goBack() {
		t.Error("the send buffer has more room where nothing new has arrived")
	}
}
