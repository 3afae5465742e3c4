// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

func TestLinuxReceiving(t *testing.T) {
	const key = 3
	mem := make([]byte, 50)
	r := linuxReceiving{size: 50}
	for i := range 40 {
		mem[i] = streamByte(key, uint64(i))
	}
	n, err := r.gain(cdc.Cursor{Count: 40})
	if err != nil || n != 40 {
		t.Fatalf("%d new bytes, %v", n, err)
	}
	r.take(cdc.Cursor{Count: 40}, n)
	for i := range 30 {
		if got, want := r.read(mem, key); got != want {
			t.Fatalf("byte %d is %d, want %d", i, got, want)
		}
	}
	if w := r.window(key); w.told != 0 || w.prod != 40 || r.unread != 10 {
		t.Errorf("window %+v, %d unread", w, r.unread)
	}
	if _, err := r.gain(cdc.Cursor{Wrap: 1, Count: 31}); err == nil {
		t.Error("more unread than the RMB holds")
	}
	if r.checkTold(cdc.Cursor{Wrap: 1}) != nil || r.checkTold(cdc.Cursor{Wrap: 1, Count: 1}) == nil {
		t.Error("want to take what fits behind the told cursor, and no more")
	}
	mem[30]++
	if got, want := r.read(mem, key); got == want || r.consumed != 30 {
		t.Errorf("a wrong byte was taken: %d, want %d", got, want)
	}
}
