// SPDX-License-Identifier: Apache-2.0

package rocev2

import "testing"

// posted is a queue of three work requests with the PSNs 10 to 12, 13, and 14 to 15, whose
// indexes wrap.
func posted() sendQueue {
	s := newSendQueue(4, 8)
	s.head, s.cur, s.tail = ^uint32(0), ^uint32(0), ^uint32(0)
	for _, m := range []span{{10, 12}, {13, 13}, {14, 15}} {
		w := s.at(s.tail)
		w.first, w.last = m.start, m.end
		s.tail++
	}
	return s
}

func TestSendQueue_seek(t *testing.T) {
	for from := uint64(10); from <= 16; from++ {
		for psn := uint64(10); psn <= 16; psn++ {
			s := posted()
			s.skip(from)
			s.seek(psn)
			if psn == 16 {
				if !s.isSent() {
					t.Errorf("seek(%d) from %d: work request %d is left to be sent", psn, from, s.cur-s.head)
				}
				continue
			}
			if w := s.at(s.cur); s.isSent() || psn < w.first || psn > w.last {
				t.Errorf("seek(%d) from %d: PSNs %d to %d", psn, from, w.first, w.last)
			}
		}
	}
}

// The oldest work request that is complete before it was sent again is not sent.
func TestSendQueue_retire(t *testing.T) {
	s := posted()
	if !s.retire() || s.size() != 2 || s.at(s.cur).first != 13 {
		t.Errorf("retired the next to be sent: %d left, cur at PSN %d", s.size(), s.at(s.cur).first)
	}
	s.skip(15)
	if s.retire() || s.size() != 1 || s.at(s.cur).first != 14 {
		t.Errorf("retired one that was sent: %d left, cur at PSN %d", s.size(), s.at(s.cur).first)
	}
	s.stop()
	if !s.isEmpty() || !s.isSent() {
		t.Errorf("stopped with %d work requests", s.size())
	}
}

func TestSendQueue_inlineIsOfOne(t *testing.T) {
	s := posted()
	for i := s.head; i != s.tail; i++ {
		b := s.inlineOf(i)
		for k := range b {
			b[k] = byte(i)
		}
	}
	for i := s.head; i != s.tail; i++ {
		b := s.inlineOf(i)
		if len(b) != 8 || b[0] != byte(i) || b[7] != byte(i) {
			t.Errorf("inline bytes of work request %d: %v", i, b)
		}
	}
	if c := s.cleared(); &c.ring[0] != &s.ring[0] || &c.inline[0] != &s.inline[0] || len(c.inlineOf(1)) != 8 || !c.isEmpty() {
		t.Errorf("cleared queue has other memory, or work requests: %d", c.size())
	}
}
