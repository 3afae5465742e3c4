// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// newHandoverLab is a lab whose agents are processes that hand over.
func newHandoverLab(t testing.TB) *lab {
	t.Helper()
	l := newSpaces(t)
	l.attach(t)
	for _, n := range []*testNode{l.a, l.b} {
		n.drain = 2 * time.Second
		n.writeConfig(t, "  takeover: true\n"+preferAll)
	}
	return l
}

// succeed starts an agent and waits until it manages the node.
func (n *testNode) succeed(t testing.TB, instance string) *agentProcess {
	t.Helper()
	p := n.process(t, instance)
	n.awaitInstance(t, instance, p)
	return p
}

// awaitInstance waits until an agent manages the node.
func (n *testNode) awaitInstance(t testing.TB, instance string, alive *agentProcess) {
	t.Helper()
	eventually(t, func() string {
		alive.runs()
		s, err := n.client.Status(t.Context())
		if err != nil {
			return err.Error()
		}
		if r := agentapi.ReadinessOf(s, instance); !r.Ready {
			return r.Detail
		}
		return ""
	})
}

// load is unmodified clients that connect all the time.
type load struct {
	stop  context.CancelFunc
	wg    sync.WaitGroup
	shift atomic.Int32 // phase

	mu    sync.Mutex // guards what is below
	took  [numPhases][]time.Duration
	fails []error
}

const (
	phaseBefore = iota
	phaseGap    // from the start of the successor on
	phaseAfter  // from its readiness on
	phaseEnd    // from the end of the old agent on
	numPhases
)

// shorts opens connections from the pod of a, one after the other in each of
// so many workers.
func shorts(t testing.TB, l *lab, addr string, workers int) *load {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	ld := &load{stop: stop}
	for range workers {
		ld.wg.Go(func() {
			for ctx.Err() == nil {
				phase := ld.shift.Load()
				begin := time.Now()
				err := once(t, l, addr)
				d := time.Since(begin)
				ld.mu.Lock()
				if err != nil {
					ld.fails = append(ld.fails, fmt.Errorf("phase %d, after %v: %w", phase, d, err))
				}
				ld.took[phase] = append(ld.took[phase], d)
				ld.mu.Unlock()
			}
		})
	}
	t.Cleanup(ld.end)
	return ld
}

func (ld *load) end() {
	ld.stop()
	ld.wg.Wait()
}

// await waits until there were so many connections of the present phase.
func (ld *load) await(t testing.TB, conns int) {
	t.Helper()
	eventually(t, func() string {
		ld.mu.Lock()
		defer ld.mu.Unlock()
		if n := len(ld.took[ld.shift.Load()]); n < conns {
			return fmt.Sprintf("%d of %d connections", n, conns)
		}
		return ""
	})
}

// report fails the test if a connection failed, and logs how long they took.
func (ld *load) report(t testing.TB) {
	t.Helper()
	ld.end()
	for i, err := range ld.fails {
		if i < 10 {
			t.Errorf("connection failed: %v", err)
		}
	}
	for phase, name := range [numPhases]string{"before", "gap", "after", "end"} {
		d := ld.took[phase]
		if len(d) == 0 {
			t.Errorf("no connection in phase %s", name)
			continue
		}
		slices.Sort(d)
		t.Logf("%-6s %5d connections: p50 %v, p99 %v, max %v", name, len(d),
			d[len(d)/2].Round(10*time.Microsecond), d[len(d)*99/100].Round(10*time.Microsecond), d[len(d)-1].Round(10*time.Microsecond))
	}
}

// once is one short connection.
func once(t testing.TB, l *lab, addr string) error {
	const size = 300
	c, err := l.a.pod.dialPlain(addr)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(waitLimit))
	if _, err := c.Write(make([]byte, size)); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if err := c.CloseWrite(); err != nil {
		return fmt.Errorf("end: %w", err)
	}
	b, err := io.ReadAll(c)
	if err == nil && len(b) != size {
		err = fmt.Errorf("%d bytes of %d", len(b), size)
	}
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	return nil
}

// longs are connections that live on, with a word back and forth at times.
type longs struct {
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu    sync.Mutex // guards what is below
	ended []time.Time
	errs  []error
}

