// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softvi"
)

// faults are what a tunnel does to the streams that pass it.
type faults struct {
	seed   uint64
	single int  // bytes at the beginning of each direction that pass one by one
	piece  int  // bytes of a piece at most
	stall  int  // one in so many pieces waits for up to 2 ms; 0: none
	cut    int  // bytes of both directions after which a connection ends; 0: never
	reset  bool // and it ends by a reset
}

// tunnel is a TCP proxy.
type tunnel struct {
	l    *net.TCPListener
	to   netip.AddrPort
	from netip.Addr
	f    faults
	wg   sync.WaitGroup

	mu     sync.Mutex // guards what follows
	closed bool
	conns  []*net.TCPConn
}

// newTunnel opens a way to a device, whose connections come from another address than its callers'.
func newTunnel(t testing.TB, d *softvi.Device, f faults) *tunnel {
	t.Helper()
	u := &tunnel{to: d.Addr(), from: d.Addr().Addr(), f: f}
	var err error
	if u.l, err = net.ListenTCP("tcp", &net.TCPAddr{IP: u.from.AsSlice()}); err != nil {
		t.Fatal(err)
	}
	u.wg.Go(u.serve)
	t.Cleanup(u.close)
	return u
}

func (u *tunnel) port() uint16 { return u.l.Addr().(*net.TCPAddr).AddrPort().Port() }

func (u *tunnel) close() {
	_ = u.l.Close()
	u.mu.Lock()
	u.closed = true
	for _, c := range u.conns {
		_ = c.Close()
	}
	u.mu.Unlock()
	u.wg.Wait()
}

// keep has close close a connection.
func (u *tunnel) keep(c *net.TCPConn) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.conns = append(u.conns, c)
	if u.closed {
		_ = c.Close()
	}
	return !u.closed
}

func (u *tunnel) serve() {
	for i := uint64(0); ; i++ {
		in, err := u.l.AcceptTCP()
		if err != nil {
			return
		}
		out, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(u.to))
		if err != nil {
			_ = in.Close()
			continue
		}
		if !u.keep(in) || !u.keep(out) {
			return
		}
		p := &passage{f: u.f, left: u.f.cut, ends: [2]*net.TCPConn{in, out}}
		u.wg.Go(func() { p.pump(out, in, rand.New(rand.NewPCG(u.f.seed, 2*i))) })
		u.wg.Go(func() { p.pump(in, out, rand.New(rand.NewPCG(u.f.seed, 2*i+1))) })
	}
}

// passage is one connection through a tunnel.
type passage struct {
	f    faults
	ends [2]*net.TCPConn

	mu   sync.Mutex // guards what follows
	left int        // bytes until the cut
}

// pump moves one direction.
func (p *passage) pump(to, from *net.TCPConn, rng *rand.Rand) {
	buf := make([]byte, 64<<10)
	for passed := 0; ; {
		n, err := from.Read(buf)
		for b := buf[:n]; len(b) > 0; {
			k := min(1+rng.IntN(p.f.piece), len(b))
			if passed < p.f.single {
				k = 1
			}
			if p.f.stall > 0 && rng.IntN(p.f.stall) == 0 {
				<-time.After(time.Duration(rng.IntN(2000)) * time.Microsecond) // the fault
			}
			if p.isCut(k) {
				return
			}
			if _, err := to.Write(b[:k]); err != nil {
				p.end(true)
				return
			}
			passed += k
			b = b[k:]
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			_ = to.CloseWrite()
			return
		default:
			p.end(true)
			return
		}
	}
}

// isCut counts bytes, and ends the connection when they are too many.
func (p *passage) isCut(n int) bool {
	if p.f.cut == 0 {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left -= n
	if p.left < 0 {
		p.end(p.f.reset)
	}
	return p.left < 0
}

func (p *passage) end(reset bool) {
	for _, c := range p.ends {
		if reset {
			_ = c.SetLinger(0)
		}
		_ = c.Close()
	}
}

// TestProvider_faultyStreams: the conformance suite through tunnels that cut the streams into pieces, and
// stall.
func TestProvider_faultyStreams(t *testing.T) {
	for name, f := range map[string]faults{
		"Bytes":  {seed: 11, single: 3000, piece: 1 << 16, stall: 5000},
		"Pieces": {seed: 12, piece: 3000, stall: 500},
	} {
		t.Run(name, func(t *testing.T) {
			rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
				a, b := devices(t)
				return rdmatest.Net{A: a, B: b, Connect: func(t testing.TB, x, y *rdmatest.End) {
					t.Helper()
					x.Init(t)
					y.Init(t)
					to := at(device(y), "test")
					to.Port = newTunnel(t, device(y), f).port()
					connectTo(t, x, y, to, softvi.Options{}, softvi.Options{})
				}}
			})
		})
	}
}

