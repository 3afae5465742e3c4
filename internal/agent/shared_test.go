// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// sharing is a bare agent whose stacks a test counts.
type sharing struct {
	*bare
	made []*fakeStack
	err  error // of the next stack
}

func newSharing(t *testing.T) *sharing {
	t.Helper()
	s := &sharing{bare: newAbleBare(t, "", preferAll)}
	s.a.cfg.newStack = func(smcr.Config) (stack, error) {
		if s.err != nil {
			return nil, s.err
		}
		f := &fakeStack{}
		s.made = append(s.made, f)
		return f, nil
	}
	return s
}

// pod is a pod of a namespace, without a stack, that wants to share one.
func (s *sharing) pod(namespace, name string, change func(*proxy)) *proxy {
	s.t.Helper()
	px := s.proxy(name).px
	px.account.close()
	att := attachmentOf(name)
	att.Pod.Namespace = namespace
	px.atts.Store(&[]cni.Attachment{att})
	px.settings.Shared = true
	if change != nil {
		change(px)
	}
	must(s.t, px.openAccount())
	return px
}

// open opens the stack of a proxy, as startProxy does.
func (s *sharing) open(px *proxy) {
	s.t.Helper()
	px.stack = value(px.openStack())(s.t)
}

// TestOpenStack: which pods get a stack of their own, which share one, and which get none.
func TestOpenStack(t *testing.T) {
	s := newSharing(t)
	first := s.pod("x", "a", nil)
	s.open(first)
	for _, tt := range []struct {
		name   string
		px     *proxy
		shares bool
	}{
		{"same namespace and settings", s.pod("x", "b", nil), true},
		{"other namespace", s.pod("y", "c", nil), false},
		{"other settings", s.pod("x", "d", func(px *proxy) { px.settings.SingleLink = true }), false},
		{"for itself", s.pod("x", "e", func(px *proxy) { px.settings.Shared = false }), false},
	} {
		s.open(tt.px)
		if got := tt.px.stack == first.stack; got != tt.shares {
			t.Errorf("%s: shares the first stack: %t", tt.name, got)
		}
		if got := tt.px.memory == first.memory; got != tt.shares {
			t.Errorf("%s: memory is in the account of the first stack: %t", tt.name, got)
		}
		if own := !tt.px.settings.Shared; own != (tt.px.memory == tt.px.account) {
			t.Errorf("%s: memory is in the pod's account: %t", tt.name, !own)
		}
	}
	if len(s.made) != 4 {
		t.Errorf("%d stacks made, want 4", len(s.made))
	}
	s.a.unable = unable{"no BPF here", agentapi.CodeNoOption}
	if px := s.pod("x", "f", nil); value(px.openStack())(t) != (noStack{}) {
		t.Error("a node that cannot use SMC-R has a stack")
	}
}

// newClosing is two pods on one stack with a connection that ended, and has bytes to deliver still.
func newClosing(t *testing.T) (f *fakeStack, a, b *proxy) {
	t.Helper()
	s := newSharing(t)
	a, b = s.pod("x", "a", nil), s.pod("x", "b", nil)
	s.open(a)
	s.open(b)
	f = s.made[0]
	f.closing = 1
	return f, a, b
}

// TestSharedStack_legaciesDeliver: of pods that were handed over together and share a stack, exactly one stays until all is
// delivered.
func TestSharedStack_legaciesDeliver(t *testing.T) {
	f, a, b := newClosing(t)
	stops := make(chan struct{})
	a.tasks.Go(func() { <-stops }) // a is still stopping when b is looked at
	now := time.Unix(1000, 0)
	var ls legacies
	ls.add(a, now)
	ls.add(b, now)
	now = now.Add(handoverTTL + 1)
	ls.stopFinished(now)
	if len(ls.proxies) != 1 || ls.proxies[0].proxy != b {
		t.Errorf("%d proxies stay, want the second one", len(ls.proxies))
	}
	close(stops)
	ls.ending.Wait()
	if ls.stopFinished(now); len(ls.proxies) != 1 || f.closed {
		t.Errorf("behind the first one's stop %d proxies stay; the stack is closed: %t", len(ls.proxies), f.closed)
	}
	f.change(func() { f.closing = 0 })
	ls.stopFinished(now)
	ls.ending.Wait()
	if len(ls.proxies) != 0 || !f.closed || a.memory.pods != 0 {
		t.Errorf("all is delivered: %d proxies stay; the stack is closed: %t, and its account of %d pods", len(ls.proxies), f.closed, a.memory.pods)
	}
}

