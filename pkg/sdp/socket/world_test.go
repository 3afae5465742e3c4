// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// world is two sockets, a queue pair between them, and programs. The byte of a stream at a position follows from the
// side and the position, so that nobody has to remember what was written.
type world struct {
	now   time.Time
	sides [2]*host
	err   error
	trace func(string, ...any)
	gone  bool // an abort, on purpose
	blind bool // a peer sends any bytes
	plant func(*Socket)

	// What a script writes down; nil: nobody does.
	does    func(*host, *Output)
	gets    func(*host, *item)
	revokes func(*host, rdma.RKey)

	mids   map[bsdh.MID]int
	modes  map[[2]bsdh.Mode]int
	failed map[OutputKind]int // completions
}

// item travels on the queue pair, in order.
type item struct {
	message []byte
	inv     *rdma.RKey
	read    *Output // RDMA READ request
	write   *Output // RDMA WRITE
	data    []byte
	answer  bool   // RDMA READ response
	hello   []byte // on a connection of its own
	end     bool   // of the transport connection
	reset   bool   // and not in order
}

// grant is what a key opens.
type grant struct {
	right Right
	pos   uint64 // of the stream
	read  *testRead
	n     uint32
	addr  uint64
}

type testRead struct {
	Read
	buf  []byte
	over bool
}

type host struct {
	w        *world
	side     int
	s        *Socket
	cfg      Config
	keys     map[rdma.RKey]grant
	lastKey  rdma.RKey
	reads    map[uint64]*testRead
	writes   map[uint64]posted
	order    []uint64 // Reads, oldest first
	id       uint64
	out      []item             // to the peer
	done     []Output           // work requests whose completions were not handled
	posted   []int              // receive buffers
	buffers  [][]byte           // by number, of both sets
	sizes    []uint32           // of each; 0: dropped
	kept     []byte             // private memory
	moves    int                // to another connection
	targets  []Output           // RDMA READs that were not answered
	most     map[OutputKind]int // of them, and of RDMA WRITEs, at a time
	received uint64
	eof      bool
	ended    bool
	endErr   error
	urgents  int
	oracle   oracle
	marks    map[uint64]bool // out-of-band bytes that were written
	seen     map[uint64]bool // and read
	refuse   bool            // Memory has no keys left
}

func pattern(side int, pos uint64) byte { return byte(pos*7+pos>>8*13+pos>>16*5) ^ byte(side*0x5a) }

func (w *world) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

// newWorld makes sockets of which the connecting one has sent its Hello.
func newWorld(a, b Config, trace func(string, ...any), few ...bool) *world {
	w := stillWorld(a, b, trace, few...)
	if w.err == nil {
		w.sides[0].run()
	}
	return w
}

// stillWorld makes sockets that have done nothing.
func stillWorld(a, b Config, trace func(string, ...any), few ...bool) *world {
	w := &world{now: time.Unix(1000, 0), trace: trace, mids: map[bsdh.MID]int{}, modes: map[[2]bsdh.Mode]int{}, failed: map[OutputKind]int{}}
	for i, cfg := range []Config{a, b} {
		h := &host{
			w: w, side: i, keys: map[rdma.RKey]grant{}, lastKey: rdma.RKey(1000 * (i + 1)), reads: map[uint64]*testRead{},
			writes: map[uint64]posted{}, marks: map[uint64]bool{}, seen: map[uint64]bool{}, oracle: newOracle(), most: map[OutputKind]int{},
		}
		cfg.Role, cfg.Memory = Role(i), h
		s, err := New(w.now, cfg)
		if err != nil {
			w.fail("new: %v", err)
			return w
		}
		h.s, h.cfg = s, cfg.withDefaults()
		if len(few) > 0 && few[i] {
			h.haveThree()
		}
		h.buffers, h.sizes = make([][]byte, 2*h.cfg.RecvBuffers), make([]uint32, 2*h.cfg.RecvBuffers)
		h.post(0, h.cfg.RecvBytes)
		w.sides[i] = h
	}
	return w
}

