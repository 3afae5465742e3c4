// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// rings are the geometries of both dialects.
func rings(size uint32) map[string]cdc.Ring {
	return map[string]cdc.Ring{
		"linux": {Origin: cdc.OriginLinux, Size: size},
		"rfc":   {Origin: cdc.OriginRFC, Size: size},
	}
}

// The RFC's examples: an RMBE of 64K, the window that the sender sees, and
// what it would see after an update.
func TestSection4_5_1_WindowUpdate(t *testing.T) {
	const k = 1 << 10
	for _, tt := range []struct {
		name           string
		sender, actual uint64 // window in bytes
		want           bool
	}{
		{"example a: plenty of space", 50 * k, 64 * k, false},
		{"example b: gain of 1K", 30 * k, 31 * k, false},
		{"example c: gain of 34K", 30 * k, 64 * k, true},
		{"half of the window is not less than half", 32 * k, 64 * k, false},
		{"a byte less than half", 32*k - 1, 64 * k, true},
		{"a tenth", 20 * k, 20*k + 6553, true},
		{"a byte less than a tenth", 20 * k, 20*k + 6552, false},
		{"closed window, nothing read", 0, 0, false},
		{"closed window, all read", 0, 64 * k, true},
	} {
		for name, ring := range rings(64 * k) {
			t.Run(tt.name+"/"+name, func(t *testing.T) {
				ring.Size += ring.Origin // 64K of data in both dialects
				s := newSide(t, ring)
				s.prod = 64*k - tt.sender
				if err := s.receive(0); err != nil {
					t.Fatal(err)
				}
				s.c.Consume(tt.actual - tt.sender)
				if got := s.c.UpdateDue(); got != tt.want {
					t.Fatalf("UpdateDue() = %t, want %t", got, tt.want)
				}
				if s.c.Pending() != tt.want {
					t.Fatalf("Pending() = %t", s.c.Pending())
				}
				if !tt.want {
					return
				}
				tr, _ := s.c.Next()
				if tr.Len != 0 || tr.Message.Cons != ring.Cursor(tt.actual-tt.sender) || tr.Message.Prod != ring.Start() {
					t.Errorf("update is %d bytes and %v", tr.Len, tr.Message)
				}
				if s.c.UpdateDue() || s.c.Announced() != tt.actual-tt.sender {
					t.Errorf("announced %d, update still due: %t", s.c.Announced(), s.c.UpdateDue())
				}
			})
		}
	}
}

func TestSection4_5_1_UpdateRidesOnData(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	s.prod = 100
	if err := s.receive(0); err != nil {
		t.Fatal(err)
	}
	s.c.Consume(60)
	s.write(1)
	s.flush()
	if len(s.sent) != 1 || s.sent[0].Cons.Count != 60 || s.sent[0].Prod.Count != 1 {
		t.Errorf("sent %v", s.sent)
	}
}

// While the peer's B is on, any consumption is told.
func TestSection4_5_1_WriterBlocked(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	s.prod = 1000
	if err := s.receive(cdc.Flags(0).WithWriterBlocked()); err != nil {
		t.Fatal(err)
	}
	if !s.c.PeerBlocked() || s.c.Pending() {
		t.Fatalf("PeerBlocked() = %t, Pending() = %t before anything was read", s.c.PeerBlocked(), s.c.Pending())
	}
	for pos := uint64(1); pos <= 3; pos++ {
		s.c.Consume(pos)
		s.flush()
		if len(s.sent) != int(pos) {
			t.Fatalf("sent %v after %d bytes read", s.sent, pos)
		}
	}
	if err := s.receive(0); err != nil {
		t.Fatal(err)
	}
	s.c.Consume(4)
	if s.c.PeerBlocked() || s.c.Pending() {
		t.Error("still telling after B was cleared")
	}
}

