// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// arrivals is what receivers got: for each queue pair number the receiver, and of
// which order the packets were.
type arrivals struct {
	mu    sync.Mutex
	by    map[byte]int // last byte of the number -> receiver
	order map[byte][]byte
	mixed bool
}

func (a *arrivals) take(receiver int) func([]Message) {
	return func(msgs []Message) {
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, m := range msgs {
			qp := m.Data[7]
			if was, ok := a.by[qp]; ok && was != receiver {
				a.mixed = true
			}
			a.by[qp] = receiver
			a.order[qp] = append(a.order[qp], m.Data[11])
		}
	}
}

func (a *arrivals) count() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range a.order {
		n += len(o)
	}
	return n
}

// Each queue pair has one of the receivers, those with other lowest bits another one, and
// the kernel lets no other socket in.
func TestSpread(t *testing.T) {
	for _, c := range []struct {
		addr      string
		share     bool
		receivers int
	}{
		{"127.92.0.1", false, 1}, {"127.92.0.1", false, 2}, {"127.92.0.1", false, 4}, {"127.92.0.1", true, 4}, {"::1", false, 1},
	} {
		cfg := Config{
			Addr: netip.MustParseAddr(c.addr), Port: loopPort, SocketBufferBytes: 1 << 20, NoSegmentation: true,
			Receivers: c.receivers, Share: c.share, Dir: t.TempDir() + "/shared",
		}
		t.Run(netip.AddrPortFrom(cfg.Addr, uint16(c.receivers)).String(), func(t *testing.T) {
			w, err := openUDP(cfg)
			if err != nil {
				t.Fatal(err)
			}
			got := arrivals{by: map[byte]int{}, order: map[byte][]byte{}}
			var wg sync.WaitGroup
			receivers := 0
			start := func(r Receive) {
				take := got.take(receivers)
				receivers++
				wg.Go(func() {
					if err := r(take, func() bool { return false }); !errors.Is(err, net.ErrClosed) {
						t.Error(err)
					}
				})
			}
			start(w.Receive)
			w.Spread(start)
			if n := w.Receivers(); n != c.receivers {
				t.Errorf("%d receivers, want %d", n, c.receivers)
			}
			const qps, each = 16, 20
			for i := range byte(each) {
				for n := range byte(qps) {
					bth := []byte{5: 0x12, 6: 0x34, 7: n, 11: i}
					m := Message{Peer: netip.AddrPortFrom(cfg.Addr, cfg.Port), Flow: flowOf(rdma.QPN(n)), Bufs: [][]byte{bth}}
					if _, err := w.Send([]Message{m}); err != nil {
						t.Fatal(err)
					}
				}
			}
			for end := time.Now().Add(10 * time.Second); got.count() < qps*each; <-time.After(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("%d packets of %d", got.count(), qps*each)
				}
			}
			if s, err := reusing(t, cfg); !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("a stranger binds: %v, %v", s, err)
			}
			if err := w.Close(); err != nil {
				t.Error(err)
			}
			wg.Wait()
			if got.mixed {
				t.Error("a queue pair had two receivers")
			}
			for n := range byte(qps) {
				if want := got.by[n%byte(c.receivers)]; got.by[n] != want {
					t.Errorf("queue pair %d had receiver %d, want %d", n, got.by[n], want)
				}
				for i, v := range got.order[n] {
					if int(v) != i {
						t.Fatalf("queue pair %d: packet %d came as %d", n, v, i)
					}
				}
			}
			used := map[int]bool{}
			for _, r := range got.by {
				used[r] = true
			}
			if len(used) != c.receivers {
				t.Errorf("%d receivers had packets, want %d", len(used), c.receivers)
			}
		})
	}
}