func lasting(t testing.TB, l *lab, addr string, conns int) *longs {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	ls := &longs{stop: stop}
	for range conns {
		c := value(l.a.pod.dialPlain(addr))(t)
		ls.wg.Go(func() {
			defer func() { _ = c.Close() }()
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			b := make([]byte, 100)
			for {
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
				_ = c.SetDeadline(time.Now().Add(waitLimit))
				_, err := c.Write(b)
				if err == nil {
					_, err = io.ReadFull(c, b)
				}
				if err != nil {
					ls.mu.Lock()
					ls.ended, ls.errs = append(ls.ended, time.Now()), append(ls.errs, err)
					ls.mu.Unlock()
					return
				}
			}
		})
	}
	t.Cleanup(func() {
		stop()
		ls.wg.Wait()
	})
	return ls
}

func (ls *longs) dead() int {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return len(ls.errs)
}

// TestHandover replaces agents under load: no new connection fails, and those
// that are carried live until the old agent's drain ends.
func TestHandover(t *testing.T) {
	t.Parallel() // the test mostly waits
	for _, tt := range []struct {
		name             string
		clients, servers bool
	}{{"client's agent", true, false}, {"server's agent", false, true}, {"both agents", true, true}} {
		t.Run(tt.name, func(t *testing.T) { testHandover(t, tt.clients, tt.servers) })
	}
}

func testHandover(t *testing.T, clients, servers bool) {
	const longConns = 5
	l := newHandoverLab(t)
	var nodes []*testNode
	olds := map[*testNode]*agentProcess{}
	for n, replaced := range map[*testNode]bool{l.a: clients, l.b: servers} {
		olds[n] = n.succeed(t, "old")
		if replaced {
			nodes = append(nodes, n)
		}
	}
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	addr := ln.Addr().String()
	long := lasting(t, l, addr, longConns)
	ld := shorts(t, l, addr, 2)
	ld.await(t, 200)
	for _, n := range []*testNode{l.a, l.b} {
		eventually(t, func() string {
			if s := n.status(t); s.Conns.TotalSMCR < 100 || s.Conns.LiveSMCR < longConns {
				return fmt.Sprintf("node %s: %+v", n.name, s.Conns)
			}
			return ""
		})
	}

	ld.shift.Store(phaseGap)
	for _, n := range nodes {
		begin := time.Now()
		n.succeed(t, "new")
		eventually(t, func() string {
			if s := n.status(t); s.Instance != "new" || s.Conns.TotalSMCR == 0 {
				return fmt.Sprintf("node %s: %+v, reasons %v", n.name, s.Conns, s.Reasons)
			}
			return ""
		})
		t.Logf("on SMC-R through the new agent of %s after %v", n.name, time.Since(begin).Round(time.Millisecond))
		if d := time.Since(begin); d > 2*time.Second {
			t.Errorf("the first connection through the new agent of %s was on SMC-R after %v", n.name, d)
		}
	}
	ld.shift.Store(phaseAfter)
	ld.await(t, 200)
	if n := long.dead(); n != 0 {
		t.Errorf("%d long connections are dead: %v", n, long.errs)
	}

	// The old agents drain.
	term := time.Now()
	for _, n := range nodes {
		olds[n].signal(syscall.SIGTERM)
	}
	for _, n := range nodes {
		if err := olds[n].wait(); err != nil {
			t.Errorf("old agent of %s ended with %v", n.name, err)
		}
	}
	eventually(t, func() string {
		if n := long.dead(); n != longConns {
			return fmt.Sprintf("%d of %d long connections ended", n, longConns)
		}
		return ""
	})
	for i, err := range long.errs {
		if d := long.ended[i].Sub(term); d < l.a.node.DrainTimeout || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("long connection ended %v after SIGTERM: %v", d, err)
		}
	}
	ld.shift.Store(phaseEnd)
	ld.await(t, 200)
	ld.report(t)
	for _, n := range []*testNode{l.a, l.b} {
		if s := n.status(t); s.Pods.Ready != 1 || len(s.Problems) != 0 || len(s.Reasons) != 0 {
			t.Errorf("node %s: %+v", n.name, s)
		}
	}
	wantCarried(t, l, l.b.pod.listen(t, podB+":0"))
}

