// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// What the victims of hostile peers have.
const (
	hostileAddr     = "127.93.0.3"
	victimBuffers   = 8
	victimBytes     = 4096
	victimAdverts   = 4
	victimZcopy     = 8 << 10
	victimTransfer  = 64 << 10 // each Buffer of its program
	hostilePatience = 20 * time.Second
)

// A hostileHost has memory for peers that speak SDP by hand:
//
//	receive buffers | messages to be sent | what is read and written by RDMA
type hostileHost struct {
	dev *softiwarp.Device
	ctx rdma.Context
	pd  rdma.PD
	mr  rdma.MR
}

const (
	hostileRecvs = 32
	hostileSends = 64
	recvArea     = 0
	sendArea     = hostileRecvs * victimBytes
	sendBytes    = 2 * victimBytes
	rdmaArea     = sendArea + hostileSends*sendBytes
)

func newHostileHost(t *testing.T) *hostileHost {
	t.Helper()
	h := &hostileHost{dev: openIWARP(t, hostileAddr).(*softiwarp.Device)}
	var err error
	if h.ctx, err = h.dev.Open(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.ctx.Close(); err != nil {
			t.Error(err)
		}
	})
	if h.pd, err = h.ctx.AllocPD(); err == nil {
		h.mr, err = h.pd.AllocMR(rdmaArea+victimTransfer, rdma.LocalWrite|rdma.RemoteRead|rdma.RemoteWrite)
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// hostilePeer is the connecting peer of a victim. It sends what a test wants, and remembers what the victim offers.
type hostilePeer struct {
	t  *testing.T
	h  *hostileHost
	cq rdma.CQ
	qp rdma.QP

	seq, ack  uint32
	sent      int
	src, sink bsdh.Advert // the victim's last ones
	answers   map[bsdh.MID]int
	ended     bool // the queue pair is of no use any more
}

// victim is what a hostile peer talks to.
type victim struct {
	conn    *sdp.Conn
	ended   chan error
	in, out *sdp.Buffer   // of its program
	wanted  *sdp.Transfer // what it reads in the state of that name
}

// hostileBed is a listening stack with victims, and an honest connection that they must not disturb.
type hostileBed struct {
	*pair
	t    *testing.T
	host *hostileHost
	mu   sync.Mutex
	ends map[*sdp.Conn]chan error
}

func newHostileBed(t *testing.T) *hostileBed {
	t.Helper()
	b := &hostileBed{t: t, ends: make(map[*sdp.Conn]chan error)}
	b.pair = newPair(t, openIWARP, func(c *sdp.Config) {
		c.RecvBuffers, c.RecvBufferSize, c.MaxAdverts, c.ZcopySize = victimBuffers, victimBytes, victimAdverts, victimZcopy
		c.Hooks.Ended = func(c *sdp.Conn, err error) { b.end(c) <- err }
	})
	b.host = newHostileHost(t)
	return b
}

// end is where the end of a connection is told.
func (b *hostileBed) end(c *sdp.Conn) chan error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ends[c] == nil {
		b.ends[c] = make(chan error, 1)
	}
	return b.ends[c]
}

// attack connects a hostile peer to a victim.
func (b *hostileBed) attack(t *testing.T) (*hostilePeer, *victim) {
	t.Helper()
	b.dialing.Lock()
	defer b.dialing.Unlock()
	p := &hostilePeer{t: t, h: b.host, answers: make(map[bsdh.MID]int)}
	p.connect(b.l.Addr().String())
	c, err := b.l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	v := &victim{conn: c.(*sdp.Conn), in: newBuffer(t, b.server, victimTransfer), out: newBuffer(t, b.server, victimTransfer)}
	v.ended = b.end(v.conn)
	copy(v.out.Bytes(), random(3, victimTransfer))
	return p, v
}

