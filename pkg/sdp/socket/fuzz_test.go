// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// fuzzBytes is a string of events.
type fuzzBytes []byte

func (b *fuzzBytes) next() int {
	if len(*b) == 0 {
		return 0
	}
	n := (*b)[0]
	*b = (*b)[1:]
	return int(n)
}

// fuzzEvent is the first byte of an event of [FuzzSocket]. The second is its argument. What a message has of values that are
// not allowed follows, if lie is set.
type fuzzEvent byte

const (
	fuzzData fuzzEvent = iota
	fuzzPayload
	fuzzSrcAvail
	fuzzSinkAvail
	fuzzRdCompl
	fuzzSendSm
	fuzzWrCompl
	fuzzMode
	fuzzSrcCancel
	fuzzSinkCancel
	fuzzCancelAck
	fuzzChRcvBuf
	fuzzChRcvBufAck
	fuzzDisConn
	fuzzAbortConn
	fuzzSuspComm
	fuzzSuspCommAck
	fuzzBytewise // a message of any bytes
	fuzzHello
	fuzzComplete
	fuzzFail
	fuzzAnswer // the peer's queue pair takes the next thing
	fuzzWrite
	fuzzUrgent
	fuzzRead
	fuzzCancelReads
	fuzzCancelWrites
	fuzzPrefer
	fuzzEnd
	fuzzResize
	fuzzTime
	fuzzKeys

	fuzzKinds           = fuzzKeys + 1
	fuzzLie   fuzzEvent = 0x80 // the message has values that are not allowed
	fuzzLate  fuzzEvent = 0x40 // it acknowledges nothing new
)

// fuzzPeer plays the peer of a socket, knowing all that the socket does: it builds what the draft allows in the socket's state,
// or, if the input says so, what it does not. It checks that the socket sends only what the draft allows it.
type fuzzPeer struct {
	w    *world
	a, b *host // the peer's memory, and the socket
	lied bool

	limit uint32 // the last message that the socket was ever allowed
	bytes uint32 // the longest one
	out   bsdh.Mode
	in    bsdh.Mode
}

func newFuzzPeer(in *fuzzBytes) *fuzzPeer {
	how := in.next()
	cfg := Config{RecvBuffers: 4 + how&3, RecvBytes: 60, ZcopyBytes: 50, MaxAdverts: 1 + how>>2&3}
	cfg.Keep, cfg.Suspends = how&16 > 0, how&48 == 48
	if how&64 > 0 {
		cfg.MinRecvBytes, cfg.MaxRecvBytes = 37, 200
	}
	if how&128 > 0 {
		cfg.SendDepth = 1
	}
	p := &fuzzPeer{w: stillWorld(Config{RecvBytes: 90, RecvBuffers: 4 + in.next()&7}, cfg, quiet)}
	p.a, p.b = p.w.sides[0], p.w.sides[1]
	p.w.gone, p.w.blind = true, true
	p.w.does = p.watch
	p.begin()
	p.w.sides[0].run()
	p.b.out = nil
	return p
}

// begin is for each connection of the transport.
func (p *fuzzPeer) begin() {
	p.limit, p.bytes = none+uint32(p.a.cfg.RecvBuffers), max(p.bytes, p.a.cfg.RecvBytes)
	p.in, p.out = bsdh.Combined, bsdh.Combined
	clear(p.a.keys)
}

// watch looks at an output of the socket: what figure 25 allows, within credit and the peer's receive buffers.
func (p *fuzzPeer) watch(h *host, o *Output) {
	if h != p.b {
		return
	}
	m := &o.Message
	ok := true
	switch {
	case o.Kind == OutRDMARead:
		ok = p.in != bsdh.Buffered
	case o.Kind == OutRDMAWrite:
		ok = p.out == bsdh.Pipelined
	case o.Kind == OutSuspended:
		p.begin()
	case o.Kind != OutSend || m.MID == bsdh.HelloAck:
	case after(m.Seq, p.limit), uint32(m.MID.HeadersLen())+o.Len > p.bytes:
		ok = false
	case m.MID == bsdh.SrcAvail:
		ok = p.out == bsdh.Combined && o.Len > 0 && o.Len < m.Advert.Len || p.out == bsdh.Pipelined && o.Len == 0
	case m.MID == bsdh.SinkAvail:
		ok = p.in == bsdh.Pipelined
	case m.MID == bsdh.ModeChange && m.Change.Send:
		ok, p.in = p.in == bsdh.Buffered, m.Change.Mode
	case m.MID == bsdh.ModeChange:
		ok, p.out = p.out != m.Change.Mode, m.Change.Mode
	}
	if !ok {
		p.w.fail("%v of %v with %d bytes, out %v, in %v, credit up to %d", o.Kind, m, o.Len, p.out, p.in, p.limit)
	}
}

