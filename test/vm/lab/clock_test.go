// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCounterArguments(t *testing.T) {
	for _, tc := range []struct {
		name, cpuinfo string
		want          []string
	}{
		{"two processors", "flags\t\t: fpu constant_tsc sse\nbogomips\t: 5192.24\n\nbogomips\t: 5192.25\n", []string{"tsc_early_khz=2596120"}},
		{"no counter of constant rate", "flags\t\t: fpu tsc sse\nbogomips\t: 5192.24\n", nil},
		{"another architecture", "BogoMIPS\t: 243.75\nFeatures\t: fp asimd\n", nil},
		{"no number", "flags\t\t: fpu constant_tsc sse\nbogomips\t: many\n", nil},
		{"none", "", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, counterArguments(tc.cpuinfo)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
