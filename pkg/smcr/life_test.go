// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"sync"
	"sync/atomic"
	"testing"
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