// message builds what the draft allows; ok is false if it allows nothing of that kind.
func (p *fuzzPeer) message(e fuzzEvent, arg int) (m bsdh.Message, inv *rdma.RKey, ok bool) {
	o, k, size, susp := &p.b.s.src, &p.b.s.snk, &p.b.s.size, &p.b.s.susp
	n := uint32(arg)
	mayPay := !k.done && k.srcs.isEmpty() && (k.adv == 0 || k.reads.at(0).Len > 1)
	mayOffer := o.sinks.n+k.srcs.n < p.b.cfg.MaxAdverts
	if susp.due || susp.answered {
		return m, nil, false // nothing comes behind SuspComm
	}
	ok = true
	switch e {
	case fuzzData, fuzzPayload:
		m.MID = bsdh.Data
		switch {
		case e == fuzzData:
		case mayPay:
			m.Payload = make([]byte, 1+n%40)
		case k.owed > 0:
			m.Payload = make([]byte, min(k.owed, 1+n%40))
		}
		if m.Flags = bsdh.Flags(n >> 6); len(m.Payload) == 0 {
			m.Flags &^= bsdh.OOBPresent
		}
		m.Flags &^= bsdh.RequestPipelined
	case fuzzSrcAvail:
		m.MID, ok = bsdh.SrcAvail, mayOffer && !k.done && !k.stop && k.owed == 0
		switch {
		case k.mode == bsdh.Combined && k.srcs.isEmpty():
			m.Payload = make([]byte, 1+n%20)
		case k.mode != bsdh.Pipelined:
			ok = false
		}
		m.Advert.Len = uint32(len(m.Payload)) + 1 + n*3
	case fuzzSinkAvail:
		m.MID, m.Advert.Len, ok = bsdh.SinkAvail, 1+n*3, mayOffer && (o.mode == bsdh.Pipelined || o.window.open)
		if m.Advert.NonDiscards = o.potential; o.window.open {
			m.Advert.NonDiscards = o.window.potential
		}
		if mayPay && n&1 > 0 {
			m.Payload = make([]byte, 1+n%20)
		}
	case fuzzRdCompl:
		if m.MID, ok = bsdh.RdmaRdCompl, !o.srcs.isEmpty() && o.next >= o.forced; ok {
			a := o.srcs.at(0)
			if m.Bytes = min(n*2, uint32(a.end-o.next)); m.Bytes == uint32(a.end-o.next) {
				inv = &a.key
			}
		}
		m.Flags = bsdh.Flags(n & 4)
	case fuzzSendSm:
		m.MID, ok = bsdh.SendSm, !o.srcs.isEmpty()
	case fuzzWrCompl:
		if m.MID, ok = bsdh.RdmaWrCompl, k.adv > 0 && !k.done; ok {
			r, least := k.reads.at(0), uint32(min(k.adv-1, 1)) // nothing at all only into the last one
			if m.Bytes = min(max(n*2, least), r.Len); n&1 > 0 {
				inv = &r.key
			}
		}
	case fuzzMode:
		m.MID = bsdh.ModeChange
		switch {
		case n&1 > 0 && o.mode == bsdh.Buffered:
			m.Change = bsdh.ModeWord{Mode: bsdh.Combined, Send: true}
		case k.mode == bsdh.Pipelined:
			m.Change.Mode = bsdh.Combined
		case k.mode == bsdh.Combined && n&2 > 0 && k.srcs.isEmpty():
			m.Change.Mode = bsdh.Buffered
		default:
			m.Change.Mode, ok = bsdh.Pipelined, k.mode == bsdh.Combined
		}
	case fuzzSrcCancel:
		m.MID = bsdh.SrcAvailCancel
	case fuzzSinkCancel:
		m.MID = bsdh.SinkAvailCancel
	case fuzzCancelAck:
		m.MID = bsdh.SinkCancelAck
	case fuzzChRcvBuf:
		m.MID, m.Bytes, ok = bsdh.ChRcvBuf, bsdh.MinBuffer+n, !size.isBusy()
	case fuzzChRcvBufAck:
		if m.MID, m.Bytes, ok = bsdh.ChRcvBufAck, size.asked, size.asked > 0; n&1 > 0 {
			m.Bytes = size.before
		}
	case fuzzDisConn:
		m.MID, ok = bsdh.DisConn, (!k.done || k.again) && k.srcs.isEmpty() && k.owed == 0
	case fuzzAbortConn:
		m.MID = bsdh.AbortConn
	case fuzzSuspComm:
		m.MID, m.Port, ok = bsdh.SuspComm, 1+uint16(n), p.b.cfg.Suspends
	case fuzzSuspCommAck:
		m.MID, ok = bsdh.SuspCommAck, susp.sent
	default:
		ok = false
	}
	return m, inv, ok
}