// TestSharedStack_goneDeliver: a pod that is gone does not count as one that keeps the stack.
func TestSharedStack_goneDeliver(t *testing.T) {
	f, a, b := newClosing(t)
	a.net.(*fakePod).isGone = true
	stops := make(chan struct{})
	a.tasks.Go(func() { <-stops })
	now := time.Unix(1000, 0)
	var ls legacies
	ls.add(a, now)
	ls.add(b, now)
	ls.stopFinished(now.Add(handoverTTL + 1))
	close(stops)
	ls.ending.Wait()
	if len(ls.proxies) != 1 || f.closed {
		t.Errorf("%d proxies stay, want 1; the stack is closed: %t", len(ls.proxies), f.closed)
	}
}

// TestSharedStack_drainsDeliver: of pods that share a stack and are left together, exactly one waits until all is delivered,
// also if the other one has not stopped yet.
func TestSharedStack_drainsDeliver(t *testing.T) {
	f, a, b := newClosing(t)
	a.drain(t.Context())
	drained := make(chan struct{})
	go func() {
		b.drain(t.Context())
		close(drained)
	}()
	select {
	case <-drained:
		t.Error("the last pod's bytes are not waited for")
	case <-time.After(3 * drainPoll):
	}
	must(t, a.stop(agentapi.CodeDraining, false))
	if f.closed {
		t.Error("the first pod's stop closes the stack")
	}
	f.change(func() { f.closing = 0 })
	<-drained
	if must(t, b.stop(agentapi.CodeDraining, false)); !f.closed {
		t.Error("the last pod's stop does not close the stack")
	}
}

// TestSharesStack: a pod with devices of its own has a stack of its own, whatever the policy says.
func TestSharesStack(t *testing.T) {
	s := newSharing(t)
	px := s.pod("x", "a", nil)
	if !px.sharesStack() {
		t.Error("not shared")
	}
	px.set = s.a.rnics.NewSet(nil)
	if px.sharesStack() {
		t.Error("a stack on a pod's own devices is shared")
	}
}

// TestSharedStack_lives: a shared stack and its account live as long as one pod uses the stack. Pods that
// come later get another stack.
func TestSharedStack_lives(t *testing.T) {
	s := newSharing(t)
	a, b := s.pod("x", "a", nil), s.pod("x", "b", nil)
	s.open(a)
	s.open(b)
	shared := a.memory
	if shared.pods != 2 {
		t.Errorf("the account has the shares of %d pods, want 2", shared.pods)
	}
	must(t, a.stack.Close())
	if s.made[0].closed || shared.closed || shared.pods != 1 {
		t.Errorf("after one of two ended: stack closed %t, account closed %t and of %d pods", s.made[0].closed, shared.closed, shared.pods)
	}
	must(t, b.stack.Close())
	if !s.made[0].closed || !shared.closed {
		t.Errorf("after both ended: stack closed %t, account closed %t", s.made[0].closed, shared.closed)
	}
	c := s.pod("x", "c", nil)
	s.open(c)
	if len(s.made) != 2 || c.memory == shared || c.memory.closed {
		t.Errorf("%d stacks made; the next pod has the old account: %t", len(s.made), c.memory == shared)
	}
	must(t, c.stack.Close())
	defer func() {
		if recover() == nil {
			t.Error("a stack was closed more often than opened, and nobody noticed")
		}
		s.a.stacks.mu.TryLock() // the panic came while the lock was taken
		s.a.stacks.mu.Unlock()
	}()
	_ = c.stack.Close()
}

// TestOpenStack_fails: a shared stack that cannot be made leaves no account behind, and the next pod
// tries again.
func TestOpenStack_fails(t *testing.T) {
	s := newSharing(t)
	px := s.pod("x", "a", nil)
	accounts := len(s.a.ledger.accounts)
	s.err = errors.New("no device works")
	if st, err := px.openStack(); st != nil || !errors.Is(err, s.err) {
		t.Errorf("openStack = %v, %v", st, err)
	}
	if n := len(s.a.ledger.accounts); n != accounts || px.memory != px.account || len(s.a.stacks.all) != 0 {
		t.Errorf("%d accounts, want %d; stacks %v", n, accounts, s.a.stacks.all)
	}
	s.err = nil
	s.open(px)
	must(t, px.stack.Close())
}

