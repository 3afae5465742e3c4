// SPDX-License-Identifier: Apache-2.0

package rocev2

import "testing"

func TestAckRequest(t *testing.T) {
	var a ackRequest
	var asked []int
	for i := range 12 {
		if i == 9 {
			a.again()
		}
		if a.next(16) {
			a.asked()
			asked = append(asked, i)
		}
	}
	// Every fourth packet of a window of 16, and the first one after a go-back.
	if len(asked) != 3 || asked[0] != 3 || asked[1] != 7 || asked[2] != 9 {
		t.Errorf("packets that ask: %v, want 3, 7, 9", asked)
	}
	if !a.next(1) {
		t.Error("the only packet of a window does not ask")
	}
}