// lie changes a message so that it need not be allowed any more.
func lie(m *bsdh.Message, in *fuzzBytes) {
	n := uint32(in.next())
	switch in.next() % 9 {
	case 0:
		m.Seq += n
	case 1:
		m.Ack += n
	case 2:
		m.Bytes = n * n * n * n
	case 3:
		m.Advert.Len = n * n * n * n
	case 4:
		m.Advert.NonDiscards += n
	case 5:
		m.Flags = bsdh.Flags(n & 7)
	case 6:
		m.Change = bsdh.ModeWord{Mode: bsdh.Mode(n % 3), Send: n&8 > 0}
	case 7:
		m.Payload = nil
	case 8:
		if m.MID >= bsdh.SinkAvail {
			m.Payload = make([]byte, n%40)
		}
	}
}

// tell gives the socket a message.
func (p *fuzzPeer) tell(e fuzzEvent, arg int, in *fuzzBytes) {
	if len(p.b.posted) == 0 || p.b.s.state == StateHello {
		return // the transport would end the connection; there is none
	}
	lying, kind := e&fuzzLie > 0, e%fuzzKinds
	m, inv, ok := p.message(kind, arg)
	if !ok && !lying {
		return
	}
	c := &p.b.s.credits
	m.Seq, m.Ack, m.Bufs = c.received+1, c.sent, uint16(3+arg%6)
	if e&fuzzLate > 0 || kind == fuzzSinkAvail && p.b.s.src.window.open { // it crosses ModeChange
		m.Ack = c.peerAck
	}
	if m.Ack == none {
		m.Ack = 0
	}
	if lying {
		p.lied = true
		lie(&m, in)
		if key := p.b.lastKey; in.next()&1 > 0 {
			inv = &key
		}
	}
	switch m.MID {
	case bsdh.SrcAvail:
		m.Advert.Key, m.Advert.Addr, _ = p.a.AdvertiseStream(0, m.Advert.Len)
	case bsdh.SinkAvail: // no Write is longer than 600 bytes
		r := &testRead{Read: Read{Len: m.Advert.Len}, buf: make([]byte, min(m.Advert.Len, 1000))}
		m.Advert.Key, m.Advert.Addr, _ = p.a.newKey(grant{right: PeerWrites, read: r, n: m.Advert.Len})
	}
	b := m.Append(nil, bsdh.LayoutFigures)
	if kind == fuzzBytewise {
		for i := range b[:min(len(b), arg)] {
			b[i] ^= byte(in.next())
		}
		p.lied = true
	}
	if len(b) > int(p.b.sizes[p.b.posted[0]]) {
		return
	}
	p.allows(&m)
	if m.MID == bsdh.SuspCommAck {
		p.b.out = nil // it had arrived
	}
	p.receive(item{message: b, inv: inv})
}

