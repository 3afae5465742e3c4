// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// ending is how a connection of the churn ends.
type ending uint8

const (
	endOrderly    ending = iota // both streams end, then both close
	endClose                    // the client closes right after its last write
	endAbort                    // the client resets in the middle
	endServerDrop               // the server closes with data unread
	endServerStop               // the server resets in the middle
	numEndings
)

// plan is what client and server do with one connection; the client sends it
// first.
type plan struct {
	seed uint64
	size uint32
	end  ending
}

const planBytes = 16

func (p plan) bytes() []byte {
	b := binary.BigEndian.AppendUint64(nil, p.seed)
	b = binary.BigEndian.AppendUint32(b, p.size)
	return append(b, byte(p.end), 0, 0, 0)
}

func parsePlan(b []byte) plan {
	return plan{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:]), ending(b[12])}
}

// pattern is an endless stream in which every place is recognizable.
type pattern struct{ seed, pos uint64 }

func (p *pattern) byteAt(i uint64) byte {
	x := (p.seed + i/8) * 0x9e3779b97f4a7c15
	return byte((x ^ x>>29) >> (8 * (i % 8)))
}

func (p *pattern) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = p.byteAt(p.pos + uint64(i))
	}
	p.pos += uint64(len(b))
	return len(b), nil
}

// Write checks what arrived.
func (p *pattern) Write(b []byte) (int, error) {
	for i := range b {
		if want := p.byteAt(p.pos + uint64(i)); b[i] != want {
			return i, fmt.Errorf("byte %d of stream %#x is %#x, want %#x", p.pos+uint64(i), p.seed, b[i], want)
		}
	}
	p.pos += uint64(len(b))
	return len(b), nil
}

var errPlanned = errors.New("planned end")

// stopAfter ends a copy after n bytes.
type stopAfter struct {
	io.Writer
	n int
}

func (s *stopAfter) Write(b []byte) (int, error) {
	n, err := s.Writer.Write(b)
	if s.n -= n; err == nil && s.n <= 0 {
		err = errPlanned
	}
	return n, err
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// onlyWriter and onlyReader hide ReadFrom and WriteTo.
type (
	onlyWriter struct{ io.Writer }
	onlyReader struct{ io.Reader }
)

// drain reads a stream to its end in a way that the seed chooses.
func drain(c *smcr.Conn, w io.Writer, seed uint64) (int64, error) {
	switch seed % 3 {
	case 0:
		return c.WriteTo(w)
	case 1:
		return io.CopyBuffer(onlyWriter{w}, onlyReader{c}, make([]byte, 1+seed%70000))
	}
	// Deadlines race with the data.
	var total int64
	buf := make([]byte, 1+seed%9000)
	for {
		_ = c.SetReadDeadline(time.Now().Add(time.Duration(50+seed%400) * time.Microsecond))
		n, err := c.Read(buf)
		total += int64(n)
		if _, werr := w.Write(buf[:n]); werr != nil {
			return total, werr
		}
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return total, err
		}
	}
}

func fill(c *smcr.Conn, r io.Reader, seed uint64) (int64, error) {
	if seed%2 == 0 {
		return c.ReadFrom(r)
	}
	return io.CopyBuffer(onlyWriter{c}, onlyReader{r}, make([]byte, 1+seed%50000))
}

