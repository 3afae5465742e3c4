// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

func quiet(string, ...any) {}

// pair is a world whose sockets are established, with nothing under way.
func pair(t *testing.T, a, b Config) (*world, *host, *host) {
	t.Helper()
	w := newWorld(a, b, quiet)
	settle(t, w)
	return w, w.sides[0], w.sides[1]
}

func settle(t *testing.T, w *world) {
	t.Helper()
	w.rest()
	if w.err != nil {
		t.Fatal(w.err)
	}
}

// lone is an accepting socket whose peer is the test.
type lone struct {
	t    *testing.T
	s    *Socket
	h    *host
	next uint32 // number of the peer's next message
}

func newLone(t *testing.T, cfg Config) *lone {
	t.Helper()
	w := newWorld(Config{}, cfg, quiet)
	h := w.sides[1]
	w.gone = true
	return &lone{t: t, s: h.s, h: h}
}

// send gives a message of the peer to the socket, with number and acknowledgement filled in.
func (l *lone) send(m bsdh.Message, inv *rdma.RKey) error {
	m.Seq, m.Bufs = l.next, 100
	m.Ack = l.s.credits.sent
	if m.Ack == none {
		m.Ack = 0
	}
	l.next++
	return l.s.HandleRecv(l.h.w.now, 0, m.Append(nil, bsdh.LayoutFigures), inv)
}

func TestSection8_1_1_Establish(t *testing.T) {
	w, a, b := pair(t, Config{IRD: 3, ORD: 9}, Config{IRD: 5, ORD: 2})
	for _, h := range w.sides {
		if v := h.s.Snapshot(); v.State != StateOpen || v.SendMode != bsdh.Combined || v.RecvMode != bsdh.Combined {
			t.Errorf("side %d: %v", h.side, v)
		}
	}
	if a.s.peer.recvBytes != DefaultRecvBytes || b.s.credits.available() != DefaultRecvBuffers-1 {
		t.Errorf("terms %+v, credit %d", a.s.peer, b.s.credits.available())
	}
}

// IRD and ORD are lowered to what the peer asks for and serves.
func TestSection8_1_1_Reads(t *testing.T) {
	hello := bsdh.Message{MID: bsdh.Hello, Bufs: 9, Setup: bsdh.Setup{MaxAdverts: 1, Major: 1, Minor: 7, RecvBytes: 100, IRD: 3, ORD: 7}}
	s, err := New(time.Unix(0, 0), Config{Role: Accepting, ZcopyBytes: NoZcopy, IRD: 10, ORD: 10})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.HandleHello(time.Unix(0, 0), hello.Append(nil, bsdh.LayoutFigures)); err != nil {
		t.Fatal(err)
	}
	out := s.Poll(nil)
	if len(out) != 2 || out[0].Kind != OutEstablished || out[0].ORD != 3 || out[0].IRD != 7 {
		t.Errorf("outputs %+v", out)
	}
	if m := out[1].Message; m.MID != bsdh.HelloAck || !m.Solicited() || m.Setup.Major != 1 || m.Setup.Minor != 1 {
		t.Errorf("answer %+v", m)
	}
}

func TestSection8_1_1_Refuses(t *testing.T) {
	good := bsdh.Message{MID: bsdh.Hello, Bufs: 9, Setup: bsdh.Setup{MaxAdverts: 1, Major: 1, Minor: 1, RecvBytes: 100, IRD: 3, ORD: 7}}
	for name, change := range map[string]func(m *bsdh.Message){
		"major version": func(m *bsdh.Message) { m.Setup.Major = 2 },
		"no adverts":    func(m *bsdh.Message) { m.Setup.MaxAdverts = 0 },
		"no IRD":        func(m *bsdh.Message) { m.Setup.IRD = 0 },
		"no ORD":        func(m *bsdh.Message) { m.Setup.ORD = 0 },
		"HelloAck":      func(m *bsdh.Message) { m.MID = bsdh.HelloAck },
	} {
		m := good
		change(&m)
		s, err := New(time.Unix(0, 0), Config{Role: Accepting, ZcopyBytes: NoZcopy})
		if err != nil {
			t.Fatal(err)
		}
		err = s.HandleHello(time.Unix(0, 0), m.Append(nil, bsdh.LayoutFigures))
		out := s.Poll(nil)
		if !errors.Is(err, ErrProtocol) || s.State() != StateClosed || len(out) != 2 || out[0].Kind != OutReset || out[1].Kind != OutEnded {
			t.Errorf("Hello with %s: %v, %v, outputs %+v", name, err, s.State(), out)
		}
	}
}

