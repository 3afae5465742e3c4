// SPDX-License-Identifier: Apache-2.0

package cdc

import "testing"

func TestCoalescing(t *testing.T) {
	var k coalescing
	if k.isOn(0) || k.delays(1, 0) {
		t.Error("data waits though nobody wants that")
	}
	k.below = 100
	if !k.isOn(0) || !k.delays(99, 0) || k.delays(100, 0) {
		t.Error("want less than 100 bytes to wait")
	}
	k.flushed = 50
	if k.isOn(49) || k.delays(1, 49) || !k.isOn(50) || !k.delays(1, 50) {
		t.Error("want what follows position 50 to wait, and nothing before")
	}
}
