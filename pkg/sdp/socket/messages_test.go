// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"encoding/hex"
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// What a socket sends for what it was told, message by message. Its peer is the test, so that both sides cannot be wrong
// in the same way.

// rdmaMoves are sockets that move more than 1000 bytes by RDMA, and may advertise more than 900.
var rdmaMoves = Config{ZcopyBytes: 1000, RecvBytes: 900}

// mustSend is send of what is in order.
func (l *lone) mustSend(m bsdh.Message) {
	l.t.Helper()
	if err := l.send(m, nil); err != nil {
		l.t.Fatalf("%v: %v", m.MID, err)
	}
}

func (l *lone) write(id uint64, n uint32) {
	l.t.Helper()
	if err := l.s.Write(l.h.w.now, Write{ID: id, Len: n, Direct: true}); err != nil {
		l.t.Fatal(err)
	}
}

func (l *lone) read(r Read) {
	l.t.Helper()
	if err := l.s.Read(l.h.w.now, r); err != nil {
		l.t.Fatal(err)
	}
}

// outputs polls what is sent by messages, and by RDMA.
func (l *lone) outputs() []Output {
	var all []Output
	for _, o := range l.s.Poll(nil) {
		if (o.Kind == OutSend && o.Message.MID != bsdh.HelloAck) || o.Kind == OutRDMARead || o.Kind == OutRDMAWrite {
			all = append(all, o)
		}
	}
	return all
}

// only is the one of outputs that there must be.
func (l *lone) only() Output {
	l.t.Helper()
	all := l.outputs()
	if len(all) != 1 {
		l.t.Fatalf("outputs %+v, want one", all)
	}
	return all[0]
}

// pipeline brings our stream, the peer's, or both into Pipelined mode.
func (l *lone) pipeline(ours, peers bool) {
	l.t.Helper()
	if ours {
		l.s.PreferMode(l.h.w.now, bsdh.Pipelined)
	}
	if peers {
		l.mustSend(bsdh.Message{MID: bsdh.ModeChange, Change: bsdh.ModeWord{Mode: bsdh.Pipelined}})
	}
	l.outputs()
}

// Hello and HelloAck are those of figures 5 and 6, byte by byte. Their numbers, which are 0, are not looked at, and both sides
// lower their RDMA READs to what the other one asks for and serves.
func TestSection6_2_Messages(t *testing.T) {
	now := time.Unix(0, 0)
	cfg := Config{ZcopyBytes: NoZcopy, RecvBuffers: 9, RecvBytes: 700, SendBytes: 800, MaxAdverts: 5, IRD: 3, ORD: 4}
	a, err := New(now, cfg)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Role, cfg.IRD, cfg.ORD = Accepting, 2, 1
	b, err := New(now, cfg)
	if err != nil {
		t.Fatal(err)
	}
	want := func(m bsdh.Message, text string) []byte {
		t.Helper()
		if got := hex.EncodeToString(m.Append(nil, bsdh.LayoutFigures)); got != text {
			t.Errorf("%v %s, want %s", m.MID, got, text)
		}
		m.Seq, m.Ack = 7, 9
		return m.Append(nil, bsdh.LayoutFigures)
	}
	hello := want(a.Poll(nil)[0].Message, "00090000"+"00000020"+"00000000"+"00000000"+"00050011"+"00000320"+"000002bc"+"00030004")
	if err := b.HandleHello(now, hello); err != nil {
		t.Fatal(err)
	}
	out := b.Poll(nil)
	if len(out) != 2 || out[0].Kind != OutEstablished || out[0].IRD != 2 || out[0].ORD != 1 {
		t.Fatalf("accepting peer: %+v", out)
	}
	ack := want(out[1].Message, "00090001"+"0000001c"+"00000000"+"00000000"+"00050011"+"000002bc"+"00020001")
	if err := a.HandleRecv(now, 0, ack, nil); err != nil {
		t.Fatal(err)
	}
	if out = a.Poll(nil); out[0].Kind != OutEstablished || out[0].IRD != 1 || out[0].ORD != 2 {
		t.Errorf("connecting peer: %+v", out)
	}
}

