// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// transmissions renders what the connection sends now, nothing delivered:
// position+length, sequence number, producer and consumer cursor, flags.
func (s *side) transmissions() string {
	var out []string
	for s.c.Pending() {
		t, ev := s.c.Next()
		s.events |= ev
		m := t.Message
		line := fmt.Sprintf("seq %d prod %v cons %v %v", m.Seq, m.Prod, m.Cons, m.Flags)
		switch {
		case t.Validation:
			line = fmt.Sprintf("validation seq %d %v", m.Seq, m.Flags)
			if t.Len != 0 || m.Token != testPeerToken || m.Prod != (cdc.Cursor{}) || m.Cons != (cdc.Cursor{}) {
				s.t.Errorf("validation message says more: %+v", t)
			}
		case t.Len > 0:
			line = fmt.Sprintf("write %d+%d, %s", t.Pos, t.Len, line)
		}
		out = append(out, line)
	}
	return strings.Join(out, "; ")
}

func TestSection4_6_Sender(t *testing.T) {
	write := func(n uint64) func(s *side) { return func(s *side) { s.write(n); s.transmissions() } }
	delivered := func(n int) func(s *side) {
		return func(s *side) {
			for range n {
				s.c.HandleSent()
			}
		}
	}
	hear := func(prod, cons uint64, f cdc.Flags) func(s *side) {
		return func(s *side) {
			s.prod, s.cons = prod, cons
			if err := s.receive(f); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	read := func(pos uint64) func(s *side) { return func(s *side) { s.c.Consume(pos); s.transmissions() } }
	type steps []func(s *side)
	for _, tt := range []struct {
		name   string
		before steps
		after  steps // of the failover
		want   string
		events cdc.Events
	}{
		{name: "nothing was ever sent", want: "validation seq 0 F"},
		{
			name: "all was delivered", before: steps{write(10), write(10), delivered(2)},
			want: "validation seq 2 F",
		},
		{
			name: "nothing was delivered", before: steps{write(10), write(10)},
			want: "validation seq 0 F; write 0+20, seq 3 prod 0:20 cons 0:0 -",
		},
		{
			name: "pending writes become one", before: steps{write(10), write(20), write(30), delivered(1)},
			want: "validation seq 1 F; write 10+50, seq 4 prod 0:60 cons 0:0 -",
		},
		{
			name: "new data goes along", before: steps{write(10)},
			after: steps{func(s *side) { s.write(5) }},
			want:  "validation seq 0 F; write 0+15, seq 2 prod 0:15 cons 0:0 -",
		},
		{
			name: "what the peer has read is not sent again", before: steps{write(10), write(10), hear(0, 15, 0)},
			want: "validation seq 0 F; write 15+5, seq 3 prod 0:20 cons 0:0 -", events: cdc.Writable,
		},
		{
			name: "all was read, no delivery seen", before: steps{write(10), hear(0, 10, 0)},
			want: "validation seq 0 F; seq 2 prod 0:10 cons 0:0 -", events: cdc.Writable,
		},
		{
			name: "the peer's cursor comes after the failover", before: steps{write(10), write(10)},
			after: steps{hear(0, 20, 0)},
			want:  "validation seq 0 F; seq 3 prod 0:20 cons 0:0 -",
		},
		{
			name: "a consumer cursor is lost", before: steps{hear(9000, 0, cdc.Flags(0).WithWriterBlocked()), read(9000)},
			want: "validation seq 0 F; seq 2 prod 0:0 cons 0:9000 -",
		},
		{
			name: "a message without a write does not count", before: steps{
				write(10), hear(9000, 0, cdc.Flags(0).WithWriterBlocked()), read(9000), delivered(2),
			},
			want: "validation seq 1 F",
		},
		{
			name: "done is told again", before: steps{write(10), delivered(1), func(s *side) { s.c.Shutdown(); s.transmissions() }},
			want: "validation seq 1 F; seq 3 prod 0:10 cons 0:0 D",
		},
		{
			name: "closed is told again", before: steps{write(10), delivered(1), func(s *side) { s.c.Close(); s.transmissions() }},
			want: "validation seq 1 F; seq 3 prod 0:10 cons 0:0 C",
		},
		{
			name: "closed by both, ours is lost", before: steps{
				hear(0, 0, cdc.Flags(0).WithClosed()), func(s *side) { s.c.Close(); s.transmissions() },
			},
			want: "validation seq 0 F; seq 2 prod 0:0 cons 0:0 C",
		},
		{
			name: "closed by both and delivered", before: steps{
				hear(0, 0, cdc.Flags(0).WithClosed()), func(s *side) { s.c.Close(); s.transmissions() }, delivered(1),
			},
		},
		{
			name: "a reset is told again, without the data", before: steps{write(10), func(s *side) { s.c.Abort(); s.transmissions() }},
			want: "validation seq 0 F; seq 3 prod 0:10 cons 0:0 A",
		},
		{
			name: "a reset was not told yet", before: steps{write(10), func(s *side) { s.c.Abort() }},
			want: "validation seq 0 F; seq 2 prod 0:10 cons 0:0 A",
		},
		{
			name: "the answer to a reset is told again", before: steps{hear(0, 0, cdc.Flags(0).WithAbort()), func(s *side) { s.transmissions() }},
			want: "validation seq 0 F; seq 2 prod 0:0 cons 0:0 A",
		},
		{
			name: "closed, then reset by the peer, ours is lost", before: steps{
				func(s *side) { s.c.Close(); s.transmissions() }, hear(0, 0, cdc.Flags(0).WithAbort()),
			},
			want: "validation seq 0 F; seq 2 prod 0:0 cons 0:0 C",
		},
		{
			name: "reset by both and delivered", before: steps{
				hear(0, 0, cdc.Flags(0).WithAbort()), func(s *side) { s.transmissions() }, delivered(1),
			},
		},
		{
			name: "reset after the failover", before: steps{write(10)},
			after: steps{func(s *side) { s.c.Abort() }},
			want:  "validation seq 0 F; seq 2 prod 0:10 cons 0:0 A",
		},
		{
			name: "reset by the peer after the failover", before: steps{write(10)},
			after: steps{hear(0, 0, cdc.Flags(0).WithAbort())},
			want:  "validation seq 0 F; seq 2 prod 0:10 cons 0:0 A",
		},
		{name: "given up", before: steps{write(10), func(s *side) { s.c.Fail() }}},
		{
			name: "twice", before: steps{
				write(10), func(s *side) { s.c.Failover(); s.transmissions() }, write(10), func(s *side) { s.c.Failover() },
			},
			want: "validation seq 0 F; write 0+20, seq 4 prod 0:20 cons 0:0 -",
		},
		{
			name: "the link of the validation message is lost, too",
			before: steps{
				write(10), delivered(1), func(s *side) { s.c.Failover(); s.transmissions() }, func(s *side) { s.c.Failover() },
			},
			want: "validation seq 1 F",
		},
		{
			name: "a full window in pieces", before: steps{
				func(s *side) {
					for range 4 {
						s.write(1 << 12)
						s.transmissions()
					}
				}, delivered(1), hear(0, 100, 0),
			},
			want: "validation seq 1 F; write 4096+12288, seq 5 prod 1:0 cons 0:0 -",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(t, cdc.Ring{Size: 1 << 14})
			for _, f := range tt.before {
				f(s)
			}
			s.events = s.c.Failover()
			if s.events != tt.events {
				t.Errorf("events %v, want %v", s.events, tt.events)
			}
			for _, f := range tt.after {
				f(s)
			}
			if got, want := s.c.InFlight() > 0, strings.Contains(tt.want, ";"); got != want {
				t.Errorf("in flight before the repetition: %t, want %t", got, want)
			}
			if diff := cmp.Diff(tt.want, s.transmissions()); diff != "" {
				t.Errorf("sent (-want +got):\n%s", diff)
			}
			if s.c.Pending() {
				t.Error("still something to send")
			}
			for s.c.InFlight() > 0 {
				s.c.HandleSent()
			}
			if tt.name != "given up" && !s.c.WasAborted() && s.c.Completed() != s.c.Produced() {
				t.Errorf("completed %d of %d", s.c.Completed(), s.c.Produced())
			}
		})
	}
}

// A replay that is larger than a usual transmission goes out in one piece, so that no cursor that the peer sees
// goes back.
func TestSection4_6_2_ReplayIsOneWrite(t *testing.T) {
	ring := cdc.Ring{Size: 4 * cdc.MaxTransmission}
	c := cdc.NewConn(cdc.Config{Local: ring, SendBuffer: ring.Size})
	c.Activate(ring, testPeerToken)
	c.Produce(3 * cdc.MaxTransmission)
	for c.Pending() {
		c.Next()
	}
	sent := c.Sent()
	if sent <= 2*cdc.MaxTransmission {
		t.Fatalf("%d bytes were sent", sent)
	}
	c.Failover()
	c.Next()
	if tr, _ := c.Next(); tr.Pos != 0 || uint64(tr.Len) != sent || tr.Message.Prod != ring.Cursor(sent) {
		t.Errorf("replay is %+v", tr)
	}
}

// The number in the validation message is one that the peer has seen, even if only messages without writes were
// delivered for a long time.
func TestSection4_6_1_NumberStaysInReach(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	last := uint16(0)
	for pos := uint64(1); pos < 1<<17; pos++ {
		s.prod = pos
		if err := s.receive(cdc.Flags(0).WithWriterBlocked()); err != nil {
			t.Fatal(err)
		}
		s.c.Consume(pos)
		tr, _ := s.c.Next()
		last = tr.Message.Seq
		s.c.HandleSent()
		if pos%1000 == 0 {
			s.c.Failover()
			if tr, _ := s.c.Next(); !tr.Validation || cdc.SeqNewer(tr.Message.Seq, last) {
				t.Fatalf("validates %d after message %d", tr.Message.Seq, last)
			}
			s.c.HandleSent()
		}
	}
}

// After the peer's validation message its producer cursor may repeat and go
// back, as Linux's does, until it has caught up.
func TestSection4_6_2_Receiver(t *testing.T) {
	for dialect, ring := range rings(1 << 14) {
		cursor := func(pos uint64) cdc.Cursor { return ring.Cursor(pos) }
		for _, tt := range []struct {
			name     string
			validate bool
			prods    []cdc.Cursor
			want     error
			pos      uint64
		}{
			{"back without validation", false, []cdc.Cursor{cursor(20_000)}, cdc.ErrStale, 20_100},
			{"back", true, []cdc.Cursor{cursor(20_000)}, nil, 20_100},
			{"back over the wrap", true, []cdc.Cursor{cursor(15_000)}, nil, 20_100},
			{"the same", true, []cdc.Cursor{cursor(20_100)}, nil, 20_100},
			{"in steps, then ahead", true, []cdc.Cursor{cursor(15_000), cursor(20_099), cursor(21_000)}, nil, 21_000},
			{"back again after it caught up", true, []cdc.Cursor{cursor(15_000), cursor(20_100), cursor(20_099)}, cdc.ErrStale, 20_100},
			{"back again after it went ahead", true, []cdc.Cursor{cursor(15_000), cursor(20_200), cursor(20_199)}, cdc.ErrStale, 20_200},
			{"back by more than the RMBE", true, []cdc.Cursor{cursor(20_099 - uint64(ring.Capacity()))}, cdc.ErrStale, 20_100},
			{"outside the RMBE", true, []cdc.Cursor{{Wrap: 1, Count: ring.Size}}, &cdc.CursorError{}, 20_100},
			{"past the window", true, []cdc.Cursor{cursor(20_001 + uint64(ring.Capacity()))}, cdc.ErrOverrun, 20_100},
		} {
			t.Run(tt.name+"/"+dialect, func(t *testing.T) {
				s := newSide(t, ring)
				for _, pos := range []uint64{10_000, 20_000} {
					s.prod = pos
					if err := s.receive(cdc.Flags(0).WithWriterBlocked()); err != nil {
						t.Fatal(err)
					}
					s.c.Consume(pos)
					s.flush()
				}
				s.prod = 20_100
				if err := s.receive(0); err != nil {
					t.Fatal(err)
				}
				if tt.validate {
					if ev, err := s.c.HandleMessage(cdc.Message{Seq: s.seq - 1, Token: testToken, Flags: cdc.Flags(0).WithFailoverValidation()}); ev != 0 || err != nil {
						t.Fatalf("validation: %v, %v", ev, err)
					}
				}
				var err error
				for _, prod := range tt.prods {
					if err != nil {
						t.Fatal(err)
					}
					s.seq++
					_, err = s.c.HandleMessage(cdc.Message{Seq: s.seq, Token: testToken, Prod: prod, Cons: ring.Start()})
				}
				var cursorErr *cdc.CursorError
				if wantCursor := errors.As(tt.want, new(*cdc.CursorError)); wantCursor && !errors.As(err, &cursorErr) || !wantCursor && !errors.Is(err, tt.want) {
					t.Errorf("error %v, want %v", err, tt.want)
				}
				if s.c.PeerProduced() != tt.pos || s.c.WasAborted() != (tt.want != nil) {
					t.Errorf("position %d, aborted: %t, want %d", s.c.PeerProduced(), s.c.WasAborted(), tt.pos)
				}
			})
		}
	}
}

// A connection that is being reset ignores the peer's validation message.
func TestSection4_6_1_ValidationDuringReset(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	s.do("abort")
	ev, err := s.c.HandleMessage(cdc.Message{Seq: 9, Token: testToken, Flags: cdc.Flags(0).WithFailoverValidation()})
	if ev != 0 || err != nil || s.c.State() != cdc.PeerAbortWait {
		t.Errorf("events %v, error %v, state %v", ev, err, s.c.State())
	}
	// It also ignores that the cursor of the peer, which has not heard of the reset, goes back.
	s.seq, s.prod = 9, 0
	if err := s.receive(0); err != nil || s.c.State() != cdc.PeerAbortWait {
		t.Errorf("error %v, state %v", err, s.c.State())
	}
}

// A connection that does not know its peer yet has sent nothing.
func TestSection4_6_1_BeforeActivate(t *testing.T) {
	ring := cdc.Ring{Size: 1 << 14}
	c := cdc.NewConn(cdc.Config{Local: ring, SendBuffer: 1 << 14})
	if ev := c.Failover(); ev != 0 {
		t.Errorf("events %v", ev)
	}
	c.Activate(ring, testPeerToken)
	if c.Pending() {
		tr, _ := c.Next()
		t.Errorf("sends %+v", tr)
	}
}

// A message that leaves others out and announces bytes, over another link than before and without a validation
// message, resets the connection. The application gets what came before, and neither bytes that came later nor an end.
func TestSection4_6_1_LeftOut(t *testing.T) {
	done, closed, aborted := cdc.Flags(0).WithSendingDone(), cdc.Flags(0).WithClosed(), cdc.Flags(0).WithAbort()
	for _, tt := range []struct {
		name   string
		before string // what happened here
		flags  cdc.Flags
		want   cdc.Events
		state  cdc.State
		err    error
	}{
		{"data", "shutdown", 0, cdc.Aborted, cdc.PeerAbortWait, cdc.ErrLostData},
		{"data and D", "shutdown", done, cdc.Aborted, cdc.PeerAbortWait, cdc.ErrLostData},
		{"data and C", "shutdown", closed, cdc.Aborted, cdc.Closed, cdc.ErrLostData},
		{"data and C, closed here", "close", closed, cdc.Aborted | cdc.Ended, cdc.Closed, cdc.ErrLostData},
		{"data and A", "shutdown", aborted, cdc.Aborted, cdc.Closed, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(t, cdc.Ring{Size: 1 << 14})
			s.prod = 10
			if err := s.receive(0); err != nil {
				t.Fatal(err)
			}
			if tt.before == "close" {
				s.c.Consume(10)
			}
			s.do(tt.before)
			m := cdc.Message{Seq: s.seq + 3, Token: testToken, Prod: s.local.Cursor(40), Cons: s.peer.Cursor(0), Flags: tt.flags}
			if !s.c.Skips(m) {
				t.Fatal("Skips() = false")
			}
			ev, err := s.c.HandleSkip(m)
			s.flush()
			if ev != tt.want || !errors.Is(err, tt.err) || s.c.State() != tt.state {
				t.Errorf("events %v, error %v, state %v, want %v, %v, %v", ev, err, s.c.State(), tt.want, tt.err, tt.state)
			}
			s.seq, s.prod, s.events = s.seq+3, 50, 0
			if err := s.receive(done); err != nil || s.events&cdc.PeerDone != 0 || s.c.PeerProduced() != 10 {
				t.Errorf("later: error %v, events %v, position %d", err, s.events, s.c.PeerProduced())
			}
			if err := s.receive(closed); err != nil || s.events&cdc.PeerDone != 0 || s.c.State() != cdc.Closed {
				t.Errorf("at the end: error %v, events %v, state %v", err, s.events, s.c.State())
			}
		})
	}
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	for _, m := range []cdc.Message{
		{Seq: 1, Prod: s.local.Cursor(10)},
		{Seq: 2, Prod: s.local.Cursor(0)},
		{Seq: 9, Prod: s.local.Cursor(10), Flags: cdc.Flags(0).WithFailoverValidation()},
		{Seq: 0xffff, Prod: s.local.Cursor(10)},
	} {
		if s.c.Skips(m) {
			t.Errorf("%v leaves something out", m)
		}
	}
}
