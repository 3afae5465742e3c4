// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// ask sends a byte over a connection.
func ask(t testing.TB, c *net.TCPConn) {
	t.Helper()
	value(c.Write([]byte("x")))(t)
}

// answered wants the echo of it.
func answered(t testing.TB, c *net.TCPConn) {
	t.Helper()
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Error(err)
	}
}

// TestAttack_silentDestinations: two pods connect to addresses that are silent, as
// often as they can. Ten other pods open 30 connections each at once: all are
// answered, though there are fewer reservations than that for each.
func TestAttack_silentDestinations(t *testing.T) {
	const others, burst = 10, 30
	b := newBench(t, "  budgets: {node: {relays: 256, pending: 256}, pod: {relays: 128, pending: 128}}\n", preferAll)
	silent := make(chan struct{})
	var evil, good []*fakePod
	for i := range 2 {
		p := b.attach(fmt.Sprintf("evil%d", i), uint64(1+i))
		p.silent, p.dst = silent, b.server()
		evil = append(evil, p)
	}
	for i := range others {
		p := b.attach(fmt.Sprintf("good%d", i), uint64(3+i))
		p.dst = b.server()
		good = append(good, p)
	}
	b.start()
	for _, p := range evil {
		for range 200 {
			b.dial(p, 0)
		}
	}
	eventually(t, func() string {
		for i := range evil {
			if x := b.attachment(fmt.Sprintf("evil%d", i)); x.Paused != agentapi.CodeBudgetPending {
				return fmt.Sprintf("%+v", x)
			}
		}
		return ""
	})
	var conns []*net.TCPConn
	for _, p := range good {
		for range burst {
			c := b.dial(p, 0)
			ask(t, c)
			conns = append(conns, c)
		}
	}
	for _, c := range conns {
		answered(t, c)
	}
	if s := b.status(); s.Conns.Reset != 0 {
		t.Errorf("%d connections were reset: %v", s.Conns.Reset, s.Reasons)
	}
	close(silent)
}

// TestProxy_waitsForReservation: a connection for which there is no pending reservation waits as
// long as it takes. One that must be on SMC-R is reset after a while, with the
// reason, and those behind it at once, as long as there is no place.
func TestProxy_waitsForReservation(t *testing.T) {
	const pending = 16
	begin := func(t *testing.T, policies string) (*bench, *fakePod, []*net.TCPConn) {
		t.Helper()
		b := newBench(t, fmt.Sprintf("  budgets: {pod: {pending: %d}}\n", pending), policies)
		p := b.attach("a", 1)
		p.silent, p.dst = make(chan struct{}), b.server()
		b.start()
		var first []*net.TCPConn
		for range pending {
			c := b.dial(p, 0)
			ask(t, c)
			first = append(first, c)
		}
		eventually(t, func() string {
			if s := b.status(); s.NodeBudget.PendingUsed != pending {
				return fmt.Sprintf("%+v", s.NodeBudget)
			}
			return ""
		})
		return b, p, first
	}
	t.Run("prefer", func(t *testing.T) {
		b, p, conns := begin(t, preferAll)
		var late []*net.TCPConn
		for range 10 {
			c := b.dial(p, 0)
			ask(t, c)
			late = append(late, c)
		}
		// Longer than one that must be on SMC-R would wait.
		must(t, late[0].SetReadDeadline(time.Now().Add(3*pendingPatience/2)))
		if _, err := late[0].Read(make([]byte, 1)); !os.IsTimeout(err) {
			t.Errorf("read = %v, want that it waits", err)
		}
		must(t, late[0].SetReadDeadline(time.Now().Add(waitLimit)))
		if late := b.attachment("a"); late.State != agentapi.StateReady {
			t.Errorf("attachment %+v", late)
		}
		close(p.silent)
		for _, c := range append(conns, late...) {
			answered(t, c)
		}
		if s := b.status(); s.Conns.Reset != 0 {
			t.Errorf("%d connections were reset: %v", s.Conns.Reset, s.Reasons)
		}
		if strings.Contains(b.log.String(), "accept loop is late") {
			t.Error("the diversion ended because a loop waited")
		}
	})
	t.Run("required", func(t *testing.T) {
		b, p, conns := begin(t, "policies:\n- {name: must, mode: Required}\n")
		start := time.Now()
		for range 3 {
			b.dialReset(p, 0)
		}
		if took := time.Since(start); took < pendingPatience || took > 3*pendingPatience {
			t.Errorf("3 resets took %v, want all after about %v", took, pendingPatience)
		}
		s := b.status()
		if s.Conns.Reset != 3 || s.Reasons[agentapi.CodeBudgetPending] != 3 {
			t.Errorf("%d resets, reasons %v", s.Conns.Reset, s.Reasons)
		}
		e := value(b.client.Explain(t.Context(), "test/a", p.dst.String()))(t)
		if len(e.Recent) != 1 || e.Recent[0].Reason != agentapi.CodeRequired || !strings.Contains(e.Recent[0].Detail, string(agentapi.CodeBudgetPending)) {
			t.Errorf("explanation %+v", e)
		}
		close(p.silent)
		for _, c := range conns {
			answered(t, c)
		}
	})
	t.Run("required, for a moment", func(t *testing.T) {
		b, p, conns := begin(t, "policies:\n- {name: must, mode: Required}\n")
		c := b.dial(p, 0)
		ask(t, c)
		close(p.silent)
		for _, c := range append(conns, c) {
			answered(t, c)
		}
	})
	t.Run("the agent ends", func(t *testing.T) {
		b, p, _ := begin(t, preferAll)
		c := b.dial(p, 0)
		eventually(t, func() string {
			if _, text := b.get(agentapi.PathMetrics); !strings.Contains(text, "kube_smcr_pending_waits_total 1\n") {
				return "nothing waits"
			}
			return ""
		})
		b.stop()
		wantReset(t, c)
	})
}

