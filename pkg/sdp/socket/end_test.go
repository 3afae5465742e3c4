// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// endings are the states in which the end of a connection may meet a socket: side 1 of a world.
var endings = []struct {
	name  string
	bring func(w *world, a, b *host)
}{
	{"idle", func(*world, *host, *host) {}},
	{"writes", func(_ *world, _, b *host) { b.write(5000, false, false); b.write(100_000, true, false) }},
	{"reads", func(_ *world, _, b *host) { b.read(5000, true, false); b.read(100_000, true, true) }},
	{"held", func(w *world, a, _ *host) { a.write(500, false, false); w.rest() }},
	{"adverts", func(w *world, a, b *host) {
		a.s.PreferMode(w.now, bsdh.Pipelined)
		a.run()
		w.rest()
		b.read(100_000, true, false)
		b.write(100_000, true, false)
		w.rest()
	}},
	{"RDMA READ", func(w *world, a, b *host) {
		a.write(100_000, true, false)
		w.rest()
		b.read(100_000, true, false)
	}},
	{"RDMA WRITE", func(w *world, a, b *host) {
		b.s.PreferMode(w.now, bsdh.Pipelined)
		b.run()
		w.rest()
		a.read(100_000, true, false)
		w.rest()
		b.write(100_000, true, false)
	}},
	{"canceling", func(w *world, a, b *host) {
		b.write(100_000, true, false)
		a.s.PreferMode(w.now, bsdh.Pipelined)
		a.run()
		w.rest()
		b.read(100_000, true, false)
		b.s.CancelReads(w.now)
		b.s.CancelWrites(w.now)
		b.run()
	}},
	{"shut down", func(w *world, _, b *host) { b.s.Shutdown(w.now); b.run(); w.rest() }},
	{"peer done", func(w *world, a, _ *host) { a.s.Shutdown(w.now); a.run(); w.rest() }},
	{"linger", func(w *world, a, b *host) {
		b.s.Shutdown(w.now)
		b.run()
		w.rest()
		a.s.Shutdown(w.now)
		a.run()
		for b.s.State() == StateOpen && a.deliver() {
		}
	}},
	{"aborting", func(w *world, a, b *host) {
		a.write(100_000, true, false)
		w.rest()
		b.s.Shutdown(w.now)
		b.run()
		b.read(100_000, true, false)
		b.s.Abort(w.now)
		b.run()
	}},
	{"closed", func(w *world, _, b *host) { b.s.Close(w.now); b.run() }},
}

// failNext lets the oldest work request of a kind fail, or tells the socket of one that there is not.
func (h *host) failNext(k OutputKind) {
	if i := slices.IndexFunc(h.done, func(o Output) bool { return o.Kind == k }); i >= 0 {
		h.done = slices.Delete(h.done, i, i+1)
	}
	switch k {
	case OutRDMARead:
		h.targets = h.targets[min(1, len(h.targets)):]
		h.s.HandleRead(h.w.now, false)
	case OutRDMAWrite:
		h.s.HandleWrite(h.w.now, false)
	default:
		h.s.HandleSent(h.w.now, false)
	}
}