// A HelloAck that offers what no connection can be made of ends the connection. The minor version is no such thing.
func TestSection8_1_1_RefusesAck(t *testing.T) {
	for name, c := range map[string]struct {
		setup bsdh.Setup
		bad   bool
	}{
		"another minor version": {setup: bsdh.Setup{MaxAdverts: 1, Major: 1, Minor: 9, RecvBytes: 100, IRD: 1, ORD: 1}},
		"major version":         {setup: bsdh.Setup{MaxAdverts: 1, Major: 2, Minor: 1, RecvBytes: 100, IRD: 1, ORD: 1}, bad: true},
		"no adverts":            {setup: bsdh.Setup{Major: 1, Minor: 1, RecvBytes: 100, IRD: 1, ORD: 1}, bad: true},
		"no IRD":                {setup: bsdh.Setup{MaxAdverts: 1, Major: 1, Minor: 1, RecvBytes: 100, ORD: 1}, bad: true},
		"no ORD":                {setup: bsdh.Setup{MaxAdverts: 1, Major: 1, Minor: 1, RecvBytes: 100, IRD: 1}, bad: true},
	} {
		s, err := New(time.Unix(0, 0), Config{ZcopyBytes: NoZcopy})
		if err != nil {
			t.Fatal(err)
		}
		s.Poll(nil)
		m := bsdh.Message{MID: bsdh.HelloAck, Bufs: 9, Setup: c.setup}
		err = s.HandleRecv(time.Unix(0, 0), 0, m.Append(nil, bsdh.LayoutFigures), nil)
		if errors.Is(err, ErrProtocol) != c.bad || (s.State() == StateClosed) != c.bad || (s.State() == StateOpen) == c.bad {
			t.Errorf("HelloAck with %s: %v, %v", name, err, s.State())
		}
		if e := (*ViolationError)(nil); c.bad && (!errors.As(err, &e) || e.Violation != BadSetup) {
			t.Errorf("HelloAck with %s: %v, want %v", name, err, BadSetup)
		}
	}
}

// REQ_PIPE goes with RdmaRdCompl if the program waits with a buffer that is worth an advert. That no other message has it
// the simulator looks after, and TestSection9_3_Writes has RdmaWrCompl.
func TestSection6_1_2_AsksForPipelined(t *testing.T) {
	for _, next := range []bool{false, true} {
		l := newLone(t, rdmaMoves)
		l.read(Read{ID: 1, Len: 5000, Direct: true})
		if next {
			l.read(Read{ID: 2, Len: 5000, Direct: true})
		}
		l.mustSend(bsdh.Message{MID: bsdh.SrcAvail, Advert: bsdh.Advert{Len: 5000, Key: 7}, Payload: []byte{1}})
		l.outputs()
		l.s.HandleRead(l.h.w.now, true)
		if o := l.only(); o.Message.MID != bsdh.RdmaRdCompl || (o.Message.Flags == bsdh.RequestPipelined) != next {
			t.Errorf("another Read waits %t: %v %v", next, o.Message.MID, o.Message.Flags)
		}
	}
}

// REQ_PIPE is heeded in RdmaRdCompl and RdmaWrCompl, for our stream in Combined mode, and means nothing elsewhere.
func TestSection6_1_2_HeedsRequest(t *testing.T) {
	for name, c := range map[string]struct {
		ours, peers bool // in Pipelined mode
		buffered    bool // our stream
		m           bsdh.Message
		want        bsdh.Mode // of our stream
	}{
		"RdmaRdCompl":              {m: bsdh.Message{MID: bsdh.RdmaRdCompl, Bytes: 5000 - srcInline, Flags: bsdh.RequestPipelined}, want: bsdh.Pipelined},
		"RdmaRdCompl without":      {m: bsdh.Message{MID: bsdh.RdmaRdCompl, Bytes: 5000 - srcInline}, want: bsdh.Combined},
		"RdmaWrCompl":              {peers: true, m: bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 1, Flags: bsdh.RequestPipelined}, want: bsdh.Pipelined},
		"RdmaWrCompl without":      {peers: true, m: bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 1}, want: bsdh.Combined},
		"in Buffered mode":         {peers: true, buffered: true, m: bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 1, Flags: bsdh.RequestPipelined}, want: bsdh.Buffered},
		"without in Pipelined":     {ours: true, m: bsdh.Message{MID: bsdh.RdmaRdCompl, Bytes: 5000}, want: bsdh.Pipelined},
		"Data":                     {m: bsdh.Message{MID: bsdh.Data, Flags: bsdh.RequestPipelined}, want: bsdh.Combined},
		"SendSm":                   {m: bsdh.Message{MID: bsdh.SendSm, Flags: bsdh.RequestPipelined}, want: bsdh.Combined},
		"SrcAvail":                 {m: bsdh.Message{MID: bsdh.SrcAvail, Flags: bsdh.RequestPipelined, Advert: bsdh.Advert{Len: 9}, Payload: []byte{1}}, want: bsdh.Combined},
		"ChRcvBuf":                 {m: bsdh.Message{MID: bsdh.ChRcvBuf, Flags: bsdh.RequestPipelined, Bytes: 900}, want: bsdh.Combined},
		"ModeChange":               {m: bsdh.Message{MID: bsdh.ModeChange, Flags: bsdh.RequestPipelined, Change: bsdh.ModeWord{Mode: bsdh.Pipelined}}, want: bsdh.Combined},
		"cancel of what is not":    {m: bsdh.Message{MID: bsdh.SrcAvailCancel, Flags: bsdh.RequestPipelined}, want: bsdh.Combined},
		"end of the peer's stream": {m: bsdh.Message{MID: bsdh.DisConn, Flags: bsdh.RequestPipelined}, want: bsdh.Combined},
	} {
		l := newLone(t, rdmaMoves)
		if l.pipeline(c.ours, c.peers); c.buffered {
			l.s.PreferMode(l.h.w.now, bsdh.Buffered)
		} else {
			l.write(1, 5000) // is advertised
		}
		if c.peers {
			l.read(Read{ID: 2, Len: 5000, Direct: true}) // is advertised
		}
		l.mustSend(c.m)
		want := map[bool]bsdh.Mode{false: bsdh.Combined, true: bsdh.Pipelined}[c.peers || name == "ModeChange"]
		if v := l.s.Snapshot(); v.SendMode != c.want || v.RecvMode != want || l.s.src.want != c.want {
			t.Errorf("%s: our stream in %v mode, %v wanted, the peer's in %v", name, v.SendMode, l.s.src.want, v.RecvMode)
		}
	}
}

