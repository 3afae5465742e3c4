// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// resizable are sockets that take receive buffers of 100 to 2000 bytes, with 500 at first.
func resizable(t *testing.T) (*world, *host, *host) {
	t.Helper()
	c := Config{ZcopyBytes: NoZcopy, RecvBuffers: 8, RecvBytes: 500, SendBytes: 4000, MinRecvBytes: 100, MaxRecvBytes: 2000}
	return pair(t, c, c)
}

func (h *host) resize(t *testing.T, n uint32) {
	t.Helper()
	if err := h.s.ResizePeer(h.w.now, n); err != nil {
		t.Fatal(err)
	}
	h.run()
}

// A larger size counts when ChRcvBufAck is there, and that goes when every receive buffer of the old size was used. Those of
// the new size are posted at once.
func TestSection10_6_Increase(t *testing.T) {
	w, a, b := resizable(t)
	a.resize(t, 1500)
	for a.deliver() {
	}
	posted := len(b.posted)
	if posted < 15 || w.mids[bsdh.ChRcvBufAck] != 0 || a.s.peer.recvBytes != 500 {
		t.Fatalf("%d receive buffers posted, %d acknowledgements, peer's are of %d bytes", posted, w.mids[bsdh.ChRcvBufAck], a.s.peer.recvBytes)
	}
	for range 8 {
		if w.mids[bsdh.ChRcvBufAck] != 0 || b.s.Snapshot().RecvBytes != 500 {
			t.Fatalf("acknowledged with %v posted", b.posted)
		}
		a.write(10, false, false)
		b.read(100, false, false)
		settle(t, w)
	}
	if w.mids[bsdh.ChRcvBufAck] != 1 || a.s.peer.recvBytes != 1500 || b.s.Snapshot().RecvBytes != 1500 || len(b.posted) != 8 {
		t.Fatalf("%d acknowledgements, %v, posted %v", w.mids[bsdh.ChRcvBufAck], a.s.Snapshot(), b.posted)
	}
	n := w.mids[bsdh.Data]
	a.write(1400, false, false)
	b.read(1400, false, false)
	settle(t, w)
	if got := w.mids[bsdh.Data] - n; got != 1 || b.received != 1480 {
		t.Errorf("%d messages for 1400 bytes, %d bytes", got, b.received)
	}
}

// A smaller size counts for its sender when ChRcvBuf goes, and is acknowledged at once.
func TestSection10_6_Decrease(t *testing.T) {
	w, a, b := resizable(t)
	a.resize(t, 120)
	if a.s.peer.recvBytes != 120 {
		t.Errorf("messages of up to %d bytes behind ChRcvBuf", a.s.peer.recvBytes)
	}
	settle(t, w)
	if w.mids[bsdh.ChRcvBufAck] != 1 || b.s.Snapshot().RecvBytes != 120 {
		t.Errorf("%d acknowledgements, %v", w.mids[bsdh.ChRcvBufAck], b.s.Snapshot())
	}
	for range 10 {
		a.write(400, false, false)
		b.read(400, false, true)
		settle(t, w)
	}
	if len(b.posted) != 8 || b.received != 4000 {
		t.Errorf("posted %v, %d bytes", b.posted, b.received)
	}
}

// What is beyond our bounds comes as close as it may.
func TestSection10_6_Bounds(t *testing.T) {
	for _, c := range []struct{ ask, want uint32 }{{40, 100}, {100, 100}, {500, 500}, {2001, 2000}, {1 << 30, 2000}} {
		w, a, b := resizable(t)
		a.resize(t, c.ask)
		for range 10 {
			a.write(10, false, false)
			b.read(10, false, false)
			settle(t, w)
		}
		if got := b.s.Snapshot().RecvBytes; got != c.want || a.s.peer.recvBytes != c.want {
			t.Errorf("asked for %d: %d bytes, peer thinks %d, want %d", c.ask, got, a.s.peer.recvBytes, c.want)
		}
	}
}

// A size that stays as it is bars requests of that direction, and of no other.
func TestSection10_6_Barred(t *testing.T) {
	c := Config{ZcopyBytes: NoZcopy, RecvBytes: 500}
	for _, sizes := range [][2]uint32{{600, 700}, {400, 300}} {
		w, a, b := pair(t, c, c)
		for i, n := range sizes {
			a.resize(t, n)
			settle(t, w)
			if w.mids[bsdh.ChRcvBuf] != 1 || w.mids[bsdh.ChRcvBufAck] != 1 || a.s.peer.recvBytes != 500 {
				t.Errorf("request %d for %d: %d sent, %d answered, %d bytes", i, n, w.mids[bsdh.ChRcvBuf], w.mids[bsdh.ChRcvBufAck], a.s.peer.recvBytes)
			}
		}
		a.resize(t, 1000-sizes[0])
		settle(t, w)
		if w.mids[bsdh.ChRcvBuf] != 2 || w.mids[bsdh.ChRcvBufAck] != 2 {
			t.Errorf("the other direction: %d sent", w.mids[bsdh.ChRcvBuf])
		}
		_ = b
	}
}

// While one is not acknowledged there is no other.
func TestSection10_6_OneAtATime(t *testing.T) {
	w, a, b := resizable(t)
	a.resize(t, 1000)
	a.resize(t, 1800)
	settle(t, w)
	if w.mids[bsdh.ChRcvBuf] != 1 {
		t.Errorf("%d requests", w.mids[bsdh.ChRcvBuf])
	}
	for range 20 {
		a.write(10, false, false)
		b.read(10, false, false)
		settle(t, w)
	}
	if w.mids[bsdh.ChRcvBuf] != 2 || b.s.Snapshot().RecvBytes != 1800 {
		t.Errorf("%d requests, %v", w.mids[bsdh.ChRcvBuf], b.s.Snapshot())
	}
}

