// SPDX-License-Identifier: Apache-2.0

package agent

import "testing"

// A connection that ends is for a moment counted twice, and then once: the
// counter that Prometheus sees must not go back.
func TestSums_carriedDoesNotGoBack(t *testing.T) {
	var s sums
	for _, step := range []struct {
		name              string
		ended, live, want uint64
	}{
		{"one lives", 0, 100, 100},
		{"it ended and is still listed", 100, 100, 200},
		{"it is gone", 100, 0, 200},
		{"others carried more", 100, 150, 250},
	} {
		if got := s.carried(step.ended, step.live); got != step.want {
			t.Errorf("%s: %d, want %d", step.name, got, step.want)
		}
	}
}

func TestRedundancyLabel(t *testing.T) {
	for in, want := range map[string]string{
		"SINGLE": "Single", "SYMMETRIC": "Symmetric", "ASYMMETRIC LOCAL": "Asymmetric", "ASYMMETRIC PEER": "Asymmetric",
	} {
		if got := redundancyLabel(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}