// allows notes what a message allows the socket.
func (p *fuzzPeer) allows(m *bsdh.Message) {
	ack := m.Ack
	if ack == 0 && !p.b.s.credits.ackSeen {
		ack = none
	}
	if l := ack + uint32(m.Bufs); after(l, p.limit) {
		p.limit = l
	}
	switch {
	case m.MID == bsdh.ChRcvBufAck:
		p.bytes = max(p.bytes, m.Bytes)
	case m.MID == bsdh.ModeChange && m.Change.Send:
		p.out = m.Change.Mode
	case m.MID == bsdh.ModeChange:
		p.in = m.Change.Mode
	}
}

// receive has a message arrive, and looks at the verdict: one that is allowed is taken, and what is refused ends the connection.
func (p *fuzzPeer) receive(it item) {
	h := p.b
	i := h.posted[0]
	h.posted, h.buffers[i] = h.posted[1:], it.message
	m, _ := bsdh.Parse(it.message, h.cfg.Layout)
	h.oracle.receives(&m)
	switch err := h.s.HandleRecv(p.w.now, i, it.message, it.inv); {
	case err != nil && !p.lied:
		p.w.fail("%v, which is allowed: %v", m.MID, err)
	case err != nil && (!errors.Is(err, ErrProtocol) || h.s.state != StateClosed && h.s.state != StateAbort):
		p.w.fail("%v: %v, and the socket is in %v", m.MID, err, h.s.state)
	}
	h.run()
}

// program is what the program of the socket does, and time, and the queue pair.
func (p *fuzzPeer) program(e fuzzEvent, arg int) {
	h, s, now := p.b, p.b.s, p.w.now
	switch e {
	case fuzzHello:
		p.again()
	case fuzzComplete:
		for range 1 + arg%8 {
			h.complete()
		}
	case fuzzFail:
		if len(h.done) > 0 && !h.ended {
			h.done = nil
			s.HandleSent(now, false)
		}
	case fuzzAnswer:
		for range 1 + arg%8 {
			p.answer()
		}
	case fuzzWrite, fuzzUrgent:
		h.write(1+uint32(arg)*2, arg&1 > 0, e == fuzzUrgent)
	case fuzzRead:
		h.read(1+uint32(arg)*2, arg&1 > 0, arg&6 == 6)
	case fuzzCancelReads:
		s.CancelReads(now)
	case fuzzCancelWrites:
		s.CancelWrites(now)
	case fuzzPrefer:
		s.PreferMode(now, bsdh.Mode(arg%3))
	case fuzzEnd:
		switch arg % 8 {
		case 0:
			s.Close(now)
		case 1:
			s.Abort(now)
		case 2, 3: // nothing is under way on what is not there
			h.out, h.done, h.targets = nil, nil, nil
			s.HandleDown(map[bool]error{true: errors.New("gone")}[arg&1 > 0])
		default:
			s.Shutdown(now)
		}
	case fuzzResize:
		if arg&1 > 0 {
			_ = s.Suspend(now, 1) // not always
		} else {
			_ = s.ResizePeer(now, bsdh.MinBuffer+uint32(arg)) // not behind the end
		}
	case fuzzTime:
		p.w.now = now.Add(time.Duration(arg) * 10 * time.Millisecond)
		p.w.expire()
	case fuzzKeys:
		h.refuse = arg&1 > 0
	default:
	}
	h.run()
}

// again sets the next connection up, if the socket waits for one.
func (p *fuzzPeer) again() {
	if p.b.s.state != StateHello {
		return
	}
	p.b.out = nil
	m := bsdh.Message{MID: bsdh.Hello, Bufs: uint16(p.a.cfg.RecvBuffers), Setup: bsdh.Setup{MaxAdverts: 4, Major: 1, Minor: 1, RecvBytes: p.a.cfg.RecvBytes, IRD: 3, ORD: 3}}
	if p.b.s.cfg.Role == Connecting {
		m.MID = bsdh.HelloAck
		p.receive(item{message: m.Append(nil, bsdh.LayoutFigures)})
		return
	}
	if err := p.b.s.HandleHello(p.w.now, m.Append(nil, bsdh.LayoutFigures)); err != nil {
		p.w.fail("%v", err)
	}
}

