// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// writeUrgent produces n bytes of which the last is urgent.
func (s *side) writeUrgent(n uint64) bool {
	ok := s.c.Urgent(s.produced + n)
	s.write(n)
	return ok
}

func TestSection4_7_5_UrgentSender(t *testing.T) {
	hear := func(s *side, cons uint64) {
		s.cons = cons
		if err := s.receive(0); err != nil {
			s.t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name string
		run  func(s *side) string // returns what was sent last
		want string
	}{
		{
			"goes with P and U at once",
			func(s *side) string { s.writeUrgent(500); return s.transmissions() },
			"write 0+500, seq 1 prod 0:500 cons 0:0 PU",
		},
		{
			"what was produced before goes along, what comes after waits",
			func(s *side) string { s.write(10); s.writeUrgent(1); s.write(100); return s.transmissions() },
			"write 0+11, seq 1 prod 0:11 cons 0:0 PU",
		},
		{
			"part of it was consumed",
			func(s *side) string {
				s.writeUrgent(500)
				s.write(100)
				s.transmissions()
				hear(s, 499)
				return s.transmissions()
			},
			"",
		},
		{
			"all of it was consumed",
			func(s *side) string {
				s.writeUrgent(500)
				s.write(100)
				s.transmissions()
				hear(s, 500)
				return s.transmissions()
			},
			"write 500+100, seq 2 prod 0:600 cons 0:0 -",
		},
		{
			"messages without data do not repeat it",
			func(s *side) string {
				s.writeUrgent(500)
				s.transmissions()
				s.prod = 10000
				if err := s.receive(cdc.Flags(0).WithWriterBlocked()); err != nil {
					s.t.Fatal(err)
				}
				s.c.Consume(9000)
				return s.transmissions()
			},
			"seq 2 prod 0:500 cons 0:9000 -",
		},
		{
			"waits for window: announced alone, once",
			func(s *side) string {
				s.write(1 << 14)
				s.writeUrgent(1)
				return s.transmissions()
			},
			"write 0+16384, seq 1 prod 1:0 cons 0:0 BP",
		},
		{
			"made after the window closed",
			func(s *side) string {
				s.write(1<<14 + 1)
				s.transmissions()
				s.writeUrgent(1)
				return s.transmissions()
			},
			"seq 2 prod 1:0 cons 0:0 BP",
		},
		{
			"the window opens in part",
			func(s *side) string {
				s.write(1 << 14)
				s.writeUrgent(100)
				s.write(100)
				s.transmissions()
				hear(s, 60)
				return s.transmissions()
			},
			"write 16384+60, seq 2 prod 1:60 cons 0:0 BP",
		},
		{
			"the window opens",
			func(s *side) string {
				s.write(1 << 14)
				s.writeUrgent(100)
				s.write(100)
				s.transmissions()
				hear(s, 1<<14)
				return s.transmissions()
			},
			"write 16384+100, seq 2 prod 1:100 cons 0:0 PU",
		},
		{
			"a later one replaces one not announced",
			func(s *side) string { s.writeUrgent(10); s.writeUrgent(10); return s.transmissions() },
			"write 0+20, seq 1 prod 0:20 cons 0:0 PU",
		},
		{
			"a second one is not announced before the first was consumed",
			func(s *side) string {
				s.writeUrgent(10)
				s.transmissions()
				s.writeUrgent(10)
				return s.transmissions()
			},
			"",
		},
		{
			"then the second one goes",
			func(s *side) string {
				s.writeUrgent(10)
				s.transmissions()
				s.writeUrgent(10)
				hear(s, 10)
				return s.transmissions()
			},
			"write 10+10, seq 2 prod 0:20 cons 0:0 PU",
		},
		{
			"does not wait for company",
			func(s *side) string {
				s.c.Coalesce(1000)
				for range 4 {
					s.write(1000)
					s.transmissions()
				}
				s.write(1)
				held := s.transmissions()
				s.writeUrgent(1)
				return held + s.transmissions()
			},
			"write 4000+2, seq 5 prod 0:4002 cons 0:0 PU",
		},
		{
			"too late, the byte is gone",
			func(s *side) string {
				s.write(10)
				s.transmissions()
				if s.c.Urgent(10) {
					return "late"
				}
				s.write(10)
				return s.transmissions()
			},
			"write 10+10, seq 2 prod 0:20 cons 0:0 -",
		},
		{
			"§4.6.2: lost with its link, repeated without P",
			func(s *side) string {
				s.write(10)
				s.transmissions()
				s.writeUrgent(10)
				s.write(50)
				s.transmissions()
				s.c.Failover()
				return s.transmissions()
			},
			"validation seq 0 F; write 0+20, seq 3 prod 0:20 cons 0:0 U",
		},
		{
			"§4.6.2: lost before it was sent",
			func(s *side) string {
				s.write(10)
				s.transmissions()
				s.writeUrgent(10)
				s.write(50)
				s.c.Failover()
				return s.transmissions()
			},
			"validation seq 0 F; write 0+20, seq 2 prod 0:20 cons 0:0 PU",
		},
		{
			"§4.6.2: consumed before the link was lost",
			func(s *side) string {
				s.writeUrgent(10)
				s.transmissions()
				hear(s, 10)
				s.write(50)
				s.transmissions()
				s.c.Failover()
				return s.transmissions()
			},
			"validation seq 0 F; write 10+50, seq 3 prod 0:60 cons 0:0 -",
		},
		{
			"a reset says nothing of it",
			func(s *side) string { s.writeUrgent(10); s.c.Abort(); return s.transmissions() },
			"seq 1 prod 0:0 cons 0:0 A",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(t, cdc.Ring{Size: 1 << 14})
			if diff := cmp.Diff(tt.want, tt.run(s)); diff != "" {
				t.Errorf("sent (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSection4_7_6_UrgentReceiver(t *testing.T) {
	p, u := cdc.Flags(0).WithUrgentPending(), cdc.Flags(0).WithUrgentPending().WithUrgentPresent()
	type step struct {
		prod    uint64
		flags   cdc.Flags
		events  cdc.Events
		pending bool
		end     uint64
	}
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"present", []step{{20, u, cdc.Readable | cdc.PeerUrgent, false, 20}}},
		{"present without P", []step{{20, cdc.Flags(0).WithUrgentPresent(), cdc.Readable | cdc.PeerUrgent, false, 20}}},
		{"pending, repeated, then present", []step{
			{0, p, cdc.Readable | cdc.PeerUrgent, true, 0},
			{10, p, cdc.Readable, true, 0},
			{20, u, cdc.Readable | cdc.PeerUrgent, false, 20},
			{30, 0, cdc.Readable, false, 20},
		}},
		{"present, repeated", []step{
			{20, u, cdc.Readable | cdc.PeerUrgent, false, 20},
			{20, u, cdc.Readable, false, 20},
		}},
		{"a second one", []step{
			{20, u, cdc.Readable | cdc.PeerUrgent, false, 20},
			{30, u, cdc.Readable | cdc.PeerUrgent, false, 30},
		}},
		{"pending and withdrawn", []step{
			{0, p, cdc.Readable | cdc.PeerUrgent, true, 0},
			{0, 0, cdc.Readable, false, 0},
		}},
		{"present without any data", []step{{0, u, cdc.Readable, false, 0}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(t, cdc.Ring{Size: 1 << 14})
			for i, step := range tt.steps {
				s.prod, s.events = step.prod, 0
				if err := s.receive(step.flags); err != nil {
					t.Fatal(err)
				}
				got := struct {
					Events  cdc.Events
					Pending bool
					End     uint64
				}{s.events, s.c.PeerUrgentPending(), s.c.PeerUrgent()}
				want := got
				want.Events, want.Pending, want.End = step.events, step.pending, step.end
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("step %d (-want +got):\n%s", i, diff)
				}
				if s.c.PeerBlocked() != (step.pending || step.end > 0) {
					t.Errorf("step %d: PeerBlocked() = %t", i, s.c.PeerBlocked())
				}
			}
		})
	}
	t.Run("what is read while it is pending is told at once", func(t *testing.T) {
		s := newSide(t, cdc.Ring{Size: 1 << 14})
		s.prod = 1 << 14
		if err := s.receive(p); err != nil {
			t.Fatal(err)
		}
		s.c.Consume(1)
		if got, want := s.transmissions(), "seq 1 prod 0:0 cons 0:1 -"; got != want {
			t.Errorf("sent %q, want %q", got, want)
		}
	})
	t.Run("a message without U overtakes the one with it over another link", func(t *testing.T) {
		for _, consumed := range []bool{false, true} {
			s := newSide(t, cdc.Ring{Size: 1 << 14})
			s.seq, s.prod = 1, 20
			if err := s.receive(0); err != nil {
				t.Fatal(err)
			}
			if consumed {
				s.c.Consume(20)
			}
			late := cdc.Message{Seq: 1, Token: testToken, Prod: s.local.Cursor(20), Cons: s.peer.Cursor(0), Flags: u}
			for i, want := range []cdc.Events{cdc.Readable | cdc.PeerUrgent, 0} { // the second one says nothing new
				if ev, err := s.c.HandleMessage(late); ev != want || !errors.Is(err, cdc.ErrStaleMessage) || s.c.PeerUrgent() != 20 || !s.c.PeerBlocked() {
					t.Errorf("consumed %t, message %d: events %v, error %v, urgent byte before %d", consumed, i, ev, err, s.c.PeerUrgent())
				}
			}
			s.c.Consume(20)
			if got, want := s.transmissions(), "seq 1 prod 0:0 cons 0:20 -"; got != want {
				t.Errorf("consumed %t: sent %q, want %q: the peer waits for that", consumed, got, want)
			}
		}
	})
	t.Run("and so late that the peer was told of the byte, or has written on", func(t *testing.T) {
		for name, later := range map[string]func(*side){
			"told":    func(s *side) { s.c.Consume(20); s.c.RequestUpdate(); s.transmissions() },
			"written": func(s *side) { s.prod = 30; _ = s.receive(0) },
		} {
			s := newSide(t, cdc.Ring{Size: 1 << 14})
			s.seq, s.prod = 1, 20
			if err := s.receive(0); err != nil {
				t.Fatal(err)
			}
			later(s)
			ev, err := s.c.HandleMessage(cdc.Message{Seq: 1, Token: testToken, Prod: s.local.Cursor(20), Cons: s.peer.Cursor(0), Flags: u})
			if ev != 0 || !errors.Is(err, cdc.ErrStaleMessage) || s.c.PeerUrgent() != 0 {
				t.Errorf("%s: events %v, error %v, urgent byte before %d", name, ev, err, s.c.PeerUrgent())
			}
		}
	})
	t.Run("§4.6.2: U of a message that is behind is old", func(t *testing.T) {
		s := newSide(t, cdc.Ring{Size: 1 << 14})
		s.prod = 20
		if err := s.receive(u); err != nil {
			t.Fatal(err)
		}
		s.c.Consume(20)
		s.prod = 30
		if err := s.receive(0); err != nil {
			t.Fatal(err)
		}
		if _, err := s.c.HandleMessage(cdc.Message{Seq: 2, Token: testToken, Flags: cdc.Flags(0).WithFailoverValidation()}); err != nil {
			t.Fatal(err)
		}
		s.prod, s.events = 20, 0
		if err := s.receive(u); err != nil || s.c.PeerUrgent() != 20 || s.events != cdc.Readable {
			t.Errorf("error %v, urgent byte before %d, events %v", err, s.c.PeerUrgent(), s.events)
		}
	})
}

// What Linux wrote when it sent and when it received urgent data is, bit for
// bit, what we write in its place, whichever side we play.
func TestSection4_7_5_UrgentCaptures(t *testing.T) {
	for _, name := range []string{"07-oob-urgent", "45-v1-oob-urgent"} {
		for _, first := range []bool{true, false} {
			who := map[bool]string{true: "sender", false: "receiver"}[first]
			t.Run(name+"/"+who, func(t *testing.T) {
				msgs, fromFirst := conversation(t, name)
				ring := cdc.Ring{Size: 1 << 16}
				s := newSide(t, ring)
				urgent := 0
				for i, m := range msgs {
					if fromFirst[i] != first {
						ev, err := s.c.HandleMessage(m)
						if err != nil {
							t.Fatalf("message %d, %v: %v", i, m, err)
						}
						if ev&cdc.PeerUrgent != 0 {
							urgent++
							if end := s.c.PeerUrgent(); ring.Cursor(end) != m.Prod || !m.Flags.UrgentPresent() {
								t.Errorf("message %d, %v: urgent byte before %d", i, m, end)
							}
						}
						continue
					}
					// The application's part of our own message.
					if m.Flags.UrgentPresent() {
						s.c.Urgent(uint64(m.Prod.Count))
						urgent++
					}
					s.write(uint64(m.Prod.Count) - s.produced)
					s.c.Consume(uint64(m.Cons.Count))
					if m.Flags.Closed() {
						s.c.Close()
					}
					if !s.c.Pending() {
						t.Fatalf("message %d: nothing to send, want %v", i, m)
					}
					tr, _ := s.c.Next()
					s.c.HandleSent()
					m.Token = testPeerToken
					if diff := cmp.Diff(m, tr.Message); diff != "" {
						t.Errorf("message %d (-captured +ours):\n%s", i, diff)
					}
				}
				if urgent != 1 || s.c.Pending() || s.c.State() != cdc.Closed {
					t.Errorf("%d urgent bytes, state %v, pending %t", urgent, s.c.State(), s.c.Pending())
				}
			})
		}
	}
}

// §4.5.2: coalescing needs a timer, which the owner has.
func TestSection4_5_2_Coalesce(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	s.c.Coalesce(1000)
	expect := func(want string, held bool) {
		t.Helper()
		if diff := cmp.Diff(want, s.transmissions()); diff != "" {
			t.Errorf("sent (-want +got):\n%s", diff)
		}
		if s.c.Coalesced() != held {
			t.Errorf("Coalesced() = %t", !held)
		}
		for s.c.InFlight() > 0 {
			s.c.HandleSent()
		}
	}
	expect("", false)
	s.write(600)
	expect("", true)
	s.write(400)
	expect("write 0+1000, seq 1 prod 0:1000 cons 0:0 -", false)
	s.write(1)
	expect("", true)
	s.c.Flush() // the timer
	s.write(1)
	expect("write 1000+2, seq 2 prod 0:1002 cons 0:0 -", false)
	s.write(1)
	expect("", true)
	s.c.Coalesce(0) // the application switched Nagle's algorithm off
	expect("write 1002+1, seq 3 prod 0:1003 cons 0:0 -", false)
	s.c.Coalesce(1000)
	s.write(1)
	expect("", true)
	s.c.Shutdown()
	expect("write 1003+1, seq 4 prod 0:1004 cons 0:0 -", false)
	expect("seq 5 prod 0:1004 cons 0:0 D", false)
}

// A peer that is asked tells its cursor; asking does not touch the data path.
func TestSection4_5_1_RequestUpdate(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	s.write(100)
	s.transmissions()
	s.c.RequestUpdate()
	if got, want := s.transmissions(), "seq 2 prod 0:100 cons 0:0 R"; got != want {
		t.Errorf("sent %q, want %q", got, want)
	}
	s.c.RequestUpdate()
	s.write(1)
	if got, want := s.transmissions(), "write 100+1, seq 3 prod 0:101 cons 0:0 R"; got != want {
		t.Errorf("with data: sent %q, want %q", got, want)
	}
	s.do("D")
	s.do("C")
	s.c.RequestUpdate()
	if s.c.Pending() && !s.c.WasAborted() {
		t.Error("asks a peer that is gone")
	}
}

// After D the peer writes nothing, so more data is a violation.
func TestSectionA_4_DataAfterEnd(t *testing.T) {
	for _, f := range []string{"D", "C"} {
		s := newSide(t, cdc.Ring{Size: 1 << 14})
		s.prod = 10
		s.do(f)
		if s.c.PeerProduced() != 10 {
			t.Fatalf("data that comes with %s is lost", f)
		}
		s.prod = 11
		if err := s.receive(0); err == nil || !s.c.WasAborted() || s.c.PeerProduced() != 10 {
			t.Errorf("data after %s: error %v, position %d", f, err, s.c.PeerProduced())
		}
	}
}