// A SrcAvail describes all that is offered, whether its first bytes go with it or not. Its key lives until all is read, is
// then dead whoever ended it, and the peer can invalidate no other.
func TestSection9_2_Offers(t *testing.T) {
	for _, pipelined := range []bool{false, true} {
		for name, c := range map[string]struct {
			all bool  // the peer says that it has read all
			inv int32 // key that it invalidates: ours and this; -1: none
			bad bool
		}{
			"no key":         {all: true, inv: -1},
			"the key":        {all: true},
			"another key":    {all: true, inv: 1, bad: true},
			"the key early":  {bad: true},
			"a part, no key": {inv: -1},
		} {
			l := newLone(t, rdmaMoves)
			l.pipeline(pipelined, false)
			l.write(1, 5000)
			o := l.only()
			a, inline := o.Message.Advert, uint32(srcInline)
			if pipelined {
				inline = 0
			}
			g := l.h.keys[a.Key]
			if o.Message.MID != bsdh.SrcAvail || o.Len != inline || a.Len != 5000 || a.Addr != g.addr || g.pos != 0 || g.n != 5000 || g.right != PeerReads {
				t.Fatalf("Pipelined %t: %+v, which opens %+v", pipelined, o, g)
			}
			l.mustSend(bsdh.Message{MID: bsdh.RdmaRdCompl, Bytes: 1000})
			if len(l.h.keys) != 1 {
				t.Fatalf("Pipelined %t: keys %v when a part was read", pipelined, l.h.keys)
			}
			n := uint32(100)
			if c.all {
				n = 4000 - inline
			}
			key := a.Key + rdma.RKey(c.inv)
			inv := &key
			if c.inv < 0 {
				inv = nil
			}
			err := l.send(bsdh.Message{MID: bsdh.RdmaRdCompl, Bytes: n}, inv)
			if errors.Is(err, ErrProtocol) != c.bad || (err != nil) != c.bad || (len(l.h.keys) == 0) != (c.all || c.bad) {
				t.Errorf("Pipelined %t, %s: %v, keys %v", pipelined, name, err, l.h.keys)
			}
		}
	}
}

// A SrcAvail is read from where its payload ends, at any address, with its key, into as many Reads as it fills, by all RDMA READs at
// a time that the peer serves. RdmaRdCompl comes behind the last one, tells of all, and invalidates the key.
func TestSection9_2_Reads(t *testing.T) {
	for off := range uint64(9) {
		l := newLone(t, rdmaMoves)
		l.read(Read{ID: 1, Len: 2000, Direct: true})
		l.read(Read{ID: 2, Len: 3000, Direct: true})
		at := 1<<40 + off
		l.mustSend(bsdh.Message{MID: bsdh.SrcAvail, Advert: bsdh.Advert{Len: 5000, Key: 77, Addr: at}, Payload: []byte{1}})
		out := l.outputs()
		if len(out) != 2 {
			t.Fatalf("outputs %+v, want two RDMA READs", out)
		}
		if o := out[0]; o.Kind != OutRDMARead || o.Key != 77 || o.Addr != at+1 || o.Len != 1999 || o.ID != 1 || o.Offset != 1 {
			t.Fatalf("first RDMA READ %+v", o)
		}
		if o := out[1]; o.Kind != OutRDMARead || o.Key != 77 || o.Addr != at+2000 || o.Len != 3000 || o.ID != 2 || o.Offset != 0 {
			t.Fatalf("second RDMA READ %+v", o)
		}
		l.s.HandleRead(l.h.w.now, true)
		if out := l.outputs(); len(out) != 0 {
			t.Fatalf("after the first RDMA READ: %+v", out)
		}
		l.s.HandleRead(l.h.w.now, true)
		if o := l.only(); o.Message.MID != bsdh.RdmaRdCompl || o.Message.Bytes != 4999 || !o.Invalidate || o.Key != 77 || !o.Message.Solicited() {
			t.Errorf("after the second RDMA READ: %+v", o)
		}
	}
}