// TestListenerSet_close: listeners are closed once, and closing them again is no error.
func TestListenerSet_close(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	set := value(p.px.openListeners(t.Context(), agentapi.Outbound, nil, 0))(t)
	for range 2 {
		must(t, set.close())
	}
	if c, err := b.reach(set.port); err == nil {
		t.Errorf("port %d still listens", set.port)
		_ = c.Close()
	}
}

// handled is an accept loop of a bare pod whose sessions a test gets.
type handled struct {
	*acceptor
	got chan *reservation
}

func (p *barePod) acceptor(dir agentapi.Direction, dst error) *handled {
	h := &handled{got: make(chan *reservation, 1)}
	set := &listenerSet{
		dir: dir, progress: make([]atomic.Int64, 1),
		dst: func(*net.TCPConn) (netip.AddrPort, error) { return netip.MustParseAddrPort("192.0.2.9:80"), dst },
		handle: func(_ context.Context, c *net.TCPConn, _ netip.AddrPort, rv *reservation) {
			reset(c)
			rv.release()
			h.got <- rv
		},
	}
	h.acceptor = &acceptor{proxy: p.px, set: set, progress: &set.progress[0]}
	return h
}

// TestAcceptor_admit: a diverted connection gets a session with a reservation. A connection that was not diverted is reset, and only that is counted.
func TestAcceptor_admit(t *testing.T) {
	for _, tt := range []struct {
		name       string
		err        error // of the look-up of the destination
		undiverted float64
	}{
		{"diverted", nil, 0},
		{"not diverted", fmt.Errorf("look: %w", linux.ErrNotRedirected), 1},
		{"broken", errors.New("the socket is gone"), 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", preferAll)
			p := b.proxy("a")
			h := p.acceptor(agentapi.Outbound, tt.err)
			h.fullLast = time.Now()
			near, far := loopback(t)
			if _, goOn := h.admit(near); !goOn {
				t.Error("the accept loop ends")
			}
			wantReset(t, far) // by handle, if the connection was diverted
			if tt.err == nil {
				if rv := <-h.got; rv == nil || !h.fullLast.IsZero() {
					t.Errorf("reservation %v; full until %v", rv, h.fullLast)
				}
			}
			p.px.sessionTasks.Wait()
			b.wantFree()
			if got := testutil.ToFloat64(b.a.metrics.undiverted.WithLabelValues(string(agentapi.Outbound))); got != tt.undiverted {
				t.Errorf("%v connections counted that were not diverted, want %v", got, tt.undiverted)
			}
			if got := strings.Contains(b.log.String(), "a program in the pod connects to the agent's port"); got != (tt.undiverted > 0) {
				t.Errorf("in the log: %t", got)
			}
		})
	}
}

// TestAcceptor_strayLog: a program that connects to the agent's port without end does not fill the
// log.
func TestAcceptor_strayLog(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	h := p.acceptor(agentapi.Inbound, linux.ErrNotRedirected)
	near, _ := loopback(t)
	for range 2 * logBurst {
		p.px.resetUndiverted(h.set, near, linux.ErrNotRedirected)
	}
	if n := strings.Count(b.log.String(), "was not diverted"); n < logBurst || n > logBurst+logBurst/2 {
		t.Errorf("%d records, want about %d", n, logBurst)
	}
}