// churnServer plays the server's part of one connection.
func churnServer(c *smcr.Conn) error {
	defer c.Close()
	var head [planBytes]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		if isReset(err) {
			return nil // aborted at once
		}
		return fmt.Errorf("read plan: %w", err)
	}
	p := parsePlan(head[:])
	var wg sync.WaitGroup
	defer wg.Wait()
	in := &pattern{seed: p.seed}
	switch p.end {
	case endServerDrop, endServerStop:
		_, err := drain(c, &stopAfter{in, int(p.size) / 2}, p.seed)
		if !errors.Is(err, errPlanned) {
			return fmt.Errorf("plan %+v: server read %d: %w", p, in.pos, err)
		}
		if p.end == endServerStop {
			return c.Abort()
		}
		return c.Close()
	case endAbort:
		if _, err := drain(c, in, p.seed); !isReset(err) {
			return fmt.Errorf("plan %+v: server read %d of an aborted stream: %w", p, in.pos, err)
		}
		return nil
	case endClose:
		if n, err := drain(c, in, p.seed); err != nil || n != int64(p.size) {
			return fmt.Errorf("plan %+v: server read %d: %w", p, n, err)
		}
		return nil
	case endOrderly, numEndings:
	}
	var werr error
	wg.Go(func() {
		if _, werr = fill(c, io.LimitReader(&pattern{seed: ^p.seed}, int64(p.size)), p.seed); werr == nil {
			werr = c.CloseWrite()
		}
	})
	n, err := drain(c, in, p.seed)
	wg.Wait()
	if err != nil || werr != nil || n != int64(p.size) {
		return fmt.Errorf("plan %+v: server read %d: %w", p, n, errors.Join(err, werr))
	}
	return nil
}

// churnClient plays the client's part.
func churnClient(c *smcr.Conn, p plan) error {
	defer c.Close()
	if _, err := c.Write(p.bytes()); err != nil {
		return fmt.Errorf("write plan: %w", err)
	}
	out := io.LimitReader(&pattern{seed: p.seed}, int64(p.size))
	switch p.end {
	case endAbort:
		if _, err := fill(c, io.LimitReader(out, int64(p.size)/2), p.seed); err != nil {
			return fmt.Errorf("plan %+v: client wrote: %w", p, err)
		}
		return c.Abort()
	case endClose:
		if _, err := fill(c, out, p.seed); err != nil {
			return fmt.Errorf("plan %+v: client wrote: %w", p, err)
		}
		return c.Close()
	case endServerDrop, endServerStop:
		if _, err := fill(c, out, p.seed); err != nil && !isReset(err) {
			return fmt.Errorf("plan %+v: client wrote: %w", p, err)
		}
		if _, err := io.Copy(io.Discard, c); err != nil && !isReset(err) {
			return fmt.Errorf("plan %+v: client read: %w", p, err)
		}
		return nil
	case endOrderly, numEndings:
	}
	var wg sync.WaitGroup
	in := &pattern{seed: ^p.seed}
	var n int64
	var rerr error
	wg.Go(func() { n, rerr = drain(c, in, p.seed>>8) })
	_, err := fill(c, out, p.seed>>8)
	if err == nil {
		err = c.CloseWrite()
	}
	wg.Wait()
	if err != nil || rerr != nil || n != int64(p.size) {
		return fmt.Errorf("plan %+v: client read %d: %w", p, n, errors.Join(err, rerr))
	}
	return nil
}