// Where a socket more cannot be had, or the kernel would let others in, a device has its first
// socket, as if there had never been others.
func TestSpread_fails(t *testing.T) {
	for name, spoil := range map[string]func(*spread) error{
		"a socket cannot be bound":          func(s *spread) error { return s.spare[1].Close() },
		"the guard cannot":                  func(s *spread) error { return s.spare[3].Close() },
		"it is not known who may come":      func(s *spread) error { return s.probe.Close() },
		"somebody else would be let in too": func(s *spread) error { s.cfg.Port = 0; return nil }, // at any port: at one that is free
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Addr: netip.MustParseAddr("127.92.0.2"), Port: loopPort, SocketBufferBytes: 1 << 20, Receivers: 4, Share: true, Dir: t.TempDir() + "/shared"}
			w, err := openUDP(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if err := spoil(&w.spread); err != nil {
				t.Fatal(err)
			}
			w.Spread(func(Receive) { t.Error("a receiver starts") })
			if n := w.Receivers(); n != 1 {
				t.Errorf("%d receivers", n)
			}
			came := make(chan byte, 4)
			done := make(chan error)
			go func() {
				done <- w.Receive(func(msgs []Message) {
					for _, m := range msgs {
						came <- m.Data[7]
					}
				}, func() bool { return false })
			}()
			for n := range byte(4) {
				m := Message{Peer: netip.AddrPortFrom(cfg.Addr, cfg.Port), Flow: n, Bufs: [][]byte{{7: n, 11: 0}}}
				if _, err := w.Send([]Message{m}); err != nil {
					t.Fatal(err)
				}
				select {
				case got := <-came:
					if got != n {
						t.Errorf("a packet of queue pair %d, want %d", got, n)
					}
				case <-time.After(10 * time.Second):
					t.Fatalf("no packet of queue pair %d", n)
				}
			}
			if s, err := reusing(t, cfg); !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("a stranger binds: %v, %v", s, err)
			}
			if err := w.Close(); err != nil {
				t.Error(err)
			}
			<-done
		})
	}
}

// A device goes back to its first socket also when a receiver does not get to what came. That it cannot is an error.
func TestSpread_foldsAnyway(t *testing.T) {
	cfg := Config{
		Addr: netip.MustParseAddr("127.92.0.3"), Port: loopPort, SocketBufferBytes: 1 << 20, Receivers: 2, Share: true, Dir: t.TempDir() + "/shared",
	}
	w, err := openUDP(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = w.Close() // its first socket is closed
		w.in.release()
	}()
	started := 0
	w.Spread(func(Receive) { started++ }) // and never comes to receive
	ins := w.spread.ins
	if started != 1 || len(ins) != 1 {
		t.Fatalf("%d receivers start, of %d sockets", started, len(ins))
	}
	defer ins[0].release()
	m := Message{Peer: netip.AddrPortFrom(cfg.Addr, cfg.Port), Flow: 1, Bufs: [][]byte{{7: 1, 11: 0}}}
	if _, err := w.Send([]Message{m}); err != nil {
		t.Fatal(err)
	}
	if !w.spread.pending() {
		t.Error("the packet is not seen")
	}
	begin := time.Now()
	if err := w.spread.company(); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took < foldTimeout || took > foldTimeout+10*time.Second {
		t.Errorf("it took %v, want %v", took, foldTimeout)
	}
	if n := w.Receivers(); n != 1 {
		t.Errorf("%d receivers", n)
	}
	if err := w.in.conn.Close(); err != nil {
		t.Fatal(err)
	}
	if err := w.spread.company(); err == nil {
		t.Error("another device may come although the program is not in force")
	}
}

// reusing binds to a device's port with SO_REUSEPORT.
func reusing(t *testing.T, cfg Config) (net.PacketConn, error) {
	l := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error { return reusePort(c, true) }}
	return l.ListenPacket(t.Context(), "udp", netip.AddrPortFrom(cfg.Addr, cfg.Port).String())
}

// A flow has the packets of one device and one receiver, and a port of its own.
func TestFlowOf(t *testing.T) {
	seen := map[uint8]rdma.QPN{}
	for n := range rdma.QPN(64) {
		n = n&31 | n>>5*generationBit | 0x4560
		f := flowOf(n)
		key := n & (generationBit | receiverBits)
		if was, ok := seen[f]; ok && was != key {
			t.Errorf("flow %d of queue pairs %v and %v", f, was, key)
		}
		seen[f] = key
	}
	if len(seen) != flows {
		t.Errorf("%d flows, want %d", len(seen), flows)
	}
}