// There are no more RDMA READs at a time than the peer serves. An advert that is read in part is reported when no more of it is
// under way, and no RdmaRdCompl tells of two.
func TestSection9_2_ReadsAtATime(t *testing.T) {
	l := newLone(t, Config{ZcopyBytes: 1000, RecvBytes: 900, ORD: 2})
	l.pipeline(false, true)
	for i := range uint64(3) {
		l.mustSend(bsdh.Message{MID: bsdh.SrcAvail, Advert: bsdh.Advert{Len: 2000, Key: rdma.RKey(70 + i), Addr: 10_000 * i}})
	}
	l.read(Read{ID: 1, Len: 2000, Direct: true})
	l.read(Read{ID: 2, Len: 1500, Direct: true})
	for i, o := range l.outputs() {
		if want := []uint32{2000, 1500}[i]; o.Kind != OutRDMARead || o.Len != want || o.Key != rdma.RKey(70+i) || o.Addr != uint64(10_000*i) {
			t.Fatalf("RDMA READ %d: %+v", i, o)
		}
	}
	l.read(Read{ID: 3, Len: 5000, Direct: true})
	if out := l.outputs(); len(out) != 0 {
		t.Fatalf("a third RDMA READ: %+v", out)
	}
	l.s.HandleRead(l.h.w.now, true)
	out := l.outputs()
	if len(out) != 2 || out[0].Kind != OutRDMARead || out[0].Len != 500 || out[0].Addr != 11_500 || out[0].ID != 3 || out[0].Offset != 0 {
		t.Fatalf("after the first RDMA READ: %+v", out)
	}
	if o := out[1]; o.Message.MID != bsdh.RdmaRdCompl || o.Message.Bytes != 2000 || o.Key != 70 {
		t.Fatalf("RdmaRdCompl %+v", o)
	}
	l.s.HandleRead(l.h.w.now, true) // of a part
	if o := l.only(); o.Kind != OutRDMARead || o.Len != 2000 || o.Key != 72 || o.ID != 3 || o.Offset != 500 {
		t.Fatalf("after the second RDMA READ: %+v", o)
	}
	l.s.HandleRead(l.h.w.now, true)
	if o := l.only(); o.Message.MID != bsdh.RdmaRdCompl || o.Message.Bytes != 2000 || o.Key != 71 {
		t.Fatalf("after the third RDMA READ: %+v", o)
	}
	l.s.HandleRead(l.h.w.now, true)
	if o := l.only(); o.Message.MID != bsdh.RdmaRdCompl || o.Message.Bytes != 2000 || o.Key != 72 {
		t.Fatalf("after the last RDMA READ: %+v", o)
	}
}

// What the device cannot open for RDMA READs is refused, and comes as messages.
func TestSection9_2_NoSink(t *testing.T) {
	l := newLone(t, rdmaMoves)
	l.h.refuse = true
	l.read(Read{ID: 1, Len: 5000, Direct: true, Fill: true})
	l.mustSend(bsdh.Message{MID: bsdh.SrcAvail, Advert: bsdh.Advert{Len: 2000, Key: 77}, Payload: []byte{1}})
	if o := l.only(); o.Message.MID != bsdh.SendSm {
		t.Errorf("output %+v, want SendSm", o)
	}
}

// SrcAvailCancel finds RDMA READs under way: what they bring is reported, advert by advert, and the rest refused, once. Until they
// are done the cancel is not acknowledged.
func TestSection9_5_4_CancelsReads(t *testing.T) {
	l := newLone(t, rdmaMoves)
	l.pipeline(false, true)
	for i := range rdma.RKey(3) {
		l.mustSend(bsdh.Message{MID: bsdh.SrcAvail, Advert: bsdh.Advert{Len: 2000, Key: 70 + i}})
	}
	l.read(Read{ID: 1, Len: 3500, Direct: true})
	if out := l.outputs(); len(out) != 2 || out[1].Len != 1500 {
		t.Fatalf("RDMA READs %+v", out)
	}
	l.mustSend(bsdh.Message{MID: bsdh.SrcAvailCancel})
	l.read(Read{ID: 2, Len: 3500, Direct: true})
	l.s.HandleRead(l.h.w.now, true)
	if o := l.only(); o.Message.MID != bsdh.RdmaRdCompl || o.Message.Bytes != 2000 || o.Message.Ack != l.next-2 {
		t.Fatalf("after the first RDMA READ: %+v, the cancel is number %d", o, l.next-1)
	}
	l.s.HandleRead(l.h.w.now, true)
	out := l.outputs()
	if len(out) != 3 || out[0].Message.MID != bsdh.RdmaRdCompl || out[0].Message.Bytes != 1500 || out[0].Invalidate ||
		out[1].Message.MID != bsdh.SendSm || out[1].Message.Ack != l.next-1 || out[2].Message.MID != bsdh.SinkAvail {
		t.Fatalf("after the second RDMA READ: %+v", out)
	}
}

