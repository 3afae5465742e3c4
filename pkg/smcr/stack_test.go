// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Conns may be asked while rendezvous are under way.
func TestStack_connsDuringRendezvous(t *testing.T) {
	p := newPair(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, s := range []*smcr.Stack{p.client, p.server} {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				for _, i := range s.Conns() {
					if i.Local == nil || i.Peer == nil || i.Mode != smcr.ModeSMCR {
						t.Errorf("Conns shows a connection that nobody has: %+v", i)
						return
					}
				}
			}
		})
	}
	for range 30 {
		a, b := p.dial(t)
		_, _ = a.Close(), b.Close()
	}
	close(stop)
	wg.Wait()
}

// ConnClosed comes once for each connection that was opened, and only then.
func TestHooks_closedMatchesOpened(t *testing.T) {
	var opened, closed atomic.Int64
	s := newStack(t, newFakeFabric().device("c", 1), quick, func(c *smcr.Config) {
		c.Hooks.ConnOpened = func(smcr.Info) { opened.Add(1) }
		c.Hooks.ConnClosed = func(i smcr.Info) {
			closed.Add(1)
			if i.Local == nil {
				t.Errorf("closed: %+v", i)
			}
		}
	})
	l, err := smcr.Listen(t.Context(), s, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	good := testProposal("127.0.0.0/24")
	for range 3 {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		propose(t, c, &good)
		_, _ = c.Write(clc.Decline{Version: clc.V1, PeerID: good.PeerID, Reason: clc.ReasonMem}.Append(nil))
		a, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_, _ = a.Close(), c.Close()
	}
	waitFor(t, "end", func() bool { st := s.Stats(); return st.Conns == 0 && st.Groups == 0 })
	if o, c := opened.Load(), closed.Load(); o != 3 || c != 3 {
		t.Errorf("opened %d, closed %d, want 3 and 3", o, c)
	}
}

// Close during a first contact leaves nothing behind: the check is newStack's.
func TestStack_closeDuringFirstContact(t *testing.T) {
	good := testProposal("127.0.0.0/24")
	for _, tc := range []struct {
		name string
		talk func(t *testing.T, c net.Conn)
	}{
		{"after the Accept", func(t *testing.T, c net.Conn) { propose(t, c, &good) }},
		{"after the Confirm", func(t *testing.T, c net.Conn) {
			propose(t, c, &good)
			confirm(c, testEndpoint(true))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStack(t, newFakeFabric().device("c", 1))
			l, err := smcr.Listen(t.Context(), s, "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			tc.talk(t, c)
			waitFor(t, "group", func() bool { return s.Stats().Groups == 1 })
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			_ = l.Close()
			if st := s.Stats(); st.MemoryBytes != 0 || st.Groups != 0 || st.Conns != 0 {
				t.Errorf("closed stack still has %+v", st)
			}
		})
	}
}

// TestStack_withItself: connections of a stack to a listener of its own are on SMC-R. An agent cannot always know that it
// serves both ends, as where a pod's connection to its own Service is masqueraded.
func TestStack_withItself(t *testing.T) {
	eachVersion(t, func(t *testing.T, v smcr.VersionSet) {
		p := &pair{fabric: newFakeFabric()}
		p.client = newStack(t, p.fabric.device("c", 1), versions(v))
		p.server = p.client
		p.listen(t)
		for range 3 {
			a, b := p.dial(t)
			if i := a.Info(); i.Mode != smcr.ModeSMCR {
				t.Errorf("%+v, want a connection on SMC-R", i)
			}
			want := bytes.Repeat([]byte("self"), 200_000)
			for _, way := range [][2]*smcr.Conn{{a, b}, {b, a}} {
				written := make(chan error, 1)
				go func() {
					_, err := way[0].Write(want)
					written <- err
				}()
				got := make([]byte, len(want))
				if _, err := io.ReadFull(way[1], got); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("other bytes than were sent, or %v", err)
				}
				if err := <-written; err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(a.Close(), b.Close()); err != nil {
				t.Error(err)
			}
		}
	})
}

// goroutine names the caller's goroutine.
func goroutine() string {
	var buf [64]byte
	return string(bytes.Fields(buf[:runtime.Stack(buf[:], false)])[1])
}

// TestStack_aBurstDoesNotHoldTheDevice: of what moves on many connections at once the device's goroutine, which the stack calls back,
// sends a part, though it found all of it at once; the stack's goroutine sends the rest. Nothing is lost.
func TestStack_aBurstDoesNotHoldTheDevice(t *testing.T) {
	const (
		groups   = 400
		postTime = 100 * time.Microsecond
		most     = groups / 8 // five times what fits into the millisecond that the device's goroutine may take
	)
	f := newFakeFabric()
	d := &sendsDevice{Device: f.device("s", 2)}
	small := func(c *smcr.Config) { c.RMBESizeBytes, c.SendBufferBytes, c.RMBEsPerRMB = 16<<10, 16<<10, 1 }
	p := &pair{fabric: f, client: newStack(t, f.device("c", 1), small), server: newStack(t, d, small)}
	p.listen(t)
	var clients, servers []*smcr.Conn
	for i := range groups {
		p.dialFrom = netip.AddrFrom4([4]byte{127, 1, byte(i / 250), byte(1 + i%250)}) // a TCP address is a peer
		a, b := p.dial(t)
		clients, servers = append(clients, a), append(servers, b)
	}
	if n := len(p.server.LinkGroups()); n != groups {
		t.Fatalf("%d link groups, want %d", n, groups)
	}
	var mine, others atomic.Int32 // posts
	device := goroutine()
	post := func() {
		for start := time.Now(); time.Since(start) < postTime; {
		}
		if goroutine() == device {
			mine.Add(1)
		} else {
			others.Add(1)
		}
	}
	d.post.Store(&post)
	for rounds := 0; mine.Load() == 0; rounds++ { // else another goroutine of the stack was first
		if rounds == 20 {
			t.Fatal("the device's goroutine never sends")
		}
		others.Store(0)
		release := smcr.HoldTurn(p.server)
		for _, b := range servers {
			if _, err := b.Write([]byte{byte(rounds)}); err != nil {
				t.Fatal(err)
			}
		}
		release()
		d.call()
		if n := mine.Load(); n > most {
			t.Errorf("the device's goroutine posted %d times, want %d at most", n, most)
		}
		waitFor(t, "the rest, which the stack's goroutine sends", func() bool { return mine.Load()+others.Load() >= groups })
		for _, a := range clients {
			var got [2]byte
			if n, err := a.Read(got[:]); n != 1 || got[0] != byte(rounds) || err != nil {
				t.Fatalf("read %d bytes, the first is %d, %v; want one, %d", n, got[0], err, rounds)
			}
		}
	}
}
