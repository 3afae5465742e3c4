// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// Each violation has a name of its own, and its error says what it is about.
func TestViolationError(t *testing.T) {
	seen := map[string]bool{}
	for v := BadMessage; v <= BadSize; v++ {
		if name := v.String(); seen[name] || strings.Contains(name, "Violation") {
			t.Errorf("violation %d is called %q", uint8(v), name)
		} else {
			seen[name] = true
		}
	}
	if got := (BadSize + 1).String(); got != "Violation(14)" {
		t.Errorf("no violation is called %q", got)
	}
	l := newLone(t, rdmaMoves)
	err := l.s.HandleRecv(l.h.w.now, 0, make([]byte, 3), nil)
	if !errors.Is(err, ErrProtocol) || !errors.Is(err, bsdh.ErrMalformed) || !strings.HasPrefix(err.Error(), ErrProtocol.Error()+": ") {
		t.Errorf("%v, want what could not be parsed in it", err)
	}
}
