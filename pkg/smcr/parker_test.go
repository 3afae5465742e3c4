// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// newParker returns a parker that looks so often at its directions.
func newParker(tb testing.TB, every time.Duration) *smcr.Parker {
	tb.Helper()
	p, err := smcr.NewParker(every, nil)
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

// BenchmarkParker_idle is what a process has for an idle relay, both of its directions and the
// connection that it relays, but not the program's socket or the far end's relay, which are in this
// process too: half of all is counted.
func BenchmarkParker_idle(b *testing.B) {
	for _, waits := range []string{"goroutines", "parked"} {
		b.Run(waits, func(b *testing.B) {
			const n = 500
			every := time.Hour
			if waits == "parked" {
				every = 10 * time.Millisecond
			}
			for b.Loop() {
				p := newSoftPair(b, rdma.MTU1024, small)
				parker := newParker(b, every)
				var before, after runtime.MemStats
				goroutines := 0
				for i := range n + 1 {
					x, y := p.dial(b)
					for _, r := range []*relayed{relay(b, parker, x), relay(b, parker, y)} {
						if waits == "parked" {
							parked(b, r.out, r.in)
						}
					}
					if i == 0 || i == n {
						goroutines = runtime.NumGoroutine() - goroutines
						debug.FreeOSMemory()
						before, after = after, before
						runtime.ReadMemStats(&after)
					}
				}
				inUse := func(m *runtime.MemStats) float64 { return float64(m.HeapInuse + m.StackInuse) }
				b.ReportMetric((inUse(&after)-inUse(&before))/n/2, "B/relay")
				b.ReportMetric(float64(goroutines)/n/2, "goroutines/relay")
			}
		})
	}
}

// Who wants to know hears of it once when a wave of directions has come to rest.
func TestParker_calm(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024)
	a, b := p.dial(t)
	calm := 0
	parker, err := smcr.NewParker(time.Hour, func() { calm++ })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = parker.Close() })
	var began []*smcr.Direction
	for _, c := range []*smcr.Conn{a, b} {
		r := relay(t, parker, c)
		began = append(began, r.out, r.in)
		smcr.Look(parker)
		before := calm
		waitFor(t, "parking", func() bool {
			smcr.Look(parker)
			return !slices.ContainsFunc(began, func(d *smcr.Direction) bool { return smcr.StateOf(d) != "parked" })
		})
		for range 10 {
			smcr.Look(parker)
		}
		// Each direction may have been seen at rest in a look of its own.
		if more := calm - before; more < 1 || more > 2 {
			t.Errorf("%d times calm after two directions came to rest", more)
		}
	}
}
