// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

const (
	testToken     cdc.AlertToken = 0x1234
	testPeerToken cdc.AlertToken = 0x5678
)

// side is one connection with a peer that the test writes itself.
type side struct {
	t        testing.TB
	c        cdc.Conn
	local    cdc.Ring
	peer     cdc.Ring
	seq      uint16 // of the peer's last message
	prod     uint64 // positions that the peer claims
	cons     uint64
	produced uint64
	sent     []cdc.Message
	events   cdc.Events
}

func newSide(t testing.TB, ring cdc.Ring) *side {
	s := &side{t: t, local: ring, peer: ring, c: cdc.NewConn(cdc.Config{Local: ring, SendBuffer: 1 << 16})}
	s.c.Activate(ring, testPeerToken)
	return s
}

// flush sends everything that waits, and delivers it at once.
func (s *side) flush() {
	for s.c.Pending() {
		t, ev := s.c.Next()
		s.sent = append(s.sent, t.Message)
		s.events |= ev
		s.events |= s.c.HandleSent()
	}
}

// receive takes a message of the peer with the positions it claims.
func (s *side) receive(f cdc.Flags) error {
	s.seq++
	ev, err := s.c.HandleMessage(cdc.Message{
		Seq: s.seq, Token: testToken, Prod: s.local.Cursor(s.prod), Cons: s.peer.Cursor(s.cons), Flags: f,
	})
	s.events |= ev
	return err
}

func (s *side) write(n uint64) {
	s.produced += n
	s.events |= s.c.Produce(s.produced)
}

// do runs one event of the state tables; a trailing minus keeps back what the
// connection would send.
func (s *side) do(op string) {
	s.t.Helper()
	f := cdc.Flags(0)
	switch strings.TrimSuffix(op, "-") {
	case "shutdown":
		s.c.Shutdown()
	case "close":
		s.events |= s.c.Close()
	case "abort":
		s.events |= s.c.Abort()
	case "fail":
		s.events |= s.c.Fail()
	case "D":
		f = f.WithSendingDone()
	case "C":
		f = f.WithClosed()
	case "DC":
		f = f.WithSendingDone().WithClosed()
	case "A":
		f = f.WithAbort()
	default:
		s.t.Fatalf("unknown event %q", op)
	}
	if f != 0 {
		if err := s.receive(f); err != nil {
			s.t.Fatalf("peer's %v: %v", f, err)
		}
	}
	if !strings.HasSuffix(op, "-") {
		s.flush()
	}
}