func TestSetupTimeout(t *testing.T) {
	for role := range Role(2) {
		s, err := New(time.Unix(0, 0), Config{Role: role, ZcopyBytes: NoZcopy})
		if err != nil {
			t.Fatal(err)
		}
		at, ok := s.NextTimeout()
		if !ok || at != time.Unix(0, 0).Add(DefaultSetupTimeout) {
			t.Fatalf("%v: timeout %v, %t", role, at, ok)
		}
		s.HandleTimeout(at)
		if s.State() != StateClosed || !errors.Is(s.Err(), ErrSetupTimeout) {
			t.Errorf("%v: %v, %v", role, s.State(), s.Err())
		}
	}
}

// The gate by credits: what may go with 0, 1, 2 and more of them.
func TestSection10_5_Gate(t *testing.T) {
	for n := range 5 {
		for _, gives := range []bool{false, true} {
			c := newCredits(10, 10, n)
			c.any, c.toldAck, c.received, c.told = true, true, 5, 14
			if !gives {
				c.posted--
			}
			payload, plain := n >= 3, n >= 2 || n == 1 && gives
			if c.raises() != gives || c.available() != n || c.allows(true) != payload || c.allows(false) != plain {
				t.Errorf("%d credits, gives %t (%t): payload %t, without %t", c.available(), gives, c.raises(), c.allows(true), c.allows(false))
			}
		}
	}
}

func TestSection6_1_5_NumbersWrap(t *testing.T) {
	w, a, b := pair(t, Config{}, Config{})
	for _, h := range w.sides {
		p := h.peer()
		last := h.s.credits.sent
		for _, n := range []*uint32{
			&h.s.credits.sent, &h.s.credits.peerAck, &h.s.credits.peerLimit, &p.s.credits.received, &p.s.credits.told,
		} {
			*n += 0xffff_fff0 - last
		}
		h.s.credits.ackSeen, p.s.credits.any, p.s.credits.toldAck = true, true, true
	}
	for range 100 {
		a.write(30, false, false)
		b.read(30, false, false)
		settle(t, w)
	}
	if n := a.s.credits.sent; n >= 0xffff_fff0 || b.received != 3000 {
		t.Errorf("last number %d, %d bytes", n, b.received)
	}
}

