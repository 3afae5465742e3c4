// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// The grace is over after tcpEndGrace; a peer that speaks has another one, until the limit.
func TestWatched_graces(t *testing.T) {
	const limit = 5 * tcpEndGrace / 2
	for _, tc := range []struct {
		name   string
		speaks []time.Duration // when the peer does, after the end of the TCP connection
		want   time.Duration   // when the last grace is over
	}{
		{"a silent peer", nil, tcpEndGrace},
		{"a peer that spoke before", []time.Duration{-time.Second}, tcpEndGrace},
		{"a peer that speaks in the first grace", []time.Duration{time.Second}, 2 * tcpEndGrace},
		{"a peer that speaks in each grace", []time.Duration{1, tcpEndGrace + 1, 2*tcpEndGrace + 1}, 3 * tcpEndGrace},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var (
					w    watched
					turn sync.Mutex // guards w, as the stack's turn does
				)
				turn.Lock()
				if w.inGrace() || w.stop() {
					t.Error("in a grace though the TCP connection has not ended")
				}
				start := time.Now()
				end := make(chan time.Time, 1)
				w.begin(start, func() {
					turn.Lock()
					defer turn.Unlock()
					now := time.Now()
					var heard time.Time
					for _, d := range tc.speaks {
						if at := start.Add(d); at.Before(now) {
							heard = at
						}
					}
					if !w.extend(now, heard, limit) {
						end <- now
					}
				})
				turn.Unlock()
				got := (<-end).Sub(start)
				turn.Lock()
				defer turn.Unlock()
				if got != tc.want || !w.inGrace() {
					t.Errorf("over after %v, want %v", got, tc.want)
				}
				if w.stop() {
					t.Error("a grace that is over was stopped")
				}
			})
		})
	}
}

func TestWatched_stop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w watched
		w.begin(time.Now(), func() { t.Error("the grace ended though it was stopped") })
		if !w.stop() {
			t.Error("not stopped")
		}
		<-time.After(2 * tcpEndGrace)
	})
}