// The flag R asks once, and is answered by the next progress of the consumer cursor.
func TestSection4_5_1_UpdateRequested(t *testing.T) {
	request := cdc.Flags(0).WithCursorUpdateRequested()
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	s.prod = 1000
	if err := s.receive(0); err != nil {
		t.Fatal(err)
	}
	s.c.Consume(1)
	if err := s.receive(request); err != nil {
		t.Fatal(err)
	}
	s.flush() // at once: the cursor that the peer knows is old
	s.c.Consume(2)
	s.flush()
	if len(s.sent) != 1 || s.sent[0].Cons.Count != 1 {
		t.Fatalf("sent %v, want one update", s.sent)
	}
	// Nothing to tell now: the request stays open, also over data of ours.
	s.sent = nil
	s.c.Consume(2)
	s.write(10)
	s.flush()
	s.sent = nil
	if err := s.receive(request); err != nil {
		t.Fatal(err)
	}
	s.write(10)
	s.flush()
	s.c.Consume(3)
	s.flush()
	if n := len(s.sent); n != 2 || s.sent[1].Cons.Count != 3 {
		t.Errorf("sent %v, want data, then an update", s.sent)
	}
}

// After urgent data the peer waits until it hears that all of it was consumed.
func TestSection4_7_5_UrgentData(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	s.prod = 20
	if err := s.receive(cdc.Flags(0).WithUrgentPending().WithUrgentPresent()); err != nil {
		t.Fatal(err)
	}
	s.c.Consume(19)
	if s.c.Pending() || !s.c.PeerBlocked() {
		t.Fatalf("before the urgent byte: Pending() = %t, PeerBlocked() = %t", s.c.Pending(), s.c.PeerBlocked())
	}
	s.c.Consume(20)
	s.flush()
	if len(s.sent) != 1 || s.sent[0].Cons.Count != 20 || s.c.PeerBlocked() {
		t.Fatalf("sent %v, PeerBlocked() = %t", s.sent, s.c.PeerBlocked())
	}
	s.prod = 30
	if err := s.receive(0); err != nil {
		t.Fatal(err)
	}
	s.c.Consume(30)
	if s.c.Pending() {
		t.Error("ordinary data is told at once, too")
	}
}

// Our own flag B is sent once when data waits for window, and is cleared when the data goes out.
func TestConn_tellsThatItIsBlocked(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 14})
	s.write(1 << 14)
	tr, _ := s.c.Next()
	s.c.HandleSent()
	if tr.Message.Flags.WriterBlocked() || s.c.Window() != 0 {
		t.Fatalf("nothing waits yet: %v", tr.Message)
	}
	s.write(1)
	if !s.c.Pending() {
		t.Fatal("does not tell that it is blocked")
	}
	tr, _ = s.c.Next()
	s.c.HandleSent()
	if tr.Len != 0 || !tr.Message.Flags.WriterBlocked() {
		t.Fatalf("%d bytes, %v, want B alone", tr.Len, tr.Message)
	}
	s.write(1)
	if s.c.Pending() {
		t.Fatal("tells B twice")
	}
	s.cons = 100
	if err := s.receive(0); err != nil {
		t.Fatal(err)
	}
	tr, _ = s.c.Next()
	if tr.Len != 2 || tr.Message.Flags.WriterBlocked() {
		t.Errorf("%d bytes, %v, want the rest without B", tr.Len, tr.Message)
	}
}

// A writer that has filled both buffers waits. The message that closes the window says so, and no other message is
// sent for that.
func TestConn_tellsThatItIsFull(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 16})
	s.write(1 << 15)
	s.c.Next()
	s.write(1 << 15)
	tr, _ := s.c.Next()
	if !tr.Message.Flags.WriterBlocked() || s.c.Window() != 0 {
		t.Fatalf("%v leaves a window of %d", tr.Message, s.c.Window())
	}
	s.c.HandleSent()
	s.write(1 << 10)
	if s.c.Pending() {
		t.Fatal("tells B twice")
	}
	s.cons = 1 << 14
	if err := s.receive(0); err != nil {
		t.Fatal(err)
	}
	if tr, _ = s.c.Next(); tr.Len != 1<<10 || tr.Message.Flags.WriterBlocked() {
		t.Errorf("%d bytes, %v, want the rest without B", tr.Len, tr.Message)
	}
}