// TestAcceptor_loop: an accept loop ends when its listener is closed, and, when nothing is diverted
// any more, once the listener's backlog is empty.
func TestAcceptor_loop(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	begin := func() (*handled, uint16, func()) {
		h := p.acceptor(agentapi.Outbound, nil)
		h.got = make(chan *reservation, 3)
		ls, port, err := p.listen(t.Context(), nil, 0)
		must(t, err)
		h.set.listeners = ls
		return h, port, func() { p.px.accept(h.set, 0) }
	}
	h, _, loop := begin()
	must(t, h.set.close())
	loop()
	if h.set.progress[0].Load() == 0 {
		t.Error("the loop noted no progress")
	}

	h, port, loop := begin()
	p.px.closing.Store(true)
	for range 3 {
		c, err := b.reach(port)
		must(t, err)
		defer c.Close()
	}
	loop()
	if len(h.got) != 3 {
		t.Errorf("%d of 3 connections of the backlog were accepted", len(h.got))
	}
	must(t, h.set.close())

	h, port, loop = begin()
	h.set.dst = func(*net.TCPConn) (netip.AddrPort, error) { return netip.AddrPort{}, linux.ErrNotRedirected }
	ended := make(chan struct{})
	go func() {
		loop()
		close(ended)
	}()
	for began, connecting := time.Now(), true; connecting; { // a program in the pod that connects to the port itself
		if c, err := b.reach(port); err == nil { // it is reset at once, or there is no listener any more
			defer c.Close()
		}
		select {
		case <-ended:
			connecting = false
		case <-time.After(drainAccept / 5):
			if time.Since(began) > 10*drainLimit {
				t.Fatal("the loop goes on for as long as somebody connects")
			}
		}
	}
	must(t, h.set.close())
	p.px.sessionTasks.Wait()
}

// TestAcceptor_reserve: what one client has counts only for inbound connections, and its relays only
// where the next connection may become one.
func TestAcceptor_reserve(t *testing.T) {
	const relays, pending = 16, 100
	client := netip.MustParseAddrPort("192.0.2.77:1000")
	for _, tt := range []struct {
		name, policies string
		dir            agentapi.Direction
		want           bool
	}{
		{"inbound", preferAll, agentapi.Inbound, false},
		{"inbound and required", requireAll, agentapi.Inbound, true},
		{"outbound", preferAll, agentapi.Outbound, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, fmt.Sprintf("  budgets: {pod: {relays: %d, pending: %d}}\n", relays, pending), tt.policies)
			p := b.proxy("a")
			for range relays { // the client has all relays of the pod
				rv, _ := p.px.account.reserve(client.Addr(), true)
				if rv == nil {
					break
				}
				rv.becomeRelay()
			}
			h := p.acceptor(tt.dir, nil)
			rv, freed := h.reserve(&session{dir: tt.dir, src: client, dst: netip.MustParseAddrPort("127.0.0.1:80")})
			if (rv != nil) != tt.want || freed != nil {
				t.Errorf("reservation %v, freed %v; want one: %t", rv, freed, tt.want)
			}
			if rv != nil && rv.source.IsValid() != (tt.dir == agentapi.Inbound) {
				t.Errorf("the reservation is of %v", rv.source)
			}
		})
	}
}

// fullPod is the least budget of pending connections that a pod can have, 16.
const fullPod = "  budgets: {pod: {pending: 16}}\n"

// fill takes all pending connections of a pod with that budget, and returns one of them.
func (p *barePod) fill(t testing.TB) (one *reservation) {
	t.Helper()
	for range 16 {
		one = p.reservation(t)
	}
	return one
}

