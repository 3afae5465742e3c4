// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestRun_refusesWrongSettings(t *testing.T) {
	for _, args := range []string{"links", "ueid", "ueid show", "pnet add LAB eth0 rxe0", "pnet add LAB eth0 rxe0 256"} {
		t.Run(args, func(t *testing.T) {
			if code := run(strings.Fields(args)); code != exitUsage {
				t.Errorf("exit code %d, want %d", code, exitUsage)
			}
		})
	}
}