func (p *hostilePeer) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// connect sets a connection up as the draft has it, and waits for HelloAck.
func (p *hostilePeer) connect(addr string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), hostilePatience)
	defer cancel()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(hostileAddr)}}
	c, err := d.DialContext(ctx, "tcp", addr)
	p.must(err)
	p.queuePair()
	hello := bsdh.Message{MID: bsdh.Hello, Bufs: hostileRecvs, Setup: hostileSetup}
	s, err := p.h.dev.NewSSP(c.(*net.TCPConn), softiwarp.SSPOptions{QP: p.qp, Last: hello.Append(nil, bsdh.LayoutFigures)})
	p.must(err)
	r, err := s.Request(ctx)
	p.must(err)
	p.must(r.Accept(ctx, nil, softiwarp.ConnectOptions{NoPeerToPeer: true}))
	p.waits("HelloAck", func() bool { return p.answers[bsdh.HelloAck] > 0 })
}

// hostileSetup is what hostile peers say of themselves.
var hostileSetup = bsdh.Setup{
	Major: 1, Minor: 1, MaxAdverts: 4, RecvBytes: victimBytes, WantRecvBytes: victimBytes, IRD: 4, ORD: 4,
}

// queuePair makes one with all receive buffers.
func (p *hostilePeer) queuePair() {
	var err error
	p.cq, err = p.h.ctx.CreateCQ(hostileRecvs + hostileSends)
	p.must(err)
	p.qp, err = p.h.pd.CreateQP(rdma.QPConfig{SendCQ: p.cq, RecvCQ: p.cq, MaxSendWR: hostileSends, MaxRecvWR: hostileRecvs, MaxSGE: 1})
	p.must(err)
	p.must(p.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: rdma.LocalWrite | rdma.RemoteRead | rdma.RemoteWrite}))
	for i := range hostileRecvs {
		p.post(i)
	}
}

// suspends has the victim follow to another connection.
func (p *hostilePeer) suspends() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), hostilePatience)
	defer cancel()
	n, err := net.Listen("tcp", net.JoinHostPort(hostileAddr, "0"))
	p.must(err)
	l := n.(*net.TCPListener)
	p.says(bsdh.Message{MID: bsdh.SuspComm, Port: uint16(l.Addr().(*net.TCPAddr).Port)})
	p.waits("SuspCommAck", func() bool { return p.answers[bsdh.SuspCommAck] > 0 })
	p.answers[bsdh.SuspCommAck] = 0
	_ = p.h.dev.Disconnect(p.qp) // the victim may have
	p.must(errors.Join(p.qp.Close(), p.cq.Close()))
	p.must(l.SetDeadline(time.Now().Add(hostilePatience)))
	c, err := l.AcceptTCP()
	p.must(errors.Join(err, l.Close()))
	_, err = io.ReadFull(c, make([]byte, bsdh.HelloLen))
	p.must(err)
	p.queuePair()
	_, err = p.h.dev.Connect(ctx, p.qp, c, softiwarp.ConnectOptions{NoPeerToPeer: true, Streamed: true})
	p.must(err)
	p.seq, p.ack, p.ended = 0, 0, false
	ack := bsdh.Message{MID: bsdh.HelloAck, Bufs: hostileRecvs, Setup: hostileSetup}
	ack.Setup.WantRecvBytes = 0
	p.sends(ack.Append(nil, bsdh.LayoutFigures), nil)
}

// post posts a receive buffer.
func (p *hostilePeer) post(i int) {
	sge := rdma.SGE{Addr: p.h.mr.Addr() + uint64(recvArea+i*victimBytes), Length: victimBytes, LKey: p.h.mr.LKey()}
	_, _ = p.qp.PostRecv([]rdma.RecvWR{{ID: uint64(i), SGE: sge}}) // the queue pair may have ended
}

// take looks at what has completed.
func (p *hostilePeer) take() {
	var wcs [16]rdma.WC
	n, err := p.cq.Poll(wcs[:])
	p.must(err)
	for _, wc := range wcs[:n] {
		if wc.Status != rdma.StatusSuccess {
			p.ended = true
			continue
		}
		if wc.Op != rdma.OpRecv {
			continue
		}
		b := p.h.mr.Bytes()[recvArea+int(wc.ID)*victimBytes:][:wc.Bytes]
		m, err := bsdh.Parse(b, bsdh.LayoutFigures)
		p.must(err)
		p.answers[m.MID]++
		switch m.MID {
		case bsdh.HelloAck: // it has no number
		case bsdh.SrcAvail:
			p.src, p.ack = m.Advert, m.Seq
		case bsdh.SinkAvail:
			p.sink, p.ack = m.Advert, m.Seq
		default:
			p.ack = m.Seq
		}
		p.post(int(wc.ID))
	}
}