// Each of what a peer must not do ends the connection with a reason.
func TestViolations(t *testing.T) {
	cfg := Config{ZcopyBytes: 100, RecvBytes: 60, MaxAdverts: 2}
	advert := bsdh.Advert{Len: 5000, Key: 7, Addr: 1 << 20}
	key := rdma.RKey(12345)
	src := bsdh.Message{MID: bsdh.SrcAvail, Advert: advert, Payload: []byte{1}}
	pipe := bsdh.Message{MID: bsdh.ModeChange, Change: bsdh.ModeWord{Mode: bsdh.Pipelined}}
	bare := src
	bare.Payload = nil
	buffered := bsdh.Message{MID: bsdh.ModeChange, Change: bsdh.ModeWord{Mode: bsdh.Buffered}}
	offers := func(l *lone) {
		l.pipeline(false, true)
		l.read(Read{ID: 1, Len: 5000, Direct: true})
	}
	offersTwo := func(l *lone) {
		offers(l)
		l.read(Read{ID: 2, Len: 5000, Direct: true})
	}
	asks := func(l *lone) {
		if err := l.s.ResizePeer(l.h.w.now, 200); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		want   Violation
		do     func(l *lone)
		before []bsdh.Message
		m      bsdh.Message
		inv    *rdma.RKey
	}{
		"RdmaWrCompl beyond the buffer":  {want: BeyondAdvert, do: offers, m: bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 5001}},
		"RdmaWrCompl of nothing":         {want: UnexpectedMessage, do: offersTwo, m: bsdh.Message{MID: bsdh.RdmaWrCompl}},
		"RdmaWrCompl with another key":   {want: WrongKey, do: offers, m: bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 5000}, inv: &key},
		"ChRcvBufAck of another size":    {want: BadSize, do: asks, m: bsdh.Message{MID: bsdh.ChRcvBufAck, Bytes: 100}},
		"Hello":                          {want: UnexpectedMessage, m: bsdh.Message{MID: bsdh.Hello}},
		"HelloAck":                       {want: UnexpectedMessage, m: bsdh.Message{MID: bsdh.HelloAck}},
		"RdmaRdCompl":                    {want: NoAdvert, m: bsdh.Message{MID: bsdh.RdmaRdCompl, Bytes: 1}},
		"RdmaWrCompl":                    {want: NoAdvert, m: bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 1}},
		"SendSm":                         {want: NoAdvert, m: bsdh.Message{MID: bsdh.SendSm}},
		"SinkAvail in Combined mode":     {want: WrongMode, m: bsdh.Message{MID: bsdh.SinkAvail, Advert: advert}},
		"SrcAvail without payload":       {want: WrongMode, m: bare},
		"a second SrcAvail":              {want: WrongMode, before: []bsdh.Message{src}, m: src},
		"SrcAvail with payload":          {want: WrongMode, before: []bsdh.Message{pipe}, m: src},
		"SrcAvail in Buffered mode":      {want: WrongMode, before: []bsdh.Message{buffered}, m: src},
		"three SrcAvails":                {want: TooManyAdverts, before: []bsdh.Message{pipe, bare, bare}, m: bare},
		"payload behind SrcAvail":        {want: PayloadInTurn, before: []bsdh.Message{src}, m: bsdh.Message{MID: bsdh.Data, Payload: []byte{1}}},
		"same mode":                      {want: WrongMode, m: bsdh.Message{MID: bsdh.ModeChange, Change: bsdh.ModeWord{Mode: bsdh.Combined}}},
		"Pipelined to Buffered":          {want: WrongMode, before: []bsdh.Message{pipe}, m: buffered},
		"Buffered to Pipelined":          {want: WrongMode, before: []bsdh.Message{buffered}, m: pipe},
		"Buffered with an advert":        {want: WrongMode, before: []bsdh.Message{src}, m: buffered},
		"mode of our half":               {want: WrongMode, m: bsdh.Message{MID: bsdh.ModeChange, Change: bsdh.ModeWord{Mode: bsdh.Combined, Send: true}}},
		"Data behind DisConn":            {want: BehindEnd, before: []bsdh.Message{{MID: bsdh.DisConn}}, m: bsdh.Message{MID: bsdh.Data, Payload: []byte{1}}},
		"two DisConns":                   {want: BehindEnd, before: []bsdh.Message{{MID: bsdh.DisConn}}, m: bsdh.Message{MID: bsdh.DisConn}},
		"DisConn with an advert":         {want: BehindEnd, before: []bsdh.Message{src}, m: bsdh.Message{MID: bsdh.DisConn}},
		"invalidation of a key":          {want: WrongKey, m: bsdh.Message{MID: bsdh.Data}, inv: &key},
		"ChRcvBufAck":                    {want: UnexpectedMessage, m: bsdh.Message{MID: bsdh.ChRcvBufAck, Bytes: 100}},
		"SuspCommAck":                    {want: UnexpectedMessage, m: bsdh.Message{MID: bsdh.SuspCommAck}},
		"reserved message identifier":    {want: BadMessage, m: bsdh.Message{MID: bsdh.Data, Payload: make([]byte, 3)}},
		"acknowledgement of what is not": {want: BadAck, m: bsdh.Message{MID: bsdh.Data}},
		"wrong number":                   {want: BadNumber, m: bsdh.Message{MID: bsdh.Data}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLone(t, cfg)
			if c.do != nil {
				c.do(l)
			}
			for _, m := range c.before {
				if err := l.send(m, nil); err != nil {
					t.Errorf("%v before: %v", m.MID, err)
				}
			}
			m := c.m
			m.Seq, m.Bufs = l.next, 100
			b := m.Append(nil, bsdh.LayoutFigures)
			switch name {
			case "reserved message identifier":
				b[3] = 0x0f
			case "acknowledgement of what is not":
				binary.BigEndian.PutUint32(b[12:], 1000)
			case "wrong number":
				b[11]++
			}
			err := l.s.HandleRecv(l.h.w.now, 0, b, c.inv)
			if !errors.Is(err, ErrProtocol) || l.s.State() != StateClosed || !errors.Is(l.s.Err(), ErrProtocol) {
				t.Errorf("%v, %v, %v", err, l.s.State(), l.s.Err())
			}
			if e := (*ViolationError)(nil); !errors.As(l.s.Err(), &e) || e.Violation != c.want {
				t.Errorf("%v is %v, want %v", l.s.Err(), e, c.want)
			}
			if len(l.h.keys) > 0 {
				t.Errorf("keys %v outlive the connection", l.h.keys)
			}
		})
	}
}

