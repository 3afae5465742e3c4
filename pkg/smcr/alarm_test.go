// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"runtime"
	"testing"
	"time"
)

// Only what is earlier than all before wakes the goroutine, and that once.
func TestAlarm_earlierWakes(t *testing.T) {
	var a alarm
	a.init()
	start := time.Unix(1000, 0)
	a.at = start.Add(time.Minute)
	for _, tc := range []struct {
		name string
		at   time.Duration
		want bool
	}{
		{"later", 2 * time.Minute, false},
		{"earlier", time.Second, true},
		{"at the same time", time.Second, false},
		{"later than the last one", 2 * time.Second, false},
		{"earlier again", time.Millisecond, true},
	} {
		a.wakeAt(start.Add(tc.at))
		woken := len(a.wake) > 0
		if woken {
			<-a.wake
		}
		if woken != tc.want {
			t.Errorf("%s: woken: %t", tc.name, woken)
		}
	}
	a.poke()
	a.poke()
	if n := len(a.wake); n != 1 {
		t.Errorf("%d tokens after two pokes", n)
	}
}

// Close, which waits for the last connection, sees to what others leave to the stack's goroutine.
func TestStack_awaitEmpty(t *testing.T) {
	s := &Stack{empty: make(chan struct{})}
	s.alarm.init()
	s.groups.init()
	var c Conn // without users: the machine has nothing to hear of it
	s.marks.moved(&c)
	s.alarm.poke()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.awaitEmpty()
	}()
	for deadline := time.Now().Add(10 * time.Second); c.mark.left.Load(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("nobody looks at the mark")
		}
	}
	close(s.empty)
	<-ended
}