// haveThree lets a side begin with as many receive buffers as the draft asks for (§10), which is one less than we do: the
// HelloAck takes one of them, and leaves the other peer without the right to send payload.
func (h *host) haveThree() {
	h.cfg.RecvBuffers, h.s.cfg.RecvBuffers, h.s.size.pool = bsdh.MinBufs, bsdh.MinBufs, bsdh.MinBufs
	for i := range h.s.out.list {
		h.s.out.list[i].Message.Bufs = bsdh.MinBufs
	}
}

// numberFrom establishes the connection, and lets both sides count their messages on from numbers, as if there had been others.
func (w *world) numberFrom(first [2]uint32) {
	for w.sides[1].deliver() || w.sides[0].deliver() {
	}
	for i, h := range w.sides {
		c := &h.s.credits
		if h.s.state != StateOpen || c.sent != none || c.received != none || len(h.out) > 0 {
			w.fail("side %d: something goes before there is anything to send", i)
			return
		}
		c.sent, c.peerAck, c.peerLimit, c.ackSeen = c.sent+first[i], c.peerAck+first[i], c.peerLimit+first[i], true
		c.received, c.told, c.any, c.toldAck = c.received+first[1-i], c.told+first[1-i], true, true
		h.oracle.acks, h.oracle.ackSeen, h.oracle.first = none+first[i], true, first[i]
	}
}

// post posts a set of receive buffers.
func (h *host) post(first int, bytes uint32) {
	for i := first; i < first+h.cfg.RecvBuffers; i++ {
		if h.sizes[i] != 0 {
			h.w.fail("side %d: receive buffer %d is there twice", h.side, i)
		}
		h.posted, h.sizes[i] = append(h.posted, i), bytes
	}
}

func (h *host) peer() *host { return h.w.sides[1-h.side] }

func (h *host) newKey(g grant) (rdma.RKey, uint64, error) {
	if h.refuse {
		return 0, 0, errors.New("no keys")
	}
	h.lastKey++
	g.addr = uint64(h.lastKey) << 32
	h.keys[h.lastKey] = g
	return h.lastKey, g.addr, nil
}

func (h *host) AdvertiseStream(pos uint64, n uint32) (rdma.RKey, uint64, error) {
	return h.newKey(grant{right: PeerReads, pos: pos, n: n})
}

func (h *host) AdvertiseRead(id uint64, n uint32) (rdma.RKey, uint64, error) {
	return h.newKey(grant{right: PeerWrites, read: h.reads[id], n: n})
}

func (h *host) OpenSink(id uint64) error {
	if r := h.reads[id]; r != nil && r.over {
		h.w.fail("side %d: buffer %d is opened, which is the program's", h.side, id)
	}
	if h.refuse {
		return errors.New("no keys")
	}
	return nil
}

func (h *host) Revoke(key rdma.RKey) {
	if _, ok := h.keys[key]; !ok {
		h.w.fail("side %d: key %d revoked twice", h.side, key)
	}
	if h.w.revokes != nil {
		h.w.revokes(h, key)
	}
	delete(h.keys, key)
}

// run does what the socket wants.
func (h *host) run() {
	if h.w.plant != nil && h.side == 1 && h.s.state == StateOpen {
		h.w.plant(h.s)
	}
	for _, o := range h.s.Poll(nil) {
		h.do(o)
	}
	if h.w.err == nil {
		h.check()
	}
}