// What was read in part may be refused then, once: the rest goes by Bcopy.
func TestSection9_2_ReadThenRefused(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	a.write(50_000, true, false)
	b.read(20_000, true, false)
	settle(t, w)
	b.read(30_000, false, true)
	settle(t, w)
	if w.mids[bsdh.RdmaRdCompl] != 1 || w.mids[bsdh.SendSm] != 1 || b.received != 50_000 || len(a.keys) > 0 {
		t.Errorf("%v, %d bytes, keys %v", w.mids, b.received, a.keys)
	}
}

// A SinkAvail describes the whole buffer, and tells how many messages needed none. Its key lives until the peer has written, is
// then dead whoever ended it, and the peer can invalidate no other.
func TestSection9_3_Offers(t *testing.T) {
	for name, c := range map[string]struct {
		inv int32 // key that the peer invalidates: ours and this; -1: none
		bad bool
	}{
		"no key":      {inv: -1},
		"the key":     {},
		"another key": {inv: 1, bad: true},
	} {
		l := newLone(t, rdmaMoves)
		l.pipeline(false, true)
		for id := range uint64(2) {
			l.mustSend(bsdh.Message{MID: bsdh.Data, Payload: []byte{1}})
			l.read(Read{ID: id, Len: 1})
		}
		l.outputs()
		l.read(Read{ID: 3, Len: 5000, Direct: true})
		o := l.only()
		a := o.Message.Advert
		g := l.h.keys[a.Key]
		if o.Message.MID != bsdh.SinkAvail || a.Len != 5000 || a.Addr != g.addr || a.NonDiscards != 2 || g.n != 5000 || g.right != PeerWrites {
			t.Fatalf("%+v, which opens %+v", o, g)
		}
		key := a.Key + rdma.RKey(c.inv)
		inv := &key
		if c.inv < 0 {
			inv = nil
		}
		err := l.send(bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 400}, inv)
		if errors.Is(err, ErrProtocol) != c.bad || (err != nil) != c.bad || len(l.h.keys) != 0 {
			t.Errorf("%s: %v, keys %v", name, err, l.h.keys)
		}
	}
}

// A buffer that is to be full before it comes back (MSG_WAITALL) is not advertised: one message could end it.
func TestSection9_3_WaitAll(t *testing.T) {
	for _, fill := range []bool{false, true} {
		l := newLone(t, rdmaMoves)
		l.pipeline(false, true)
		l.read(Read{ID: 1, Len: 5000, Direct: true, Fill: fill})
		if out := l.outputs(); (len(out) == 0) != fill {
			t.Errorf("to be filled %t: %+v", fill, out)
		}
	}
}

// A SinkAvail is written to from its first byte on, at any address, with its key, also if it came with payload. RdmaWrCompl comes
// right behind the RDMA WRITE, tells of it, and invalidates the key. What does not fit waits for another buffer, and is then
// offered. The Write is not over before the RDMA WRITE is.
func TestSection9_3_Writes(t *testing.T) {
	for off := range uint64(9) {
		l := newLone(t, rdmaMoves)
		l.pipeline(true, false)
		at := 1<<40 + off
		l.mustSend(bsdh.Message{MID: bsdh.SinkAvail, Advert: bsdh.Advert{Len: 3000, Key: 88, Addr: at}, Payload: []byte{1}})
		l.read(Read{ID: 1, Len: 1}) // takes the payload
		flags := bsdh.Flags(0)
		if off%2 == 0 {
			l.read(Read{ID: 2, Len: 5000, Direct: true})
			flags = bsdh.RequestPipelined
		}
		l.write(3, 5000)
		out := l.outputs()
		if len(out) != 2 {
			t.Fatalf("outputs %+v, want an RDMA WRITE and RdmaWrCompl", out)
		}
		if o := out[0]; o.Kind != OutRDMAWrite || o.Key != 88 || o.Addr != at || o.Pos != 0 || o.Len != 3000 {
			t.Fatalf("RDMA WRITE %+v", o)
		}
		if o := out[1]; o.Message.MID != bsdh.RdmaWrCompl || o.Message.Bytes != 3000 || !o.Invalidate || o.Key != 88 || o.Message.Flags != flags || !o.Message.Solicited() {
			t.Errorf("RdmaWrCompl %+v", o)
		}
		if at, ok := l.s.NextTimeout(); !ok || at != l.h.w.now.Add(sinkDelay) {
			t.Errorf("due at %v, %t, want the end of the wait for a buffer", at, ok)
		}
		l.h.w.now = l.h.w.now.Add(sinkDelay)
		l.s.HandleTimeout(l.h.w.now)
		if o := l.only(); o.Message.MID != bsdh.SrcAvail || o.Message.Advert.Len != 2000 {
			t.Errorf("%+v, want SrcAvail", o)
		}
		l.mustSend(bsdh.Message{MID: bsdh.RdmaRdCompl, Bytes: 2000})
		if v := l.s.Snapshot(); v.Writes != 1 || v.Writing != 1 {
			t.Fatalf("before the end of the RDMA WRITE: %d Writes, %d RDMA WRITEs", v.Writes, v.Writing)
		}
		if l.s.HandleWrite(l.h.w.now, true); l.s.Snapshot().Writes != 0 {
			t.Error("the RDMA WRITE is done, and its Write is not over")
		}
	}
}