// waits waits until something holds, or the queue pair has ended.
func (p *hostilePeer) waits(what string, holds func() bool) {
	p.t.Helper()
	for end := time.Now().Add(hostilePatience); ; time.Sleep(100 * time.Microsecond) { // polls the completion queue
		p.take()
		switch {
		case holds() || p.ended:
			return
		case time.Now().After(end):
			p.t.Fatalf("never: %s", what)
		}
	}
}

// sends sends any bytes as a message. It does not wait.
func (p *hostilePeer) sends(b []byte, inv *rdma.RKey) {
	off := sendArea + p.sent%hostileSends*sendBytes
	p.sent++
	copy(p.h.mr.Bytes()[off:], b)
	wr := rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{{Addr: p.h.mr.Addr() + uint64(off), Length: uint32(len(b)), LKey: p.h.mr.LKey()}}}
	if inv != nil {
		wr.Flags, wr.InvKey = wr.Flags|rdma.SendInvalidate, *inv
	}
	p.posts(wr)
}

// posts posts a work request; the queue pair may have ended, or be full of what nobody takes.
func (p *hostilePeer) posts(wr rdma.SendWR) {
	if _, err := p.qp.PostSend([]rdma.SendWR{wr}); err != nil {
		p.ended = true
	}
}

// numbered is a message with the number that is due.
func (p *hostilePeer) numbered(m *bsdh.Message) []byte {
	p.take()
	if m.Seq, m.Ack = p.seq, p.ack; m.Bufs == 0 {
		m.Bufs = hostileRecvs - 1
	}
	p.seq++
	return m.Append(nil, bsdh.LayoutFigures)
}

// says sends a message with the number that is due.
func (p *hostilePeer) says(m bsdh.Message) { p.sends(p.numbered(&m), nil) }

// invalidates is says, with a key that the message makes worthless.
func (p *hostilePeer) invalidates(m bsdh.Message, inv *rdma.RKey) { p.sends(p.numbered(&m), inv) }

// pipelined has the victim receive in Pipelined mode.
func (p *hostilePeer) pipelined() {
	p.says(bsdh.Message{MID: bsdh.ModeChange, Change: bsdh.ModeWord{Mode: bsdh.Pipelined}})
}

// moves posts an RDMA WRITE or READ of n bytes with a key of somebody.
func (p *hostilePeer) moves(op rdma.Opcode, key rdma.RKey, addr uint64, n int) {
	sge := rdma.SGE{Addr: p.h.mr.Addr() + rdmaArea, Length: uint32(n), LKey: p.h.mr.LKey()}
	p.posts(rdma.SendWR{Op: op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{sge}, RKey: key, RemoteAddr: addr})
}

// offers is memory of the hostile host.
func (p *hostilePeer) offers(n uint32) bsdh.Advert {
	return bsdh.Advert{Len: n, Key: p.h.mr.RKey(), Addr: p.h.mr.Addr() + rdmaArea}
}

// gone ends the queue pair, and waits for the end of the victim, whose reason it returns.
func (p *hostilePeer) gone(v *victim) error {
	p.t.Helper()
	var why error
	p.waits("the victim's connection ends", func() bool {
		select {
		case why = <-v.ended:
			v.ended <- why
			return true
		default:
			return p.answers[bsdh.AbortConn] > 0 // it waits for us
		}
	})
	_ = p.qp.Modify(rdma.QPAttr{State: rdma.QPError}) // allowed from everywhere
	select {
	case why = <-v.ended:
	case <-time.After(hostilePatience):
		p.t.Fatalf("the victim's connection does not end: %v", v.conn.Info())
	}
	p.must(errors.Join(p.qp.Close(), p.cq.Close()))
	_ = v.conn.Close() // says why it ended
	return why
}

