// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

const (
	allAccess = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	guardLen  = 64
)

// region is a registered region of a testMemory. Guard bytes stand before and behind it.
type region struct {
	addr   uint64
	buf    []byte
	lkey   rdma.LKey
	rkey   rdma.RKey
	access rdma.Access
	gone   bool
	all    []byte

	written int // bytes that peers were let write
}

func (r *region) sge(off, n int) rdma.SGE {
	return rdma.SGE{Addr: r.addr + uint64(off), Length: uint32(n), LKey: r.lkey}
}

// testMemory is a table of regions.
type testMemory struct{ regions []*region }

func (m *testMemory) add(n int, acc rdma.Access) *region {
	k := uint32(len(m.regions) + 1)
	r := &region{addr: uint64(k) << 40, lkey: rdma.LKey(k), rkey: rdma.RKey(k<<8 | 7), access: acc, all: make([]byte, n+2*guardLen)}
	for i := range r.all {
		r.all[i] = 0xee
	}
	r.buf = r.all[guardLen : guardLen+n : guardLen+n]
	clear(r.buf)
	m.regions = append(m.regions, r)
	return r
}

// intact fails if a byte outside the registered parts was written.
func (m *testMemory) intact(tb testing.TB) {
	tb.Helper()
	for _, r := range m.regions {
		for i := range guardLen {
			if k := len(r.all) - 1 - i; r.all[i] != 0xee || r.all[k] != 0xee {
				tb.Fatalf("byte %d or %d of region %v written, outside its bounds", i-guardLen, k-guardLen, r.lkey)
			}
		}
	}
}

func (r *region) at(addr uint64, n uint32) ([]byte, bool) {
	if addr < r.addr || addr-r.addr > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-(addr-r.addr) {
		return nil, false
	}
	o := addr - r.addr
	return r.buf[o : o+uint64(n) : o+uint64(n)], true
}

func (m *testMemory) Local(s rdma.SGE, write bool) ([]byte, rdma.Status) {
	for _, r := range m.regions {
		if r.lkey == s.LKey && !r.gone && (!write || r.access&rdma.LocalWrite != 0) {
			if b, ok := r.at(s.Addr, s.Length); ok {
				return b, rdma.StatusSuccess
			}
		}
	}
	return nil, rdma.StatusLocalProtect
}

func (m *testMemory) Remote(k rdma.RKey, addr uint64, n uint32, acc rdma.Access) ([]byte, rdma.Status) {
	for _, r := range m.regions {
		if r.rkey != k || r.gone {
			continue
		}
		if r.access&acc != acc {
			return nil, rdma.StatusRemoteAccess
		}
		if b, ok := r.at(addr, n); ok {
			if acc&rdma.RemoteWrite != 0 {
				r.written += int(n)
			}
			return b, rdma.StatusSuccess
		}
		return nil, rdma.StatusRemoteOp
	}
	return nil, rdma.StatusRemoteInvalid
}

func (m *testMemory) Invalidate(rdma.RKey) bool { return false }

// side is one queue pair of a duo, and the stream towards it.
type side struct {
	*QP
	mem    *testMemory
	mr     *region
	in     []byte // on its way to this side
	fin    bool   // behind in
	broken bool
	finned bool // this side sent its FIN
	ended  bool // HandleEnd was called
	deaf   bool // reads nothing
	mute   bool // completions are not polled
	wcs    []rdma.WC
	events []rdma.AsyncEvent
	tap    *tap
	bufs   [][]byte
	poll   [8]wq.Completion
	quiet  bool // completions are not kept
}

// duo is two queue pairs back to back.
type duo struct {
	t     testing.TB
	rng   *rand.Rand
	now   time.Time
	piece int // bytes of a read or write at most; 0: all
	x, y  *side
}

type duoConfig struct {
	attr   Attr
	depth  int
	bytes  int
	recvs  int // posted to each side before they connect
	first  uint32
	piece  int
	seed   uint64
	inline int
	access rdma.Access

	segment int // longest segment; 0: the protocol's
}

