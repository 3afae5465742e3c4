// SPDX-License-Identifier: Apache-2.0

package smcr

import "testing"

// Answers are looked for while they come in time; a program that takes longer
// is left alone, longer each time.
func TestIntake_credit(t *testing.T) {
	f := newIntake(nil, nil)
	asked := func(n int) (wanted int) {
		for range n {
			if f.wanted() {
				wanted++
			}
		}
		return wanted
	}
	for range 1000 { // one in five too late is no reason to stop
		for range 4 {
			f.hit()
		}
		f.miss()
		if !f.wanted() {
			t.Fatal("answers are no longer looked for")
		}
	}
	misses := 0
	for ; f.credit.Load() > 0; misses++ {
		f.miss()
	}
	if misses > mostCredit/missCost {
		t.Errorf("%d late answers in a row before it stopped", misses)
	}
	for pause := firstPause; pause < longestPause; pause *= 2 {
		if n := asked(pause - 1); n != 0 {
			t.Fatalf("looked %d times in a pause of %d", n, pause)
		}
		if n := asked(1); n != 1 {
			t.Fatalf("not tried again after a pause of %d", pause)
		}
		f.miss()
	}
	asked(longestPause)
	for range mostCredit {
		f.hit()
	}
	for f.wanted() {
		f.miss()
	}
	if p := f.pause.Load(); p != firstPause {
		t.Errorf("the pause after good times is %d, want %d", p, firstPause)
	}
}