// answer has the peer's queue pair take the next thing, or the socket's take the answer.
func (p *fuzzPeer) answer() {
	switch {
	case len(p.a.out) > 0:
		p.a.deliver()
	case len(p.b.out) == 0:
	case p.b.out[0].read != nil && p.lied && p.a.keys[p.b.out[0].read.Key].n == 0:
		p.b.out = nil // to what is not there no answer comes
	case p.b.out[0].read != nil || p.b.out[0].write != nil:
		p.b.deliver()
	default:
		if key := p.b.out[0].inv; key != nil {
			if _, ok := p.a.keys[*key]; !ok && !p.lied {
				p.w.fail("a message invalidates key %d, which is not there", *key)
			}
			delete(p.a.keys, *key)
		}
		p.b.out = p.b.out[1:]
	}
}

// end ends the connection, if it has not ended: nothing may be left.
func (p *fuzzPeer) end() {
	h := p.b
	h.done = nil
	h.s.Abort(p.w.now)
	h.run()
	h.s.HandleTimeout(p.w.now.Add(time.Hour))
	h.s.HandleDown(errors.New("gone"))
	h.run()
	if h.s.state != StateClosed || !h.ended || len(h.keys)+len(h.writes) > 0 {
		p.w.fail("the end: %v, keys %v, Writes %v", h.s.state, h.keys, h.writes)
	}
	for id, r := range h.reads {
		if !r.over && h.s.snk.held.isEmpty() {
			p.w.fail("the end: Read %d is not over", id)
		}
	}
}

// FuzzSocket plays events of two bytes, or more, to a socket: of its program, of its queue pair, and messages of a peer that keeps
// to the draft, or lies. As long as it does not, nothing is refused. In any case the socket sends what modes, credit
// and the peer's receive buffers allow, touches what keys open, gives each buffer back once, agrees with the
// draft's own way to tell stale adverts, and ends with nothing left.
func FuzzSocket(f *testing.F) {
	for _, seed := range fuzzSeeds {
		f.Add(seed)
	}
	for e := range fuzzKinds {
		lying := byte(e | fuzzLie)
		f.Add([]byte{0xff, 7, byte(fuzzWrite), 255, byte(fuzzRead), 255, lying, 9, 200, 2, 1, lying, 9, 1, 8, 0, lying, 1, 1, 3, 0})
	}
	f.Fuzz(func(t *testing.T, bytes []byte) {
		in := fuzzBytes(bytes[:min(len(bytes), 2000)])
		p := newFuzzPeer(&in)
		for len(in) > 0 && p.w.err == nil && p.b.s.state != StateClosed {
			e, arg := fuzzEvent(in.next()), in.next()
			if kind := e % fuzzKinds; kind <= fuzzBytewise {
				p.tell(e, arg, &in)
			} else {
				p.program(kind, arg)
			}
			if n := p.b.s.src.sinks.n + p.b.s.snk.srcs.n; n > p.b.cfg.MaxAdverts {
				p.w.fail("%d adverts of the peer", n)
			}
		}
		p.end()
		if p.w.err != nil {
			t.Fatal(p.w.err)
		}
	})
}