// A peer without credit sends: the message is not taken.
func TestSection10_3_Overrun(t *testing.T) {
	l := newLone(t, Config{RecvBuffers: 4, ZcopyBytes: NoZcopy})
	for i := range 5 {
		err := l.send(bsdh.Message{MID: bsdh.Data, Payload: []byte{1}}, nil)
		if want := i == 4; errors.Is(err, ErrProtocol) != want {
			t.Errorf("message %d into 4 receive buffers: %v", i, err)
		}
		if e := (*ViolationError)(nil); i == 4 && (!errors.As(err, &e) || e.Violation != NoCredit) {
			t.Errorf("%v, want %v", err, NoCredit)
		}
	}
}

// Bcopy: what a message does not carry, others do; nothing is longer than the peer's receive buffers.
func TestSection9_1_Bcopy(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: NoZcopy}, Config{ZcopyBytes: NoZcopy, RecvBytes: 37})
	a.write(500, true, false)
	for range 20 {
		b.read(33, true, false)
		settle(t, w)
	}
	if b.received != 500 || w.mids[bsdh.Data] < 500/21 {
		t.Errorf("%d bytes by %d messages", b.received, w.mids[bsdh.Data])
	}
}

// Read Zcopy in Combined mode: a prefix travels as payload, the rest is read, and the last report invalidates the key.
func TestSection9_2_ReadZcopy(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	b.read(100_000, true, true)
	a.write(100_000, true, false)
	settle(t, w)
	if w.mids[bsdh.SrcAvail] != 1 || w.mids[bsdh.RdmaRdCompl] != 1 || b.received != 100_000 || len(a.keys) > 0 || len(a.writes) > 0 {
		t.Errorf("%v, %d bytes, keys %v", w.mids, b.received, a.keys)
	}
}

// SendSm: what suits no buffer goes by Bcopy.
func TestSection9_5_2_1_SendSm(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	a.write(50_000, true, false)
	for b.received < 50_000 && w.err == nil {
		b.read(20_000, false, false)
		settle(t, w)
	}
	if w.mids[bsdh.SendSm] != 1 || w.mids[bsdh.RdmaRdCompl] != 0 || len(a.keys) > 0 {
		t.Errorf("%v, keys %v", w.mids, a.keys)
	}
}

// Both peers offer, and neither program reads: after a while both fall back to Bcopy (§9.2).
func TestSection9_2_MutualAdverts(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	a.write(50_000, true, false)
	b.write(50_000, true, false)
	settle(t, w)
	if len(a.s.Snapshot().SrcAdverts) != 1 || len(b.s.Snapshot().SrcAdverts) != 1 {
		t.Fatalf("%v\n%v", a.s.Snapshot(), b.s.Snapshot())
	}
	at, ok := a.s.NextTimeout()
	if !ok || at.Sub(w.now) != deadlockDelay {
		t.Fatalf("timeout in %v, %t", at.Sub(w.now), ok)
	}
	w.now = at
	w.expire()
	settle(t, w)
	if w.mids[bsdh.SendSm] == 0 || a.s.Snapshot().Held+b.s.Snapshot().Held < 50_000 {
		t.Errorf("%v\n%v\n%v", w.mids, a.s.Snapshot(), b.s.Snapshot())
	}
}