// Figures 22 and 23 as a table: from each state, by each event, to which
// state, and the flags of the message sent meanwhile ("." when none).
func TestSection4_8_Transitions(t *testing.T) {
	events := []string{"shutdown", "close", "abort", "D", "C", "A", "fail"}
	for _, tt := range []struct {
		name       string
		state, way string // how to get there
		want       string // one entry per event
	}{
		{
			"open", "ACTIVE", "",
			"PEERCLW1/D PEERCLW1/C PEERABORTW/A APPLCLW1 APPLCLW1 CLOSED/A CLOSED",
		},
		{
			"active close: we are done", "PEERCLW1", "shutdown",
			"PEERCLW1 PEERCLW1/DC PEERABORTW/DA PEERCLW2 APPLFINCLW CLOSED/DA CLOSED",
		},
		{"active close: we closed", "PEERCLW1", "close", // §4.8.2: no A once C was sent
			"PEERCLW1 PEERCLW1 PEERABORTW PEERCLW2 CLOSED CLOSED CLOSED"},
		{
			"both are done, we first", "PEERCLW2", "shutdown D",
			"PEERCLW2 PEERCLW2/DC PEERABORTW/DA PEERCLW2 APPLFINCLW CLOSED/DA CLOSED",
		},
		{
			"we closed, the peer is done", "PEERCLW2", "close D",
			"PEERCLW2 PEERCLW2 PEERABORTW PEERCLW2 CLOSED CLOSED CLOSED",
		},
		{
			"passive close: the peer is done", "APPLCLW1", "D",
			"APPLCLW2/D PEERFINCLW/C PEERABORTW/A APPLCLW1 APPLCLW1 CLOSED/A CLOSED",
		},
		{"passive close: the peer closed", "APPLCLW1", "C", // the peer is gone: our A is the last word
			"APPLCLW2/D CLOSED/C CLOSED/A APPLCLW1 APPLCLW1 CLOSED/A CLOSED"},
		{
			"passive close: the peer is done, then closed", "APPLCLW1", "DC",
			"APPLCLW2/D CLOSED/C CLOSED/A APPLCLW1 APPLCLW1 CLOSED/A CLOSED",
		},
		{
			"both are done, the peer first", "APPLCLW2", "D shutdown",
			"APPLCLW2 PEERFINCLW/DC PEERABORTW/DA APPLCLW2 APPLCLW2 CLOSED/DA CLOSED",
		},
		{
			"both are done, the peer closed", "APPLCLW2", "D shutdown C",
			"APPLCLW2 CLOSED/DC CLOSED/DA APPLCLW2 APPLCLW2 CLOSED/DA CLOSED",
		},
		{
			"we are done, the peer closed", "APPLFINCLW", "shutdown C",
			"APPLFINCLW CLOSED/DC CLOSED/DA APPLFINCLW APPLFINCLW CLOSED/DA CLOSED",
		},
		{
			"the peer is done, we closed", "PEERFINCLW", "D close",
			"PEERFINCLW PEERFINCLW PEERABORTW PEERFINCLW CLOSED CLOSED CLOSED",
		},
		{"active abort", "PEERABORTW", "abort", // everything but the peer's last word is ignored
			"PEERABORTW PEERABORTW PEERABORTW PEERABORTW CLOSED CLOSED CLOSED"},
		{
			"active abort after our close", "PEERABORTW", "close abort",
			"PEERABORTW PEERABORTW PEERABORTW PEERABORTW CLOSED CLOSED CLOSED",
		},
		{"active abort not told yet", "PEERABORTW", "abort-", // the peer's last word before our A went out
			"PEERABORTW/A PEERABORTW/A PEERABORTW/A PEERABORTW/A CLOSED/A CLOSED/A CLOSED"},
		{
			"passive abort not answered yet", "PROCESSABORT", "A-",
			"CLOSED/A CLOSED/A CLOSED/A CLOSED/A CLOSED/A CLOSED/A CLOSED",
		},
		{
			"closed by both", "CLOSED", "close C",
			"CLOSED CLOSED CLOSED CLOSED CLOSED CLOSED CLOSED",
		},
		{
			"aborted by the peer", "CLOSED", "A",
			"CLOSED CLOSED CLOSED CLOSED CLOSED CLOSED CLOSED",
		},
		{
			"given up", "CLOSED", "fail",
			"CLOSED CLOSED CLOSED CLOSED CLOSED CLOSED CLOSED",
		},
	} {
		for i, want := range strings.Fields(tt.want) {
			t.Run(fmt.Sprintf("%s/%s", tt.name, events[i]), func(t *testing.T) {
				s := newSide(t, cdc.Ring{Size: 1 << 14})
				for _, op := range strings.Fields(tt.way) {
					s.do(op)
				}
				if s.c.State().String() != tt.state {
					t.Fatalf("state is %v before the event", s.c.State())
				}
				s.sent = nil
				s.do(events[i])
				got := s.c.State().String()
				for _, m := range s.sent {
					got += "/" + m.Flags.String()
				}
				if got != want {
					t.Errorf("got %s, want %s", got, want)
				}
			})
		}
	}
}