// When both cross the accepting peer's counts, and the connecting peer's is sent again behind it.
func TestSection10_6_1_Crossing(t *testing.T) {
	w, a, b := resizable(t)
	a.resize(t, 200)
	b.resize(t, 300)
	settle(t, w)
	if w.mids[bsdh.ChRcvBuf] != 3 || w.mids[bsdh.ChRcvBufAck] != 2 {
		t.Errorf("%d requests, %d answers", w.mids[bsdh.ChRcvBuf], w.mids[bsdh.ChRcvBufAck])
	}
	if x, y := a.s.Snapshot(), b.s.Snapshot(); x.RecvBytes != 300 || y.RecvBytes != 200 || x.Resizing || y.Resizing {
		t.Errorf("%v: %d bytes, %v: %d bytes", x, x.RecvBytes, y, y.RecvBytes)
	}
}

// A message may not be longer than a buffer that is advertised when it comes: more is not promised while such a buffer is
// out, nor is such a buffer advertised when more is to be promised.
func TestSection10_6_SinkAvail(t *testing.T) {
	c := Config{ZcopyBytes: 50, RecvBuffers: 8, RecvBytes: 500, MaxRecvBytes: 2000}
	w, a, b := pair(t, c, c)
	a.s.PreferMode(w.now, bsdh.Pipelined)
	a.run()
	b.read(800, true, false)
	settle(t, w)
	a.resize(t, 1500)
	settle(t, w)
	b.read(900, true, false)
	settle(t, w)
	if n := len(b.s.Snapshot().SinkAdverts); n != 1 {
		t.Fatalf("%d adverts, want that of 800 bytes", n)
	}
	for b.s.Snapshot().RecvBytes == 500 {
		if n := len(b.s.Snapshot().SinkAdverts); n > 1 || w.mids[bsdh.ChRcvBufAck] > 0 {
			t.Fatalf("%d adverts, %d answers", n, w.mids[bsdh.ChRcvBufAck])
		}
		a.write(10, false, false)
		settle(t, w)
	}
	for b.s.Snapshot().Reads > 0 {
		a.write(10, false, false)
		settle(t, w)
	}
	for b.s.Snapshot().Held > 0 {
		b.read(100, false, false)
	}
	b.read(1600, true, false)
	b.read(900, true, false)
	settle(t, w)
	if n := len(b.s.Snapshot().SinkAdverts); n != 1 {
		t.Errorf("%d adverts with receive buffers of 1500 bytes, want that of 1600", n)
	}
}

// The answer to a request for more waits for an advert that a message of the new size would not fit into.
func TestSection10_6_ShortAdvert(t *testing.T) {
	l := newLone(t, Config{ZcopyBytes: 50, RecvBuffers: 8, RecvBytes: 500, MaxRecvBytes: 2000})
	l.pipeline(false, true)
	l.read(Read{ID: 1, Len: 800, Direct: true})
	l.mustSend(bsdh.Message{MID: bsdh.ChRcvBuf, Bytes: 1500})
	for range 8 { // each takes a receive buffer of the old size
		l.mustSend(bsdh.Message{MID: bsdh.Data})
	}
	for _, o := range l.outputs() {
		if o.Message.MID == bsdh.ChRcvBufAck {
			t.Fatal("answered while a buffer of 800 bytes is advertised")
		}
	}
	l.mustSend(bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 1})
	if o := l.only(); o.Message.MID != bsdh.ChRcvBufAck || o.Message.Bytes != 1500 {
		t.Errorf("%+v", o)
	}
}

// What a peer must not answer, and a second request before the answer to the first.
func TestSection10_6_Violations(t *testing.T) {
	for name, c := range map[string]struct{ ask, answer uint32 }{
		"less than asked":           {ask: 200, answer: 199},
		"more for less":             {ask: 200, answer: 501},
		"less for more":             {ask: 1000, answer: 499},
		"more than there is":        {ask: 1000, answer: bsdh.MaxBytes + 1},
		"without a request":         {answer: 500},
		"a second time":             {ask: 200, answer: 300},
		"nothing for a small thing": {ask: 37, answer: 0},
	} {
		l := newLone(t, Config{ZcopyBytes: NoZcopy})
		l.s.peer.recvBytes = 500
		if c.ask > 0 {
			l.h.resize(t, c.ask)
		}
		m := bsdh.Message{MID: bsdh.ChRcvBufAck, Bytes: c.answer}
		err := l.send(m, nil)
		if name == "a second time" && err == nil {
			err = l.send(m, nil)
		}
		if !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
	l := newLone(t, Config{ZcopyBytes: NoZcopy, MaxRecvBytes: 1 << 20})
	m := bsdh.Message{MID: bsdh.ChRcvBuf, Bytes: 1 << 20}
	if err := l.send(m, nil); err != nil {
		t.Fatal(err)
	}
	if err := l.send(m, nil); !errors.Is(err, ErrProtocol) {
		t.Errorf("a second request before the answer: %v", err)
	}
	for _, n := range []uint32{0, bsdh.MinBuffer - 1, bsdh.MaxBytes + 1} {
		if err := l.s.ResizePeer(l.h.w.now, n); !errors.Is(err, ErrInvalid) {
			t.Errorf("request of our own for %d bytes: %v", n, err)
		}
	}
}
