// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"testing"
	"time"
)

// bugs are mistakes that are planted into one side after each input, as if a line were missing or wrong, and by how many
// schedules the simulator must have found each. The log of the test says how many it took: most are found by the first
// one, refused payload that waits by the 289th.
var bugs = []struct {
	name   string
	within uint64
	plant  func(s *Socket)
}{
	{"payload without a buffer is not counted", 20, func(s *Socket) { s.snk.nonDiscards = 0 }},
	{"sent payload is not counted", 20, func(s *Socket) { s.src.potential = 0 }},
	{"bytes owed after SendSm are forgotten", 500, func(s *Socket) { s.snk.owed = 0 }},
	{"bytes forced to Bcopy are forgotten", 500, func(s *Socket) { s.src.forced = 0 }},
	{"one more credit than there is", 20, func(s *Socket) { s.credits.peerLimit += 4 }},
	{"an advert of the peer is dropped", 200, func(s *Socket) { s.snk.dropSrcs() }},
	{"a buffer of the peer is dropped", 500, func(s *Socket) { s.src.dropSinks() }},
	{"an answer to ChRcvBuf comes early", 2000, func(s *Socket) { s.size.unused = 0 }},
	{"the peer's receive buffers seem larger", 20, func(s *Socket) { s.peer.recvBytes += 10 }},
	{"timeouts of credit are lost", 2000, func(s *Socket) { s.credits.prodAt, s.credits.updateAt = s.deadline, s.deadline }},
	{"what RDMA READs bring is reported before it has come", 100, func(s *Socket) {
		for !s.snk.flight.isEmpty() {
			s.snk.arrived()
		}
	}},
	{"a Read is full before its RDMA READ is done", 100, func(s *Socket) {
		for i := range s.snk.reads.n {
			r := s.snk.reads.at(i)
			r.got, r.asked = r.got+r.asked, 0
		}
	}},
	{"RDMA READs are taken for others", 500, func(s *Socket) {
		if f := &s.snk.flight; f.n > 1 {
			a, b := f.at(0), f.at(1)
			*a, *b = *b, *a
		}
	}},
	{"more RDMA READs at a time than the peer serves", 500, func(s *Socket) { s.peer.reads = s.cfg.ORD + 1 }},
	{"a SrcAvailCancel is answered with RDMA READs under way", 500, func(s *Socket) {
		if s.snk.stop {
			s.credits.holds = false
			s.snk.flight.clear()
		}
	}},
	{"a SrcAvailCancel is acknowledged with RDMA READs under way", 500, func(s *Socket) { s.credits.holds = false }},
	{"a Write is over before its RDMA WRITE is done", 500, func(s *Socket) { s.src.flight.clear() }},
	{"an RDMA WRITE goes into the second buffer of the peer", 500, func(s *Socket) {
		if q := &s.src.sinks; q.n > 1 {
			a, b := q.at(0), q.at(1)
			*a, *b = *b, *a
		}
	}},
	{"payload that was refused waits for other adverts", 2000, func(s *Socket) {
		if !s.src.srcs.isEmpty() {
			s.credits.prodAt = time.Time{}
		}
	}},
	{"a mode changes by itself", 100, func(s *Socket) { s.src.mode = 2 }},
}

// Each deliberate bug is found, and soon.
func TestSimFindsBugs(t *testing.T) {
	for _, b := range bugs {
		found := uint64(0)
		for seed := uint64(1); seed <= b.within && found == 0; seed++ {
			s := randomSchedule(seed)
			s.plant = b.plant
			if _, err := s.play(func(string, ...any) {}); err != nil {
				found = seed
			}
		}
		if found == 0 {
			t.Errorf("%s: not found in %d schedules", b.name, b.within)
		}
		t.Logf("%s: schedule %d", b.name, found)
	}
}
