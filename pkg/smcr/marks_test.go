// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"slices"
	"sync"
	"testing"
)

func (m *marks) takeAll() (conns []*Conn) {
	for c := m.take(); c != nil; {
		conns = append(conns, c)
		c = c.mark.wipe()
	}
	return conns
}

// A connection is in the queue once however often its positions move, and again after it
// was taken out.
func TestMarks_onceInTheQueue(t *testing.T) {
	var m marks
	var a, b Conn
	for range 2 {
		if m.any() {
			t.Fatal("marks that nobody left")
		}
		for _, c := range []*Conn{&a, &b, &a} {
			m.moved(c)
		}
		if !m.any() {
			t.Error("no mark")
		}
		if got := m.takeAll(); !slices.Equal(got, []*Conn{&b, &a}) {
			t.Errorf("took %d connections, want each of 2 once", len(got))
		}
	}
	m.ready.Store(true)
	if !m.any() {
		t.Error("no mark of a completion queue")
	}
}

// No move is overlooked: whoever moves a position and finds the mark left already has it
// looked at afterwards.
func TestMarks_noneIsOverlooked(t *testing.T) {
	var m marks
	conns := make([]Conn, 3)
	var writers sync.WaitGroup
	const moves = 2000
	for i := range conns {
		writers.Go(func() {
			for range moves {
				conns[i].streams.produced.Add(1)
				m.moved(&conns[i])
			}
		})
	}
	done := make(chan struct{})
	go func() { writers.Wait(); close(done) }()
	seen := map[*Conn]uint64{}
	look := func() {
		for c := m.take(); c != nil; {
			next := c.mark.wipe()
			seen[c] = c.streams.produced.Load()
			c = next
		}
	}
	for over := false; !over; {
		select {
		case <-done:
			over = true
		default:
		}
		look()
	}
	for i := range conns {
		if n := seen[&conns[i]]; n != moves {
			t.Errorf("connection %d: seen at %d, is at %d", i, n, moves)
		}
	}
}
