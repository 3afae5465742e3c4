// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"syscall"
	"testing"
)

// The wait ends when both streams have ended, or with a reset.
func TestAwaitTCPEnd(t *testing.T) {
	a, b := tcpEnds(t)
	_, _ = a.CloseWrite(), b.CloseWrite()
	if err := AwaitTCPEnd(b); err != nil {
		t.Errorf("both streams have ended: %v", err)
	}
	a, b = tcpEnds(t)
	_, _ = a.SetLinger(0), a.Close()
	if err := AwaitTCPEnd(b); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after a reset: %v", err)
	}
}
