// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

var suspendable = Config{ZcopyBytes: 1000, RecvBuffers: 8, RecvBytes: 900, Keep: true, Suspends: true}

func (h *host) suspend(t *testing.T) {
	t.Helper()
	if err := h.s.Suspend(h.w.now, 4711); err != nil {
		t.Fatal(err)
	}
	h.run()
}

// A connection that moves loses nothing, in either role, whoever connected at first: neither what nobody has read, nor what
// was advertised, nor what was read in part, nor the end of a stream.
func TestSection13_1_1_Moves(t *testing.T) {
	for side := range 2 {
		for _, fin := range []bool{false, true} {
			w, _, _ := pair(t, suspendable, suspendable)
			l, x := w.sides[side], w.sides[1-side]
			for _, h := range w.sides {
				h.write(300, false, false)
				h.write(50_000, true, false)
			}
			w.rest()
			x.read(20_000, true, false)
			l.read(20_000, true, false)
			if fin {
				l.s.Shutdown(w.now)
				l.run()
			}
			l.suspend(t)
			settle(t, w)
			if w.mids[bsdh.SuspComm] != 1 || w.mids[bsdh.SuspCommAck] != 1 || l.moves != 1 || x.moves != 1 {
				t.Fatalf("side %d: %v, moved %d and %d times", side, w.mids, l.moves, x.moves)
			}
			if l.s.cfg.Role != Accepting || x.s.cfg.Role != Connecting || l.s.State() != StateOpen || x.s.State() != StateOpen {
				t.Fatalf("side %d: %v %v, %v %v", side, l.s.cfg.Role, l.s.State(), x.s.cfg.Role, x.s.State())
			}
			w.finish()
			if w.err != nil {
				t.Fatalf("side %d, end of stream %t: %v", side, fin, w.err)
			}
		}
	}
}

// What is under way ends before SuspComm and before SuspCommAck, and nothing but the answer comes behind SuspComm.
func TestSection13_1_1_InProcess(t *testing.T) {
	for side := range 2 {
		w, _, _ := pair(t, suspendable, suspendable)
		l, x := w.sides[side], w.sides[1-side]
		for _, h := range w.sides {
			h.write(50_000, true, false)
		}
		w.rest()
		x.read(50_000, true, false)
		l.read(50_000, true, false)
		l.suspend(t)
		if w.mids[bsdh.SuspComm] != 0 || l.s.Snapshot().Reading == 0 {
			t.Fatalf("side %d: %v, %v", side, w.mids, l.s.Snapshot())
		}
		for w.mids[bsdh.SuspComm] == 0 && w.err == nil {
			l.complete()
			l.deliver()
			x.deliver()
		}
		last := l.s.Snapshot().SentSeq
		l.write(5000, false, false)
		settle(t, w)
		if l.moves != 1 || last > 10 || w.mids[bsdh.RdmaRdCompl] < 2 {
			t.Errorf("side %d: moved %d times, %v", side, l.moves, w.mids)
		}
	}
}

// When both ask, the connecting peer answers, and asks again on the next connection.
func TestSection13_1_2_Crossing(t *testing.T) {
	w, a, b := pair(t, suspendable, suspendable)
	a.suspend(t)
	b.suspend(t)
	settle(t, w)
	if w.mids[bsdh.SuspComm] != 3 || w.mids[bsdh.SuspCommAck] != 2 || a.moves != 2 || b.moves != 2 {
		t.Fatalf("%v, moved %d and %d times", w.mids, a.moves, b.moves)
	}
	a.write(100, false, false)
	w.finish()
	if w.err != nil {
		t.Error(w.err)
	}
}

// A SuspComm that is sent again is not waited for longer than the first.
func TestSection13_1_2_Timeout(t *testing.T) {
	w, a, b := pair(t, suspendable, suspendable)
	a.suspend(t)
	b.suspend(t)
	for w.mids[bsdh.SuspComm] < 3 && w.err == nil {
		for _, h := range w.sides {
			h.deliver()
			h.complete()
		}
	}
	at, ok := a.s.NextTimeout()
	if !ok || at.Sub(w.now) != DefaultSuspendTimeout {
		t.Errorf("timeout in %v, %t, %v", at.Sub(w.now), ok, a.s.State())
	}
}