// §4.5.2: small pieces travel together while a message is under way, and
// nothing ever waits for more than its delivery.
func TestSection4_5_2_Cork(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 16})
	next := func(want uint32) {
		t.Helper()
		if got := s.c.Pending(); got != (want > 0) {
			t.Fatalf("Pending() = %t, want %d bytes", got, want)
		}
		if want > 0 {
			if tr, _ := s.c.Next(); tr.Len != want {
				t.Fatalf("%d bytes, want %d", tr.Len, want)
			}
		}
	}
	for range 12 { // pieces of one request wait for nobody
		s.write(10)
		next(10)
	}
	s.write(10)
	s.write(20)
	next(0)
	s.c.HandleSent()
	next(30)
	s.write(1 << 15) // half of the send buffer: no need to wait
	next(1 << 15)
	s.write(5)
	next(0)
	s.c.Shutdown() // the application wants it out
	next(5)
}

// A long write ends where the RMBE does if that is within a packet: what follows begins the RMBE, and then it
// ends with a packet. A short write does not.
func TestConn_cutsAtTheWrap(t *testing.T) {
	const size = 512 << 10
	for _, c := range []struct{ from, n, want uint64 }{
		{8, 256 << 10, 256 << 10}, // no wrap
		{size - 100<<10, 100 << 10, 100 << 10},
		{size - 100<<10, 200 << 10, 200 << 10},
		{size - 100<<10, 100<<10 + 8, 100<<10 + 8},
		{size - 100<<10 + 8, 200 << 10, 100<<10 - 8},
		{size - 100<<10 - 8, 100<<10 + 9, 100<<10 + 8},
		{size - 60, 64<<10 - 1, 64<<10 - 1},
		{size - 60, 64 << 10, 60},
	} {
		s := newSide(t, cdc.Ring{Size: size})
		s.c = cdc.NewConn(cdc.Config{Local: s.local, SendBuffer: size})
		s.c.Activate(s.peer, testPeerToken)
		for at := uint64(0); at < c.from; { // all of it read by the peer
			n := min(c.from-at, 32<<10)
			s.write(n)
			s.c.Next()
			s.c.HandleSent()
			at += n
			s.cons = at
			if err := s.receive(0); err != nil {
				t.Fatal(err)
			}
		}
		s.write(c.n)
		if tr, _ := s.c.Next(); uint64(tr.Len) != c.want {
			t.Errorf("%d bytes from %d on: a message tells of %d, want %d", c.n, c.from, tr.Len, c.want)
		}
	}
}

// In the midst of a stream a write fills datagrams, and the rest waits for more, for less under way, or for
// what has the application wait. Before and after that, everything goes.
func TestConn_wholeSends(t *testing.T) {
	const (
		size = 2 << 20
		send = 60 << 10
	)
	begin := func() *side {
		s := newSide(t, cdc.Ring{Size: size})
		s.c = cdc.NewConn(cdc.Config{Local: s.local, SendBuffer: size})
		s.c.Activate(s.peer, testPeerToken)
		return s
	}
	next := func(s *side, want uint64) {
		t.Helper()
		got := uint64(0)
		if s.c.Pending() {
			tr, _ := s.c.Next()
			got = uint64(tr.Len)
		}
		if got != want {
			t.Fatalf("a message tells of %d bytes, want %d", got, want)
		}
	}
	stream := func() *side { // with 4 KiB that wait, and 188 KiB under way
		s := begin()
		for _, want := range []uint64{64 << 10, 64 << 10, send} {
			s.write(64 << 10)
			next(s, want)
			next(s, 0)
		}
		return s
	}

	s := stream()
	s.write(64 << 10)
	next(s, send) // and 8 KiB wait
	s.write(1)
	next(s, 0)
	s.write(300 << 10)
	next(s, 4*send) // of 256 KiB at most
	next(s, send)
	next(s, 0)

	s = begin() // one message, which the peer may be slow to acknowledge
	s.write(256 << 10)
	next(s, 256<<10)
	s.write(100)
	next(s, 100)

	s = stream()
	s.c.HandleSent()
	next(s, 0)
	s.c.HandleSent() // 60 KiB are under way
	next(s, 4<<10)

	s = stream()
	s.cons = 128 << 10 // the peer has read that, which is as good as delivered
	if err := s.receive(0); err != nil {
		t.Fatal(err)
	}
	next(s, 4<<10)

	for _, end := range []func(*side){
		func(s *side) { s.c.Shutdown() },
		func(s *side) { s.c.Close() },
		func(s *side) { s.c.Urgent(s.c.Produced()) },
		func(s *side) { s.c.Flush() },
	} {
		s := stream()
		end(s)
		next(s, 4<<10)
	}
}

