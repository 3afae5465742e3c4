// SPDX-License-Identifier: Apache-2.0

package socket

import "testing"

// bugs are mistakes that are planted into one side after each input, as if a line were missing or wrong, and by how many
// schedules the simulator must have found each. The log of the test says how many it took: most are found by the first
// one, lost timeouts by the 486th.
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