// A connection that moves can be asked to move again, which it does then.
func TestSection13_1_2_Again(t *testing.T) {
	w, a, b := pair(t, suspendable, suspendable)
	a.suspend(t)
	for b.s.State() != StateHello && w.err == nil {
		for _, h := range w.sides {
			h.deliver()
			h.complete()
		}
	}
	b.suspend(t)
	if err := b.s.Suspend(w.now, 4712); !errors.Is(err, ErrState) {
		t.Errorf("asked twice: %v", err)
	}
	settle(t, w)
	if a.moves != 2 || b.moves != 2 {
		t.Fatalf("%v, moved %d and %d times", w.mids, a.moves, b.moves)
	}
	b.write(100, false, false)
	w.finish()
	if w.err != nil {
		t.Error(w.err)
	}
}

// That the next connection does not come ends the socket, and has no say as long as there is one.
func TestSection13_Left(t *testing.T) {
	l := newLone(t, suspendable)
	l.h.suspend(t)
	none := errors.New("nobody listens")
	if l.s.HandleLeft(none); l.s.State() != StateOpen {
		t.Fatalf("%v: %v", l.s.State(), l.s.Err())
	}
	if err := l.send(bsdh.Message{MID: bsdh.SuspCommAck}, nil); err != nil {
		t.Fatal(err)
	}
	if l.s.HandleLeft(none); l.s.State() != StateClosed || !errors.Is(l.s.Err(), none) || !errors.Is(l.s.Err(), ErrLost) {
		t.Errorf("%v: %v", l.s.State(), l.s.Err())
	}
}

// A peer that moves again and again while nobody reads does not make us hold more with every move: it has to wait until something was read, or
// the time is up.
func TestSection13_1_1_KeepsWithinBounds(t *testing.T) {
	for _, urgent := range []bool{false, true} {
		w, a, b := pair(t, suspendable, suspendable)
		size, room := suspendable.RecvBytes, suspendable.RecvBuffers*int(suspendable.RecvBytes)
		if urgent {
			size = 1
		}
		for range 5 {
			for range suspendable.RecvBuffers {
				a.write(size, false, urgent)
			}
			w.rest()
			if a.s.Suspend(w.now, 4711) == nil {
				a.run()
			}
			settle(t, w)
			if v := b.s.Snapshot(); int(v.Held) > 3*room {
				t.Fatalf("urgent %t: %v", urgent, v)
			}
		}
		if b.moves < 2 || b.moves > 3 {
			t.Errorf("urgent %t: moved %d times, want 2 or 3", urgent, b.moves)
		}
		w.finish()
		if w.err != nil || b.moves != a.moves {
			t.Errorf("urgent %t: moved %d and %d times: %v", urgent, a.moves, b.moves, w.err)
		}
	}
}

// The size of receive buffers that a peer knows is that of the next connection too.
func TestSection13_1_1_KeepsSize(t *testing.T) {
	c := suspendable
	c.MinRecvBytes = 100
	w, a, b := pair(t, c, c)
	a.resize(t, 200)
	settle(t, w)
	b.suspend(t)
	settle(t, w)
	if v := b.s.Snapshot(); v.RecvBytes != 200 || a.s.Snapshot().PeerRecvBytes != 200 {
		t.Errorf("%d bytes, peer thinks %d", v.RecvBytes, a.s.Snapshot().PeerRecvBytes)
	}
}

// A peer that does not answer, or does not come back, ends the connection in time; so does the program.
func TestSection13_Timeout(t *testing.T) {
	for _, answered := range []bool{false, true} {
		l := newLone(t, suspendable)
		l.h.suspend(t)
		if answered {
			if err := l.send(bsdh.Message{MID: bsdh.SuspCommAck}, nil); err != nil {
				t.Fatal(err)
			}
			l.s.HandleDown(errors.New("the old connection"))
			l.s.HandleSent(l.h.w.now, false)
		}
		at, ok := l.s.NextTimeout()
		if !ok || at.Sub(l.h.w.now) != DefaultSuspendTimeout || l.s.State() == StateClosed {
			t.Fatalf("timeout in %v, %t, %v", at.Sub(l.h.w.now), ok, l.s.State())
		}
		l.s.HandleTimeout(at)
		if l.s.State() != StateClosed || l.s.Err() == nil {
			t.Errorf("answered %t: %v, %v", answered, l.s.State(), l.s.Err())
		}
	}
}