func TestConn_MaxInflight(t *testing.T) {
	s := newSide(t, cdc.Ring{Size: 1 << 16})
	s.prod = 1000
	if err := s.receive(cdc.Flags(0).WithWriterBlocked()); err != nil {
		t.Fatal(err)
	}
	n := 0
	for pos := uint64(1); pos < 100; pos++ {
		s.c.Consume(pos)
		if s.c.Pending() {
			s.c.Next()
			n++
		}
	}
	if n != cdc.MaxInflight || s.c.InFlight() != n {
		t.Fatalf("%d messages in flight, %d sent, want %d", s.c.InFlight(), n, cdc.MaxInflight)
	}
	s.c.HandleSent()
	if !s.c.Pending() {
		t.Error("nothing to send after a delivery")
	}
}

func TestSectionA_4_Sequence(t *testing.T) {
	at := func(seq uint16, prod uint64) cdc.Message {
		ring := cdc.Ring{Size: 1 << 14}
		return cdc.Message{Seq: seq, Token: testToken, Prod: ring.Cursor(prod), Cons: ring.Start()}
	}
	t.Run("starts at 1 and wraps to 0", func(t *testing.T) {
		s := newSide(t, cdc.Ring{Size: 1 << 14})
		for i := range 1<<16 + 2 {
			s.write(1)
			s.flush()
			if got := s.sent[len(s.sent)-1].Seq; got != uint16(i+1) {
				t.Fatalf("message %d has sequence number %d", i, got)
			}
			s.sent = s.sent[:0]
			s.cons = s.produced
			if err := s.receive(0); err != nil {
				t.Fatalf("message %d: %v", i, err)
			}
		}
	})
	t.Run("updates and ends count like writes", func(t *testing.T) {
		s := newSide(t, cdc.Ring{Size: 1 << 14})
		s.write(1)
		s.flush()
		s.prod = 10_000
		if err := s.receive(0); err != nil {
			t.Fatal(err)
		}
		s.c.Consume(10_000)
		s.flush() // an update
		s.write(1)
		s.flush()
		s.c.Shutdown()
		s.flush()
		for i, m := range s.sent {
			if m.Seq != uint16(i+1) {
				t.Errorf("message %d is %v", i, m)
			}
		}
		if len(s.sent) != 4 || !s.sent[3].Flags.SendingDone() || s.sent[1].Prod != s.sent[0].Prod {
			t.Errorf("messages: %v", s.sent)
		}
	})
	t.Run("equal accepted, older dropped", func(t *testing.T) {
		s := newSide(t, cdc.Ring{Size: 1 << 14})
		for _, tt := range []struct {
			m    cdc.Message
			want error
			prod uint64
		}{
			{at(1, 10), nil, 10},
			{at(1, 20), nil, 20},
			{at(0, 30), cdc.ErrStaleMessage, 20},
			{at(3, 30), nil, 30},
			{at(2, 40), cdc.ErrStaleMessage, 30},
			{at(3+0x7fff, 50), nil, 50},
			{at(1, 60), nil, 60},
			{at(0x8003, 60), cdc.ErrStaleMessage, 60},
		} {
			if _, err := s.c.HandleMessage(tt.m); !errors.Is(err, tt.want) || s.c.PeerProduced() != tt.prod {
				t.Errorf("%v: error %v, position %d, want %v, %d", tt.m, err, s.c.PeerProduced(), tt.want, tt.prod)
			}
		}
		if s.c.State() != cdc.Active {
			t.Errorf("state %v", s.c.State())
		}
	})
}