func (h *host) do(o Output) {
	if h.w.does != nil {
		h.w.does(h, &o)
	}
	h.w.trace("side %d: %v %v seq=%d ack=%d bufs=%d id=%d pos=%d len=%d buf=%d %v", h.side, o.Kind, o.Message.MID, o.Message.Seq, o.Message.Ack, o.Message.Bufs, o.ID, o.Pos, o.Len, o.Buffer, o.Err)
	switch o.Kind {
	case OutHello:
		hello := item{hello: o.Message.Append(nil, h.cfg.Layout)}
		if h.out = append(h.out, hello); h.moves == 0 {
			h.deliver()
		}
	case OutSuspended:
		h.move(o.Message)
	case OutEstablished, OutPeerDone:
	case OutSend:
		h.send(o)
	case OutRDMAWrite:
		data := make([]byte, o.Len)
		for i := range data {
			data[i] = pattern(h.side, o.Pos+uint64(i))
		}
		h.out = append(h.out, item{write: &o, data: data})
		h.done = append(h.done, o)
		n := 0
		for _, d := range h.done {
			if d.Kind == OutRDMAWrite {
				n++
			}
		}
		h.most[o.Kind] = max(h.most[o.Kind], n)
	case OutRDMARead:
		if h.targets = append(h.targets, o); len(h.targets) > min(h.cfg.ORD, h.peer().cfg.IRD) {
			h.w.fail("side %d: %d RDMA READs at a time", h.side, len(h.targets))
		}
		h.most[o.Kind] = max(h.most[o.Kind], len(h.targets))
		h.out = append(h.out, item{read: &o})
	case OutCopy:
		r := h.reads[o.ID]
		if r == nil || r.over {
			h.w.fail("side %d: copy into buffer %d, which is the program's", h.side, o.ID)
			return
		}
		if o.Buffer == Kept {
			copy(r.buf[o.Offset:], h.kept[:o.Len])
			h.kept = h.kept[o.Len:]
			return
		}
		copy(r.buf[o.Offset:], h.buffers[o.Buffer][o.From:o.From+int(o.Len)])
	case OutKeep:
		h.kept = append(h.kept, h.buffers[o.Buffer][o.From:o.From+int(o.Len)]...)
	case OutRecycle:
		h.posted = append(h.posted, o.Buffer)
	case OutPost:
		h.post(o.Buffer, o.Len)
	case OutDrop:
		if h.sizes[o.Buffer] == 0 || slices.Contains(h.posted, o.Buffer) {
			h.w.fail("side %d: receive buffer %d is dropped and not ours", h.side, o.Buffer)
		}
		h.sizes[o.Buffer] = 0
	case OutRead:
		h.over(o)
	case OutWritten:
		w, ok := h.writes[o.ID]
		if !ok || !o.Canceled && o.Len != w.Len {
			h.w.fail("side %d: Write %+v is over with %d bytes", h.side, w, o.Len)
		}
		for _, d := range h.done {
			if d.Kind == OutRDMAWrite && d.Pos < w.end && d.Pos >= w.end-uint64(w.Len) {
				h.w.fail("side %d: Write %d is over, and an RDMA WRITE takes bytes of it", h.side, o.ID)
			}
		}
		delete(h.writes, o.ID)
	case OutUrgent:
		h.urgents++
	case OutClose, OutReset:
		p := h.peer()
		if o.Kind == OutClose && len(h.done)+len(h.targets) > 0 || h.ended {
			h.w.fail("side %d: %v with %d completions and %d RDMA READs to come", h.side, o.Kind, len(h.done), len(h.targets))
		}
		h.targets, h.done = nil, nil
		if o.Kind == OutReset {
			p.out = nil // what comes late meets nobody
		}
		h.out = append(h.out, item{reset: o.Kind == OutReset, end: true})
	case OutEnded:
		if h.ended {
			h.w.fail("side %d: ended twice", h.side)
		}
		h.ended, h.endErr = true, o.Err
	}
}

// move takes another connection: what was under way on the old one is gone, but for what the peer has still to receive.
func (h *host) move(m bsdh.Message) {
	if len(h.targets)+len(h.keys) > 0 {
		h.w.fail("side %d: suspended with RDMA READs %v, keys %v", h.side, h.targets, h.keys)
	}
	h.moves++
	h.done, h.posted, h.oracle = nil, nil, newOracle()
	clear(h.sizes)
	h.post(0, h.s.Snapshot().RecvBytes)
	if m.MID == bsdh.SuspCommAck {
		if len(h.out) > 0 {
			h.w.fail("side %d: suspended with %d things on their way", h.side, len(h.out))
		}
		return
	}
	h.out = append(h.out, item{end: true})
	if err := h.s.Resume(h.w.now); err != nil {
		h.w.fail("side %d: %v", h.side, err)
	}
	h.run()
}