func reliable() Attr {
	return Attr{Reliable: true, RDMAWrite: true, RDMARead: true, FlowControl: true, MaxTransfer: 1 << 30, ReadWindow: 4}
}

// newDuo connects two queue pairs by the machines of connection establishment.
func newDuo(t testing.TB, c duoConfig) *duo {
	t.Helper()
	if c.attr == (Attr{}) {
		c.attr = reliable()
	}
	if c.depth == 0 {
		c.depth = 16
	}
	if c.bytes == 0 {
		c.bytes = 1 << 18
	}
	if c.access == 0 {
		c.access = allAccess
	}
	d := &duo{t: t, rng: rand.New(rand.NewPCG(c.seed, 17)), now: time.Unix(0, 0), piece: c.piece}
	for i, s := range []**side{&d.x, &d.y} {
		mem := &testMemory{}
		q, err := NewQP(QPConfig{
			Num: rdma.QPN(i + 1), MaxSendWR: c.depth, MaxRecvWR: c.depth, MaxSGE: MaxSGE, MaxInline: c.inline, Memory: mem,
		})
		if err != nil {
			t.Fatal(err)
		}
		*s = &side{QP: q, mem: mem, mr: mem.add(c.bytes, allAccess), tap: newTap(t)}
		if err := q.Modify(d.now, rdma.QPAttr{State: rdma.QPInit, Access: c.access}); err != nil {
			t.Fatal(err)
		}
		for k := range c.recvs {
			(*s).recv(d, uint64(1000+k), 0, 4096)
		}
	}
	caller, err := NewCaller(CallConfig{Calling: disc(t, "x"), Called: disc(t, "y"), Attr: c.attr, First: c.first})
	if err != nil {
		t.Fatal(err)
	}
	callee := NewCallee(d.now, CalleeConfig{})
	caller.Start(d.now)
	caller.HandleDialed(d.now, d.x.Posted())
	callee.HandleData(d.now, sent(caller.Poll(nil)))
	callee.Match(d.now)
	if _, err := callee.Accept(d.now, Answer{Attr: c.attr, First: c.first + 5, Posted: d.y.Posted()}); err != nil {
		t.Fatal(err)
	}
	outs := callee.Poll(nil)
	caller.HandleData(d.now, sent(outs))
	for s, outs := range map[*side][]Output{d.x: caller.Poll(nil), d.y: outs} {
		for _, o := range outs {
			if o.Kind == OutputConnected {
				o.Terms.MaxSegment = c.segment
				if err := s.Start(d.now, o.Terms); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if d.x.TxEnded() || d.x.Closed() || d.x.HasTx() {
		t.Fatal("a new connection has something to send, or an end")
	}
	if d.x.State() != rdma.QPRTS || d.y.State() != rdma.QPRTS {
		t.Fatalf("states %v and %v, want RTS", d.x.State(), d.y.State())
	}
	return d
}

func sent(outs []Output) []byte {
	var b []byte
	for _, o := range outs {
		b = append(b, o.Data...)
	}
	return b
}

func (d *duo) other(s *side) *side {
	if s == d.x {
		return d.y
	}
	return d.x
}

// some returns how many of n bytes TCP takes or gives now.
func (d *duo) some(n int) int {
	if d.piece == 0 || n == 0 {
		return n
	}
	return min(n, 1+d.rng.IntN(d.piece))
}

// step moves what one side has to say and to hear; it reports whether anything happened.
func (d *duo) step(s *side) bool {
	moved := false
	s.bufs = s.RxBuffers(s.bufs[:0])
	room := 0
	for _, b := range s.bufs {
		room += len(b)
	}
	if n := d.some(min(room, len(s.in))); n > 0 && !s.deaf {
		moved = true
		in := s.in[:n]
		for _, b := range s.bufs {
			in = in[copy(b, in):]
		}
		s.in = s.in[n:]
		_ = s.HandleRx(d.now, n) // its event says the same
	}
	if len(s.in) == 0 && (s.fin || s.broken) && !s.ended {
		s.ended, moved = true, true
		var err error
		if s.broken {
			err = errors.New("connection reset by peer")
		}
		s.HandleEnd(d.now, err)
	}
	d.pollOf(s)
	had := s.HasTx()
	s.bufs = s.TxBuffers(d.now, s.bufs[:0])
	total := 0
	for _, b := range s.bufs {
		total += len(b)
	}
	if total > 0 && !had {
		d.t.Fatalf("queue pair %v has %d bytes to send and did not say so", s.Num(), total)
	}
	o := d.other(s)
	if n := d.some(total); n > 0 && !s.finned {
		moved = true
		left := n
		for _, b := range s.bufs {
			k := min(len(b), left)
			if !o.broken {
				o.in = append(o.in, b[:k]...)
			}
			if s.tap != nil {
				s.tap.see(b[:k])
			}
			left -= k
		}
		s.HandleTx(d.now, n)
	}
	d.pollOf(s)
	switch s.End() {
	case EndFIN, EndClose:
		if !s.finned {
			s.finned, o.fin, moved = true, true, true
		}
	case EndReset:
		if !s.finned {
			s.finned, o.broken, moved = true, true, true
		}
	case EndNone:
	}
	return moved
}

func (d *duo) pollOf(s *side) {
	for !s.mute {
		n := s.PollWC(s.poll[:])
		if !s.quiet {
			for _, c := range s.poll[:n] {
				s.wcs = append(s.wcs, c.WC)
			}
		}
		if n < len(s.poll) {
			break
		}
	}
	for {
		e, ok := s.PollEvent()
		if !ok {
			return
		}
		s.events = append(s.events, e)
	}
}

// run steps both sides until nothing moves, timers of up to a second included.
func (d *duo) run() { d.runFor(time.Second) }

func (d *duo) runFor(long time.Duration) {
	end := d.now.Add(long)
	for {
		for d.step(d.x) || d.step(d.y) {
			continue
		}
		at, ok := d.x.NextTimeout()
		if b, k := d.y.NextTimeout(); k && (!ok || b.Before(at)) {
			at, ok = b, true
		}
		if !ok || at.After(end) {
			return
		}
		d.now = at
		d.x.HandleTimeout(at)
		d.y.HandleTimeout(at)
	}
}

func (s *side) send(d *duo, wr rdma.SendWR) {
	d.t.Helper()
	if n, err := s.PostSend(d.now, []rdma.SendWR{wr}); n != 1 || err != nil {
		d.t.Fatalf("post %v: %d, %v", wr.Op, n, err)
	}
}

func (s *side) recv(d *duo, id uint64, off, n int) {
	d.t.Helper()
	if k, err := s.PostRecv([]rdma.RecvWR{{ID: id, SGE: s.mr.sge(off, n)}}); k != 1 || err != nil {
		d.t.Fatalf("post receive: %d, %v", k, err)
	}
}

// take returns the completions until now, and forgets them.
func (s *side) take() []rdma.WC {
	w := s.wcs
	s.wcs = nil
	return w
}

// want compares completions by what counts.
func (d *duo) want(s *side, name string, want ...rdma.WC) {
	d.t.Helper()
	got := s.take()
	if len(got) != len(want) {
		d.t.Fatalf("%s: completions %+v, want %+v", name, got, want)
	}
	for i := range got {
		g := got[i]
		g.QPN = 0
		if want[i].Status != rdma.StatusSuccess {
			g.Bytes = want[i].Bytes
		}
		if g != want[i] {
			d.t.Fatalf("%s: completion %d is %+v (%v), want %+v (%v)", name, i, g, g.Status, want[i], want[i].Status)
		}
	}
}

// wantEvent checks the only event of a side.
func (d *duo) wantEvent(s *side, name string, kind rdma.EventKind, target error) {
	d.t.Helper()
	if len(s.events) != 1 || s.events[0].Kind != kind || target != nil && !errors.Is(s.events[0].Err, target) {
		d.t.Fatalf("%s: events %+v, want one %v with %v", name, s.events, kind, target)
	}
	s.events = nil
}

// wantOver checks that both queue pairs and the TCP connection have ended.
func (d *duo) wantOver(name string) {
	d.t.Helper()
	for _, s := range []*side{d.x, d.y} {
		if s.State() != rdma.QPError || s.End() != EndClose && s.End() != EndReset {
			d.t.Fatalf("%s: queue pair %v in %v, TCP %v, want ERR and closed", name, s.Num(), s.State(), s.End())
		}
		if !s.TxEnded() || !s.Closed() {
			d.t.Fatalf("%s: queue pair %v does not say that it has ended", name, s.Num())
		}
		if _, ok := s.NextTimeout(); ok && s.End() == EndClose {
			d.t.Fatalf("%s: queue pair %v still has a timer", name, s.Num())
		}
	}
}

func fillWith(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i*7) + byte(i>>8) + seed
	}
}

// tap reads the segments of one direction and holds them against §2.2.2.2.3 and §3.1: it is a parser of its
// own, that knows nothing of the machine.
type tap struct {
	t        testing.TB
	buf      []byte
	segments []Header
	request  map[Type]*tapMessage
	next     uint32 // number of the next message
	started  bool
	response *tapMessage
	off      bool
}

type tapMessage struct {
	number, got uint32
	rdma        []byte
	open        bool
}

func newTap(t testing.TB) *tap { return &tap{t: t} }

func (p *tap) see(b []byte) {
	if p.off {
		return
	}
	p.buf = append(p.buf, b...)
	for len(p.buf) >= HeaderLen {
		h, err := ParseHeader(p.buf[:HeaderLen])
		if err != nil {
			p.t.Fatalf("our own segment: %v", err)
		}
		if len(p.buf) < int(h.Length) {
			return
		}
		p.segment(&h, p.buf[:h.Length])
		p.buf = p.buf[h.Length:]
	}
}

func (p *tap) segment(h *Header, b []byte) {
	p.segments = append(p.segments, *h)
	if h.Type == TypeNOP {
		return
	}
	payload := uint32(len(b) - h.PayloadOffset())
	m := p.response
	if m == nil {
		m = &tapMessage{}
	}
	if h.Type != TypeReadResponse {
		if p.request == nil {
			p.request = map[Type]*tapMessage{}
		}
		// One message at a time, whatever its type.
		m = p.request[TypeSend]
		if m == nil {
			m = &tapMessage{}
		}
		if !m.open {
			if p.started && h.Message != p.next {
				p.t.Fatalf("%v has number %d, want %d", h.Type, h.Message, p.next)
			}
			p.started, p.next = true, h.Message+1
		}
	}
	if m.open && h.Message != m.number {
		p.t.Fatalf("%v %d inside message %d", h.Type, h.Message, m.number)
	}
	if !m.open {
		*m = tapMessage{number: h.Message, open: true, rdma: b[HeaderLen:h.PayloadOffset()]}
		m.rdma = bytes.Clone(m.rdma)
	}
	if h.Offset != m.got {
		p.t.Fatalf("%v %d at offset %d, want %d", h.Type, h.Message, h.Offset, m.got)
	}
	if !bytes.Equal(m.rdma, b[HeaderLen:h.PayloadOffset()]) {
		p.t.Fatalf("%v %d: RDMA headers differ", h.Type, h.Message)
	}
	m.got += payload
	m.open = h.Flags&FlagEnd == 0
	if h.Type == TypeReadResponse {
		p.response = m
	} else {
		p.request[TypeSend] = m
	}
}