func TestSection4_6_1_FailoverValidation(t *testing.T) {
	for _, tt := range []struct {
		name    string
		seq     uint16
		aborted bool
	}{
		{"older than received", 4, false},
		{"last received", 5, false},
		{"never arrived", 6, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(t, cdc.Ring{Size: 1 << 14})
			for range 5 {
				s.prod += 10
				if err := s.receive(0); err != nil {
					t.Fatal(err)
				}
			}
			// The rest of the message does not count.
			m := cdc.Message{
				Seq: tt.seq, Token: testToken, Prod: cdc.Cursor{Wrap: 9, Count: 1 << 30},
				Flags: cdc.Flags(0).WithFailoverValidation().WithClosed(),
			}
			if s.c.Misses(m) != tt.aborted {
				t.Errorf("Misses() = %t", s.c.Misses(m))
			}
			ev, err := s.c.HandleMessage(m)
			if errors.Is(err, cdc.ErrLostData) != tt.aborted || (ev&cdc.Aborted != 0) != tt.aborted {
				t.Errorf("events %b, error %v, want abort: %t", ev, err, tt.aborted)
			}
			if s.c.Misses(m) {
				t.Error("misses a message after all was decided")
			}
			if s.c.PeerProduced() != 50 || s.c.PeerIsDone() {
				t.Errorf("the message changed more: %d, done %t", s.c.PeerProduced(), s.c.PeerIsDone())
			}
		})
	}
}

// A message that no correct peer can send resets the connection, and changes nothing else.
func TestConn_hostileCursors(t *testing.T) {
	const size = 1 << 14
	for dialect, ring := range rings(size) {
		end := uint64(ring.Capacity())
		for _, tt := range []struct {
			name       string
			prod, cons cdc.Cursor
			want       error // nil for a CursorError
		}{
			{"producer beyond the buffer", cdc.Cursor{Count: size}, ring.Start(), nil},
			{"producer far beyond the buffer", cdc.Cursor{Count: 1<<32 - 1}, ring.Start(), nil},
			{"producer in the eye catcher, or two wraps", cdc.Cursor{Wrap: 2}, ring.Start(), nil},
			{"producer passes the consumer", ring.Cursor(end + 1), ring.Start(), nil},
			{"producer passes what was announced", ring.Cursor(50 + end), ring.Start(), cdc.ErrOverrun},
			{"producer goes back", ring.Cursor(99), ring.Start(), cdc.ErrStale},
			{"producer goes back by a wrap", cdc.Cursor{Wrap: 0xffff, Count: size - 1}, ring.Start(), cdc.ErrStale},
			{"consumer beyond the buffer", ring.Cursor(100), cdc.Cursor{Count: size}, nil},
			{"consumer beyond what was sent", ring.Cursor(100), ring.Cursor(51), cdc.ErrUnsent},
			{"consumer goes back", ring.Cursor(100), ring.Cursor(9), cdc.ErrStale},
			{"consumer two wraps", ring.Cursor(100), cdc.Cursor{Wrap: 2, Count: 10}, nil},
		} {
			t.Run(tt.name+"/"+dialect, func(t *testing.T) {
				s := newSide(t, ring)
				s.write(50)
				s.flush()
				s.prod, s.cons = 100, 10
				if err := s.receive(0); err != nil {
					t.Fatal(err)
				}
				if tt.name == "producer passes what was announced" {
					s.c.Consume(100) // not told: the peer may not use it
				}
				if tt.name == "producer passes the consumer" || tt.cons == ring.Start() {
					tt.cons = ring.Cursor(10)
				}
				ev, err := s.c.HandleMessage(cdc.Message{Seq: 2, Token: testToken, Prod: tt.prod, Cons: tt.cons})
				var cursor *cdc.CursorError
				switch {
				case err == nil, tt.want != nil && !errors.Is(err, tt.want):
					t.Errorf("error %v, want %v", err, tt.want)
				case tt.want == nil && !errors.As(err, &cursor) && !errors.Is(err, cdc.ErrOverrun):
					t.Errorf("error %v, want a cursor error", err)
				}
				if ev != cdc.Aborted || s.c.State() != cdc.PeerAbortWait {
					t.Errorf("events %b, state %v", ev, s.c.State())
				}
				if s.c.PeerProduced() != 100 || s.c.Window() != uint32(end-40) {
					t.Errorf("positions moved: %d, window %d", s.c.PeerProduced(), s.c.Window())
				}
				s.sent = nil
				s.flush()
				if len(s.sent) != 1 || !s.sent[0].Flags.Abort() {
					t.Errorf("sent %v, want an abort", s.sent)
				}
			})
		}
	}
}

