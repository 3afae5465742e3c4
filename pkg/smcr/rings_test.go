// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"testing"
)

func TestRingSizes(t *testing.T) {
	for _, tt := range []struct{ configured, largest, conns, want int }{
		{512 << 10, 512 << 10, 0, 512 << 10},
		{512 << 10, 512 << 10, 7, 512 << 10},
		{512 << 10, 512 << 10, 8, 256 << 10},
		{512 << 10, 512 << 10, 15, 256 << 10},
		{512 << 10, 512 << 10, 16, 128 << 10},
		{512 << 10, 512 << 10, 100000, 128 << 10},
		{512 << 10, 2 << 20, 0, 2 << 20},
		{512 << 10, 2 << 20, 1, 2 << 20},
		{512 << 10, 2 << 20, 2, 1 << 20},
		{512 << 10, 2 << 20, 3, 1 << 20},
		{512 << 10, 2 << 20, 4, 512 << 10},
		{512 << 10, 2 << 20, 7, 512 << 10},
		{512 << 10, 2 << 20, 8, 256 << 10},
		{512 << 10, 2 << 20, 16, 128 << 10},
		{256 << 10, 256 << 10, 7, 256 << 10},
		{256 << 10, 256 << 10, 8, 128 << 10},
		{256 << 10, 256 << 10, 16, 128 << 10},
		{128 << 10, 128 << 10, 8, 128 << 10},
		{16 << 10, 16 << 10, 255, 16 << 10}, // less was wanted
	} {
		r := ringSizes{tt.configured, tt.largest}
		if got := r.of(tt.conns); got != tt.want {
			t.Errorf("of %d bytes, at most %d, with %d connections: %d, want %d", tt.configured, tt.largest, tt.conns, got, tt.want)
		}
		if least := LeastConnBytes(tt.configured, 16<<10) - 16<<10; r.of(1<<20) != least {
			t.Errorf("of %d bytes: at least %d", tt.configured, least)
		}
	}
}