// churn opens n connections, parallel at a time, and ends them in all ways.
func churn(t *testing.T, pairs []*pair, n, parallel, maxBytes int) {
	t.Helper()
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	ctx, cancel := context.WithTimeout(t.Context(), 25*time.Second)
	defer cancel()
	var servers, clients sync.WaitGroup
	var mu sync.Mutex
	live := map[*smcr.Conn]plan{}
	track := func(c *smcr.Conn, p plan) func() {
		mu.Lock()
		defer mu.Unlock()
		live[c] = p
		return func() { mu.Lock(); delete(live, c); mu.Unlock() }
	}
	context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		for c, p := range live {
			t.Errorf("stuck: %+v: %+v", p, c.Info())
			_ = c.Abort()
		}
	})
	for _, p := range pairs {
		servers.Go(func() {
			var wg sync.WaitGroup
			defer wg.Wait()
			for {
				c, err := p.l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() {
					defer track(c.(*smcr.Conn), plan{})()
					if err := churnServer(c.(*smcr.Conn)); err != nil && ctx.Err() == nil {
						t.Error(err)
					}
				})
			}
		})
	}
	slots := make(chan struct{}, parallel)
	var tcp atomic.Int64
	for i := range n {
		slots <- struct{}{}
		p := plan{seed: rng.Uint64(), size: 64 + rng.Uint32N(uint32(maxBytes)), end: ending(rng.IntN(int(numEndings)))}
		if rng.IntN(4) == 0 {
			p.size = 64 + rng.Uint32N(512)
		}
		clients.Go(func() {
			defer func() { <-slots }()
			pr := pairs[i%len(pairs)]
			c, err := (&smcr.Dialer{Stack: pr.client}).DialContext(ctx, "tcp", pr.l.Addr().String())
			if err != nil {
				t.Errorf("dial %d: %v", i, err)
				return
			}
			defer track(c.(*smcr.Conn), p)()
			if c.(*smcr.Conn).Mode() != smcr.ModeSMCR {
				tcp.Add(1)
				_ = c.Close()
				return
			}
			if err := churnClient(c.(*smcr.Conn), p); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		})
	}
	clients.Wait()
	if n := tcp.Load(); n > 0 {
		t.Errorf("%d connections fell back to TCP", n)
	}
	for _, p := range pairs {
		waitFor(t, "connections gone", func() bool { return p.client.Stats().Conns == 0 && p.server.Stats().Conns == 0 })
		_ = p.l.Close()
		for _, s := range []*smcr.Stack{p.client, p.server} {
			if st := s.Stats(); st.MemoryBytes > uint64(st.Groups)*(32<<20) {
				t.Errorf("memory does not follow the load: %+v", st)
			}
		}
	}
	servers.Wait()
}