func TestConn_panicsOnOurMistakes(t *testing.T) {
	for name, f := range map[string]func(s *side){
		"produced more than the send buffer": func(s *side) { s.c.Produce(1<<16 + 1) },
		"produced backwards":                 func(s *side) { s.c.Produce(10); s.c.Produce(9) },
		"consumed more than received":        func(s *side) { s.c.Consume(1) },
		"completion without a message":       func(s *side) { s.c.HandleSent() },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f(newSide(t, cdc.Ring{Size: 1 << 14}))
		})
	}
}

// conversation returns the messages of a capture that one side sent and, apart,
// what the other one sent.
func conversation(t testing.TB, name string) (msgs []cdc.Message, fromFirst []bool) {
	t.Helper()
	text, err := os.ReadFile("testdata/captures/" + name + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	first := ""
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		dir, raw, ok := strings.Cut(s.Text(), " ")
		if !ok || strings.HasPrefix(dir, "#") {
			continue
		}
		b, err := hex.DecodeString(raw)
		if err != nil {
			t.Fatal(err)
		}
		m, err := cdc.Parse(b)
		if err != nil {
			t.Fatal(err)
		}
		if first == "" {
			first = dir
		}
		msgs, fromFirst = append(msgs, m), append(fromFirst, dir == first)
	}
	if len(msgs) == 0 {
		t.Fatalf("%s has no messages", name)
	}
	return msgs, fromFirst
}

// A captured connection of two Linux kernels is replayed with us in the place of either kernel. We take every
// message, arrive at the same positions, and end.
func TestConn_replaysCaptures(t *testing.T) {
	for _, name := range []string{
		"40-v1-first-contact-two-links", "41-v1-subsequent-contact", "43-v1-abnormal-close-unread-data",
		"01-first-contact-orderly-close", "02-subsequent-contact", "08-flow-control-slow-reader", "10-abnormal-close-unread-data",
		"07-oob-urgent", "45-v1-oob-urgent",
	} {
		for _, first := range []bool{true, false} {
			who := map[bool]string{true: "first sender", false: "second sender"}[first]
			t.Run(name+"/"+who, func(t *testing.T) {
				msgs, fromFirst := conversation(t, name)
				ring := cdc.Ring{Size: 1 << 16}
				c := cdc.NewConn(cdc.Config{Local: ring, SendBuffer: 1 << 20})
				c.Activate(ring, testPeerToken)
				var prod, cons, produced uint64
				flush := func() {
					for c.Pending() && !c.WasAborted() {
						c.Next()
						c.HandleSent()
					}
				}
				for i, m := range msgs {
					if fromFirst[i] == first {
						// Our side sent this message: do what makes us send the same.
						if p, err := ring.Advance(produced, m.Prod); err == nil {
							produced = p
							c.Produce(p)
						}
						if r, err := ring.Advance(cons, m.Cons); err == nil {
							cons = r
							c.Consume(r)
						}
						flush()
						continue
					}
					if _, err := c.HandleMessage(m); err != nil {
						t.Fatalf("message %d, %v: %v", i, m, err)
					}
					if p, err := ring.Advance(prod, m.Prod); err == nil {
						prod = p
					}
					flush()
					if c.PeerProduced() != prod {
						t.Fatalf("message %d, %v: position %d, want %d", i, m, c.PeerProduced(), prod)
					}
				}
				if !c.PeerReleased() {
					t.Errorf("the peer did not end the connection, state %v", c.State())
				}
			})
		}
	}
}