// Both ends may close or reset at once; both end, with their last word said.
func TestSection4_8_Simultaneous(t *testing.T) {
	for _, tt := range []struct{ a, b string }{
		{"close", "close"},
		{"abort", "abort"},
		{"close", "abort"},
		{"abort", "close"},
		{"shutdown close", "close"},
		{"shutdown close", "abort"},
		{"shutdown close", "shutdown close"},
		{"abort", "shutdown close"},
	} {
		t.Run(tt.a+" with "+tt.b, func(t *testing.T) {
			ring := cdc.Ring{Size: 1 << 14}
			a, b := newSide(t, ring), newSide(t, ring)
			for _, op := range strings.Fields(tt.a) {
				a.do(op)
			}
			for _, op := range strings.Fields(tt.b) {
				b.do(op)
			}
			for range 4 {
				exchange(t, a, b)
				exchange(t, b, a)
			}
			for _, s := range []*side{a, b} {
				if s.c.State() != cdc.Closed || !s.c.PeerReleased() {
					t.Errorf("state %v, peer released: %t", s.c.State(), s.c.PeerReleased())
				}
			}
		})
	}
}

// exchange gives what a has sent to b.
func exchange(t *testing.T, a, b *side) {
	t.Helper()
	sent := a.sent
	a.sent = nil
	for _, m := range sent {
		if _, err := b.c.HandleMessage(m); err != nil {
			t.Fatalf("%v: %v", m, err)
		}
	}
	b.flush()
}

func TestSection4_8_1_UnreadDataAborts(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	s.prod = 100
	if err := s.receive(0); err != nil {
		t.Fatal(err)
	}
	s.c.Consume(99)
	s.do("close")
	if s.c.State() != cdc.PeerAbortWait || len(s.sent) != 1 || !s.sent[0].Flags.Abort() || s.events&cdc.Aborted == 0 {
		t.Errorf("state %v, sent %v, events %b", s.c.State(), s.sent, s.events)
	}
	// Read to the end, it is an orderly close.
	s = newSide(t, cdc.Ring{Size: 1 << 14})
	s.prod = 100
	if err := s.receive(0); err != nil {
		t.Fatal(err)
	}
	s.c.Consume(100)
	s.do("close")
	if s.c.State() != cdc.PeerCloseWait1 || s.events&cdc.Aborted != 0 {
		t.Errorf("all was read: state %v, sent %v", s.c.State(), s.sent)
	}
	if got, want := s.sent[len(s.sent)-1].Cons, s.local.Cursor(100); got != want {
		t.Errorf("C carries consumer cursor %v, want %v", got, want)
	}
}

func TestSection4_8_1_CloseWaitsForDelivery(t *testing.T) {
	for name, end := range map[string]struct {
		op   func(*cdc.Conn)
		want cdc.Flags
	}{
		"close":    {func(c *cdc.Conn) { c.Close() }, cdc.Flags(0).WithClosed()},
		"shutdown": {func(c *cdc.Conn) { c.Shutdown() }, cdc.Flags(0).WithSendingDone()},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSide(t, cdc.Ring{Size: 1 << 14})
			s.write(1<<14 + 10) // more than the window
			end.op(&s.c)
			tr, _ := s.c.Next()
			if tr.Len != 1<<14 || tr.Message.Flags != cdc.Flags(0).WithWriterBlocked() {
				t.Fatalf("first: %d bytes, %v", tr.Len, tr.Message)
			}
			if s.c.Pending() {
				t.Fatal("more to send without window")
			}
			s.cons = 1 << 14
			if err := s.receive(0); err != nil {
				t.Fatal(err)
			}
			tr, _ = s.c.Next()
			if tr.Len != 10 || tr.Message.Flags != 0 {
				t.Fatalf("second: %d bytes, %v", tr.Len, tr.Message)
			}
			s.c.HandleSent()
			if s.c.Pending() || s.c.State() != cdc.Active {
				t.Fatalf("end is pending before delivery, state %v", s.c.State())
			}
			s.c.HandleSent()
			tr, _ = s.c.Next()
			if tr.Len != 0 || tr.Message.Flags != end.want || s.c.State() != cdc.PeerCloseWait1 {
				t.Errorf("third: %v, state %v", tr.Message, s.c.State())
			}
		})
	}
}

