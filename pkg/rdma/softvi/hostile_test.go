// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softvi"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

// knock connects to a device's port from an address.
func knock(t testing.TB, from netip.Addr, d *softvi.Device) *net.TCPConn {
	t.Helper()
	c, err := net.DialTCP("tcp", &net.TCPAddr{IP: from.AsSlice()}, net.TCPAddrFromAddrPort(d.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// endsSoon waits until the other side has ended a connection.
func endsSoon(t testing.TB, what string, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: the connection is still there", what)
	}
}

// TestHostile_silence: who connects and says nothing, or not all of it, has a bounded part of the device for a
// bounded time, and keeps nobody else out.
func TestHostile_silence(t *testing.T) {
	a := open(t, softvi.Config{Name: "a", Addr: loopA})
	b := open(t, softvi.Config{Name: "b", Addr: loopB, RequestTimeout: 3 * time.Second})
	stranger := netip.MustParseAddr("127.0.0.66")
	conns := make([]*net.TCPConn, 4*softvi.MaxPendingOfSource)
	for i := range conns {
		conns[i] = knock(t, stranger, b)
		if i%2 == 0 {
			_, _ = conns[i].Write(request(t, "x")[:1+i%60]) // a part of a request
		}
	}
	waitPending(t, b, softvi.MaxPendingOfSource)
	x, y := end(t, a), end(t, b)
	connect(t, x, y, softvi.Options{}, softvi.Options{})
	talk(t, x, y)
	for i, c := range conns {
		endsSoon(t, fmt.Sprintf("connection %d", i), c)
	}
	waitPending(t, b, 0)
}

// TestHostile_backlog: calls that no program takes are bounded, and those of others find room when they are
// over.
func TestHostile_backlog(t *testing.T) {
	b := open(t, softvi.Config{Name: "b", Addr: loopB, AcceptTimeout: 3 * time.Second})
	l := listen(t, b, "x")
	var conns []*net.TCPConn
	for i := range 2 * softvi.MaxBacklog {
		c := knock(t, netip.AddrFrom4([4]byte{127, 0, 1, byte(i / (softvi.MaxPendingOfSource / 2))}), b)
		if _, err := c.Write(request(t, "x")); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	waitPending(t, b, softvi.MaxBacklog)
	for i, c := range conns {
		endsSoon(t, fmt.Sprintf("connection %d", i), c)
	}
	waitPending(t, b, 0)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if r, err := l.Accept(ctx); err == nil {
		t.Errorf("a call that is over is given away: from %v", r.RemoteAddr())
	}
}

// request is a Connect Request to a called program, byte by byte as some other implementation may write it.
func request(t testing.TB, called string) []byte {
	t.Helper()
	disc, err := vitcp.NewDiscriminator(called)
	if err != nil {
		t.Fatal(err)
	}
	ce := vitcp.CE{Called: disc, Attr: vitcp.Attr{
		Reliable: true, RDMAWrite: true, RDMARead: true, FlowControl: true, MaxTransfer: 1 << 30, ReadWindow: 4,
	}}
	h := vitcp.Header{Type: vitcp.TypeConnectRequest, Flags: vitcp.FlagEnd, Length: vitcp.HeaderLen + vitcp.CELen}
	return ce.Append(h.Append(nil))
}

// TestHostile_requests: what is no Connect Request ends the connection, whatever length it claims.
func TestHostile_requests(t *testing.T) {
	b := open(t, softvi.Config{Name: "b", Addr: loopB})
	listen(t, b, "x")
	edit := func(f func(b []byte)) []byte {
		r := request(t, "x")
		f(r)
		return r
	}
	for name, bytes := range map[string][]byte{
		"HTTP":               []byte("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"),
		"version 2":          edit(func(b []byte) { b[0] = 2 }),
		"length 0":           edit(func(b []byte) { b[2], b[3] = 0, 0 }),
		"length 65535":       edit(func(b []byte) { b[2], b[3] = 0xff, 0xff }),
		"no CE header":       edit(func(b []byte) { b[2], b[3] = 0, vitcp.HeaderLen }),
		"a SEND":             edit(func(b []byte) { b[1] = byte(vitcp.TypeSend)<<3 | byte(vitcp.FlagEnd) }),
		"a Connect Accept":   edit(func(b []byte) { b[1] = byte(vitcp.TypeConnectAccept)<<3 | byte(vitcp.FlagEnd) }),
		"long discriminator": edit(func(b []byte) { b[24+26], b[24+27] = 0xff, 0xff }),
		"called twice":       append(request(t, "x"), request(t, "x")...),
		"called, and sent":   append(request(t, "y"), make([]byte, 1<<20)...),
	} {
		c := knock(t, loopA, b)
		go func() { _, _ = c.Write(bytes) }()
		endsSoon(t, name, c)
	}
	waitPending(t, b, 0)
}

// TestHostile_answers: a server that answers what is no answer, or not all of one, ends the call with a reason, and in
// the caller's time.
func TestHostile_answers(t *testing.T) {
	a := open(t, softvi.Config{Name: "a", Addr: loopA})
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: loopB.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	to := softvi.Addr{IP: loopB, Port: l.Addr().(*net.TCPAddr).AddrPort().Port(), Discriminator: "x"}
	answer := func(edit func(b []byte)) []byte {
		b := request(t, "x")
		b[1] = byte(vitcp.TypeConnectAccept)<<3 | byte(vitcp.FlagEnd)
		edit(b)
		return b
	}
	const attributes, transfer = vitcp.HeaderLen, vitcp.HeaderLen + 4
	for name, c := range map[string]struct {
		bytes []byte
		want  error
	}{
		"HTTP":                  {[]byte("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"), vitcp.ErrProtocol},
		"length 65535":          {answer(func(b []byte) { b[2], b[3] = 0xff, 0xff }), vitcp.ErrProtocol},
		"a request":             {request(t, "x"), vitcp.ErrProtocol},
		"other attributes":      {answer(func(b []byte) { b[attributes+1] &^= 1 }), vitcp.ErrReliability},
		"more than was offered": {answer(func(b []byte) { b[transfer] = 0xff }), vitcp.ErrMaxTransfer},
		"half of one":           {answer(func([]byte) {})[:30], vitcp.ErrTimeout},
	} {
		x := end(t, a)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		if errors.Is(c.want, vitcp.ErrTimeout) {
			ctx, cancel = context.WithTimeout(context.Background(), 30*time.Millisecond)
		}
		served := make(chan *net.TCPConn, 1)
		go func() {
			conn, err := l.AcceptTCP()
			if err == nil {
				_, _ = conn.Write(c.bytes)
			}
			served <- conn
		}()
		if _, err := a.Dial(ctx, x.QP, to, softvi.Options{}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		cancel()
		states(t, rdma.QPInit, x)
		conn := <-served
		endsSoon(t, name, conn)
		_ = conn.Close()
	}
}

// raw is a peer that says what it likes on a connection.
type raw struct {
	*net.TCPConn
	first  uint32 // number before that of its first message
	theirs uint32
}

// hostile connects y with a peer that is none of ours.
func hostile(t testing.TB, y *rdmatest.End) *raw {
	t.Helper()
	b := device(y)
	l := listen(t, b, "x")
	defer func() { _ = l.Close() }()
	c := knock(t, loopA, b)
	if _, err := c.Write(request(t, "x")); err != nil {
		t.Fatal(err)
	}
	if _, err := accept(t, l).Accept(y.QP, softvi.Options{}); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, vitcp.HeaderLen+vitcp.CELen)
	if _, err := io.ReadFull(c, answer); err != nil {
		t.Fatal(err)
	}
	h, err := vitcp.ParseHeader(answer[:vitcp.HeaderLen])
	if err != nil || h.Type != vitcp.TypeConnectAccept {
		t.Fatalf("%+v, %v", h, err)
	}
	return &raw{TCPConn: c, theirs: h.Message}
}

// TestHostile_segments: a peer that breaks the protocol, or asks for what it has no right to, ends its own
// connection, and touches nothing.
func TestHostile_segments(t *testing.T) {
	b := open(t, softvi.Config{Name: "b", Addr: loopB})
	type segment func(p *raw, y *rdmatest.End) []byte
	send := func(f func(h *vitcp.Header)) segment {
		return func(p *raw, _ *rdmatest.End) []byte {
			h := vitcp.Header{Type: vitcp.TypeSend, Flags: vitcp.FlagEnd, Length: vitcp.HeaderLen + 8, Message: p.first + 1, Ack: p.theirs}
			f(&h)
			return append(h.Append(nil), make([]byte, 70_000)...)
		}
	}
	rdmaTo := func(typ vitcp.Type, length uint16, f func(r *vitcp.RDMA)) segment {
		return func(p *raw, y *rdmatest.End) []byte {
			h := vitcp.Header{Type: typ, Flags: vitcp.FlagEnd, Length: length, Message: p.first + 1, Ack: p.theirs}
			r := vitcp.RDMA{Addr: y.MR.Addr(), Handle: y.MR.RKey(), Length: 8}
			f(&r)
			return append(r.Append(h.Append(nil)), make([]byte, 70_000)...)
		}
	}
	const rdmaHead = vitcp.HeaderLen + vitcp.RDMALen
	for name, s := range map[string]segment{
		"no protocol":          func(*raw, *rdmatest.End) []byte { return []byte("this is no segment of VI/TCP at all") },
		"longer than receive":  send(func(h *vitcp.Header) { h.Length = 65535 }),
		"offset in the first":  send(func(h *vitcp.Header) { h.Offset = 1 << 31 }),
		"another message":      send(func(h *vitcp.Header) { h.Message += 5 }),
		"acknowledges too far": send(func(h *vitcp.Header) { h.Ack += 1 << 30 }),
		"fails what is none":   send(func(h *vitcp.Header) { h.Ack++; h.Error = vitcp.ErrorMemory }),
		"calls again":          send(func(h *vitcp.Header) { h.Type = vitcp.TypeConnectRequest; h.Length = vitcp.HeaderLen + vitcp.CELen }),
		"answers nothing":      rdmaTo(vitcp.TypeReadResponse, rdmaHead+8, func(*vitcp.RDMA) {}),
		"WRITE of 4 GiB":       rdmaTo(vitcp.TypeWrite, 65535, func(r *vitcp.RDMA) { r.Length = 1<<32 - 1 }),
		"WRITE behind the end": rdmaTo(vitcp.TypeWrite, rdmaHead+8, func(r *vitcp.RDMA) { r.Addr += 1<<20 - 4 }),
		"WRITE that wraps":     rdmaTo(vitcp.TypeWrite, rdmaHead+8, func(r *vitcp.RDMA) { r.Addr = ^uint64(0) - 3 }),
		"WRITE without a key":  rdmaTo(vitcp.TypeWrite, rdmaHead+8, func(r *vitcp.RDMA) { r.Handle ^= 0xffff }),
		"READ of 4 GiB":        rdmaTo(vitcp.TypeReadRequest, rdmaHead, func(r *vitcp.RDMA) { r.Length = 1<<32 - 1 }),
		"READ without a key":   rdmaTo(vitcp.TypeReadRequest, rdmaHead, func(r *vitcp.RDMA) { r.Handle ^= 0xffff }),
	} {
		y := end(t, b)
		y.Recv(t, 1, 0, 64)
		p := hostile(t, y)
		bytes := s(p, y)
		go func() { _, _ = p.Write(bytes) }()
		rdmatest.AwaitEvent(t, y.Ctx, rdma.EventQPFatal)
		states(t, rdma.QPError, y)
		if w := rdmatest.Await(t, y.RecvCQ, 1)[0]; w.Status != rdma.StatusFlushed && w.Status != rdma.StatusLocalLength {
			t.Errorf("%s: receive %+v (%v)", name, w, w.Status)
		}
		for _, c := range y.MR.Bytes() {
			if c != 0 {
				t.Fatalf("%s: memory was written", name)
			}
		}
		endsSoon(t, name, p)
	}
}

// TestHostile_readsNothing: a peer that reads nothing, and acknowledges nothing, does not hold up posting, nor the end of a
// queue pair, a context or the device.
func TestHostile_readsNothing(t *testing.T) {
	b, err := softvi.Open(softvi.Config{Name: "b", Addr: loopB})
	if err != nil {
		t.Fatal(err)
	}
	y, z := end(t, b), end(t, b)
	p, q := hostile(t, y), hostile(t, z)
	posted := fillQueue(t, y)
	fillQueue(t, z)
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := b.Disconnect(ctx, y.QP); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("disconnect: %v", err)
	}
	for _, w := range rdmatest.Await(t, y.SendCQ, posted) {
		if w.Status != rdma.StatusFlushed {
			t.Fatalf("%+v (%v)", w, w.Status)
		}
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("the end took %v", d)
	}
	endsSoon(t, "after Disconnect", p)
	endsSoon(t, "after Close", q)
}

// fillQueue posts WRITEs until the queue is full.
func fillQueue(t testing.TB, e *rdmatest.End) (posted int) {
	t.Helper()
	w := rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e.SGE(0, 1<<20)}, RemoteAddr: 1, RKey: 2}
	for posted < 4*64 { // which is more than fits
		n, err := e.QP.PostSend([]rdma.SendWR{w})
		posted += n
		if errors.Is(err, rdma.ErrQueueFull) {
			return posted
		}
		if err != nil {
			t.Fatalf("%d posted: %v", posted, err)
		}
	}
	t.Fatalf("%d posted", posted)
	return 0
}

