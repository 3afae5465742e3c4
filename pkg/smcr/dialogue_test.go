// SPDX-License-Identifier: Apache-2.0

package smcr

import "testing"

func TestDialogue_onlyALongOne(t *testing.T) {
	var d dialogue
	var a, b Conn
	for range 3 * dialogueStreak { // two at a time
		d.expect(&a)
		d.expect(&b)
	}
	if c := d.take(); c != nil {
		t.Error("a dialogue though two connections take turns")
	}
	for i := range dialogueStreak + 2 {
		if c := d.take(); c != nil {
			t.Fatalf("a dialogue after %d messages in a row", i)
		}
		d.expect(&a)
	}
	if c := d.take(); c != &a {
		t.Errorf("no dialogue after %d messages in a row", dialogueStreak+2)
	}
	if c := d.take(); c != nil {
		t.Error("one message has two answers")
	}
	d.expect(&a)
	d.forget(&b)
	if c := d.take(); c != &a {
		t.Error("the end of one connection ends the dialogue of another")
	}
	d.expect(&a)
	d.forget(&a)
	if c := d.take(); c != nil || d.last != nil {
		t.Error("a connection that has ended is looked at")
	}
}
