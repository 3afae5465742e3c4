// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// newParker returns a parker that looks so often at its directions.
func newParker(tb testing.TB, every time.Duration) *smcr.Parker {
	tb.Helper()
	p, err := smcr.NewParker(every)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

// relayed is one relay between a program and a connection, both of its directions with a parker.
type relayed struct {
	out, in *smcr.Direction
	program *net.TCPConn
	ended   chan error // gets two
}

// relay begins the relay of c.
func relay(tb testing.TB, p *smcr.Parker, c *smcr.Conn) *relayed {
	tb.Helper()
	x, y := tcpPair(tb)
	near := y.(*net.TCPConn)
	r := &relayed{out: p.NewDirection(), in: p.NewDirection(), program: x.(*net.TCPConn), ended: make(chan error, 2)}
	then := func(_ int64, err error) { r.ended <- err }
	c.StartRelayFrom(r.out, near, then)
	c.StartRelayTo(r.in, near, then)
	tb.Cleanup(func() {
		_, _ = r.program.Close(), c.Abort()
		_ = near.Close()
		r.out.Wake()
		r.in.Wake()
		<-r.ended
		<-r.ended
	})
	return r
}

// parked waits until directions are parked.
func parked(tb testing.TB, ds ...*smcr.Direction) {
	tb.Helper()
	waitFor(tb, "parking", func() bool {
		for _, d := range ds {
			if smcr.StateOf(d) != "parked" {
				return false
			}
		}
		return true
	})
}

// Idle relays have no goroutines, and go on when something arrives.
func TestParker_idleRelaysHaveNoGoroutines(t *testing.T) {
	for _, offered := range []bool{true, false} {
		t.Run(fmt.Sprintf("SMC-R %t", offered), func(t *testing.T) { idleRelays(t, offered) })
	}
}

func idleRelays(t *testing.T, offered bool) {
	const n = 100
	p := newSoftPair(t, rdma.MTU1024, small, func(c *smcr.Config) { c.Option = fakeOption{offered: offered} })
	parker := newParker(t, 10*time.Millisecond)
	type ends struct{ a, b *relayed }
	var all []ends
	trip := func(e ends) {
		t.Helper()
		for _, way := range [][2]*relayed{{e.a, e.b}, {e.b, e.a}} {
			if _, err := way[0].program.Write([]byte("hello")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(way[1].program, make([]byte, 5)); err != nil {
				t.Fatal(err)
			}
		}
	}
	var before int
	for i := range n + 1 {
		a, b := p.dial(t)
		e := ends{relay(t, parker, a), relay(t, parker, b)}
		trip(e)
		parked(t, e.a.out, e.a.in, e.b.out, e.b.in)
		if i == 0 {
			before = runtime.NumGoroutine()
		}
		all = append(all, e)
	}
	waitFor(t, "goroutines to end", func() bool { return runtime.NumGoroutine() < before+n/10 })
	for _, e := range all {
		trip(e)
	}
}

// What moves is not parked, and what has begun to move again is parked again.
func TestParker_look(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024)
	a, b := p.dial(t)
	parker := newParker(t, time.Hour)
	x, y := relay(t, parker, a), relay(t, parker, b)
	send := func() {
		t.Helper()
		for _, size := range []int{1, 300_000} { // what others do in its place, and what the direction does
			if _, err := x.program.Write(make([]byte, size)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(y.program, make([]byte, size)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 3 {
		for range 10 {
			send()
			smcr.Look(parker)
		}
		for name, d := range map[string]*smcr.Direction{"out": x.out, "in": y.in} {
			if s := smcr.StateOf(d); s != "running" {
				t.Errorf("%s is %s while it moves", name, s)
			}
		}
		waitFor(t, "parking", func() bool {
			smcr.Look(parker)
			return smcr.StateOf(x.out) == "parked" && smcr.StateOf(y.in) == "parked"
		})
	}
}
