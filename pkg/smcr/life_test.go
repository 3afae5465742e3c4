// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// Of the application, the group and the calls under way one is the last, and nobody comes
// after that one.
func TestLife_oneUserIsTheLast(t *testing.T) {
	for range 200 {
		var l life
		l.begin()
		var last atomic.Int32
		var wg sync.WaitGroup
		end := func() {
			if l.unref() {
				last.Add(1)
			}
		}
		wg.Go(end) // the application
		wg.Go(end) // the group
		for range 4 {
			wg.Go(func() { // a call
				if l.ref() {
					if l.isOver() {
						t.Error("over while a call is under way")
					}
					end()
				}
			})
		}
		wg.Wait()
		if n := last.Load(); n != 1 || !l.isOver() || l.ref() {
			t.Fatalf("%d users were the last, over: %t", n, l.isOver())
		}
	}
}

func TestLife_callsKeepTheMemory(t *testing.T) {
	var l life
	l.begin()
	if !l.ref() {
		t.Fatal("over at the beginning")
	}
	application, group := l.unref(), l.unref()
	if application || group {
		t.Error("application and group are gone, and with them the memory of a call under way")
	}
	if !l.ref() {
		t.Error("a call cannot begin beside another one")
	}
	if l.unref() || !l.unref() {
		t.Error("the last call did not end it")
	}
}

// A connection that was given up before its Confirm has its client's place for a while, and no longer although
// the client never says that it will not write.
func TestConn_abandonedHasItsPlaceForAWhile(t *testing.T) {
	s := &Stack{}
	s.halfOpen.init(8)
	g := &group{s: s}
	start, addr := time.Unix(1000, 0), testAddr(1)
	for i := range 2 {
		s.halfOpen.take(addr)
		c := &Conn{stack: s, group: g}
		c.abandon(start.Add(time.Duration(i)*time.Second), addr)
		g.shells = append(g.shells, nil, c)
	}
	for _, tt := range []struct {
		after time.Duration
		want  int
	}{
		{0, 2},
		{linkgroup.ZombieGrace - 1, 2},
		{linkgroup.ZombieGrace, 1},
		{linkgroup.ZombieGrace + time.Second - 1, 1},
		{linkgroup.ZombieGrace + time.Second, 0},
		{time.Hour, 0},
	} {
		if g.endAbandoned(start.Add(tt.after)); s.halfOpen.all != tt.want || g.abandoned != tt.want {
			t.Errorf("after %v there are %d places taken, by %d connections, want %d", tt.after, s.halfOpen.all, g.abandoned, tt.want)
		}
	}
	if g.shells[1].endAbandoned(); s.halfOpen.all != 0 {
		t.Error("the place was given back twice")
	}
}