// Write Zcopy: one RdmaWrCompl for each buffer, which may be filled in part; in Pipelined mode only.
func TestSection9_3_WriteZcopy(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000, RecvBytes: 900}, Config{ZcopyBytes: 1000, RecvBytes: 900})
	b.read(5000, true, false)
	settle(t, w)
	if w.mids[bsdh.SinkAvail] != 0 {
		t.Fatal("SinkAvail in Combined mode")
	}
	a.s.PreferMode(w.now, bsdh.Pipelined)
	a.run()
	settle(t, w)
	b.read(7000, true, false)
	b.read(900, true, false)  // not longer than a receive buffer
	b.read(7000, true, false) // behind one that is not advertised
	settle(t, w)
	if v := b.s.Snapshot(); len(v.SinkAdverts) != 2 || w.mids[bsdh.SinkAvail] != 2 {
		t.Fatalf("%v", v)
	}
	a.write(9000, true, false)
	settle(t, w)
	if w.mids[bsdh.RdmaWrCompl] != 2 || w.mids[bsdh.SrcAvail] != 0 || b.received != 9000 || len(b.keys) > 0 {
		t.Errorf("%v, %d bytes, keys %v", w.mids, b.received, b.keys)
	}
}

// The payload of one message ends an advert, however short it is.
func TestSection9_5_1_PayloadConsumesAdvert(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000, RecvBytes: 900}, Config{ZcopyBytes: 1000, RecvBytes: 900})
	a.s.PreferMode(w.now, bsdh.Pipelined)
	a.run()
	settle(t, w)
	b.read(5000, true, false)
	b.read(5000, true, false)
	a.write(3, false, false) // crosses both SinkAvails
	settle(t, w)
	v, u := a.s.Snapshot(), b.s.Snapshot()
	if b.received != 3 || len(u.SinkAdverts) != 1 || len(v.PeerSinks) != 1 || v.PotentialNonDiscards != u.NonDiscards {
		t.Errorf("%d bytes\n%v\n%v", b.received, v, u)
	}
}

// The example of the draft: of three adverts with count 0 and a potential of 2, the third is used.
func TestSection9_5_1_Example(t *testing.T) {
	cfg := Config{MaxAdverts: 8}
	cfg = cfg.withDefaults()
	o := newSource(&cfg)
	o.mode, o.potential = bsdh.Pipelined, 2
	for i := range 3 {
		if err := o.takeSink(&bsdh.Advert{Len: 100, Key: rdma.RKey(i)}, nil); err != nil {
			t.Fatal(err)
		}
	}
	if o.sinks.n != 1 || o.sinks.at(0).key != 2 || o.potential != 0 {
		t.Errorf("%d live, potential %d", o.sinks.n, o.potential)
	}
}

func TestSection9_5_3_Urgent(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	a.write(200_000, true, false)
	a.write(50_001, true, true)
	settle(t, w)
	if b.urgents != 0 {
		t.Error("announced more than 65,535 bytes before")
	}
	for b.received < 250_001 && w.err == nil {
		b.read(100_000, true, true)
		settle(t, w)
		b.s.CancelReads(w.now)
		b.run()
	}
	if b.urgents != 1 || !b.seen[250_000] || len(b.seen) != 1 {
		t.Errorf("%d announcements, seen %v", b.urgents, b.seen)
	}
}

func TestSection9_5_4_CancelWrites(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	a.write(50_000, true, false)
	settle(t, w)
	a.s.CancelWrites(w.now)
	a.run()
	settle(t, w)
	if w.mids[bsdh.SrcAvailCancel] != 1 || w.mids[bsdh.SendSm] != 1 || len(a.keys)+len(a.writes) > 0 || a.s.Snapshot().Produced != srcInline {
		t.Errorf("%v, keys %v, %v", w.mids, a.keys, a.s.Snapshot())
	}
	a.write(10, false, false)
	b.read(1000, false, false)
	b.read(1000, false, false)
	settle(t, w)
	if b.received != srcInline+10 {
		t.Errorf("%d bytes after it", b.received)
	}
}

// Writes behind which the stream ends can be canceled as others can. What was promised to the peer still goes, and the end of the stream
// comes right behind it.
func TestSection8_2_CancelWritesBehindShutdown(t *testing.T) {
	for _, direct := range []bool{false, true} {
		cfg := Config{ZcopyBytes: 1000, RecvBuffers: 8, RecvBytes: 900}
		w, a, b := pair(t, cfg, cfg)
		for range 3 {
			a.write(50_000, direct, false)
		}
		a.s.Shutdown(w.now)
		a.run()
		settle(t, w)
		if !a.s.CancelWrites(w.now) {
			t.Fatalf("direct %t: nothing to be canceled: %v", direct, a.s.Snapshot())
		}
		a.run()
		settle(t, w)
		if len(a.keys)+len(a.writes) > 0 {
			t.Errorf("direct %t: keys %v, Writes %v", direct, a.keys, a.writes)
		}
		for !b.eof && len(b.order) < 100 {
			b.read(1000, false, false)
			settle(t, w)
		}
		if got := b.received; !b.eof || got == 0 || got >= 50_000 || got != a.s.Snapshot().Produced {
			t.Errorf("direct %t: %d bytes, end of the stream %t: %v", direct, got, b.eof, a.s.Snapshot())
		}
		if a.s.CancelWrites(w.now) {
			t.Errorf("direct %t: canceled again", direct)
		}
	}
}