// TestHandover_again: agents follow each other, each while the one before the
// last has just ended, with connections all the time.
func TestHandover_again(t *testing.T) {
	t.Parallel() // the test mostly waits
	l := newHandoverLab(t)
	l.b.succeed(t, "peer")
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	last := l.a.succeed(t, "0")
	ld := shorts(t, l, ln.Addr().String(), 1)
	ld.await(t, 50)
	for i := range 4 {
		next := l.a.succeed(t, fmt.Sprint(i+1))
		if err := last.kill(syscall.SIGTERM); err != nil {
			t.Errorf("agent %d ended with %v", i, err)
		}
		last = next
	}
	for _, phase := range []int32{phaseGap, phaseAfter, phaseEnd} {
		ld.shift.Store(phase)
		ld.await(t, 50)
	}
	ld.report(t)
	if s := l.a.status(t); s.Conns.TotalSMCR == 0 {
		t.Errorf("nothing on SMC-R: %+v %v", s.Conns, s.Reasons)
	}
}

// TestHandover_ended: an agent that is told to end while it carries connections gives the node to an
// agent that comes then. No new connection fails, and those that are carried live as long as they may.
func TestHandover_ended(t *testing.T) {
	t.Parallel() // the test mostly waits
	l := newHandoverLab(t)
	l.b.succeed(t, "peer")
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	addr := ln.Addr().String()
	old := l.a.succeed(t, "old")
	long := lasting(t, l, addr, 1)
	ld := shorts(t, l, addr, 1)
	ld.await(t, 50)

	ld.shift.Store(phaseGap)
	term := time.Now()
	old.signal(syscall.SIGTERM)
	eventually(t, func() string {
		if s := l.a.status(t); !s.Draining {
			return "the agent does not drain"
		}
		return ""
	})
	l.a.succeed(t, "new")
	if n := long.dead(); n != 0 {
		t.Errorf("the long connection is dead after %v: %v", long.ended[0].Sub(term), long.errs)
	}
	ld.await(t, 20)
	ld.shift.Store(phaseAfter)
	if err := old.wait(); err != nil {
		t.Errorf("the old agent ended with %v", err)
	}
	eventually(t, func() string {
		if long.dead() == 0 {
			return "the long connection goes on without its agent"
		}
		return ""
	})
	if d := long.ended[0].Sub(term); d < l.a.node.DrainTimeout || !errors.Is(long.errs[0], syscall.ECONNRESET) {
		t.Errorf("the long connection ended %v after SIGTERM: %v", d, long.errs[0])
	}
	ld.await(t, 50)
	ld.shift.Store(phaseEnd)
	ld.await(t, 50)
	ld.report(t)
	if s := l.a.status(t); s.Instance != "new" || s.Pods.Ready != 1 || s.Conns.TotalSMCR == 0 || len(s.Problems) != 0 {
		t.Errorf("the new agent: %+v %v", s, s.Reasons)
	}
}

// TestHandover_successorDies: the agent that stands by manages the node again,
// and lets the next one have it.
func TestHandover_successorDies(t *testing.T) {
	t.Parallel() // the test mostly waits
	l := newHandoverLab(t)
	l.b.succeed(t, "peer")
	ln := l.b.pod.listen(t, podB+":0")
	old := l.a.succeed(t, "old")
	client, server := wantCarried(t, l, ln)
	dead := l.a.succeed(t, "new")
	if err := dead.kill(syscall.SIGKILL); err == nil {
		t.Error("a killed agent ended in order")
	}
	wantDirect(t, l, ln) // or by the old one, again
	l.a.awaitInstance(t, "old", old)
	wantCarried(t, l, ln)
	// What it carried all along is untouched.
	for _, p := range [][2]*net.TCPConn{{client, server}, {server, client}} {
		must(t, p[1].SetDeadline(time.Now().Add(waitLimit)))
		value(p[0].Write([]byte("x")))(t)
		value(io.ReadFull(p[1], make([]byte, 1)))(t)
	}
	l.a.succeed(t, "newer")
	wantCarried(t, l, ln)
	if err := old.kill(syscall.SIGTERM); err != nil {
		t.Errorf("the old agent ended with %v", err)
	}
	wantCarried(t, l, ln)
}