// TestOpenStack_lacks: all pods that share a stack know that it lacks a device.
func TestOpenStack_lacks(t *testing.T) {
	s := newSharing(t)
	s.a.cfg.openDevice = func(name string, _ config.Device, _ bool) (rdma.Device, func() error, error) {
		return (&fakeHardware{name: name}).open()
	}
	must(t, s.a.rnics.Open(t.Context(), []config.Device{{RDMA: "second"}}))
	whole := s.a.cfg.newStack
	s.a.cfg.newStack = func(cfg smcr.Config) (stack, error) {
		if len(cfg.Devices) > 1 {
			return nil, rdma.ErrNoResources
		}
		return whole(cfg)
	}
	for _, name := range []string{"a", "b"} {
		px := s.pod("x", name, nil)
		s.open(px)
		if !lacksDevice(px.stack) {
			t.Errorf("pod %s does not know", name)
		}
		defer func() { must(t, px.stack.Close()) }()
	}
	if len(s.made) != 1 {
		t.Errorf("%d stacks made, want 1", len(s.made))
	}
	s.a.cfg.newStack = whole
	px := s.pod("y", "c", nil)
	s.open(px)
	defer func() { must(t, px.stack.Close()) }()
	if lacksDevice(px.stack) {
		t.Error("a stack on all devices lacks one")
	}
}

// TestEachStack: a shared stack is shown once, for its namespace.
func TestEachStack(t *testing.T) {
	s := newSharing(t)
	for _, p := range []struct {
		namespace, name string
		alone           bool
	}{{"x", "a", false}, {"x", "b", false}, {"x", "c", true}, {"y", "d", false}} {
		s.open(s.pod(p.namespace, p.name, func(px *proxy) { px.settings.Shared = !p.alone }))
	}
	var got []string
	s.a.eachStack(func(u stackUse) { got = append(got, u.pod) })
	slices.Sort(got)
	if d := cmp.Diff([]string{"x/*", "x/c", "y/*"}, got); d != "" {
		t.Errorf("stacks (-want +got):\n%s", d)
	}
}

// TestProxies: the list has the proxies that were added, and not those that were removed.
func TestProxies(t *testing.T) {
	ps := proxies{all: map[*proxy]struct{}{}}
	a, b := &proxy{}, &proxy{}
	ps.add(a)
	ps.add(b)
	ps.add(b)
	ps.remove(a)
	ps.remove(a)
	if got := ps.list(); len(got) != 1 || got[0] != b {
		t.Errorf("%v", got)
	}
}

// TestCluster_shared: pods of a namespace share one stack while one of them is
// there.
func TestCluster_shared(t *testing.T) {
	shared := testPolicy(func(s *v1alpha1.SMCRPolicySpec) { s.Isolation = v1alpha1.IsolationNamespace })
	c := newClusterBench(t, "a b", shared)
	pods := map[string]*fakePod{"a": c.attach("a", 1), "b": c.attach("b", 2)}
	for _, p := range pods {
		p.dst = c.server()
	}
	c.start()
	for name, p := range pods {
		c.waitState(name, agentapi.StateReady, "")
		pingOnce(t, c.dial(p, 0))
	}
	if made := c.made(); len(made) != 1 || len(made[0].Prefixes) != 0 {
		t.Errorf("stacks %+v, want one for both", made)
	}
	links := value(c.client.Links(t.Context()))(t).LinkGroups
	if len(links) != 1 || links[0].Pod != "test/*" {
		t.Errorf("link groups %+v", links)
	}
	c.apply("b", shared)
	c.waitState("a", agentapi.StateIdle, "")
	closed := func() bool {
		c.stack.mu.Lock()
		defer c.stack.mu.Unlock()
		return c.stack.closed
	}
	if closed() {
		t.Error("the shared stack ended with its first pod")
	}
	pingOnce(t, c.dial(pods["b"], 0))
	c.apply("", shared)
	c.waitState("b", agentapi.StateIdle, "")
	if !closed() {
		t.Error("the shared stack outlives its pods")
	}
}