// Buffers of the peer are written to one behind the other, without a wait for completions, as long as the send queue has room for
// RDMA WRITEs; then the next one waits, and is not sent as Data. A SinkAvailCancel finds those that are left.
func TestSection9_3_WritesAtATime(t *testing.T) {
	cfg := rdmaMoves
	cfg.MaxAdverts = MaxRDMAWrites + 2
	l := newLone(t, cfg)
	l.pipeline(true, false)
	for i := range rdma.RKey(MaxRDMAWrites + 2) {
		l.mustSend(bsdh.Message{MID: bsdh.SinkAvail, Advert: bsdh.Advert{Len: 2000, Key: 100 + i}})
	}
	for i := range uint64(MaxRDMAWrites + 2) {
		l.write(i, 2000)
	}
	out := l.outputs()
	for i, o := range out {
		if i%2 == 0 && (o.Kind != OutRDMAWrite || o.Key != rdma.RKey(100+i/2)) || i%2 == 1 && o.Message.MID != bsdh.RdmaWrCompl {
			t.Fatalf("output %d: %+v", i, o)
		}
	}
	if len(out) != 2*MaxRDMAWrites {
		t.Fatalf("%d outputs, want %d RDMA WRITEs with RdmaWrCompl", len(out), MaxRDMAWrites)
	}
	l.s.HandleWrite(l.h.w.now, true)
	if out := l.outputs(); len(out) != 2 || out[0].Kind != OutRDMAWrite {
		t.Fatalf("after a completion: %+v", out)
	}
	l.mustSend(bsdh.Message{MID: bsdh.SinkAvailCancel})
	if o := l.only(); o.Message.MID != bsdh.SinkCancelAck {
		t.Errorf("after SinkAvailCancel: %+v", o)
	}
}

// Who has written to a buffer of the peer waits a moment for the next one, and then writes to that, too, with nothing offered in
// between; what is short does not wait.
func TestSection11_3_AwaitsBuffer(t *testing.T) {
	l := newLone(t, rdmaMoves)
	l.pipeline(true, false)
	sink := bsdh.Message{MID: bsdh.SinkAvail, Advert: bsdh.Advert{Len: 2000, Key: 100}}
	l.mustSend(sink)
	l.write(1, 2000)
	if out := l.outputs(); len(out) != 2 {
		t.Fatalf("%+v, want an RDMA WRITE and RdmaWrCompl", out)
	}
	l.write(2, 10)
	if o := l.only(); o.Message.MID != bsdh.Data {
		t.Fatalf("%+v, want Data", o)
	}
	l.write(3, 2000)
	if out := l.outputs(); len(out) != 0 {
		t.Fatalf("%+v, and the next buffer may come", out)
	}
	sink.Advert.NonDiscards = 1
	l.mustSend(sink)
	if out := l.outputs(); len(out) != 2 || out[0].Kind != OutRDMAWrite {
		t.Fatalf("%+v, want an RDMA WRITE and RdmaWrCompl", out)
	}
}

// What is to be sent anyhow goes with a SinkAvail, if that is all of it; the answer may come by an RDMA WRITE, or as Data.
func TestSection9_4_Transaction(t *testing.T) {
	for _, written := range []bool{false, true} {
		l := newLone(t, rdmaMoves)
		l.pipeline(false, true)
		l.s.credits.peerLimit = l.s.credits.sent // both wait for credit
		l.write(1, 10)
		l.read(Read{ID: 2, Len: 5000, Direct: true})
		l.mustSend(bsdh.Message{MID: bsdh.Data})
		if o := l.only(); o.Message.MID != bsdh.SinkAvail || o.Message.Advert.Len != 5000 || o.Pos != 0 || o.Len != 10 {
			t.Fatalf("%+v", o)
		}
		answer := bsdh.Message{MID: bsdh.Data, Payload: make([]byte, 70)}
		if written {
			answer = bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 70}
		}
		l.mustSend(answer)
		out := l.s.Poll(nil)
		if len(l.h.keys) != 0 || out[len(out)-1].Kind != OutRead || out[len(out)-1].ID != 2 || out[len(out)-1].Len != 70 {
			t.Errorf("answer %v: %+v, keys %v", answer.MID, out, l.h.keys)
		}
	}
}

