// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// failingRelease is a redirection that cannot be released.
type failingRelease struct{ redirect }

func (failingRelease) Release(time.Duration) error { return errors.New("no memory for the table") }

// TestLegacies_add: a proxy that is kept is released first, so that the pod's table diverts to it for
// handoverTTL at most. A proxy that cannot be released is kept all the same.
func TestLegacies_add(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	now := time.Unix(1000, 0)
	var ls legacies
	if !ls.divertedUntil().IsZero() {
		t.Errorf("nothing is handed over, and diverted until %v", ls.divertedUntil())
	}
	p, q := b.proxy("a"), b.proxy("b")
	q.px.redirect = failingRelease{q.redir}
	ls.add(q.px, now.Add(time.Second))
	ls.add(p.px, now)
	if p.redir.held != handoverTTL || !p.px.released.Load() || !q.px.released.Load() {
		t.Errorf("held for %v, released %t and %t", p.redir.held, p.px.released.Load(), q.px.released.Load())
	}
	if want := now.Add(time.Second + handoverTTL); !ls.divertedUntil().Equal(want) {
		t.Errorf("diverted until %v, want the last of both, %v", ls.divertedUntil(), want)
	}
	if !strings.Contains(b.log.String(), "no memory for the table") {
		t.Error("the release that failed is not in the log")
	}
	if got := ls.take(); len(got) != 2 || got[0] != q.px || got[1] != p.px || len(ls.take()) != 0 {
		t.Errorf("took %v", got)
	}
}

// TestLegacies_addLongTTL: where node.redirectTTL is longer than handoverTTL, the table diverts for that long.
func TestLegacies_addLongTTL(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	b.a.cfg.Node.RedirectTTL = 3 * handoverTTL
	p, q := b.proxy("a"), b.proxy("b")
	q.px.redirect = failingRelease{q.redir} // it diverts on
	for _, px := range []*proxy{p.px, q.px} {
		now := time.Unix(1000, 0)
		var ls legacies
		ls.add(px, now)
		if got := ls.divertedUntil().Sub(now); got != 3*handoverTTL {
			t.Errorf("diverted for %v, want %v", got, 3*handoverTTL)
		}
	}
	if p.redir.held != 3*handoverTTL {
		t.Errorf("held for %v, want %v", p.redir.held, 3*handoverTTL)
	}
}

// TestLegacies_closeListeners: once nothing is diverted to them, all listeners are closed, once, and
// nothing is diverted any more.
func TestLegacies_closeListeners(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	now := time.Unix(1000, 0)
	var ls legacies
	var pods []*barePod
	for _, name := range []string{"a", "b"} {
		p := b.proxy(name)
		p.px.out = value(p.px.openListeners(t.Context(), agentapi.Outbound, nil, 0))(t)
		p.px.in = value(p.px.openListeners(t.Context(), agentapi.Inbound, nil, 0))(t)
		ls.add(p.px, now)
		pods = append(pods, p)
	}
	for _, p := range pods {
		// An accept loop that ends only when all listeners close: else the loops of many pods would
		// end one after the other.
		p.px.tasks.Go(func() {
			eventually(t, func() string {
				for _, q := range pods {
					if !q.px.closing.Load() {
						return "a proxy does not close its listeners"
					}
				}
				return ""
			})
		})
	}
	ls.closeListeners(now)
	if !ls.divertedUntil().Equal(now) {
		t.Errorf("diverted until %v, want %v", ls.divertedUntil(), now)
	}
	for _, p := range pods {
		for _, port := range p.ports {
			if c, err := b.reach(port); err == nil {
				t.Errorf("port %d still listens", port)
				_ = c.Close()
			}
		}
	}
	ls.closeListeners(now.Add(time.Hour))
	if !ls.divertedUntil().Equal(now) {
		t.Errorf("closed again: diverted until %v, want %v", ls.divertedUntil(), now)
	}
}

// live makes a session of the pod. far is the application's end.
func (p *barePod) live(t testing.TB, dst string) *session {
	t.Helper()
	app, _ := loopback(t)
	s := p.outboundTo(dst)
	s, _, end := p.px.register(t.Context(), app, &session{dir: s.dir, src: s.src, dst: s.dst})
	t.Cleanup(end)
	return s
}

// TestLegacies_stopFinished: which proxies are stopped. A proxy that is stopped changes nothing in its pod,
// because another agent manages the pod.
func TestLegacies_stopFinished(t *testing.T) {
	for _, tt := range []struct {
		name                 string
		gone, diverted, busy bool
		delivers             bool
		stops                bool
	}{
		{"nothing to do", false, false, false, false, true},
		{"has a session", false, false, true, false, false},
		{"delivers what a session left", false, false, false, true, false},
		{"is diverted to", false, true, false, false, false},
		{"both", false, true, true, false, false},
		{"gone", true, false, false, false, true},
		{"gone, has a session", true, false, true, false, true},
		{"gone, delivers", true, false, false, true, true},
		{"gone, is diverted to", true, true, false, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", preferAll)
			p, other := b.proxy("a"), b.proxy("b")
			p.isGone = tt.gone
			if tt.delivers {
				p.px.stack = &fakeStack{closing: 1}
			}
			now := time.Unix(1000, 0)
			var ls legacies
			ls.add(p.px, now)
			ls.add(other.px, now.Add(time.Hour)) // stays
			var s *session
			if tt.busy {
				s = p.live(t, "192.0.2.9:80")
			}
			at := now.Add(handoverTTL)
			if !tt.diverted {
				at = at.Add(1)
			}
			ls.stopFinished(at)
			ls.ending.Wait()
			want := 2
			if tt.stops {
				want = 1
			}
			if len(ls.proxies) != want || ls.proxies[want-1].proxy != other.px {
				t.Errorf("%d proxies are kept, want %d", len(ls.proxies), want)
			}
			if n := b.kernel.handles(); n != want {
				t.Errorf("%d handles on namespaces, want %d", n, want)
			}
			if tt.stops && tt.busy && s.endedBy() != agentapi.CodeDraining {
				t.Errorf("the session of a pod that is gone ended by %q", s.endedBy())
			}
			if p.redir.removed || p.sweeps > 0 {
				t.Errorf("the pod was touched: table removed %t, swept %d times", p.redir.removed, p.sweeps)
			}
		})
	}
}