// released closes the Buffers of the victim: nothing has them any more.
func (v *victim) released(t *testing.T) {
	t.Helper()
	if err := errors.Join(v.in.Close(), v.out.Close()); err != nil {
		t.Error(err)
	}
}

// regions counts what this process has mapped as memory of devices.
func regions(t testing.TB) int {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(maps, []byte("kube-smcr-mr"))
}

// honest moves bytes in both directions until stop, on a connection of the same stacks, and compares sums of what was written and
// read. The result has how many bytes went, or what was wrong.
func (b *hostileBed) honest(stop <-chan struct{}) (result func() (int64, error)) {
	a, c := b.dial(b.t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	var total int64
	one := func(w, r *sdp.Conn, seed uint64, write, read func(c *sdp.Conn, p []byte) (int, error)) {
		sums := make(chan []byte, 1)
		wg.Go(func() {
			rng, sum, p := rand.New(rand.NewPCG(seed, 9)), sha256.New(), make([]byte, victimTransfer)
			for running := true; running; {
				for i := 0; i < len(p); i += 8 {
					binary.LittleEndian.PutUint64(p[i:], rng.Uint64())
				}
				_, _ = sum.Write(p)
				_, err := write(w, p)
				select {
				case <-stop:
					running = false
				default:
					running = err == nil
				}
				if err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
			}
			sums <- sum.Sum(nil)
			_ = w.CloseWrite() // an error is that of the reader, too
		})
		wg.Go(func() {
			sum, p := sha256.New(), make([]byte, victimTransfer)
			for {
				n, err := read(r, p)
				_, _ = sum.Write(p[:n])
				mu.Lock()
				total += int64(n)
				mu.Unlock()
				if err == nil {
					continue
				}
				if want := <-sums; !errors.Is(err, io.EOF) || !bytes.Equal(sum.Sum(nil), want) {
					mu.Lock()
					errs = append(errs, fmt.Errorf("read to %w, sum %x, written were %x", err, sum.Sum(nil), want))
					mu.Unlock()
				}
				return
			}
		})
	}
	out, in := newBuffer(b.t, b.client, victimTransfer), newBuffer(b.t, b.server, victimTransfer)
	one(a, c, 1, func(c *sdp.Conn, p []byte) (int, error) {
		return c.WriteBuffer(out, 0, copy(out.Bytes(), p))
	}, func(c *sdp.Conn, p []byte) (int, error) {
		n, err := c.ReadBuffer(in, 0, len(p), false)
		return copy(p, in.Bytes()[:n]), err
	})
	one(c, a, 2, (*sdp.Conn).Write, (*sdp.Conn).Read)
	return func() (int64, error) {
		wg.Wait()
		_, _ = a.Close(), c.Close()
		return total, errors.Join(errs...)
	}
}

// undisturbed runs attacks beside an honest connection. Then that has all its bytes, and of the attacks nothing is left.
func undisturbed(t *testing.T, attacks func(b *hostileBed)) {
	t.Helper()
	b := newHostileBed(t)
	stop := make(chan struct{})
	result := b.honest(stop)
	before := regions(t)
	attacks(b)
	for end := time.Now().Add(hostilePatience); len(b.server.Conns()) > 1 || regions(t) > before; time.Sleep(time.Millisecond) { // polls what is left
		if time.Now().After(end) {
			t.Errorf("%d connections and %d regions are left, want 1 and %d", len(b.server.Conns()), regions(t), before)
			break
		}
	}
	close(stop)
	if n, err := result(); err != nil || n < 4*victimTransfer {
		t.Errorf("the honest connection carried %d bytes: %v", n, err)
	}
}

// hostileStates are what victims do when the attack comes. Each brings both to it.
var hostileStates = []struct {
	name  string
	bring func(p *hostilePeer, v *victim)
}{
	{"idle", func(*hostilePeer, *victim) {}},
	{"offers", func(p *hostilePeer, v *victim) {
		_, err := v.conn.StartWrite(v.out, 0, victimTransfer)
		p.must(err)
		p.waits("SrcAvail", func() bool { return p.src.Len > 0 })
	}},
	{"wants", func(p *hostilePeer, v *victim) {
		p.pipelined()
		var err error
		v.wanted, err = v.conn.StartRead(v.in, 0, victimTransfer, false)
		p.must(err)
		p.waits("SinkAvail", func() bool { return p.sink.Len > 0 })
	}},
	{"reads", func(p *hostilePeer, v *victim) {
		_, err := v.conn.StartRead(v.in, 0, victimTransfer, true)
		p.must(err)
		p.says(bsdh.Message{MID: bsdh.SrcAvail, Advert: p.offers(victimTransfer / 2), Payload: make([]byte, 1)})
	}},
	{"shut down", func(p *hostilePeer, v *victim) {
		p.must(v.conn.CloseWrite())
		p.waits("DisConn", func() bool { return p.answers[bsdh.DisConn] > 0 })
	}},
	{"half closed", func(p *hostilePeer, v *victim) {
		p.says(bsdh.Message{MID: bsdh.DisConn})
		_, err := v.conn.Read(make([]byte, 1))
		if !errors.Is(err, io.EOF) {
			p.t.Errorf("read to %v", err)
		}
	}},
}

// Whatever messages a peer sends, and in whatever state: it ends its own connection, with a reason, and nothing else.
func TestConn_hostileMessages(t *testing.T) {
	undisturbed(t, func(b *hostileBed) {
		for _, st := range hostileStates {
			for mid := range 256 {
				known := mid <= int(bsdh.SuspCommAck) || mid >= int(bsdh.SinkAvail)
				if !known && mid%64 != 16 {
					continue // one kind in 64 of those that there are not
				}
				for _, n := range []uint32{0, 900, 1<<32 - 1} {
					p, v := b.attack(t)
					st.bring(p, v)
					m := bsdh.Message{MID: bsdh.Data, Bytes: n, Bufs: uint16(n), Port: uint16(n), Change: bsdh.ModeWord{Mode: bsdh.Mode(n % 3), Send: n&1 > 0}}
					m.Advert = bsdh.Advert{Len: n, Key: p.h.mr.RKey(), Addr: p.h.mr.Addr() + rdmaArea, NonDiscards: n}
					if known {
						m.MID = bsdh.MID(mid)
					}
					if m.MID >= bsdh.SinkAvail {
						m.Payload = make([]byte, n%1000)
					}
					for range 5 {
						b := p.numbered(&m)
						b[3] = byte(mid)
						p.sends(b, nil)
					}
					p.seq += 7
					p.says(bsdh.Message{MID: bsdh.Data}) // a number that nobody waits for
					why := p.gone(v)
					for _, e := range []error{socket.ErrProtocol, socket.ErrReset, socket.ErrLost, socket.ErrTransfer} {
						if errors.Is(why, e) {
							why = nil
						}
					}
					if why != nil {
						t.Errorf("%s, %v %d: the connection ended with %v", st.name, bsdh.MID(mid), n, why)
					}
					v.released(t)
				}
			}
		}
	})
}

// What else a peer can do ends its connection, too, and says so.
func TestConn_hostilePeers(t *testing.T) {
	undisturbed(t, func(b *hostileBed) {
		for _, tc := range []struct {
			name  string
			state string
			do    func(p *hostilePeer, v *victim)
			want  error
			text  string
		}{
			{"a message without a header", "idle", func(p *hostilePeer, _ *victim) { p.sends(make([]byte, 8), nil) }, socket.ErrProtocol, "8 bytes, want 16"},
			{"an empty message", "idle", func(p *hostilePeer, _ *victim) { p.sends(nil, nil) }, socket.ErrProtocol, "0 bytes, want 16"},
			{"a message of another length than it says", "idle", func(p *hostilePeer, _ *victim) {
				p.sends(append((&bsdh.Message{MID: bsdh.Data, Bufs: 9}).Append(nil, bsdh.LayoutFigures), 1), nil)
			}, socket.ErrProtocol, "says 16 bytes, and has 17"},
			{"a message longer than a receive buffer", "idle", func(p *hostilePeer, _ *victim) {
				p.says(bsdh.Message{MID: bsdh.Data, Payload: make([]byte, victimBytes)})
			}, socket.ErrLost, ""},
			{"adverts without end", "idle", func(p *hostilePeer, _ *victim) {
				p.pipelined()
				for range victimAdverts + 1 {
					p.says(bsdh.Message{MID: bsdh.SrcAvail, Advert: p.offers(10_000)})
				}
			}, socket.ErrProtocol, fmt.Sprintf("more than %d adverts", victimAdverts)},
			{"more than there is credit for", "idle", func(p *hostilePeer, _ *victim) {
				for range victimBuffers + 1 {
					p.says(bsdh.Message{MID: bsdh.Data, Payload: make([]byte, victimBytes-bsdh.HeaderLen)})
				}
			}, socket.ErrLost, ""},
			{"a report of more than is offered", "offers", func(p *hostilePeer, _ *victim) {
				p.says(bsdh.Message{MID: bsdh.RdmaRdCompl, Bytes: victimTransfer})
			}, socket.ErrProtocol, "are left"},
			{"a report of more than is wanted", "wants", func(p *hostilePeer, _ *victim) {
				p.says(bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: victimTransfer + 1})
			}, socket.ErrProtocol, "advertised were"},
			{"an end of a key that is not there", "offers", func(p *hostilePeer, _ *victim) {
				key := p.src.Key ^ 1
				p.invalidates(bsdh.Message{MID: bsdh.Data}, &key)
			}, socket.ErrLost, ""},
			{"an end of a key that is in use", "offers", func(p *hostilePeer, _ *victim) {
				p.invalidates(bsdh.Message{MID: bsdh.Data}, &p.src.Key)
			}, socket.ErrProtocol, "invalidates key"},
			{"a WRITE where only a READ may go", "offers", func(p *hostilePeer, _ *victim) {
				p.moves(rdma.OpWrite, p.src.Key, p.src.Addr, 8)
			}, socket.ErrLost, ""},
			{"a READ behind what is offered", "offers", func(p *hostilePeer, _ *victim) {
				p.moves(rdma.OpRead, p.src.Key, p.src.Addr+uint64(p.src.Len)-4, 8)
			}, socket.ErrLost, ""},
			{"a READ where only a WRITE may go", "wants", func(p *hostilePeer, _ *victim) {
				p.moves(rdma.OpRead, p.sink.Key, p.sink.Addr, 8)
			}, socket.ErrLost, ""},
			{"a WRITE behind what is wanted", "wants", func(p *hostilePeer, _ *victim) {
				p.moves(rdma.OpWrite, p.sink.Key, p.sink.Addr+uint64(p.sink.Len)-4, 8)
			}, socket.ErrLost, ""},
			{"a WRITE with a key that is dead", "wants", func(p *hostilePeer, v *victim) {
				p.says(bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: 8})
				if n, err := v.wanted.Wait(); n != 8 || err != nil {
					p.t.Errorf("read %d bytes: %v", n, err)
				}
				clear(v.in.Bytes()) // it is the program's
				copy(p.h.mr.Bytes()[rdmaArea:], "harm")
				p.moves(rdma.OpWrite, p.sink.Key, p.sink.Addr, 4)
			}, socket.ErrLost, ""},
			{"an advert of what is not there", "idle", func(p *hostilePeer, v *victim) {
				_, err := v.conn.StartRead(v.in, 0, victimTransfer, true)
				p.must(err)
				p.says(bsdh.Message{MID: bsdh.SrcAvail, Advert: bsdh.Advert{Len: victimTransfer, Key: 4711}, Payload: []byte{0}})
			}, socket.ErrLost, ""},
			{"data behind the end of the stream", "half closed", func(p *hostilePeer, _ *victim) {
				p.says(bsdh.Message{MID: bsdh.Data, Payload: []byte{1}})
			}, socket.ErrProtocol, "behind the end"},
			{"two ends of the stream", "half closed", func(p *hostilePeer, _ *victim) {
				p.says(bsdh.Message{MID: bsdh.DisConn})
			}, socket.ErrProtocol, "behind the end"},
			{"another Hello", "shut down", func(p *hostilePeer, _ *victim) {
				p.says(bsdh.Message{MID: bsdh.Hello})
			}, socket.ErrProtocol, "on an established connection"},
			{"the end of the connection, with work under way", "wants", func(p *hostilePeer, _ *victim) {
				_ = p.h.dev.Disconnect(p.qp) // waits
			}, socket.ErrLost, ""},
			{"a reset, with work under way", "offers", func(p *hostilePeer, _ *victim) {
				_ = p.qp.Modify(rdma.QPAttr{State: rdma.QPError}) // allowed from everywhere
			}, socket.ErrLost, ""},
		} {
			p, v := b.attack(t)
			for _, st := range hostileStates {
				if st.name == tc.state {
					st.bring(p, v)
				}
			}
			tc.do(p, v)
			why := p.gone(v)
			if !errors.Is(why, tc.want) || !strings.Contains(why.Error(), tc.text) {
				t.Errorf("%s: the connection ended with %v, want %v: %s", tc.name, why, tc.want, tc.text)
			}
			if bytes.Contains(v.in.Bytes(), []byte("harm")) {
				t.Errorf("%s: it is in the program's buffer", tc.name)
			}
			v.released(t)
		}
	})
}