func TestSection4_8_1_PeerClosedWithUndeliveredData(t *testing.T) {
	const size = 1 << 14
	for _, tt := range []struct {
		name     string
		produce  uint64 // before the peer's C
		next     bool   // it was sent
		consumed uint64 // as the peer's C says
		later    uint64 // produced after the C
		want     cdc.State
	}{
		{"nothing", 0, false, 0, 0, cdc.AppCloseWait1},
		{"unsent", 10, false, 0, 0, cdc.PeerAbortWait},
		{"sent, not consumed", 10, true, 0, 0, cdc.PeerAbortWait},
		{"consumed, completion late", 10, true, 10, 0, cdc.AppCloseWait1},
		{"more after the close", 10, true, 10, 1, cdc.PeerAbortWait},
		{"part unsent", size + 1, true, size, 0, cdc.PeerAbortWait},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(t, cdc.Ring{Size: size})
			s.write(tt.produce)
			if tt.next {
				s.c.Next()
			}
			s.cons = tt.consumed
			if err := s.receive(cdc.Flags(0).WithClosed()); err != nil {
				t.Fatal(err)
			}
			s.write(tt.later)
			if s.c.State() != tt.want || (s.events&cdc.Aborted != 0) != (tt.want == cdc.PeerAbortWait) {
				t.Errorf("state %v, events %b, want %v", s.c.State(), s.events, tt.want)
			}
			if tt.want == cdc.PeerAbortWait {
				s.flush()
				if n := len(s.sent); n != 1 || !s.sent[0].Flags.Abort() || s.c.State() != cdc.Closed {
					t.Errorf("sent %v, state %v", s.sent, s.c.State())
				}
			}
		})
	}
}

// A peer whose half we do not know yet is answered once we do: it may reset
// the connection before its Confirm is read.
func TestConn_abortBeforeActivate(t *testing.T) {
	ring := cdc.Ring{Size: 1 << 14}
	c := cdc.NewConn(cdc.Config{Local: ring, SendBuffer: 1 << 14})
	c.Shutdown()
	if c.Pending() {
		t.Error("something to send without a peer")
	}
	ev, err := c.HandleMessage(cdc.Message{Seq: 1, Token: testToken, Prod: ring.Start(), Cons: ring.Start(), Flags: cdc.Flags(0).WithAbort()})
	if err != nil || ev != cdc.Aborted || c.State() != cdc.ProcessAbort || c.Pending() {
		t.Errorf("%b, %v, state %v, pending %t", ev, err, c.State(), c.Pending())
	}
	c.Activate(ring, testPeerToken)
	if !c.Pending() {
		t.Fatal("no answer")
	}
	if tr, ev := c.Next(); !tr.Message.Flags.Abort() || ev != cdc.Ended || c.State() != cdc.Closed {
		t.Errorf("%v, events %b, state %v", tr.Message, ev, c.State())
	}
}

// A connection that was given up hears the peer's last word all the same, so
// that the RMBE can be used again.
func TestConn_failedHearsTheLastWord(t *testing.T) {
	for _, f := range []cdc.Flags{cdc.Flags(0).WithClosed(), cdc.Flags(0).WithAbort()} {
		s := newSide(t, cdc.Ring{Size: 1 << 14})
		s.c.Fail()
		if s.c.PeerReleased() {
			t.Fatal("released before the peer said so")
		}
		if err := s.receive(f); err != nil || !s.c.PeerReleased() {
			t.Errorf("%v: error %v, released: %t", f, err, s.c.PeerReleased())
		}
	}
}

func TestEvents_String(t *testing.T) {
	if got := (cdc.Readable | cdc.PeerDone).String() + "; " + cdc.Events(0).String(); got != "readable, peer done; none" {
		t.Error(got)
	}
}

func TestState_String(t *testing.T) {
	if got := cdc.State(99).String(); got != "State(99)" {
		t.Error(got)
	}
}
