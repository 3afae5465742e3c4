// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// IBTA 9.7.6.1.3: each retry has more patience, up to four times the timeout.
func TestAckTimer(t *testing.T) {
	var a ackTimer
	a.start(&rdma.QPAttr{Timeout: 10, RetryCount: 4})
	now := time.Unix(1, 0)
	for i, shift := range []int{0, 1, 2, 2, 2} {
		a.run(now)
		a.run(now.Add(time.Hour)) // runs already
		want := rdma.ACKTimeout(10) << shift
		if a.due(now.Add(want-1)) || !a.due(now.Add(want)) {
			t.Errorf("try %d is due after %v, want %v", i, a.at.Sub(now), want)
		}
		if ok := a.retry(); ok != (i < 4) {
			t.Errorf("try %d: a retry is left: %t", i, ok)
		}
		if a.due(now.Add(time.Hour)) {
			t.Errorf("try %d: runs after the retry", i)
		}
	}
	a.progress()
	if a.retries != 4 {
		t.Errorf("%d retries after progress, want 4", a.retries)
	}
	a.start(&rdma.QPAttr{})
	a.run(now)
	if !a.at.IsZero() {
		t.Error("runs without a timeout")
	}
}
