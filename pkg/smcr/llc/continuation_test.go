// SPDX-License-Identifier: Apache-2.0

package llc_test

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// The number of CONFIRM RKEY CONTINUATION counts down with this message included: as
// many RTokens as there is room for are in it, and with room for the rest it is the last.
func TestSectionA_3_6_CountsDown(t *testing.T) {
	for remaining, want := range []struct {
		n    int
		last bool
	}{{0, true}, {1, true}, {2, true}, {3, true}, {3, false}, {3, false}, {3, false}} {
		m := llc.ConfirmRKeyContinuation{Remaining: uint8(remaining)}
		if m.N() != want.n || m.Last() != want.last {
			t.Errorf("%d remain: %d in the message, last %t; want %d, %t", remaining, m.N(), m.Last(), want.n, want.last)
		}
	}
}