// bothDirections adds a listener on the client's stack: between the two
// stacks there are groups in both roles.
func bothDirections(t *testing.T, p *pair) []*pair {
	t.Helper()
	l, err := smcr.Listen(t.Context(), p.client, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return []*pair{p, {fabric: p.fabric, client: p.server, server: p.client, l: l}}
}

// patience is for machines that have more to do than the test: messages may take long, and all clients of a test,
// which have one address, get a place at once. Beyond their share they would wait for a second, and be declined.
func patience(c *smcr.Config) { c.MessageTimeout, c.MaxHalfOpen = 30*time.Second, 4096 }

func small(c *smcr.Config) { c.RMBESizeBytes = 16 << 10 }

func TestChurn_perfectFabric(t *testing.T) {
	n := 600
	if testing.Short() {
		n = 300
	}
	eachVersion(t, func(t *testing.T, v smcr.VersionSet) {
		churn(t, bothDirections(t, newPair(t, small, versions(v))), n, 32, 60_000)
	})
}

func TestChurn_softwareRoCE(t *testing.T) {
	n := 300
	if testing.Short() {
		n = 100
	}
	churn(t, bothDirections(t, newSoftPair(t, rdma.MTU1024)), n, 16, 200_000)
}

// newLossyPair is two stacks whose packets a fabric in memory mistreats.
func newLossyPair(t *testing.T, seed uint64, x softtest.Faults, edit ...func(*smcr.Config)) (*pair, *softtest.Fabric) {
	t.Helper()
	f := softtest.NewFabric(t, seed)
	p := &pair{}
	open := func(addr string) *smcr.Stack {
		return newStack(t, f.Open(t, soft.Config{Name: addr, Addr: netip.MustParseAddr(addr), MTU: rdma.MTU1024}), edit...)
	}
	p.client, p.server = open("192.0.2.1"), open("192.0.2.2")
	l, err := smcr.Listen(t.Context(), p.server, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.l = l
	t.Cleanup(func() { _ = l.Close() })
	f.SetFaults(x)
	return p, f
}

func TestChurn_badNetwork(t *testing.T) {
	for _, tc := range []struct {
		name   string
		faults softtest.Faults
	}{
		{"loss 1 %", softtest.Faults{Loss: 0.01}},
		{"loss 5 %, duplicates", softtest.Faults{Loss: 0.05, Duplicate: 0.05}},
		{"reordering, jitter", softtest.Faults{Reorder: 0.05, Jitter: 2 * time.Millisecond, Loss: 0.005}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			seed := testenv.Seed(t)
			p, _ := newLossyPair(t, seed, tc.faults, small)
			churn(t, bothDirections(t, p), 150, 12, 40_000)
		})
	}
}

// Fifty clients come at once, to a server that knows none of them, and the
// server comes to them.
func TestStack_firstContactsAtOnce(t *testing.T) {
	f := newFakeFabric()
	server := newStack(t, f.device("s", 1), small, patience)
	listen := func(s *smcr.Stack) *smcr.Listener {
		l, err := smcr.Listen(t.Context(), s, "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	l := listen(server)
	var pairs []*pair
	for i := range 50 {
		client := newStack(t, f.device(fmt.Sprint("c", i), byte(i+2)), small, patience)
		pairs = append(pairs, &pair{fabric: f, client: client, server: server, l: l})
		if i < 10 {
			pairs = append(pairs, &pair{fabric: f, client: server, server: client, l: listen(client)})
		}
	}
	var wg, servers sync.WaitGroup
	seen := map[*smcr.Listener]bool{}
	for _, p := range pairs {
		if !seen[p.l] {
			seen[p.l] = true
			servers.Go(func() {
				for {
					c, err := p.l.Accept()
					if err != nil {
						return
					}
					servers.Go(func() {
						if err := churnServer(c.(*smcr.Conn)); err != nil {
							t.Error(err)
						}
					})
				}
			})
		}
		for k := range 3 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				c, err := (&smcr.Dialer{Stack: p.client, Require: true}).DialContext(ctx, "tcp", p.l.Addr().String())
				if err != nil {
					t.Error(err)
					return
				}
				if err := churnClient(c.(*smcr.Conn), plan{seed: uint64(k), size: 5_000, end: endOrderly}); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	for _, p := range pairs {
		if g := p.client.LinkGroups(); p.client != server && (len(g) < 1 || len(g) > 2) {
			t.Errorf("client has %d groups", len(g))
		}
		_ = p.l.Close()
	}
	servers.Wait()
}

// More connections than a group carries start a parallel group.
func TestStack_parallelGroup(t *testing.T) {
	p := newPair(t, small)
	const n = 300
	conns := make([]*smcr.Conn, 0, 2*n)
	for range n {
		a, b := p.dial(t)
		if a.Mode() != smcr.ModeSMCR {
			t.Fatalf("connection %d: %v, %v", len(conns)/2, a.Mode(), a.Reason())
		}
		conns = append(conns, a, b)
	}
	for _, s := range []*smcr.Stack{p.client, p.server} {
		g := s.LinkGroups()
		if len(g) != 2 || max(g[0].Conns, g[1].Conns) != 255 {
			t.Errorf("groups: %+v", g)
		}
	}
	for i := 0; i < len(conns); i += 2 {
		exchange(t, conns[i], conns[i+1])
	}
	for _, c := range conns {
		_ = c.Close()
	}
	waitFor(t, "connections gone", func() bool { return p.client.Stats().Conns == 0 && p.server.Stats().Conns == 0 })
}

// An idle group that ends while a connection comes costs that connection at
// most SMC-R.
func TestStack_idleTimeoutRacesWithDial(t *testing.T) {
	p := newPair(t, small, func(c *smcr.Config) { c.IdleGroupTimeout = 2 * time.Millisecond })
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	modes := map[smcr.Mode]int{}
	for range 80 {
		a, b := p.dial(t)
		modes[a.Mode()]++
		if a.Mode() != b.Mode() {
			t.Fatalf("client %v, server %v", a.Mode(), b.Mode())
		}
		exchange(t, a, b)
		_, _ = a.Close(), b.Close()
		if rng.IntN(2) == 0 {
			waitFor(t, "closed", func() bool { return p.client.Stats().Conns == 0 && p.server.Stats().Conns == 0 })
			pause := time.NewTimer(time.Duration(rng.IntN(4000)) * time.Microsecond)
			<-pause.C
		}
	}
	if modes[smcr.ModeSMCR] == 0 {
		t.Error("no connection was SMC-R")
	}
	t.Logf("modes %v", modes)
	waitFor(t, "idle groups gone", func() bool { return p.client.Stats().Groups == 0 && p.server.Stats().Groups == 0 })
}

// Stacks close under traffic, in any order with devices and listeners; the
// check is that everything ends.
func TestStack_closeUnderTraffic(t *testing.T) {
	for _, tc := range []struct {
		name string
		end  func(p *pair, devs []*soft.Device)
	}{
		{"client first", func(p *pair, _ []*soft.Device) { _, _ = p.client.Close(), p.server.Close() }},
		{"server first", func(p *pair, _ []*soft.Device) { _, _ = p.server.Close(), p.client.Close() }},
		{"both at once", func(p *pair, _ []*soft.Device) {
			var wg sync.WaitGroup
			for range 2 {
				wg.Go(func() { _ = p.server.Close() })
				wg.Go(func() { _ = p.client.Close() })
			}
			wg.Wait()
		}},
		{"device first", func(p *pair, devs []*soft.Device) { _, _ = devs[0].Close(), p.client.Close() }},
		{"listener first", func(p *pair, _ []*soft.Device) { _, _ = p.l.Close(), p.server.Close() }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := softtest.NewFabric(t, 1)
			var devs []*soft.Device
			open := func(addr string) *smcr.Stack {
				d := f.Open(t, soft.Config{Name: addr, Addr: netip.MustParseAddr(addr), MTU: rdma.MTU1024})
				devs = append(devs, d)
				return newStack(t, d, small)
			}
			p := &pair{client: open("192.0.2.1"), server: open("192.0.2.2")}
			var err error
			if p.l, err = smcr.Listen(t.Context(), p.server, "tcp", "127.0.0.1:0"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.l.Close() })
			var wg sync.WaitGroup
			moved := make(chan struct{}, 64)
			for range 8 {
				a, b := p.dial(t)
				for _, c := range []*smcr.Conn{a, b} {
					wg.Go(func() {
						buf := make([]byte, 30_000)
						for {
							if _, err := c.Write(buf); err != nil {
								return
							}
							select {
							case moved <- struct{}{}:
							default:
							}
						}
					})
					wg.Go(func() { _, _ = c.WriteTo(io.Discard); _ = c.Close() })
				}
			}
			// And rendezvous under way.
			wg.Go(func() {
				for range 100 {
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					c, err := (&smcr.Dialer{Stack: p.client}).DialContext(ctx, "tcp", p.l.Addr().String())
					cancel()
					if err != nil {
						return
					}
					_ = c.Close()
				}
			})
			wg.Go(func() {
				for {
					c, err := p.l.Accept()
					if err != nil {
						return
					}
					_ = c.Close()
				}
			})
			for range 200 {
				<-moved
			}
			done := make(chan struct{})
			go func() { tc.end(p, devs); close(done) }()
			select {
			case <-done:
			case <-time.After(20 * time.Second):
				panic("close hangs") // with all goroutines
			}
			_ = p.l.Close()
			_, _ = p.client.Close(), p.server.Close()
			wg.Wait()
		})
	}
}

// A rendezvous that is given up at any moment leaves nothing, on either side.
func TestStack_rendezvousCancelled(t *testing.T) {
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 40 {
		p := newPair(t, small)
		var accepted sync.WaitGroup
		accepted.Go(func() {
			for {
				c, err := p.l.Accept()
				if err != nil {
					return
				}
				_ = c.(*smcr.Conn).Abort()
			}
		})
		var wg sync.WaitGroup
		for range 4 {
			wait := time.Duration(rng.IntN(3000)) * time.Microsecond
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), wait)
				defer cancel()
				c, err := (&smcr.Dialer{Stack: p.client}).DialContext(ctx, "tcp", p.l.Addr().String())
				if err == nil {
					_ = c.(*smcr.Conn).Abort()
				}
			})
		}
		wg.Wait()
		_ = p.l.Close()
		accepted.Wait()
		if err := errors.Join(p.client.Close(), p.server.Close()); err != nil {
			t.Fatal(err)
		}
		for _, s := range []*smcr.Stack{p.client, p.server} {
			if st := s.Stats(); st.MemoryBytes != 0 || st.Groups != 0 || st.Conns != 0 {
				t.Fatalf("closed stack still has %+v", st)
			}
		}
		if n := p.fabric.objects(); n != 0 {
			t.Fatalf("%d queue pairs and memory regions left", n)
		}
	}
}

