// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// A program may send half of what the receive buffers of its peer hold, in messages of one byte, to a program that does not
// read.
func TestSection9_5_6_OneByteEach(t *testing.T) {
	c := Config{ZcopyBytes: NoZcopy, RecvBuffers: 8, RecvBytes: 200, Keep: true}
	w, a, b := pair(t, c, c)
	for range 800 {
		a.write(1, false, false)
		settle(t, w)
	}
	if v := b.s.Snapshot(); v.Held < 790 {
		t.Fatalf("%d of 800 bytes are there: %v", v.Held, v)
	}
	for range 100 {
		b.read(8, false, true)
		settle(t, w)
	}
	if v := b.s.Snapshot(); b.received != 800 || v.Held != 0 || v.Posted != 8 || len(b.kept) != 0 {
		t.Errorf("%v, %d bytes kept", v, len(b.kept))
	}
}

// Receive buffers that are full stay as they are: a copy would gain nothing.
func TestSection9_5_6_FullBuffers(t *testing.T) {
	c := Config{ZcopyBytes: NoZcopy, RecvBuffers: 8, RecvBytes: 200, Keep: true}
	w, a, b := pair(t, c, c)
	a.write(5000, false, false)
	settle(t, w)
	if len(b.kept) != 0 || b.s.Snapshot().Held < 1000 {
		t.Errorf("%d bytes kept, %v", len(b.kept), b.s.Snapshot())
	}
}

// Without Keep nothing is kept.
func TestSection9_5_6_Off(t *testing.T) {
	c := Config{ZcopyBytes: NoZcopy, RecvBuffers: 8, RecvBytes: 200}
	w, a, b := pair(t, c, c)
	for range 100 {
		a.write(1, false, false)
	}
	settle(t, w)
	if len(b.kept) != 0 || b.s.Snapshot().Held > 8 {
		t.Errorf("%d bytes kept, %v", len(b.kept), b.s.Snapshot())
	}
}

// A peer that sends out-of-band bytes without end makes us remember no more than there are receive buffers.
func TestSection9_5_6_UrgentBytes(t *testing.T) {
	l := newLone(t, Config{ZcopyBytes: NoZcopy, RecvBuffers: 8, RecvBytes: 200, Keep: true})
	n := 0
	for l.s.State() == StateOpen && n < 1000 {
		if len(l.h.posted) == 0 {
			break
		}
		i := l.h.posted[0]
		l.h.posted = l.h.posted[1:]
		m := bsdh.Message{MID: bsdh.Data, Flags: bsdh.OOBPresent, Payload: []byte{1}, Seq: uint32(n), Bufs: 100}
		l.h.buffers[i] = m.Append(nil, bsdh.LayoutFigures)
		if err := l.s.HandleRecv(l.h.w.now, i, l.h.buffers[i], nil); err != nil {
			break
		}
		for _, o := range l.s.Poll(nil) {
			l.h.do(o)
		}
		n++
	}
	if n < 8 || n > 24 {
		t.Errorf("%d out-of-band bytes were taken", n)
	}
}

// TestSection10_6_Held has the peer change the size of receive buffers twice, while the program reads nothing and what
// it reads later is moved to private memory in between: as many messages wait as there is room for, and no more.
func TestSection10_6_Held(t *testing.T) {
	l := newLone(t, Config{ZcopyBytes: NoZcopy, RecvBuffers: 8, RecvBytes: 200, MinRecvBytes: 100, MaxRecvBytes: 400, Keep: true})
	seq := uint32(0)
	most := 0
	take := func(m bsdh.Message) {
		if l.s.State() != StateOpen || len(l.h.posted) == 0 {
			return
		}
		i := l.h.posted[0]
		l.h.posted = l.h.posted[1:]
		m.Seq, m.Bufs = seq, 100
		seq++
		l.h.buffers[i] = m.Append(nil, bsdh.LayoutFigures)
		_ = l.s.HandleRecv(l.h.w.now, i, l.h.buffers[i], nil) // the state tells
		for _, o := range l.s.Poll(nil) {
			l.h.do(o)
		}
		most = max(most, l.s.snk.held.n)
	}
	urgent := func(sizes ...int) {
		for _, n := range sizes {
			take(bsdh.Message{MID: bsdh.Data, Flags: bsdh.OOBPresent, Payload: make([]byte, n)})
		}
	}
	urgent(1, 1, 1, 1, 1, 1, 1, 1)
	take(bsdh.Message{MID: bsdh.ChRcvBuf, Bytes: 400})
	urgent(184, 184, 184, 184, 184, 184, 184, 184)
	urgent(384, 384, 384, 1, 1, 200, 200, 1)
	take(bsdh.Message{MID: bsdh.ChRcvBuf, Bytes: 200})
	urgent(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
	if most < 3*8 || most > 4*8 {
		t.Errorf("up to %d messages waited", most)
	}
	if l.s.State() != StateOpen {
		t.Fatalf("in %v", l.s.State())
	}
	for range most {
		l.h.read(400, false, false) // each ends behind an out-of-band byte
	}
	if v := l.s.Snapshot(); v.RecvBytes != 200 || v.Held != 0 {
		t.Errorf("when all is read: %v", v)
	}
}

// A message for which there is no place in line ends the connection, and nothing else.
func TestSocket_lineIsFull(t *testing.T) {
	l := newLone(t, Config{ZcopyBytes: NoZcopy, RecvBuffers: 8, RecvBytes: 200})
	for held := &l.s.snk.held; !held.isFull(); {
		held.push(heldPayload{Kept, 0, 1, true})
	}
	m := bsdh.Message{MID: bsdh.Data, Payload: []byte{1}, Bufs: 100}
	i := l.h.posted[0]
	l.h.buffers[i] = m.Append(nil, bsdh.LayoutFigures)
	var v *ViolationError
	if err := l.s.HandleRecv(l.h.w.now, i, l.h.buffers[i], nil); !errors.As(err, &v) || v.Violation != NoCredit {
		t.Errorf("error %v, want %v", err, NoCredit)
	}
}