// The key of one connection opens nothing on another one: who uses it ends his own.
func TestConn_keysOfOthers(t *testing.T) {
	undisturbed(t, func(b *hostileBed) {
		thief, robbed := b.attack(t)
		p, v := b.attack(t)
		hostileStates[2].bring(p, v) // wants
		before := bytes.Clone(v.in.Bytes())
		thief.moves(rdma.OpWrite, p.sink.Key, p.sink.Addr, 1000)
		if why := thief.gone(robbed); !errors.Is(why, socket.ErrLost) {
			t.Errorf("the thief's connection ended with %v", why)
		}
		robbed.released(t)
		if !bytes.Equal(v.in.Bytes(), before) {
			t.Error("the buffer of the other connection has changed")
		}
		// The owner of the key still has it.
		want := random(5, 1000)
		copy(p.h.mr.Bytes()[rdmaArea:], want)
		p.moves(rdma.OpWrite, p.sink.Key, p.sink.Addr, len(want))
		p.says(bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: uint32(len(want))})
		p.says(bsdh.Message{MID: bsdh.Data, Payload: []byte("!")})
		if _, err := io.ReadFull(v.conn, make([]byte, 1)); err != nil || !bytes.Equal(v.in.Bytes()[:len(want)], want) {
			t.Errorf("the owner of the key has not written: %v", err)
		}
		_ = v.conn.Abort() // it has no reason to say
		if why := p.gone(v); !errors.Is(why, socket.ErrAborted) {
			t.Errorf("ended with %v", why)
		}
		v.released(t)
	})
}

// A peer whose stream has ended, and that says nothing of it on the connection to which it has moved, does not keep a stack from its end
// when the program has closed the connection.
func TestStack_closesDespiteSilence(t *testing.T) {
	b := newHostileBed(t)
	p, v := b.attack(t)
	p.says(bsdh.Message{MID: bsdh.DisConn})
	if _, err := v.conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read to %v", err)
	}
	p.suspends()
	p.waits("the victim has moved", func() bool { return v.conn.Info().Moves == 1 })
	p.must(v.conn.Close())
	p.waits("DisConn", func() bool { return p.answers[bsdh.DisConn] > 0 })
	v.released(t)
	closed := make(chan error, 1)
	go func() { closed <- b.server.Close() }()
	select {
	case err := <-closed:
		p.must(err)
	case <-time.After(20 * time.Second):
		t.Error("the stack is not closed")
	}
	if why := p.gone(v); !errors.Is(why, socket.ErrLinger) {
		t.Errorf("ended with %v", why)
	}
}
