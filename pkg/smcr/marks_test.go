// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
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

// Of what a step leaves the next one sees first, before what came since.
func TestStack_takeDirty_restFirst(t *testing.T) {
	s := &Stack{}
	conns := make([]Conn, 5) // without users: the machine has nothing to hear of them
	for i := range conns[:4] {
		s.marks.moved(&conns[i])
	}
	check := func(what string, left ...bool) {
		t.Helper()
		for i, want := range left {
			if got := conns[i].mark.left.Load(); got != want {
				t.Errorf("%s: connection %d has its mark: %t", what, i, got)
			}
		}
	}
	if !s.takeDirty(2) {
		t.Error("nothing moved")
	}
	check("the last two of four", true, true, false, false, false)
	s.marks.moved(&conns[0]) // is to be looked at anyway
	s.marks.moved(&conns[3])
	s.marks.moved(&conns[4])
	if !s.takeDirty(unbounded) {
		t.Error("nothing moved")
	}
	check("the rest", false, false, false, true, true)
	if !s.takeDirty(unbounded) || s.takeDirty(unbounded) || s.rest != nil || s.marks.any() {
		t.Error("something else is left than what came since")
	}
	check("what came since", false, false, false, false, false)
}

// slowCQ is an empty completion queue. It takes longer to find that than a caller of kick works for others.
type slowCQ struct{ rdma.CQ }

func (slowCQ) Poll([]rdma.WC) (int, error) {
	for start := time.Now(); time.Since(start) <= 2*maxKick; {
	}
	return 0, nil
}

// Who has worked for others for long enough after one step leaves the rest, with a mark, and wakes the stack's goroutine.
func TestStack_kick_leavesTheRest(t *testing.T) {
	s := &Stack{}
	s.alarm.init()
	r := &rnic{s: s}
	r.recvs.CQ, r.recvs.look = slowCQ{}, true
	s.devices.list = []*rnic{r}
	conns := make([]Conn, kickConns+1) // without users: the machine has nothing to hear of them
	for i := range conns {
		s.marks.moved(&conns[i])
	}
	s.kick()
	if !conns[0].mark.left.Load() || conns[1].mark.left.Load() || !s.marks.any() {
		t.Error("the step did not leave just the last connection, with a mark")
	}
	if len(s.alarm.wake) != 1 {
		t.Error("the stack's goroutine is not awake")
	}
	s.kick()
	if conns[0].mark.left.Load() || s.marks.any() {
		t.Error("the next step left something")
	}
}