// The payload of a SinkAvail that is stale is taken as any other, and its buffer is not written to.
func TestSection9_5_1_StaleWithPayload(t *testing.T) {
	l := newLone(t, rdmaMoves)
	l.pipeline(true, false)
	l.write(1, 10) // crosses the SinkAvail, and consumes it
	l.read(Read{ID: 2, Len: 5})
	l.outputs()
	l.mustSend(bsdh.Message{MID: bsdh.SinkAvail, Advert: bsdh.Advert{Len: 3000, Key: 88}, Payload: make([]byte, 5)})
	if v := l.s.Snapshot(); v.Reads != 0 || v.Held != 0 || len(v.PeerSinks) != 0 || v.PotentialNonDiscards != 0 {
		t.Errorf("%v", v)
	}
	l.write(3, 5000)
	if o := l.only(); o.Message.MID != bsdh.SrcAvail {
		t.Errorf("%+v", o)
	}
}

// Up to the threshold all goes as Data, in each mode, and into a buffer of the peer, too; above it what the mode has.
func TestSection11_Thresholds(t *testing.T) {
	data, src := bsdh.Data, bsdh.SrcAvail
	for name, c := range map[string]struct {
		mode bsdh.Mode
		sink bool // the peer has a buffer advertised
		long bsdh.MID
	}{
		"Buffered":              {mode: bsdh.Buffered, long: data},
		"Combined":              {mode: bsdh.Combined, long: src},
		"Pipelined":             {mode: bsdh.Pipelined, long: src},
		"Pipelined with a sink": {mode: bsdh.Pipelined, sink: true},
	} {
		for _, n := range []uint32{1000, 1001} {
			cfg := rdmaMoves
			cfg.SendBytes = 4000 // all of it is one message
			l := newLone(t, cfg)
			if l.s.PreferMode(l.h.w.now, c.mode); c.sink {
				l.mustSend(bsdh.Message{MID: bsdh.SinkAvail, Advert: bsdh.Advert{Len: 2000, Key: 1}})
			}
			l.outputs()
			l.write(1, n)
			write := n > 1000 && c.sink
			out := l.outputs()
			if want := map[bool]int{false: 1, true: 2}[write]; len(out) != want { // with RdmaWrCompl
				t.Fatalf("%s, %d bytes: outputs %+v", name, n, out)
			}
			o, mid := out[0], data
			if n > 1000 {
				mid = c.long
			}
			if write != (o.Kind == OutRDMAWrite) || !write && o.Message.MID != mid {
				t.Errorf("%s, %d bytes: %v %v", name, n, o.Kind, o.Message.MID)
			}
			if v := l.s.Snapshot(); n == 1000 && len(v.PeerSinks) != 0 {
				t.Errorf("%s: a message left the peer's buffer: %v", name, v)
			}
		}
	}
}

// What the peer offers is read even if it is too short for us to offer it ourselves: that is less work for both than a
// refusal.
func TestSection9_5_2_OtherThreshold(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 100_000})
	b.read(5000, true, false)
	a.write(5000, true, false)
	settle(t, w)
	if w.mids[bsdh.RdmaRdCompl] != 1 || w.mids[bsdh.SendSm] != 0 {
		t.Errorf("%v", w.mids)
	}
}

// The sender of a stream changes its mode when ModeChange goes, and not later; SendSm asks for the next lower one, twice for
// Buffered.
func TestSection12_Refusals(t *testing.T) {
	l := newLone(t, rdmaMoves)
	wantMode := func(m bsdh.Mode, after string) {
		t.Helper()
		if got := l.s.Snapshot().SendMode; got != m {
			t.Fatalf("after %s: %v mode, want %v", after, got, m)
		}
	}
	l.s.PreferMode(l.h.w.now, bsdh.Pipelined)
	wantMode(bsdh.Pipelined, "ModeChange")
	if o := l.only(); o.Message.MID != bsdh.ModeChange || o.Message.Change != (bsdh.ModeWord{Mode: bsdh.Pipelined}) {
		t.Fatalf("%+v", o)
	}
	for i, want := range []bsdh.Mode{bsdh.Combined, bsdh.Combined, bsdh.Buffered} {
		l.write(uint64(i), 5000)
		l.mustSend(bsdh.Message{MID: bsdh.SendSm})
		wantMode(want, "SendSm")
		l.mustSend(bsdh.Message{MID: bsdh.Data}) // acknowledges
	}
}

// An out-of-band byte goes with the bytes before it, if there is credit for payload; else it is announced by one of the
// credits that are kept back.
func TestSection9_5_3_Announces(t *testing.T) {
	for _, credit := range []uint32{2, 3} {
		l := newLone(t, rdmaMoves)
		l.outputs()
		l.s.credits.peerLimit = l.s.credits.sent + credit
		if err := l.s.WriteUrgent(l.h.w.now, Write{ID: 1, Len: 4}); err != nil {
			t.Fatal(err)
		}
		flags, n := bsdh.OOBPending, uint32(0)
		if credit == 3 {
			flags, n = bsdh.OOBPending|bsdh.OOBPresent, 4
		}
		if o := l.only(); o.Message.MID != bsdh.Data || o.Message.Flags != flags || o.Len != n {
			t.Errorf("%d credits: %v with %v, %d bytes", credit, o.Message.MID, o.Message.Flags, o.Len)
		}
	}
}