func (f *fakeFabric) objects() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.qps) + len(f.mrs)
}

// A connection that is closed while its calls wait for the application's own
// reader and writer keeps its memory until they return.
func TestConn_closeWhileCallsHoldMemory(t *testing.T) {
	for _, kind := range []string{"close", "abort", "peer abort"} {
		t.Run(kind, func(t *testing.T) {
			p := newPair(t, small)
			a, b := p.dial(t)
			r1, w1 := net.Pipe() // r1 blocks in Read
			r2, w2 := net.Pipe() // w2 blocks in Write
			entered := make(chan struct{}, 2)
			var wg sync.WaitGroup
			wg.Go(func() { _, _ = a.ReadFrom(enterReader{r1, entered}) })
			wg.Go(func() { _, _ = a.WriteTo(enterWriter{w2, entered}) })
			if _, err := b.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
			<-entered
			<-entered
			switch kind {
			case "close":
				_ = a.Close()
			case "abort":
				_ = a.Abort()
			case "peer abort":
				_ = b.Abort()
				waitFor(t, "reset", func() bool { return a.Info().State != "ACTIVE" })
				_ = a.Close()
			}
			_ = b.Close()
			waitFor(t, "peer is done", func() bool { return p.server.Stats().Conns == 0 })
			if st := p.client.Stats(); st.Conns != 1 {
				t.Errorf("memory given back while calls hold it: %+v", st)
			}
			c, d := p.dial(t) // must not get the same memory
			exchange(t, c, d)
			_, _ = c.Close(), d.Close()
			for _, x := range []io.Closer{r1, w1, r2, w2} {
				_ = x.Close()
			}
			wg.Wait()
			waitFor(t, "memory given back", func() bool { return p.client.Stats().Conns == 0 })
		})
	}
}