const (
	cutMessage = 5000 // bytes of a message
	cutDepth   = 16
)

// TestFaults_cuts: wherever a TCP connection ends or breaks, in a call or later, everything completes, what
// completed with success is at the peer, and nothing is there that was not sent.
func TestFaults_cuts(t *testing.T) {
	rounds := 80
	if testing.Short() {
		rounds = 10
	}
	for seed := range uint64(rounds) {
		rng := rand.New(rand.NewPCG(seed, 7))
		f := faults{seed: seed, piece: 2000, cut: 1 + rng.IntN(1<<(6+rng.IntN(13))), reset: rng.IntN(2) == 0}
		t.Run(fmt.Sprintf("seed%d", seed), func(t *testing.T) { cutRound(t, f) })
	}
}

func cutRound(t *testing.T, f faults) {
	a, b := devices(t)
	u := newTunnel(t, b, f)
	l := listen(t, b, "x")
	ctx, cancel := context.WithTimeout(within(t), 10*time.Second)
	defer cancel()
	accepted := make(chan *rdmatest.End, 64)
	go func() { // each call has a queue pair of its own
		defer close(accepted)
		for {
			r, err := l.Accept(ctx)
			if err != nil {
				return
			}
			y := end(t, b)
			for i := range uint64(cutDepth) {
				y.Recv(t, i, int(i)*cutMessage, cutMessage)
			}
			if _, err := r.Accept(y.QP, softvi.Options{}); err == nil {
				accepted <- y
			}
		}
	}()
	x := end(t, a)
	to := at(b, "x")
	to.Port = u.port()
	patient, stop := ctx, func() {}
	if f.cut < 200 { // no call gets through
		patient, stop = context.WithTimeout(ctx, 200*time.Millisecond)
	}
	_, err := a.Dial(patient, x.QP, to, softvi.Options{})
	stop()
	cancel()
	var y *rdmatest.End
	for e := range accepted { // the last one is x's, if x is connected
		y = e
	}
	if err != nil {
		states(t, rdma.QPInit, x)
		if f.cut >= 200 {
			t.Errorf("%+v: no connection: %v", f, err)
		}
		return
	}
	sent := cutSend(t, x)
	done := map[uint64]bool{}
	for range sent {
		w := rdmatest.Await(t, x.SendCQ, 1)[0]
		done[w.ID] = w.Status == rdma.StatusSuccess
	}
	if err := x.QP.Close(); err != nil { // the end, if nothing was cut
		t.Error(err)
	}
	cutCheck(t, f, y, done)
}

// cutSend posts messages, each of which says which one it is.
func cutSend(t *testing.T, x *rdmatest.End) (posted int) {
	t.Helper()
	for i := range uint64(cutDepth) {
		at := int(i) * cutMessage
		fillMessage(x.MR.Bytes()[at:at+cutMessage], i)
		n, err := x.QP.PostSend([]rdma.SendWR{{ID: i, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(at, cutMessage)}}})
		if err != nil {
			t.Fatal(err)
		}
		posted += n
	}
	return posted
}

func fillMessage(b []byte, number uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], number<<32|uint64(i))
	}
}

// cutCheck waits for the end of y, and looks at what came.
func cutCheck(t *testing.T, f faults, y *rdmatest.End, done map[uint64]bool) {
	t.Helper()
	want := make([]byte, cutMessage)
	for i, w := range rdmatest.Await(t, y.RecvCQ, cutDepth) {
		id := uint64(i)
		if w.ID != id || w.Status != rdma.StatusSuccess && w.Status != rdma.StatusFlushed {
			t.Fatalf("%+v: receive %d: %+v (%v)", f, i, w, w.Status)
		}
		if done[id] && w.Status != rdma.StatusSuccess {
			t.Errorf("%+v: message %d was acknowledged and not received", f, i)
		}
		fillMessage(want, id)
		if got := y.MR.Bytes()[i*cutMessage : (i+1)*cutMessage]; w.Status == rdma.StatusSuccess && !bytes.Equal(got, want) {
			t.Errorf("%+v: message %d has other bytes", f, i)
		}
	}
	awaitError(t, y)
}

// awaitError waits until a queue pair is in ERR.
func awaitError(t testing.TB, e *rdmatest.End) {
	t.Helper()
	for end := time.Now().Add(patience); e.QP.State() != rdma.QPError; time.Sleep(time.Millisecond) { // polls the state
		if time.Now().After(end) {
			t.Fatalf("queue pair of %s in %v, want ERR", e.Dev.Name(), e.QP.State())
		}
	}
}