// OOB_PEND in any message tells the program.
func TestSection6_1_2_AnnouncedInAny(t *testing.T) {
	for _, mid := range []bsdh.MID{bsdh.Data, bsdh.ChRcvBuf, bsdh.SrcAvailCancel, bsdh.DisConn} {
		l := newLone(t, rdmaMoves)
		l.mustSend(bsdh.Message{MID: mid, Flags: bsdh.OOBPending, Bytes: 900})
		n := 0
		for _, o := range l.s.Poll(nil) {
			if o.Kind == OutUrgent {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%v: told %d times", mid, n)
		}
	}
}

// What fails behind the close of our stream makes an abort of it, at once.
func TestSection8_2_1_FailedCompletion(t *testing.T) {
	for name, fail := range map[string]func(l *lone){
		"message": func(l *lone) { l.s.HandleSent(l.h.w.now, false) },
		"RDMA READ": func(l *lone) {
			l.read(Read{ID: 1, Len: 5000, Direct: true})
			l.mustSend(bsdh.Message{MID: bsdh.SrcAvail, Advert: bsdh.Advert{Len: 5000}, Payload: []byte{1}})
			l.s.HandleRead(l.h.w.now, false)
		},
		"RDMA WRITE": func(l *lone) {
			l.mustSend(bsdh.Message{MID: bsdh.SinkAvail, Advert: bsdh.Advert{Len: 5000}})
			l.s.HandleWrite(l.h.w.now, false)
		},
	} {
		l := newLone(t, rdmaMoves)
		l.pipeline(true, false)
		l.write(9, 5000) // DisConn waits for it
		l.s.Shutdown(l.h.w.now)
		if fail(l); l.s.State() != StateClosed || !errors.Is(l.s.Err(), ErrTransfer) || len(l.h.keys) != 0 {
			t.Errorf("%s: %v, %v, keys %v", name, l.s.State(), l.s.Err(), l.h.keys)
		}
	}
}

// Two credits let no payload go, and the peer gives none before they are down to one: what it has refused to read is waited for, with other
// adverts outstanding, too.
func TestSection10_5_RefusedWithTwoCredits(t *testing.T) {
	l := newLone(t, rdmaMoves)
	l.pipeline(true, false)
	l.write(1, 2000)
	l.write(2, 2000)
	if out := l.outputs(); len(out) != 2 || out[1].Message.MID != bsdh.SrcAvail {
		t.Fatalf("%+v, want two SrcAvails", out)
	}
	m := bsdh.Message{MID: bsdh.SendSm, Ack: l.s.credits.sent, Bufs: 3}
	if err := l.s.HandleRecv(l.h.w.now, 0, m.Append(nil, bsdh.LayoutFigures), nil); err != nil {
		t.Fatal(err)
	}
	if o := l.only(); o.Message.MID != bsdh.ModeChange {
		t.Fatalf("%+v, want ModeChange, which leaves two credits", o)
	}
	l.h.w.now = l.h.w.now.Add(updateDelay)
	l.s.HandleTimeout(l.h.w.now)
	if o := l.only(); o.Message.MID != bsdh.Data || o.Len != 0 {
		t.Errorf("%+v, want Data without payload", o)
	}
}

// After an RdmaWrCompl of 0 bytes, the only Read that is advertised stays before those that are not: it gets what comes next, and is advertised
// again.
func TestSection9_3_WritesNothing(t *testing.T) {
	l := newLone(t, rdmaMoves)
	l.pipeline(false, true)
	l.read(Read{ID: 1, Len: 5000, Direct: true})
	first := l.only().Message.Advert.Key
	l.read(Read{ID: 2, Len: 50})
	l.mustSend(bsdh.Message{MID: bsdh.RdmaWrCompl})
	if _, ok := l.h.keys[first]; ok {
		t.Error("the key that the peer has used is alive")
	}
	if o := l.only(); o.Message.MID != bsdh.SinkAvail || o.Message.Advert.Len != 5000 || o.Message.Advert.Key == first {
		t.Errorf("output %+v, want that the Read is advertised again", o)
	}
	l.mustSend(bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 4000})
	l.mustSend(bsdh.Message{MID: bsdh.Data, Payload: make([]byte, 50)})
	var over []uint64
	for _, o := range l.s.Poll(nil) {
		if o.Kind == OutRead {
			over = append(over, o.ID)
		}
	}
	if len(over) != 2 || over[0] != 1 || over[1] != 2 {
		t.Errorf("Reads %v are over, want 1 and 2", over)
	}
}
