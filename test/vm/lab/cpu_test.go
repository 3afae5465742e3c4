// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"testing"
	"time"
)

func TestCPUOf(t *testing.T) {
	for _, tt := range []struct {
		name, stat string
		want       time.Duration
		bad        bool
	}{
		{"user and kernel", "7 (qemu (x) 1) S 1 7 7 0 -1 4194560 9 9 9 9 120 30 5 5 20 0 4 0 99\n", 1500 * time.Millisecond, false},
		{"nothing", "", 0, true},
		{"no number", "7 (qemu) S 1 7 7 0 -1 4194560 9 9 9 9 x 30 5 5\n", 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := cpuOf(tt.stat)
			if got != tt.want || (err != nil) != tt.bad {
				t.Errorf("cpuOf = %v, %v; want %v", got, err, tt.want)
			}
		})
	}
}