// fuzzSeeds lead into each state that takes more than a message: adverts of both sides, read and written in part, refused, canceled
// and crossed, all modes, resizing, suspension, and both ends. The first two bytes configure.
var fuzzSeeds = [][]byte{
	fuzzSeed(1, 0, fuzzPayload, 0x7f, fuzzWrite, 49),
	fuzzSeed(0, 3, fuzzWrite, 255, fuzzRdCompl, 30, fuzzRdCompl, 255, fuzzComplete, 7, fuzzWrite, 255, fuzzSendSm, 0, fuzzComplete, 7, fuzzData, 0),
	fuzzSeed(0, 3, fuzzSrcAvail, 100, fuzzRead, 101, fuzzAnswer, 7, fuzzComplete, 7, fuzzRead, 251, fuzzAnswer, 7, fuzzComplete, 7),
	fuzzSeed(0, 3, fuzzSrcAvail, 100, fuzzRead, 100, fuzzAnswer, 7, fuzzComplete, 7, fuzzPayload, 30, fuzzPayload, 30, fuzzData, 0),
	fuzzSeed(12, 3, fuzzMode, 0, fuzzRead, 101, fuzzRead, 201, fuzzWrCompl, 21, fuzzRead, 99, fuzzPayload, 5, fuzzCancelReads, 0, fuzzCancelAck, 0),
	fuzzSeed(12, 3, fuzzMode, 0, fuzzRead, 101, fuzzWrCompl, 0, fuzzRead, 101, fuzzMode, 0, fuzzMode, 2, fuzzRead, 201, fuzzMode, 0),
	fuzzSeed(12, 7, fuzzPrefer, 2, fuzzSinkAvail, 60, fuzzSinkAvail, 61, fuzzWrite, 255, fuzzAnswer, 7, fuzzComplete, 7, fuzzSinkAvail, 40, fuzzSinkCancel, 0),
	fuzzSeed(12, 7, fuzzPrefer, 2, fuzzWrite, 99, fuzzWrite, 101, fuzzCancelWrites, 0, fuzzSendSm, 0, fuzzPrefer, 2, fuzzWrite, 99, fuzzPrefer, 1, fuzzSinkAvail|fuzzLate, 60, fuzzData, 0),
	fuzzSeed(12, 7, fuzzPrefer, 2, fuzzWrite, 99, fuzzCancelWrites, 0, fuzzSendSm|fuzzLate, 0, fuzzPrefer, 0, fuzzWrite, 99, fuzzMode, 1),
	fuzzSeed(12, 7, fuzzMode, 0, fuzzSrcAvail, 60, fuzzSrcAvail, 61, fuzzRead, 41, fuzzSrcCancel, 0, fuzzAnswer, 7, fuzzComplete, 7, fuzzPayload, 8),
	fuzzSeed(64, 7, fuzzChRcvBuf, 90, fuzzPayload, 1, fuzzPayload, 2, fuzzPayload, 3, fuzzPayload, 4, fuzzRead, 250, fuzzResize, 100, fuzzChRcvBufAck, 0),
	fuzzSeed(48, 7, fuzzWrite, 255, fuzzPayload, 9, fuzzSuspComm, 9, fuzzComplete, 7, fuzzHello, 0, fuzzRead, 200, fuzzRdCompl, 255),
	fuzzSeed(48, 7, fuzzResize, 1, fuzzSuspCommAck, 9, fuzzHello, 0, fuzzWrite, 255),
	fuzzSeed(0, 7, fuzzEnd, 4, fuzzComplete, 7, fuzzPayload, 5, fuzzDisConn, 0, fuzzTime, 255, fuzzTime, 255, fuzzTime, 255, fuzzTime, 255),
	fuzzSeed(0, 7, fuzzDisConn, 0, fuzzRead, 9, fuzzWrite, 8, fuzzEnd, 4, fuzzComplete, 7),
	fuzzSeed(0, 7, fuzzEnd, 4, fuzzSrcAvail, 90, fuzzRead, 91, fuzzEnd, 1, fuzzAnswer, 7, fuzzComplete, 7),
	fuzzSeed(128, 0, fuzzWrite, 200, fuzzPayload, 1, fuzzPayload, 1, fuzzPayload, 1, fuzzTime, 1, fuzzComplete, 7, fuzzUrgent, 100, fuzzComplete, 7),
	fuzzSeed(0, 7, fuzzWrite, 99, fuzzSrcAvail, 30, fuzzTime, 6, fuzzComplete, 7, fuzzPayload, 30, fuzzEnd, 2),
}

func fuzzSeed(configure, buffers byte, events ...fuzzEvent) []byte {
	b := []byte{configure, buffers}
	for _, e := range events {
		b = append(b, byte(e))
	}
	return b
}