func (h *host) send(o Output) {
	m := o.Message
	if m.Flags&bsdh.RequestPipelined != 0 && m.MID != bsdh.RdmaRdCompl && m.MID != bsdh.RdmaWrCompl {
		h.w.fail("side %d: REQ_PIPE in %v", h.side, m.MID)
	}
	h.w.mids[m.MID]++
	h.w.modes[[2]bsdh.Mode{h.s.src.mode, h.s.snk.mode}]++
	b := m.AppendHeaders(nil, h.cfg.Layout, int(o.Len))
	for i := range o.Len {
		b = append(b, pattern(h.side, o.Pos+uint64(i)))
	}
	it := item{message: b}
	if o.Invalidate {
		it.inv = &o.Key
	}
	if m.MID != bsdh.HelloAck {
		h.oracle.reading = len(h.targets)
		for _, d := range h.done {
			if d.Kind == OutRDMARead {
				h.oracle.reading++
			}
		}
		h.oracle.sends(&m, o.Len)
	}
	h.out = append(h.out, it)
	h.done = append(h.done, o)
}

// over takes a buffer back, and looks at what is in it.
func (h *host) over(o Output) {
	r := h.reads[o.ID]
	if r == nil || r.over || o.Len > r.Len {
		h.w.fail("side %d: Read %d is over with %d bytes", h.side, o.ID, o.Len)
		return
	}
	for _, g := range h.keys {
		if g.read == r {
			h.w.fail("side %d: Read %d is over, and open to the peer", h.side, o.ID)
		}
	}
	r.over = true
	if len(h.order) == 0 {
		h.w.fail("side %d: no Read is posted", h.side)
	}
	for i := range o.Len {
		if h.w.blind {
			break
		}
		if want := pattern(1-h.side, h.received+uint64(i)); r.buf[i] != want {
			h.w.fail("side %d: byte %d of the stream is %#x, want %#x (Read %d, %d bytes)", h.side, h.received+uint64(i), r.buf[i], want, o.ID, o.Len)
			return
		}
	}
	h.received += uint64(o.Len)
	if o.Urgent {
		h.seen[h.received-1] = true
	}
	if o.EOF {
		h.eof = true
	}
	if o.Len == 0 && !o.EOF && !o.Canceled {
		h.w.fail("side %d: Read %d is over with nothing", h.side, o.ID)
	}
}

// deliver brings the next thing of this side to the peer.
func (h *host) deliver() bool {
	if len(h.out) == 0 {
		return false
	}
	it, p := h.out[0], h.peer()
	h.out = h.out[1:]
	if h.w.gets != nil && !p.ended {
		h.w.gets(p, &it)
	}
	switch {
	case p.ended:
	case it.message != nil:
		p.receive(it)
	case it.write != nil:
		g, ok := p.keys[it.write.Key]
		off := it.write.Addr - g.addr
		if !ok || g.right != PeerWrites || off+uint64(len(it.data)) > uint64(g.n) {
			h.w.fail("side %d: RDMA WRITE of %d bytes with key %d, which opens %+v", h.side, len(it.data), it.write.Key, g)
			return true
		}
		if g.read.over {
			h.w.fail("side %d: RDMA WRITE into Read %d, which is the program's", h.side, g.read.ID)
		}
		copy(g.read.buf[off:], it.data)
	case it.read != nil:
		g, ok := p.keys[it.read.Key]
		off := it.read.Addr - g.addr
		if !ok || g.right != PeerReads || off+uint64(it.read.Len) > uint64(g.n) {
			h.w.fail("side %d: RDMA READ of %d bytes at %d with key %d, which opens %+v", h.side, it.read.Len, off, it.read.Key, g)
			return true
		}
		data := make([]byte, it.read.Len)
		for i := range data {
			data[i] = pattern(p.side, g.pos+off+uint64(i))
		}
		p.out = append(p.out, item{answer: true, data: data})
	case it.answer:
		if len(p.targets) == 0 {
			break
		}
		o := p.targets[0]
		r := p.reads[o.ID]
		if r.over {
			h.w.fail("side %d: RDMA READ into Read %d, which is the program's", p.side, r.ID)
		}
		copy(r.buf[o.Offset:], it.data)
		p.targets = p.targets[1:]
		p.done = append(p.done, o)
	case it.hello != nil:
		if err := p.s.HandleHello(h.w.now, it.hello); err != nil && !h.w.gone {
			h.w.fail("hello: %v", err)
		}
		p.run()
	case it.reset:
		p.down(errors.New("reset"))
	case it.end:
		p.down(nil)
	}
	return true
}

