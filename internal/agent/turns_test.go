// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"sync"
	"testing"
	"time"
)

// TestTurns: a task that hangs lets nobody wait for long, others for its pod not at all, and those for other pods run.
func TestTurns(t *testing.T) {
	var ts turns
	a, b := &proxy{}, &proxy{}
	const long, short = time.Minute, 20 * time.Millisecond
	if !ts.run(a, long, func() {}) {
		t.Error("a task that ends was not awaited")
	}
	hangs, ran := make(chan struct{}), make(chan struct{})
	waits := make(chan bool)
	if ts.run(a, short, func() {
		go func() { waits <- ts.run(a, long, func() { t.Error("ran beside another one") }) }()
		<-hangs
		close(ran)
	}) {
		t.Error("a task that hangs has ended")
	}
	if <-waits {
		t.Error("a task has ended that waited for its turn")
	}
	begin := time.Now()
	if ts.run(a, long, func() { t.Error("ran beside another one") }) || time.Since(begin) > long/2 {
		t.Errorf("waited %v for a task that is late", time.Since(begin))
	}
	if !ts.run(b, long, func() {}) {
		t.Error("a task of another pod was not run")
	}
	close(hangs)
	<-ran
	eventually(t, func() string {
		if !ts.run(a, long, func() {}) {
			return "the next turn has not come"
		}
		return ""
	})
	if len(ts.busy) > 0 {
		t.Errorf("%d turns are left", len(ts.busy))
	}
}

// TestTurns_inTurn: many at once run one after the other.
func TestTurns_inTurn(t *testing.T) {
	var ts turns
	a := &proxy{}
	var all sync.WaitGroup
	n := 0
	for range 50 {
		all.Go(func() {
			if !ts.run(a, time.Minute, func() { n++ }) { // the race detector sees two at once
				t.Error("not run")
			}
		})
	}
	if all.Wait(); n != 50 {
		t.Errorf("%d ran, want 50", n)
	}
}