// FuzzPair plays a schedule of two sockets, whose operations are three bytes each, with all that TestSim checks: here what
// comes next follows from what the machine has not done yet, and not from chance.
func FuzzPair(f *testing.F) {
	for seed := range uint64(12) {
		f.Add(encodeSchedule(randomSchedule(seed + 1)))
	}
	f.Fuzz(func(t *testing.T, bytes []byte) {
		s := decodeSchedule(bytes)
		if _, err := s.play(quiet); err != nil {
			t.Fatalf("%v\n%v", err, s)
		}
	})
}

// The choices that a byte of a schedule makes.
var (
	fuzzBuffers = []int{4, 5, 8, 32}
	fuzzSizes   = []int{37, 60, 200, 1000}
	fuzzDepths  = []int{1, 3, 64}
	fuzzAdverts = []int{1, 2, 5, 16}
	fuzzZcopy   = []int{1, 50, 300, NoZcopy}
	fuzzLens    = []uint32{1, 2, 3, 4, 7, 20, 40, 61, 80, 150, 320, 500, 700, 1100, 2000, 3000}
)

// fuzzOps is how many operations a schedule has at most.
const fuzzOps = 300

func pickOf[T any](list []T, n int) T { return list[n%len(list)] }

func decodeSchedule(bytes []byte) schedule {
	in := fuzzBytes(bytes)
	var s schedule
	for i := range s.cfg {
		a, b := in.next(), in.next()
		s.cfg[i] = Config{
			RecvBuffers: pickOf(fuzzBuffers, a), RecvBytes: uint32(pickOf(fuzzSizes, a>>2)), MaxAdverts: pickOf(fuzzAdverts, a>>4), Keep: a&64 > 0,
			SendDepth: pickOf(fuzzDepths, b), ZcopyBytes: uint32(pickOf(fuzzZcopy, b>>2)),
		}
		if b&16 > 0 {
			s.cfg[i].MinRecvBytes, s.cfg[i].MaxRecvBytes = 37, 1500
		}
	}
	if in.next()&1 > 0 {
		for i := range s.cfg {
			s.cfg[i].Keep, s.cfg[i].Suspends = true, true
		}
	}
	for len(in) > 0 && len(s.ops) < fuzzOps {
		a, b := in.next(), in.next()
		o := simOp{kind: opKind(a & 15), side: a >> 4 & 1, direct: a&32 == 0, more: a&64 > 0, n: pickOf(fuzzLens, b)}
		switch o.kind {
		case opDeliver, opComplete:
			o.n = 1 + uint32(b&3)
		case opMode:
			o.n = uint32(b % 3)
		case opTime:
			o.n = 1 + uint32(b%80)
		case opSuspend:
			if !s.cfg[o.side].Suspends {
				continue
			}
		default:
		}
		s.ops = append(s.ops, o)
	}
	return s
}

// encodeSchedule is the nearest that decodeSchedule makes.
func encodeSchedule(s schedule) []byte {
	var b []byte
	at := func(list []int, n int) int { return max(0, slices.Index(list, n)) }
	for _, c := range s.cfg {
		x := at(fuzzBuffers, c.RecvBuffers) | at(fuzzSizes, int(c.RecvBytes))<<2 | at(fuzzAdverts, c.MaxAdverts)<<4
		y := at(fuzzDepths, c.SendDepth) | at(fuzzZcopy, int(c.ZcopyBytes))<<2
		if c.MaxRecvBytes > 0 {
			y |= 16
		}
		b = append(b, byte(x), byte(y))
	}
	b = append(b, map[bool]byte{true: 1}[s.cfg[0].Suspends])
	for _, o := range s.ops {
		x := byte(o.kind) | byte(o.side)<<4
		if !o.direct {
			x |= 32
		}
		if o.more {
			x |= 64
		}
		i, _ := slices.BinarySearch(fuzzLens, o.n)
		if o.kind <= opComplete || o.kind == opMode || o.kind == opTime {
			i = int(o.n)
		}
		b = append(b, x, byte(i))
	}
	return b
}
