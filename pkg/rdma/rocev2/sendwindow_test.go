// SPDX-License-Identifier: Apache-2.0

package rocev2

import "testing"

func TestSendWindow(t *testing.T) {
	var w sendWindow
	w.start(100)
	if first, last := w.reserve(5); first != 100 || last != 104 {
		t.Fatalf("five PSNs from 100: %d to %d", first, last)
	}
	for psn := uint64(100); psn < 104; psn++ {
		if w.sent(psn + 1) {
			t.Errorf("PSN %d is a repetition", psn)
		}
	}
	if w.outstanding() != 4 || !w.awaits(100) || !w.awaits(103) || w.awaits(99) || w.awaits(104) {
		t.Errorf("sent 100 to 103: %+v", w)
	}
	if w.acked(101) || w.outstanding() != 3 || w.awaits(100) {
		t.Errorf("acknowledged 100: %+v", w)
	}
	w.nxt = 101 // go back
	if !w.sent(102) {
		t.Error("PSN 101 is no repetition after the go-back")
	}
	if !w.awaits(103) {
		t.Error("PSN 103, sent before the go-back, awaits nothing")
	}
	// The peer had all the time what was to be sent again.
	if !w.acked(104) || w.nxt != 104 || w.outstanding() != 0 {
		t.Errorf("acknowledged all that was sent: %+v", w)
	}
	w.stop()
	if w.una != 105 || w.nxt != 105 || w.max != 105 {
		t.Errorf("stopped: %+v", w)
	}
}