// However a connection ends, and whatever is under way then: it ends once, no key outlives it, every buffer comes back,
// and nothing comes behind that.
func TestEndings(t *testing.T) {
	gone := errors.New("gone")
	for name, end := range map[string]func(now time.Time, h *host){
		"FIN":    func(_ time.Time, h *host) { h.down(nil) },
		"reset":  func(_ time.Time, h *host) { h.down(gone) },
		"Abort":  func(now time.Time, h *host) { h.s.Abort(now) },
		"Close":  func(now time.Time, h *host) { h.s.Close(now) },
		"SEND":   func(_ time.Time, h *host) { h.failNext(OutSend) },
		"READ":   func(_ time.Time, h *host) { h.failNext(OutRDMARead) },
		"WRITE":  func(_ time.Time, h *host) { h.failNext(OutRDMAWrite) },
		"expiry": func(now time.Time, h *host) { h.s.HandleTimeout(now.Add(time.Hour)) },
		"garbage": func(now time.Time, h *host) {
			_ = h.s.HandleRecv(now, 0, []byte("garbage"), nil)
		},
	} {
		for _, e := range endings {
			for _, zcopy := range []uint32{1000, NoZcopy} {
				cfg := Config{ZcopyBytes: zcopy, RecvBytes: 900}
				w, a, b := pair(t, cfg, cfg)
				w.gone = true
				if zcopy == NoZcopy {
					b.s.cfg.Memory = nil
				}
				e.bring(w, a, b)
				if w.err != nil {
					t.Fatalf("%s before %s: %v", e.name, name, w.err)
				}
				a.out, a.posted = nil, nil // the peer is silent from now on
				end(w.now, b)
				b.run()
				for range 5 {
					for b.complete() {
					}
					w.now = w.now.Add(time.Hour)
					b.s.HandleTimeout(w.now)
					b.run()
				}
				b.down(gone)
				if w.err != nil || !b.ended || len(b.keys)+len(b.writes) > 0 || b.s.State() != StateClosed {
					t.Errorf("%s, then %s (zcopy %d): %v, ended %t, keys %v, writes %v, %v", e.name, name, zcopy, w.err, b.ended, b.keys, b.writes, b.s.State())
				}
				for id, r := range b.reads {
					if !r.over {
						t.Errorf("%s, then %s (zcopy %d): Read %d is not over", e.name, name, zcopy, id)
					}
				}
			}
		}
	}
}

// Before there is a connection, too.
func TestEndingsOfSetup(t *testing.T) {
	for role := range Role(2) {
		for name, end := range map[string]func(now time.Time, s *Socket){
			"FIN":   func(_ time.Time, s *Socket) { s.HandleDown(nil) },
			"reset": func(_ time.Time, s *Socket) { s.HandleDown(errors.New("gone")) },
			"Abort": func(now time.Time, s *Socket) { s.Abort(now) },
			"SEND":  func(now time.Time, s *Socket) { s.HandleSent(now, false) },
			"expiry": func(now time.Time, s *Socket) {
				s.Close(now)
				s.HandleTimeout(now.Add(time.Hour))
			},
			"message": func(now time.Time, s *Socket) {
				m := bsdh.Message{MID: bsdh.Data}
				_ = s.HandleRecv(now, 0, m.Append(nil, bsdh.LayoutFigures), nil)
			},
		} {
			now := time.Unix(0, 0)
			s, err := New(now, Config{Role: role, ZcopyBytes: NoZcopy})
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(s.Write(now, Write{ID: 1, Len: 9}), s.Read(now, Read{ID: 2, Len: 9})); err != nil {
				t.Fatal(err)
			}
			end(now, s)
			var kinds []OutputKind
			for _, o := range s.Poll(nil) {
				if o.Kind != OutHello && o.Kind != OutReset {
					kinds = append(kinds, o.Kind)
				}
			}
			if name == "expiry" && len(kinds) == 3 && kinds[0] == OutRead {
				kinds[0], kinds[1] = kinds[1], kinds[0] // Close gives the Read back
			}
			if len(kinds) != 3 || kinds[0] != OutWritten || kinds[1] != OutRead || kinds[2] != OutEnded || s.Err() == nil {
				t.Errorf("%v, %s: outputs %v, %v", role, name, kinds, s.Err())
			}
		}
	}
}

// What arrived before a reset is there to be read, and the end of the stream behind it if the peer told that.
func TestSection8_2_HeldBeforeReset(t *testing.T) {
	for _, fin := range []bool{false, true} {
		w, a, b := pair(t, Config{ZcopyBytes: NoZcopy}, Config{ZcopyBytes: NoZcopy})
		a.write(500, false, false)
		if fin {
			a.s.Shutdown(w.now)
			a.run()
		}
		settle(t, w)
		w.gone = true
		b.s.HandleDown(errors.New("reset"))
		b.run()
		if !errors.Is(b.endErr, ErrLost) {
			t.Errorf("ended with %v", b.endErr)
		}
		b.read(300, false, false)
		b.read(300, false, true)
		if b.received != 500 {
			t.Errorf("end of stream %t: %d of 500 bytes were read", fin, b.received)
		}
		err := b.s.Read(w.now, Read{ID: 99, Len: 1})
		if eof := err == nil; eof != fin || !eof && !errors.Is(err, ErrState) {
			t.Errorf("end of stream %t: next Read: %v", fin, err)
		}
	}
}

