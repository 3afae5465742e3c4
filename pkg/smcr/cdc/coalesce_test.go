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
	if !k.isFlushed(49) || k.isFlushed(50) {
		t.Error("want what follows position 50 not to be flushed, and all before")
	}
	if k.isOn(49) || k.delays(1, 49) || !k.isOn(50) || !k.delays(1, 50) {
		t.Error("want what follows position 50 to wait, and nothing before")
	}
}

// TestConn_Flush: what Flush was called for goes, also where it waits because of the messages on their way; what comes after waits.
func TestConn_Flush(t *testing.T) {
	ring := Ring{Size: 1 << 16}
	c := NewConn(Config{Local: ring, SendBuffer: 1 << 16})
	c.Activate(ring, 1)
	pos := uint64(0)
	write := func(n uint64) (sent uint32) {
		pos += n
		c.Produce(pos)
		if c.Pending() {
			t, _ := c.Next()
			sent = t.Len
		}
		return sent
	}
	for i := range corkMessages {
		if n := write(10); n != 10 {
			t.Fatalf("message %d tells of %d bytes", i, n)
		}
	}
	if n := write(10); n != 0 {
		t.Errorf("%d bytes go though %d messages are on their way", n, corkMessages)
	}
	c.Flush()
	if n := write(1); n != 11 {
		t.Errorf("after Flush %d bytes go, want those and the next one", n)
	}
	if n := write(1); n != 0 {
		t.Errorf("%d bytes go, which came after Flush", n)
	}
}
