// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// beating is a pod with a TTL of 3 s and two accept loops for each direction, which only a test moves.
type beating struct {
	*barePod
	b     *bare
	begin time.Time
}

func newBeating(t *testing.T) *beating {
	t.Helper()
	b := newAbleBare(t, "", preferAll)
	n := *b.a.node.Load()
	n.RedirectTTL = 3 * time.Second
	b.a.node.Store(&n)
	p := &beating{barePod: b.proxy("a"), b: b, begin: time.Now()}
	for _, set := range []*listenerSet{p.px.out, p.px.in} {
		set.progress = make([]atomic.Int64, 2)
	}
	p.progress()
	return p
}

// progress is what all accept loops note when they come round.
func (p *beating) progress() {
	for _, set := range []*listenerSet{p.px.out, p.px.in} {
		for i := range set.progress {
			set.progress[i].Store(int64(time.Since(p.b.a.started)))
		}
	}
}

func (p *beating) renews() (n int) {
	p.redir.look(func() { n = p.redir.renews })
	return n
}

func (p *beating) updates() (n int) {
	p.redir.look(func() { n = p.redir.updates })
	return n
}

// TestProxy_heartbeat: the diversion is renewed while all accept loops come round and the stack
// answers, and the heartbeat ends with the proxy.
func TestProxy_heartbeat(t *testing.T) {
	t.Run("an accept loop hangs", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newBeating(t)
			go p.px.heartbeat()
			<-time.After(500 * time.Millisecond) // the loops come round for the last time
			p.progress()
			for second, want := range []int{0, 1, 2, 3, 3, 3} {
				<-time.After(time.Until(p.begin.Add(time.Duration(second)*time.Second + time.Millisecond)))
				if n := p.renews(); n != want {
					t.Errorf("%d renewals after %d s, want %d", n, second, want)
				}
			}
			if !strings.Contains(p.b.log.String(), "accept loop is late") {
				t.Error("nothing is said about it")
			}
			p.progress()
			<-time.After(time.Second)
			if n := p.renews(); n != 4 {
				t.Errorf("%d renewals after the loops came round again, want 4", n)
			}
			if n := testutil.ToFloat64(p.b.a.metrics.renewErrors); n != 0 {
				t.Errorf("%v renewals count as errors, and the diversion never lapsed", n)
			}
			p.px.kill()
			synctest.Wait()
		})
	})
	t.Run("the stack hangs", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newBeating(t)
			hang := make(chan struct{})
			p.stack.hang = hang
			go p.px.heartbeat()
			<-time.After(time.Minute)
			if n := p.renews(); n != 0 {
				t.Errorf("%d renewals while the stack hangs", n)
			}
			p.progress()
			close(hang)
			synctest.Wait()
			if n := p.renews(); n != 1 {
				t.Errorf("%d renewals when the stack answers again, want 1", n)
			}
			<-time.After(p.px.renewEvery())
			if n := testutil.ToFloat64(p.b.a.metrics.renewErrors); n != 1 || strings.Count(p.b.log.String(), "renewed too late") != 1 {
				t.Errorf("%v renewals count as errors, want the one before which the diversion had lapsed:\n%s", n, p.b.log.String())
			}
			p.px.kill()
			synctest.Wait()
		})
	})
	for _, tt := range []struct {
		name            string
		err             error
		updates, errors int
	}{
		{"somebody deleted the table", linux.ErrNoTable, 1, 0},
		{"broken", errors.New("no memory"), 0, 1},
		{"the proxy ends", linux.ErrClosed, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newBeating(t)
				p.redir.renewErr = tt.err
				go p.px.heartbeat()
				<-time.After(p.px.renewEvery() + time.Millisecond)
				p.px.kill()
				synctest.Wait()
				if n := strings.Count(p.b.log.String(), "diversion not renewed"); p.updates() != tt.updates || n != tt.errors {
					t.Errorf("the table was put back %d times, want %d; %d errors in the log, want %d", p.updates(), tt.updates, n, tt.errors)
				}
			})
		})
	}
	for name, end := range map[string]func(*proxy){
		"draining": func(px *proxy) { px.draining.Store(true) },
		"released": func(px *proxy) { px.released.Store(true) },
		"ended":    func(px *proxy) { px.kill() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newBeating(t)
				end(p.px)
				p.px.heartbeat() // returns
				if n := p.renews(); n != 0 {
					t.Errorf("%d renewals", n)
				}
			})
		})
	}
}

// TestProxy_late: the name of the direction whose loop hangs, whichever of its listeners it is.
func TestProxy_late(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newBeating(t)
		<-time.After(time.Minute)
		for _, set := range []*listenerSet{p.px.out, p.px.in} {
			for i := range set.progress {
				p.progress()
				if late := p.px.late(); late != "" {
					t.Errorf("%s is late", late)
				}
				set.progress[i].Store(int64(time.Since(p.b.a.started) - p.px.agent.node.Load().RedirectTTL - 1))
				if late := p.px.late(); late != string(set.dir) {
					t.Errorf("%q is late, want %s", late, set.dir)
				}
			}
		}
	})
}
