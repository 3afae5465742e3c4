// SPDX-License-Identifier: Apache-2.0

package rocev2

import "testing"

func TestReadState(t *testing.T) {
	var s readState
	for i := range uint64(MaxReads) {
		if s.isFull(MaxReads) {
			t.Fatalf("full with %d requests", i)
		}
		s.add(span{10 * i, 10*i + 10})
	}
	if !s.isFull(MaxReads) {
		t.Fatalf("not full with %d requests", s.n)
	}
	s.acked(25) // the third request is answered in part
	if s.n != MaxReads-2 || s.spans[0] != (span{20, 30}) {
		t.Errorf("acknowledged to 25: %d requests, the oldest %v", s.n, s.spans[0])
	}
	s.goBack(45) // the fifth request is sent again from the middle
	if s.n != 2 || s.spans[1] != (span{30, 40}) {
		t.Errorf("back to 45: %d requests, the last %v", s.n, s.spans[s.n-1])
	}
	s.goBack(20)
	if s.n != 0 {
		t.Errorf("back to 20: %d requests", s.n)
	}
}