// TestHostile_memory: a peer that never stops talking costs no memory, and one that asks for more READs than agreed, whose
// answers it does not read, no more than those.
func TestHostile_memory(t *testing.T) {
	b := open(t, softvi.Config{Name: "b", Addr: loopB})
	y, z := end(t, b), end(t, b)
	p, q := hostile(t, y), hostile(t, z)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	nop := vitcp.Header{Type: vitcp.TypeNOP, Flags: vitcp.FlagEnd, Length: vitcp.HeaderLen, Ack: p.theirs}
	var nops []byte
	for i := range 1 << 12 {
		nop.Posted = uint16(i) // what it says of its receives
		nops = nop.Append(nops)
	}
	for range 200 {
		if _, err := p.Write(nops); err != nil {
			t.Fatal(err)
		}
	}
	for i := range uint32(8) {
		h := vitcp.Header{Type: vitcp.TypeReadRequest, Flags: vitcp.FlagEnd, Length: vitcp.HeaderLen + vitcp.RDMALen, Message: q.first + 1 + i, Ack: q.theirs}
		r := vitcp.RDMA{Addr: z.MR.Addr(), Handle: z.MR.RKey(), Length: 1 << 20}
		if _, err := q.Write(r.Append(h.Append(nil))); err != nil {
			break // refused already
		}
	}
	rdmatest.AwaitEvent(t, z.Ctx, rdma.EventQPFatal)
	if after := heap(); after > before+4<<20 {
		t.Errorf("%d bytes before, %d after", before, after)
	}
	states(t, rdma.QPRTS, y)
}
