// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"reflect"
	"testing"
)

func TestStreams_endOfOurs(t *testing.T) {
	var s streams
	if !s.produce(5) || !s.produce(2) || s.written() != 7 || s.ended() {
		t.Errorf("7 bytes written: at %d, ended: %t", s.written(), s.ended())
	}
	s.end()
	if s.produce(1) || s.written() != 7 || !s.ended() {
		t.Errorf("after the end: at %d, ended: %t", s.written(), s.ended())
	}
}

func TestStreams_unread(t *testing.T) {
	var s streams
	s.peerProduced.Store(10)
	s.consumed.Add(4)
	if pos, n := s.unread(); pos != 4 || n != 6 {
		t.Errorf("%d bytes at %d, want 6 at 4", n, pos)
	}
}

// What the application's goroutines store and what the holder of the turn stores are on
// different cache lines, and on other ones than what is before and behind, wherever in
// memory the connection is.
func TestStreams_cacheLines(t *testing.T) {
	const line = 64
	all := reflect.TypeFor[streams]()
	end := uintptr(0) // of the group before
	for _, group := range [][]string{{"produced", "consumed"}, {"completed", "peerProduced", "announced", "flags"}} {
		for i, name := range group {
			f, _ := all.FieldByName(name)
			if i == 0 && f.Offset < end+line {
				t.Errorf("%s is %d bytes behind what others store, want %d", name, f.Offset-end, line)
			}
			if i > 0 && f.Offset >= end+8 {
				t.Errorf("%s is %d bytes behind what the same goroutine stores", name, f.Offset-end)
			}
			end = f.Offset + f.Type.Size()
		}
	}
	if all.Size() < end+line {
		t.Errorf("%d bytes to what follows, want %d", all.Size()-end, line)
	}
}