// A peer's SuspComm that crosses ours, and is disregarded, gives it no more time to answer.
func TestSection13_1_2_DisregardedTimeout(t *testing.T) {
	l := newLone(t, suspendable)
	l.h.suspend(t)
	begin := l.h.w.now
	for range 3 {
		l.h.w.now = l.h.w.now.Add(DefaultSuspendTimeout / 4)
		l.mustSend(bsdh.Message{MID: bsdh.SuspComm, Port: 4711})
		l.h.run()
	}
	if at, ok := l.s.NextTimeout(); !ok || at.Sub(begin) != DefaultSuspendTimeout {
		t.Errorf("timeout %v after SuspComm, %t", at.Sub(begin), ok)
	}
}

func TestSection13_Violations(t *testing.T) {
	comm := bsdh.Message{MID: bsdh.SuspComm, Port: 80}
	for name, c := range map[string]struct {
		cfg Config
		in  []bsdh.Message
	}{
		"SuspCommAck":    {suspendable, []bsdh.Message{{MID: bsdh.SuspCommAck}}},
		"two SuspComms":  {suspendable, []bsdh.Message{comm, comm}},
		"no port":        {suspendable, []bsdh.Message{{MID: bsdh.SuspComm}}},
		"not configured": {Config{ZcopyBytes: NoZcopy}, []bsdh.Message{comm}},
	} {
		l := newLone(t, c.cfg)
		var err error
		for _, m := range c.in {
			err = l.send(m, nil)
		}
		if !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
	l := newLone(t, Config{ZcopyBytes: NoZcopy})
	if err := l.s.Suspend(time.Unix(0, 0), 80); !errors.Is(err, ErrInvalid) {
		t.Errorf("Suspend without Suspends: %v", err)
	}
	if err := l.s.Resume(time.Unix(0, 0)); !errors.Is(err, ErrState) {
		t.Errorf("Resume: %v", err)
	}
	if _, err := New(time.Unix(0, 0), Config{ZcopyBytes: NoZcopy, Suspends: true}); !errors.Is(err, ErrInvalid) {
		t.Errorf("Suspends without Keep: %v", err)
	}
}

// A SrcAvailCancel before SuspComm is acknowledged when no RDMA READ is under way any more, not with the first one's report.
func TestSection13_1_CanceledReads(t *testing.T) {
	cfg := rdmaMoves
	cfg.Keep, cfg.Suspends = true, true
	l := newLone(t, cfg)
	l.pipeline(false, true)
	for i := range rdma.RKey(2) {
		l.mustSend(bsdh.Message{MID: bsdh.SrcAvail, Advert: bsdh.Advert{Len: 2000, Key: 70 + i}})
		l.read(Read{ID: uint64(i), Len: 2000, Direct: true})
	}
	l.mustSend(bsdh.Message{MID: bsdh.SrcAvailCancel})
	l.mustSend(bsdh.Message{MID: bsdh.SuspComm, Port: 5})
	l.outputs()
	l.s.HandleRead(l.h.w.now, true)
	if o := l.only(); o.Message.MID != bsdh.RdmaRdCompl || o.Message.Ack != l.next-3 {
		t.Fatalf("after the first RDMA READ: %+v, the cancel is number %d", o, l.next-2)
	}
	l.s.HandleRead(l.h.w.now, true)
	out := l.outputs()
	if len(out) != 2 || out[0].Message.MID != bsdh.RdmaRdCompl || out[1].Message.MID != bsdh.SuspCommAck || out[1].Message.Ack != l.next-1 {
		t.Errorf("after the second RDMA READ: %+v", out)
	}
}