// TestAcceptor_waits: how long a connection waits for which there is no reservation, and what ends
// the wait.
func TestAcceptor_waits(t *testing.T) {
	for _, tt := range []struct {
		name, policies string
		after          time.Duration // when meanwhile is called
		meanwhile      func(p *barePod, first *reservation)
		draining       bool

		want   bool          // the connection gets a reservation
		goOn   bool          // the accept loop does
		took   time.Duration // at least, and a look longer at most
		code   agentapi.Code // of the reset
		detail string
	}{
		{name: "another session ends", policies: preferAll, after: time.Hour, meanwhile: func(_ *barePod, first *reservation) { first.release() }, want: true, goOn: true, took: time.Hour},
		{name: "required", policies: requireAll, goOn: true, took: pendingPatience, code: agentapi.CodeRequired, detail: "BUDGET_PENDING: "},
		{name: "required, another session ends", policies: requireAll, after: pendingPatience / 2, meanwhile: func(_ *barePod, first *reservation) { first.release() }, want: true, goOn: true, took: pendingPatience / 2},
		{name: "draining", policies: preferAll, draining: true, took: pendingPatience, code: agentapi.CodeDraining},
		{name: "the proxy ends", policies: preferAll, after: time.Minute, meanwhile: func(p *barePod, _ *reservation) { p.px.kill() }, took: time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newAbleBare(t, fullPod, tt.policies)
				p := b.proxy("a")
				first := p.fill(t)
				h := p.acceptor(agentapi.Outbound, nil)
				near, far := loopback(t)
				s := &session{dir: agentapi.Outbound, src: addrPort(near.RemoteAddr()), dst: netip.MustParseAddrPort("192.0.2.9:80"), app: near}
				rv, freed := h.reserve(s)
				if rv != nil || freed == nil {
					t.Fatalf("reservation %v, freed %v, though others have all", rv, freed)
				}
				p.px.draining.Store(tt.draining)
				begin := time.Now()
				if tt.meanwhile != nil {
					time.AfterFunc(tt.after, func() { tt.meanwhile(p, first) })
				}
				rv, goOn := h.awaitReservation(s, freed)
				if (rv != nil) != tt.want || goOn != tt.goOn {
					t.Errorf("reservation %v, the loop goes on: %t", rv, goOn)
				}
				look := p.px.renewEvery()
				if took := time.Since(begin); took < tt.took || took > tt.took+look {
					t.Errorf("after %v, want %v", took, tt.took)
				}
				if late := time.Since(b.a.started) - time.Duration(h.progress.Load()); late > look {
					t.Errorf("the loop noted no progress for %v", late)
				}
				if !tt.want {
					wantReset(t, far)
				}
				if got := b.a.metrics.sum(); tt.code != "" && got.resets != 1 {
					t.Errorf("%d resets", got.resets)
				}
				if tt.detail != "" {
					if d := b.decided(); d.Reason != tt.code || !strings.Contains(d.Detail, tt.detail) {
						t.Errorf("decision %+v, want %s (%s)", d, tt.code, tt.detail)
					}
				}
				if got := testutil.ToFloat64(b.a.metrics.pendingWaits); got != 1 {
					t.Errorf("%v waits counted", got)
				}
			})
		})
	}
}

// TestAcceptor_fullForLong: what must be on SMC-R does not wait at all behind a connection that
// waited for pendingPatience in vain.
func TestAcceptor_fullForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newAbleBare(t, fullPod, requireAll)
		p := b.proxy("a")
		p.fill(t)
		h := p.acceptor(agentapi.Outbound, nil)
		begin := time.Now()
		for range 3 {
			near, far := loopback(t)
			if _, goOn := h.admit(near); !goOn {
				t.Error("the loop ends")
			}
			wantReset(t, far)
		}
		if took := time.Since(begin); took < pendingPatience || took > pendingPatience+p.px.renewEvery() {
			t.Errorf("three resets took %v, want %v for all", took, pendingPatience)
		}
	})
}

// TestAcceptor_fullAgain: a connection waits for pendingPatience of its own if the shortage that an earlier one met is long over, and
// not because of time in which nobody asked.
func TestAcceptor_fullAgain(t *testing.T) {
	for _, tt := range []struct {
		name   string
		pause  time.Duration // between the two
		want   time.Duration // that the second one waits
		places bool          // there are some in between
	}{
		{"at once", 0, 0, false},
		{"shortly after", pendingPatience, 0, false},
		{"long after", 2 * pendingPatience, pendingPatience, false},
		{"an hour after", time.Hour, pendingPatience, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newAbleBare(t, fullPod, requireAll)
				p := b.proxy("a")
				one := p.fill(t)
				h := p.acceptor(agentapi.Outbound, nil)
				refused := func() time.Duration {
					near, far := loopback(t)
					begin := time.Now()
					if _, goOn := h.admit(near); !goOn {
						t.Error("the loop ends")
					}
					wantReset(t, far)
					return time.Since(begin)
				}
				refused()
				if tt.places {
					one.release()
				}
				<-time.After(tt.pause)
				if tt.places { // another listener takes it
					p.reservation(t)
				}
				if took := refused(); took < tt.want || took > tt.want+p.px.renewEvery() {
					t.Errorf("refused after %v, want %v", took, tt.want)
				}
			})
		})
	}
}

// TestAcceptor_refuseGreedy: a client that has all that one client may have is reset at once, with
// the reason.
func TestAcceptor_refuseGreedy(t *testing.T) {
	for policies, want := range map[string]agentapi.Code{preferAll: agentapi.CodeBudgetSource, requireAll: agentapi.CodeRequired} {
		b := newAbleBare(t, "", policies)
		p := b.proxy("a")
		near, far := loopback(t)
		s := &session{dir: agentapi.Inbound, src: addrPort(near.RemoteAddr()), dst: netip.MustParseAddrPort("127.0.0.1:80"), app: near}
		rv, goOn := p.acceptor(agentapi.Inbound, nil).awaitReservation(s, nil)
		if rv != nil || !goOn {
			t.Errorf("reservation %v, the loop goes on: %t", rv, goOn)
		}
		wantReset(t, far)
		if d := b.decided(); d.Reason != want || d.Mode != agentapi.ModeReset || !strings.Contains(d.Detail, agentapi.CodeBudgetSource.Text()) {
			t.Errorf("decision %+v, want %s", d, want)
		}
	}
}