// A program that aborts gives up what it has not read.
func TestSection8_2_HeldBeforeAbort(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: NoZcopy}, Config{ZcopyBytes: NoZcopy})
	a.write(500, false, false)
	settle(t, w)
	w.gone = true
	b.s.Abort(w.now)
	if err := b.s.Read(w.now, Read{ID: 99, Len: 1}); !errors.Is(err, ErrState) {
		t.Errorf("Read after Abort: %v", err)
	}
}

// While AbortConn is on its way, a buffer that RDMA touches is not the program's, whatever completes first.
func TestSection8_2_2_AbortDuringRead(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	w.gone = true
	b.s.Shutdown(w.now)
	b.run()
	a.write(50_000, true, false)
	settle(t, w)
	b.read(50_000, true, false)
	if b.s.Snapshot().Reading == 0 {
		t.Fatal("no RDMA READ")
	}
	b.s.Abort(w.now)
	b.run()
	for len(b.done) > 0 {
		b.complete()
	}
	if b.ended {
		t.Fatal("ended with an RDMA READ under way")
	}
	b.s.HandleRead(w.now, true)
	b.run()
	if !b.ended || !errors.Is(b.endErr, ErrAborted) {
		t.Errorf("ended %t, %v", b.ended, b.endErr)
	}
}

// Close is like that of TCP: an end in order if nobody misses anything, and a reset else.
func TestClose(t *testing.T) {
	for name, c := range map[string]struct {
		before, after uint32
		zcopy         bool
		want          error
	}{
		"nothing unread":  {},
		"unread":          {before: 5, want: ErrAborted},
		"unread advert":   {before: 5000, zcopy: true, want: ErrAborted},
		"arrives later":   {after: 5, want: ErrAborted},
		"advert of later": {after: 5000, zcopy: true, want: ErrAborted},
	} {
		w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
		w.gone = c.want != nil
		if c.before > 0 {
			a.write(c.before, c.zcopy, false)
			settle(t, w)
		}
		b.s.Close(w.now)
		b.run()
		if err := b.s.Read(w.now, Read{ID: 99, Len: 1}); !errors.Is(err, ErrState) {
			t.Errorf("%s: Read after Close: %v", name, err)
		}
		settle(t, w)
		if c.after > 0 {
			a.write(c.after, c.zcopy, false)
			settle(t, w)
		}
		a.s.Close(w.now)
		a.run()
		settle(t, w)
		if !a.ended || !b.ended || !errors.Is(b.endErr, c.want) || (a.endErr == nil) != (c.want == nil) {
			t.Errorf("%s: ended %t with %v, peer %t with %v", name, b.ended, b.endErr, a.ended, a.endErr)
		}
	}
}

// A peer that does not end its stream after Close holds nothing for ever.
func TestCloseTimeout(t *testing.T) {
	w, _, b := pair(t, Config{ZcopyBytes: NoZcopy}, Config{ZcopyBytes: NoZcopy})
	b.s.Close(w.now)
	b.run()
	settle(t, w)
	endsByLinger(t, w, b)
}

// endsByLinger lets the time after Close pass for one side, while nothing of the other one arrives.
func endsByLinger(t *testing.T, w *world, h *host) {
	t.Helper()
	at, ok := h.s.NextTimeout()
	if !ok || at.Sub(w.now) != lingerTimeout {
		t.Fatalf("timeout in %v, %t", at.Sub(w.now), ok)
	}
	w.gone, w.now = true, at
	w.expire()
	settle(t, w)
	if !errors.Is(h.endErr, ErrLinger) {
		t.Errorf("ended with %v", h.endErr)
	}
}

