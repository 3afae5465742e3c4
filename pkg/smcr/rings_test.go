// SPDX-License-Identifier: Apache-2.0

package smcr

import "testing"

func TestRingBytes(t *testing.T) {
	for _, tt := range []struct{ configured, conns, want int }{
		{512 << 10, 0, 512 << 10},
		{512 << 10, 7, 512 << 10},
		{512 << 10, 8, 256 << 10},
		{512 << 10, 15, 256 << 10},
		{512 << 10, 16, 128 << 10},
		{512 << 10, 100000, 128 << 10},
		{256 << 10, 7, 256 << 10},
		{256 << 10, 8, 128 << 10},
		{256 << 10, 16, 128 << 10},
		{128 << 10, 8, 128 << 10},
		{16 << 10, 255, 16 << 10}, // less was wanted
	} {
		if got := ringBytes(tt.configured, tt.conns); got != tt.want {
			t.Errorf("of %d bytes, with %d connections: %d, want %d", tt.configured, tt.conns, got, tt.want)
		}
		if least := LeastConnBytes(tt.configured, 16<<10) - 16<<10; ringBytes(tt.configured, 1<<20) != least {
			t.Errorf("of %d bytes: at least %d", tt.configured, least)
		}
	}
}
