// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestRNRWait(t *testing.T) {
	var w rnrWait
	w.start(&rdma.QPAttr{RNRRetry: 2})
	now := time.Unix(1, 0)
	if !w.ended(now) || w.isRunning() {
		t.Error("waits before the peer asked for it")
	}
	w.until = now.Add(time.Millisecond)
	if w.ended(now) || !w.isRunning() {
		t.Error("the wait is over too early")
	}
	if !w.ended(now.Add(time.Millisecond)) || w.isRunning() {
		t.Error("the wait is not over at its end")
	}
	if got := [3]bool{w.retry(), w.retry(), w.retry()}; got != [3]bool{true, true, false} {
		t.Errorf("tries: %v, want two", got)
	}
	w.progress()
	if !w.retry() {
		t.Error("no try after progress")
	}
	w.start(&rdma.QPAttr{RNRRetry: rnrForever})
	for range 20 {
		if !w.retry() {
			t.Fatal("no try left, want tries without end")
		}
	}
}