// A peer that takes nothing, or no more, does not keep a connection that was closed: also where Writes are in line before the end of
// the stream.
func TestCloseTimeout_notSent(t *testing.T) {
	w, a, _ := pair(t, Config{ZcopyBytes: NoZcopy}, Config{ZcopyBytes: NoZcopy})
	for range 3 {
		a.write(200_000, false, false) // more than the peer has buffers for
	}
	a.run()
	settle(t, w)
	a.s.Shutdown(w.now)
	a.s.Close(w.now)
	a.run()
	settle(t, w)
	endsByLinger(t, w, a)
}

// helloAck sets the connection up that a lone socket has moved to.
func (l *lone) helloAck() {
	l.t.Helper()
	m := bsdh.Message{MID: bsdh.HelloAck, Bufs: 9, Setup: bsdh.Setup{MaxAdverts: 1, Major: 1, Minor: 1, RecvBytes: 900, IRD: 1, ORD: 1}}
	if err := l.s.HandleRecv(l.h.w.now, 0, m.Append(nil, bsdh.LayoutFigures), nil); err != nil {
		l.t.Fatal(err)
	}
	l.next = 0
	l.rest()
}

// rest has all completed that a lone socket does.
func (l *lone) rest() {
	for l.h.run(); l.h.complete(); {
	}
}

// moves has a lone socket follow its peer to another connection.
func (l *lone) moves() {
	l.t.Helper()
	l.mustSend(bsdh.Message{MID: bsdh.SuspComm, Port: 4711})
	l.rest()
	if l.s.State() != StateHello {
		l.t.Fatalf("%v: %v", l.s.State(), l.s.Err())
	}
	l.helloAck()
}

// ends lets time pass for a lone socket that was closed at begin: it ends behind the time that a closed one has, and that of AbortConn.
func (l *lone) ends(begin time.Time) {
	l.t.Helper()
	for l.s.State() != StateClosed {
		at, ok := l.s.NextTimeout()
		if !ok || at.After(begin.Add(lingerTimeout+abortTimeout)) {
			l.t.Fatalf("%v, next timeout %v after Close, %t", l.s.State(), at.Sub(begin), ok)
		}
		l.h.w.now = at
		l.s.HandleTimeout(at)
		l.rest()
	}
	if !errors.Is(l.s.Err(), ErrLinger) {
		l.t.Errorf("ended with %v", l.s.Err())
	}
}

// A peer that has ended its stream, moves, and does not repeat the end on the next connection cannot keep a closed socket alive.
func TestCloseTimeout_movedPeer(t *testing.T) {
	l := newLone(t, suspendable)
	l.mustSend(bsdh.Message{MID: bsdh.DisConn})
	l.moves()
	l.s.Close(l.h.w.now)
	l.rest()
	l.ends(l.h.w.now)
}

// Nor does one that moves again and again, or that moves and does not come back.
func TestCloseTimeout_movingPeer(t *testing.T) {
	for _, back := range []bool{true, false} {
		l := newLone(t, suspendable)
		begin := l.h.w.now
		l.s.Close(begin)
		l.rest()
		l.h.w.now = begin.Add(lingerTimeout * 9 / 10)
		if l.moves(); !back {
			l.mustSend(bsdh.Message{MID: bsdh.SuspComm, Port: 4711})
			l.rest()
		}
		l.ends(begin)
	}
}