// down ends the transport connection, and what is under way on it.
func (h *host) down(err error) {
	h.done, h.targets = nil, nil
	h.s.HandleDown(err)
	h.run()
}

func (h *host) receive(it item) {
	if len(h.posted) == 0 {
		h.w.fail("side %d: no receive buffer is posted", h.side)
		return
	}
	i := h.posted[0]
	h.posted = h.posted[1:]
	h.buffers[i] = it.message
	if len(it.message) > int(h.sizes[i]) {
		h.w.fail("side %d: message of %d bytes into receive buffer %d of %d", h.side, len(it.message), i, h.sizes[i])
	}
	m, _ := bsdh.Parse(it.message, h.cfg.Layout)
	h.w.trace("side %d: gets %v seq=%d ack=%d bufs=%d %d bytes %+v %d", h.side, m.MID, m.Seq, m.Ack, m.Bufs, len(m.Payload), m.Advert, m.Bytes)
	if m.MID != bsdh.HelloAck {
		h.oracle.receives(&m)
	}
	err := h.s.HandleRecv(h.w.now, i, it.message, it.inv)
	if err != nil && !h.w.gone {
		h.w.fail("side %d: %v", h.side, err)
	}
	h.run()
}

// complete hands over the next completion.
func (h *host) complete() bool {
	if len(h.done) == 0 || h.ended {
		return false
	}
	k := h.done[0].Kind
	h.done = h.done[1:]
	switch k {
	case OutSend:
		h.s.HandleSent(h.w.now, true)
	case OutRDMAWrite:
		h.s.HandleWrite(h.w.now, true)
	case OutRDMARead:
		h.s.HandleRead(h.w.now, true)
	}
	h.run()
	return true
}

func (h *host) write(n uint32, direct, urgent bool) {
	if h.s.state == StateClosed {
		return
	}
	h.id++
	w := Write{ID: h.id, Len: n, Direct: direct}
	end := h.s.src.produced + uint64(n) - 1
	f := h.s.Write
	if urgent {
		f = h.s.WriteUrgent
	}
	h.writes[w.ID] = posted{w, end + 1}
	if urgent {
		h.marks[end] = true
	}
	if err := f(h.w.now, w); err != nil {
		delete(h.writes, w.ID)
		if urgent {
			delete(h.marks, end)
		}
	}
	h.run()
}

func (h *host) read(n uint32, direct, fill bool) {
	h.id++
	r := &testRead{Read: Read{ID: h.id, Len: n, Direct: direct, Fill: fill}, buf: make([]byte, n)}
	h.reads[r.ID] = r
	h.order = append(h.order, r.ID)
	if err := h.s.Read(h.w.now, r.Read); err != nil {
		delete(h.reads, r.ID)
	}
	h.run()
}

// check looks at what must hold always.
func (h *host) check() {
	s := h.s
	if s.err != nil && !h.w.gone {
		h.w.fail("side %d: ended: %v", h.side, s.err)
	}
	if s.state != StateOpen {
		return
	}
	if n := s.src.srcs.n + s.snk.adv; n > min(s.peer.maxAdverts, s.cfg.MaxAdverts) {
		h.w.fail("side %d: %d adverts", h.side, n)
	}
	if s.snk.adv > 0 && (!s.snk.held.isEmpty() || s.snk.owed > 0 || !s.snk.srcs.isEmpty()) {
		h.w.fail("side %d: a buffer is advertised before earlier bytes have theirs", h.side)
	}
	if s.credits.posted != len(h.posted) {
		h.w.fail("side %d: %d receive buffers counted, %d posted", h.side, s.credits.posted, len(h.posted))
	}
	if uint64(len(h.kept)) != s.snk.count.kept || len(h.kept) > 3*h.cfg.RecvBuffers*int(max(h.cfg.RecvBytes, h.cfg.MaxRecvBytes)) {
		h.w.fail("side %d: %d bytes are kept, %d counted", h.side, len(h.kept), s.snk.count.kept)
	}
	if err := h.oracle.compare(s); err != nil {
		h.w.fail("side %d: %v", h.side, err)
	}
}