// TestLegacies_addNewDevices: a device that is opened later is given to every stack once. If one stack
// refuses the device, the others still get it.
func TestLegacies_addNewDevices(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	node := b.a.rnics.Node()
	stacks := []*fakeStack{{addErr: rdma.ErrBusy}, {}}
	var ls legacies
	for i, name := range []string{"a", "b"} {
		p := b.proxy(name)
		p.px.stack = stacks[i]
		ls.add(p.px, time.Now())
	}
	_, ls.openCount = node.Usable()
	added := func() int { return len(stacks[1].added) }
	ls.addNewDevices(node)
	if added() != 0 {
		t.Error("a device was added, though none is new")
	}
	b.a.rnics.NewSet(nil).Update(t.Context(), nil, nil) // counts like the opening of a device
	for range 2 {
		ls.addNewDevices(node)
	}
	if added() != 1 {
		t.Errorf("%d devices added, want 1", added())
	}
	if !strings.Contains(b.log.String(), rdma.ErrBusy.Error()) {
		t.Error("the refusal is not in the log")
	}
}

// TestLegacies_enforcePolicies: sessions that were handed over end when a policy no longer allows
// them, and no others.
func TestLegacies_enforcePolicies(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	var ls legacies
	ls.add(p.px, time.Now())
	stays, ends := p.live(t, "192.0.2.9:80"), p.live(t, "192.0.2.9:81")
	ls.enforcePolicies()
	b.put("", "policies:\n- {name: p, ports: [80]}\n")
	if ends.endedBy() != "" {
		t.Fatalf("ended by %q under the same policies", ends.endedBy())
	}
	ls.enforcePolicies()
	if stays.endedBy() != "" || ends.endedBy() != agentapi.CodePolicyChange {
		t.Errorf("ended by %q and %q, want only the second one by %q", stays.endedBy(), ends.endedBy(), agentapi.CodePolicyChange)
	}
}

// TestHandover_podGoes: an agent that stands by does not keep the namespace of a pod that is gone, and
// changes nothing in the namespace of a pod that is there.
func TestHandover_podGoes(t *testing.T) {
	b := newHandoverBench(t, "old")
	p, q := b.attach("a", 1), b.attach("b", 2)
	p.dst = b.server()
	b.start()
	c := b.dial(p, 0)
	before := p.redir
	b.successor("new")
	if n := b.kernel.handles(); n != 4 {
		t.Errorf("%d handles of namespaces, want each pod's twice", n)
	}
	before.look(func() {
		if before.held != handoverTTL || before.removed {
			t.Errorf("redirection %+v", before)
		}
	})
	must(t, b.store.Delete("a", "eth0"))
	b.kernel.change(func() { p.isGone = true })
	eventually(t, func() string {
		if n := b.kernel.handles(); n != 2 {
			return fmt.Sprintf("%d handles are open", n)
		}
		return ""
	})
	wantReset(t, c)
	b.stop()
	if q.sweeps != 0 {
		t.Errorf("the pod of the successor was swept")
	}
}

// TestHandover_policyChange: connections that were handed over still end when a
// policy no longer allows them.
func TestHandover_policyChange(t *testing.T) {
	b := newHandoverBench(t, "old")
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	c := b.dial(p, 0)
	pingOnce(t, c)
	b.successor("new")
	pingOnce(t, c)
	b.configure("  takeover: true\n", "policies:\n- {name: p, ports: [9]}\n")
	b.reload <- struct{}{}
	wantReset(t, c)
}

// TestHandover_unable: a successor for which SMC-R is not possible ends the diversion of new connections, and
// leaves in the pods what those need that the old agent carries on, until no policy selects the pod any more.
func TestHandover_unable(t *testing.T) {
	b := newHandoverBench(t, "old")
	p, q := b.attach("a", 1), b.attach("b", 2)
	p.dst = b.server()
	b.start()
	c := b.dial(p, 0)
	pingOnce(t, c)
	before := p.redir
	b.cfg.Stay = true
	b.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) {
		return nil, nil, errors.New("UDP port 4791 is taken")
	}
	next := b.successor("new")
	for range 2 {
		next.sync()
		pingOnce(t, c)
	}
	if s := next.status(); s.Accelerating || s.Pods.Failed != 0 {
		t.Errorf("the successor: %+v", s)
	}
	seen := func() (out [4]int) {
		b.kernel.change(func() { out = [4]int{p.ends, p.sweeps, q.ends, q.sweeps} })
		return out
	}
	if got, want := seen(), [4]int{1, 0, 1, 0}; got != want || p.redir != before {
		t.Errorf("diversion ended and pod swept, of both pods: %v times, want %v; another table: %t", got, want, p.redir != before)
	}
	b.configure("  takeover: true\n", "policies:\n- {name: p, pods: {names: [a]}}\n")
	next.reload <- struct{}{}
	next.sync()
	next.sync()
	pingOnce(t, c)
	if got, want := seen(), [4]int{1, 0, 1, 1}; got != want {
		t.Errorf("no policy selects the second pod: %v times, want %v", got, want)
	}
}