// A peer that never says what became of a buffer does not keep it: the connection ends, and the buffer comes back.
func TestCancelTimeout(t *testing.T) {
	for name, begin := range map[string]func(w *world, a, b *host){
		"a Write that is offered": func(w *world, a, _ *host) {
			a.write(50_000, true, false)
			settle(t, w)
			a.s.CancelWrites(w.now)
		},
		"a Read that is advertised": func(w *world, a, b *host) {
			b.s.PreferMode(w.now, bsdh.Pipelined)
			b.run()
			settle(t, w)
			a.read(5000, true, false)
			settle(t, w)
			a.s.CancelReads(w.now)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, a, b := pair(t, Config{ZcopyBytes: 1000, RecvBytes: 900}, Config{ZcopyBytes: 1000, RecvBytes: 900})
			begin(w, a, b)
			a.run()
			for a.complete() { // what it sends never arrives
			}
			if len(a.keys) != 1 {
				t.Fatalf("keys %v: a buffer is to be the peer's", a.keys)
			}
			at, ok := a.s.NextTimeout()
			if !ok || at.Sub(w.now) > cancelTimeout {
				t.Fatalf("timeout in %v, %t", at.Sub(w.now), ok)
			}
			w.gone, w.now = true, w.now.Add(cancelTimeout-1)
			a.s.HandleTimeout(w.now)
			a.run()
			if a.ended {
				t.Error("ended early")
			}
			w.now = w.now.Add(1)
			a.s.HandleTimeout(w.now)
			a.run()
			if !errors.Is(a.endErr, ErrStalled) || len(a.keys)+len(a.writes) > 0 || a.s.Snapshot().Reads != 0 {
				t.Errorf("ended with %v, keys %v, %v", a.endErr, a.keys, a.s.Snapshot())
			}
		})
	}
}

// cancelRefused has a cancel a Write of 50,000 bytes that b has refused to read by RDMA, and returns when that was.
func cancelRefused(t *testing.T, w *world, a, b *host) time.Time {
	t.Helper()
	a.write(50_000, true, false)
	settle(t, w)
	for range 2 { // the first one has what goes with the offer
		b.read(900, false, false)
		settle(t, w)
	}
	if a.s.Snapshot().Forced == 0 {
		t.Fatalf("nothing was refused: %v", a.s.Snapshot())
	}
	a.s.CancelWrites(w.now)
	a.run()
	settle(t, w)
	return w.now
}

// A peer that refuses to read by RDMA, and whose program then reads the messages slowly, keeps its connection: each step gives
// it more time. What moves in the other direction gives it none.
func TestCancelTimeout_slowReader(t *testing.T) {
	for _, reads := range []bool{true, false} {
		cfg := Config{ZcopyBytes: 1000, RecvBuffers: 8, RecvBytes: 900}
		w, a, b := pair(t, cfg, cfg)
		begin := cancelRefused(t, w, a, b)
		w.gone = !reads
		for w.now.Before(begin.Add(20*cancelTimeout)) && len(a.writes) > 0 {
			w.now = w.now.Add(cancelTimeout / 5)
			w.expire()
			if reads {
				b.read(900, false, false)
			}
			a.read(10, false, false)
			b.write(10, false, false)
			settle(t, w)
		}
		passed := w.now.Sub(begin)
		if reads && (a.ended || passed < 2*cancelTimeout || a.s.Snapshot().Produced != 50_000) {
			t.Errorf("ended %t with %v after %v: %v", a.ended, a.endErr, passed, a.s.Snapshot())
		}
		if !reads && (!errors.Is(a.endErr, ErrStalled) || passed > 2*cancelTimeout) {
			t.Errorf("nobody reads: ended with %v after %v: %v", a.endErr, passed, a.s.Snapshot())
		}
	}
}

// Reads that come and are canceled, too, are no progress of a canceled Write: a program that reads by Buffer, with a
// deadline each, does not keep the Write of another one waiting.
func TestCancelTimeout_otherDirection(t *testing.T) {
	cfg := Config{ZcopyBytes: 1000, RecvBuffers: 8, RecvBytes: 900}
	w, a, b := pair(t, cfg, cfg)
	for _, h := range []*host{a, b} { // both streams may be written to adverts
		h.s.PreferMode(w.now, bsdh.Pipelined)
		h.run()
	}
	settle(t, w)
	begin := cancelRefused(t, w, a, b)
	for w.now.Before(begin.Add(4*cancelTimeout)) && !a.ended {
		a.read(5000, true, false)
		settle(t, w)
		w.now = w.now.Add(cancelTimeout / 5)
		if w.expire(); a.ended {
			break
		}
		a.s.CancelReads(w.now)
		a.run()
		settle(t, w)
	}
	if passed := w.now.Sub(begin); !errors.Is(a.endErr, ErrStalled) || passed > 2*cancelTimeout {
		t.Errorf("ended with %v after %v: %v", a.endErr, passed, a.s.Snapshot())
	}
}

