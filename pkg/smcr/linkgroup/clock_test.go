// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"slices"
	"testing"
	"time"
)

// waiting lists the connections of a queue from its head, and checks that the list from the tail is the same.
func (q *clocks) waiting(t *testing.T, names map[*Conn]string) string {
	t.Helper()
	var forward, back []byte
	for c := q.head; c != nil && len(forward) <= len(names); c = c.clockNext {
		forward = append(forward, names[c]...)
	}
	for c := q.tail; c != nil && len(back) <= len(names); c = c.clockPrev {
		back = append(back, names[c]...)
	}
	slices.Reverse(back)
	if string(forward) != string(back) {
		t.Errorf("%s from the head, %s from the tail", forward, back)
	}
	return string(forward)
}

// RFC 7609 §4.8.1: the connection that has waited longest is due first, even if other connections stop
// waiting, or begin to wait again.
func TestClocks(t *testing.T) {
	g := New(Config{CloseTimeout: time.Minute})
	q := &g.conns.closing
	conns, names := map[string]*Conn{}, map[*Conn]string{}
	for _, name := range []string{"a", "b", "c", "d"} {
		conns[name] = &Conn{g: g}
		names[conns[name]] = name
	}
	now := time.Unix(1, 0)
	if _, ok := q.due(); ok {
		t.Error("something is due although nobody waits")
	}
	for _, step := range []struct {
		do   func(c *Conn, now time.Time)
		conn string
		want string
		due  time.Duration // since the first step, without CloseTimeout
	}{
		{(*Conn).startClock, "a", "a", 0},
		{(*Conn).startClock, "b", "ab", 0},
		{(*Conn).startClock, "c", "abc", 0},
		{(*Conn).startClock, "d", "abcd", 0},
		{(*Conn).startClock, "a", "abcd", 0}, // it waits already
		{(*Conn).resetClock, "a", "bcda", 1},
		{(*Conn).resetClock, "c", "bdac", 1},
		{func(c *Conn, _ time.Time) { c.stopClock() }, "d", "bac", 1},
		{func(c *Conn, _ time.Time) { c.stopClock() }, "d", "bac", 1}, // it does not wait
		{func(c *Conn, _ time.Time) { c.stopClock() }, "b", "ac", 5},
		{func(c *Conn, _ time.Time) { c.stopClock() }, "c", "a", 5},
		{func(c *Conn, _ time.Time) { c.stopClock() }, "a", "", 0},
		{(*Conn).startClock, "b", "b", 12},
	} {
		step.do(conns[step.conn], now)
		if got := q.waiting(t, names); got != step.want {
			t.Fatalf("%s wait after %s, want %s", got, step.conn, step.want)
		}
		due, ok := q.due()
		if want := time.Unix(1, 0).Add(time.Minute + step.due); ok != (step.want != "") || ok && !due.Equal(want) {
			t.Errorf("%s wait: due at %v, %t, want %v", step.want, due, ok, want)
		}
		now = now.Add(1)
	}
	conns["a"].done = true
	if conns["a"].startClock(now); q.waiting(t, names) != "b" {
		t.Error("a connection that is done waits")
	}
}