// The data path allocates nothing.
func TestConn_allocatesNothing(t *testing.T) {
	for name, f := range map[string]func(testing.TB) func(){
		"data": echo, "urgent data": urgentEcho, "failovers": failoverEcho,
	} {
		if n := testing.AllocsPerRun(1000, f(t)); n != 0 {
			t.Errorf("%s: %v allocations per message", name, n)
		}
	}
}

// urgentEcho is echo with each last byte urgent.
func urgentEcho(t testing.TB) func() {
	return echoWith(t, func(a *cdc.Conn, pos uint64) { a.Urgent(pos) }, nil)
}

// failoverEcho is echo with a link lost after each write.
func failoverEcho(t testing.TB) func() {
	return echoWith(t, nil, func(a *cdc.Conn) {
		a.Next()
		a.Failover()
	})
}

// echo returns a function that sends one message with data from one
// connection to another, which consumes it.
func echo(t testing.TB) func() { return echoWith(t, nil, nil) }

// echoWith calls before with the position of the write to be made, and after
// once it is made.
func echoWith(t testing.TB, before func(a *cdc.Conn, pos uint64), after func(a *cdc.Conn)) func() {
	ring := cdc.Ring{Size: 1 << 16}
	a := cdc.NewConn(cdc.Config{Local: ring, SendBuffer: 1 << 16})
	b := cdc.NewConn(cdc.Config{Local: ring, SendBuffer: 1 << 16})
	a.Activate(ring, 1)
	b.Activate(ring, 2)
	var pos uint64
	return func() {
		pos += 4000
		if before != nil {
			before(&a, pos)
		}
		a.Produce(pos)
		if after != nil {
			after(&a)
		}
		for a.Pending() {
			tr, _ := a.Next()
			a.WriteSpans(tr)
			if _, err := b.HandleMessage(tr.Message); err != nil {
				t.Fatal(err)
			}
			a.HandleSent()
		}
		b.Consume(pos)
		for b.Pending() {
			tr, _ := b.Next()
			if _, err := a.HandleMessage(tr.Message); err != nil {
				t.Fatal(err)
			}
			b.HandleSent()
		}
	}
}

func BenchmarkConn(b *testing.B) {
	f := echo(b)
	b.ReportAllocs()
	for b.Loop() {
		f()
	}
}

func TestConn_AwaitsDelivery(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(s *side)
		want bool
	}{
		{"nothing is on its way", func(*side) {}, false},
		{"a question", func(s *side) { s.write(100); s.c.Next() }, false},
		{"a question that was delivered, and the end", func(s *side) { s.write(100); s.flush(); s.c.Shutdown() }, false},
		{"a question and the end behind it", func(s *side) { s.write(100); s.c.Next(); s.c.Shutdown() }, true},
		{"a question, then closed", func(s *side) { s.write(100); s.c.Next(); s.c.Close() }, true},
		{"a question, then reset", func(s *side) { s.write(100); s.c.Next(); s.c.Abort() }, true},
		{"more to say than goes out", func(s *side) { s.write(100); s.c.Next(); s.write(100) }, true},
		{"a quarter of the send buffer", func(s *side) { s.write(1 << 14); s.c.Next() }, true},
		{"messages one after the other", func(s *side) {
			for range 4 {
				s.write(10)
				s.c.Next()
			}
		}, true},
		{"all of the window, and no more", func(s *side) { s.write(1 << 15); s.c.Next() }, true},
		{"all of the window, and more behind it", func(s *side) { s.write(1<<15 + 1); s.c.Next() }, false},
		{"the same, and the end", func(s *side) { s.write(1<<15 + 1); s.c.Next(); s.c.Shutdown() }, true},
		{"the same, and the peer has read a little", func(s *side) {
			s.write(1<<15 + 1)
			s.c.Next()
			s.cons = 1
			_ = s.receive(0)
		}, true},
		{"many messages until the window is closed", func(s *side) {
			for range 11 {
				s.write(10)
				s.c.Next()
			}
			s.write(1 << 15)
			s.c.Next()
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(t, cdc.Ring{Size: 1 << 15})
			tt.do(s)
			if got := s.c.AwaitsDelivery(); got != tt.want {
				t.Errorf("AwaitsDelivery = %v", got)
			}
		})
	}
}