// That a DisConn completed does not say that it arrived: a connection that is lost then is not ended in order.
func TestSection8_2_1_LostDisConn(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: NoZcopy}, Config{ZcopyBytes: NoZcopy, SendDepth: 2})
	w.gone = true
	a.s.Shutdown(w.now)
	a.run()
	b.write(5, false, false)
	b.s.Shutdown(w.now)
	b.run()
	b.complete()
	b.complete()
	for a.deliver() { // its DisConn does not know ours
		if b.ended {
			return
		}
		b.s.HandleDown(errors.New("reset"))
		b.run()
	}
	if !errors.Is(b.endErr, ErrLost) {
		t.Errorf("ended with %v", b.endErr)
	}
}

// One side's bytes fill the receive buffers of a program that waits for its own advert to be read: the other side takes that
// by Bcopy after a while.
func TestSection9_2_DataAgainstAdvert(t *testing.T) {
	cfg := Config{ZcopyBytes: 1000, RecvBuffers: 8, RecvBytes: 100}
	w, a, b := pair(t, cfg, cfg)
	a.write(5000, false, false)
	b.write(5000, true, false)
	settle(t, w)
	if at, ok := a.s.NextTimeout(); !ok || at.After(w.now.Add(deadlockDelay)) {
		t.Fatalf("timeout %v, %t: %v", at, ok, a.s.Snapshot())
	}
	w.now = w.now.Add(deadlockDelay)
	w.expire()
	settle(t, w)
	if w.mids[bsdh.SendSm] == 0 {
		t.Errorf("no SendSm: %v\n%v", a.s.Snapshot(), b.s.Snapshot())
	}
}

// Our stream back from Buffered mode is asked for when the Read at the head is worth it, and not just when it is posted.
func TestSection12_3_AsksLater(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	a.s.PreferMode(w.now, bsdh.Buffered)
	a.run()
	settle(t, w)
	b.read(10, false, false)
	b.read(50_000, true, false)
	settle(t, w)
	if b.s.Snapshot().RecvMode != bsdh.Buffered {
		t.Fatal("asked for a Read that is not the next")
	}
	a.write(10, false, false)
	settle(t, w)
	if b.s.Snapshot().RecvMode != bsdh.Combined || a.s.Snapshot().SendMode != bsdh.Combined {
		t.Errorf("%v", b.s.Snapshot())
	}
}

// A stretch that is longer than an advert can tell is not advertised.
func TestSection6_2_1_4_LongRead(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	a.s.PreferMode(w.now, bsdh.Pipelined)
	a.run()
	settle(t, w)
	if err := b.s.Read(w.now, Read{ID: 1, Len: bsdh.MaxBytes + 1, Direct: true}); err != nil {
		t.Fatal(err)
	}
	if n := len(b.s.Snapshot().SinkAdverts); n != 0 {
		t.Errorf("%d adverts", n)
	}
}

// The time of a timeout is never past when it has been handled: a shell would spin.
func TestNextTimeoutMoves(t *testing.T) {
	l := newLone(t, Config{RecvBuffers: 4, ZcopyBytes: NoZcopy, SendDepth: 1})
	m := bsdh.Message{MID: bsdh.Data}
	now := l.h.w.now
	for range 3 {
		if err := l.send(m, nil); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			at, ok := l.s.NextTimeout()
			if !ok {
				break
			}
			l.s.HandleTimeout(at)
			if again, ok := l.s.NextTimeout(); ok && !again.After(at) {
				t.Fatalf("due at %v, and again at %v", at.Sub(now), again.Sub(now))
			}
		}
	}
}