type enterReader struct {
	io.Reader
	entered chan struct{}
}

func (r enterReader) Read(b []byte) (int, error) {
	select {
	case r.entered <- struct{}{}:
	default:
	}
	return r.Reader.Read(b)
}

type enterWriter struct {
	io.Writer
	entered chan struct{}
}

func (w enterWriter) Write(b []byte) (int, error) {
	select {
	case w.entered <- struct{}{}:
	default:
	}
	return w.Writer.Write(b)
}

// The cable is taken out under load: all connections are reset, and new ones
// work when it is back.
func TestStack_cableOutUnderLoad(t *testing.T) {
	p, f := newLossyPair(t, 7, softtest.Faults{}, small)
	one, two := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	var wg sync.WaitGroup
	for range 8 {
		a, b := p.dial(t)
		wg.Go(func() {
			if n, err := a.ReadFrom(&pattern{seed: 1}); !isReset(err) {
				t.Errorf("writer ends after %d bytes: %v", n, err)
			}
			_ = a.Close()
		})
		wg.Go(func() {
			if _, err := b.WriteTo(&pattern{seed: 1}); !isReset(err) {
				t.Errorf("reader ends: %v", err)
			}
			_ = b.Close()
		})
	}
	waitFor(t, "traffic", func() bool { return p.server.Stats().BytesRecvSMCR > 4<<20 })
	f.Cut(one, two, true)
	f.Cut(two, one, true)
	wg.Wait() // the retries of both queue pairs, or the keepalive of the group
	f.Cut(one, two, false)
	f.Cut(two, one, false)
	waitFor(t, "all gone", func() bool {
		return p.client.Stats().Conns == 0 && p.server.Stats().Conns == 0 && p.client.Stats().Groups == 0 && p.server.Stats().Groups == 0
	})
	a, b := p.dial(t)
	if a.Mode() != smcr.ModeSMCR {
		t.Errorf("%v, %v", a.Mode(), a.Reason())
	}
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}