func TestSection9_5_5_CancelReads(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000, RecvBytes: 900}, Config{ZcopyBytes: 1000, RecvBytes: 900})
	a.s.PreferMode(w.now, bsdh.Pipelined)
	a.run()
	settle(t, w)
	b.read(5000, true, false)
	settle(t, w)
	b.s.CancelReads(w.now)
	b.run()
	if b.s.Snapshot().Reads != 1 {
		t.Error("a buffer is given back that the peer may write")
	}
	settle(t, w)
	if w.mids[bsdh.SinkAvailCancel] != 1 || w.mids[bsdh.SinkCancelAck] != 1 || len(b.keys) > 0 || b.s.Snapshot().Reads != 0 {
		t.Errorf("%v, keys %v, %v", w.mids, b.keys, b.s.Snapshot())
	}
}

// The peer's ChRcvBuf is answered with the size as it is (§10.6).
func TestSection10_6_Declines(t *testing.T) {
	l := newLone(t, Config{ZcopyBytes: NoZcopy, RecvBytes: 500})
	l.s.Poll(nil)
	if err := l.send(bsdh.Message{MID: bsdh.ChRcvBuf, Bytes: 9000}, nil); err != nil {
		t.Fatal(err)
	}
	for _, o := range l.s.Poll(nil) {
		if o.Kind == OutSend && o.Message.MID == bsdh.ChRcvBufAck && o.Message.Bytes == 500 {
			return
		}
	}
	t.Error("no ChRcvBufAck of 500 bytes")
}

func TestSection8_2_1_Close(t *testing.T) {
	w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
	a.write(5000, true, false)
	a.s.Shutdown(w.now)
	a.run()
	settle(t, w)
	if w.mids[bsdh.DisConn] != 0 {
		t.Fatal("DisConn before the data was taken")
	}
	if err := a.s.Write(w.now, Write{ID: 99, Len: 1}); !errors.Is(err, ErrState) {
		t.Errorf("write after the end: %v", err)
	}
	b.read(9000, true, false)
	b.read(9000, true, false)
	settle(t, w)
	if !b.eof || b.received != 5000 {
		t.Errorf("end of stream %t after %d bytes", b.eof, b.received)
	}
	b.write(100, false, false) // the other direction goes on
	a.read(100, false, false)
	b.s.Shutdown(w.now)
	b.run()
	settle(t, w)
	if a.received != 100 || !a.ended || !b.ended || a.endErr != nil || b.endErr != nil {
		t.Errorf("%d bytes, ended %t %v, %t %v", a.received, a.ended, a.endErr, b.ended, b.endErr)
	}
}

func TestSection8_2_2_Abort(t *testing.T) {
	for _, fin := range []bool{false, true} {
		w, a, b := pair(t, Config{ZcopyBytes: 1000}, Config{ZcopyBytes: 1000})
		w.gone = true
		b.write(5000, true, false)
		if fin {
			a.s.Shutdown(w.now)
			a.run()
		}
		settle(t, w)
		a.s.Abort(w.now)
		a.run()
		settle(t, w)
		if got := w.mids[bsdh.AbortConn] == 1; got != fin {
			t.Errorf("DisConn sent %t: AbortConn sent %t", fin, got)
		}
		if !errors.Is(a.endErr, ErrAborted) || b.endErr == nil || fin && !errors.Is(b.endErr, ErrReset) || len(a.keys)+len(b.keys)+len(b.writes) > 0 {
			t.Errorf("DisConn sent %t: %v, %v, keys %v %v", fin, a.endErr, b.endErr, a.keys, b.keys)
		}
	}
}
