// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

func notReady(s agentapi.Status, instance string) string {
	if r := agentapi.ReadinessOf(s, instance); !r.Ready {
		return r.Detail
	}
	return ""
}

// newHandoverBench makes an agent on fakes that hands over to a successor.
func newHandoverBench(t testing.TB, instance string) *bench {
	t.Helper()
	b := newBench(t, "  takeover: true\n", preferAll)
	b.cfg.Instance = instance
	return b
}

// successor starts another agent of the same node, and waits until the successor manages the node. The
// successor ends before b does.
func (b *bench) successor(instance string) *bench {
	b.t.Helper()
	c := *b
	c.cfg.Instance, c.log, c.hurry, c.reload = instance, &logBuffer{}, make(chan struct{}), make(chan struct{}, 1)
	c.cfg.Log = slog.New(slog.NewTextHandler(c.log, nil))
	c.cfg.Hurry, c.cfg.Reload = c.hurry, c.reload
	var ctx context.Context
	ctx, c.cancel = context.WithCancel(context.Background())
	c.done = make(chan error, 1)
	go func() { c.done <- Run(ctx, c.cfg) }()
	c.t.Cleanup(func() { close(b.hurry) }) // b need not wait for a successor that is gone
	c.t.Cleanup(func() {
		c.stop()
		if c.t.Failed() {
			c.t.Log(c.log.String())
		}
	})
	eventually(c.t, func() string {
		select {
		case err := <-c.done:
			c.done = nil
			c.t.Fatalf("Run ended: %v", err)
		default:
		}
		s, err := c.client.Status(c.t.Context())
		if err != nil {
			return err.Error()
		}
		return notReady(s, instance)
	})
	return &c
}

// pingOnce sends a byte to an echo server and reads it back.
func pingOnce(t testing.TB, c *net.TCPConn) {
	t.Helper()
	value(c.Write([]byte("x")))(t)
	value(io.ReadFull(c, make([]byte, 1)))(t)
}

// TestHandover_links: an agent that handed over still has its link groups, until
// it ends.
func TestHandover_links(t *testing.T) {
	b := newHandoverBench(t, "old")
	var old View
	b.cfg.Observe = func(v View) { old = v }
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	c := b.dial(p, 0)
	pingOnce(t, c)
	want := old.Links().LinkGroups
	if len(want) == 0 {
		t.Fatal("no link group")
	}
	b.cfg.Observe = nil
	b.successor("new")
	pingOnce(t, c)
	if diff := cmp.Diff(want, old.Links().LinkGroups); diff != "" {
		t.Errorf("handed over (-before +after):\n%s", diff)
	}
	close(b.hurry)
	b.hurry = make(chan struct{}) // the clean-up closes it, too
	b.stop()
	if got := old.Links().LinkGroups; len(got) != 0 {
		t.Errorf("ended: %+v", got)
	}
}

// TestHandover_stillDiverted: the old agent carries connections that come to its listeners before the
// successor has replaced the pod's table.
func TestHandover_stillDiverted(t *testing.T) {
	b := newHandoverBench(t, "old")
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	ports := p.ports[0]
	b.successor("new")
	if p.ports[2] == ports {
		t.Fatal("both agents have one port")
	}
	pingOnce(t, b.dial(p, 0))
	pingOnce(t, b.dial(p, 2))
}

// TestHandover_draining: an agent that was told to end, and drains, gives the node to a successor. It
// carries on what it carries, and leaves the pods as the successor has them.
func TestHandover_draining(t *testing.T) {
	b := newHandoverBench(t, "old")
	b.cfg.Node.DrainTimeout = time.Hour
	p, idle := b.attach("a", 1), b.attach("b", 2)
	p.dst = b.server()
	b.start()
	c := b.dial(p, 0)
	pingOnce(t, c)
	before := p.redir
	b.cancel()
	eventually(t, func() string {
		removed := false
		before.look(func() { removed = before.removed })
		if s := b.status(); !s.Draining || !removed {
			return "the agent does not drain"
		}
		return ""
	})
	b.successor("new")
	if s := b.status(); s.Draining || s.Pods.Ready != 2 {
		t.Errorf("the successor: %+v", s)
	}
	pingOnce(t, c)
	pingOnce(t, b.dial(p, 2))
	swept := idle.sweeps // before the successor asked, perhaps
	close(b.hurry)
	b.hurry = make(chan struct{}) // the clean-up closes it, too
	wantReset(t, c)
	b.stop()
	if p.sweeps != 0 || idle.sweeps != swept || p.redir == before || p.redir.removed {
		t.Errorf("the pods of the successor were changed: swept %d and %d times, table removed %t", p.sweeps, idle.sweeps-swept, p.redir.removed)
	}
	pingOnce(t, b.dial(p, 2))
}

// TestHandover_manages: Config.Manages is told when the agent begins to manage the node, and when it no
// longer does.
func TestHandover_manages(t *testing.T) {
	var mu sync.Mutex
	var heard []string
	hear := func(who string) func(bool) {
		return func(yes bool) {
			mu.Lock()
			defer mu.Unlock()
			heard = append(heard, fmt.Sprint(who, " ", yes))
		}
	}
	b := newHandoverBench(t, "old")
	b.cfg.Manages = hear("old")
	b.start()
	b.cfg.Manages = hear("new")
	b.successor("new")
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff([]string{"old true", "old false", "new true"}, heard); diff != "" {
		t.Error(diff)
	}
}

// TestHandover_refused: who may not take over, and why.
func TestHandover_refused(t *testing.T) {
	t.Run("not allowed", func(t *testing.T) {
		b := newBench(t, "", preferAll)
		b.start()
		wantRefused(t, b, http.StatusForbidden, "node.takeover is false")
		second := *b
		second.cfg.Node = value(config.Parse("test", []byte(strings.Replace(b.text, "node:\n", "node:\n  takeover: true\n", 1))))(t)
		if err := Run(t.Context(), second.cfg); err == nil || !strings.Contains(err.Error(), "node.takeover is false: set it for both agents") {
			t.Errorf("Run = %v", err)
		}
	})
	t.Run("predecessor comes back", func(t *testing.T) {
		b := newHandoverBench(t, "old")
		b.start()
		b.successor("new")
		wantRefused(t, b, http.StatusConflict, "old handed over to this agent")
	})
}

func wantRefused(t *testing.T, b *bench, status int, reason string) {
	t.Helper()
	var refused *agentapi.RefusedError
	err := b.client.Handover(t.Context(), "old")
	if !errors.As(err, &refused) || refused.HTTPStatus != status || !strings.Contains(refused.Reason, reason) {
		t.Errorf("handover = %v, want %d %s", err, status, reason)
	}
}

// TestHandover_twoAtOnce: of two successors that start at the same time one takes the node over, and the
// other one takes the node over from the first.
func TestHandover_twoAtOnce(t *testing.T) {
	b := newHandoverBench(t, "old")
	b.attach("a", 1)
	b.start()
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	for _, name := range []string{"x", "y"} {
		c := *b
		c.cfg.Instance = name
		wg.Go(func() { // the successor ends with the test
			if err := Run(ctx, c.cfg); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	t.Cleanup(func() {
		close(b.hurry)
		cancel()
		wg.Wait()
	})
	seen := map[string]bool{}
	eventually(t, func() string {
		s, err := b.client.Status(t.Context())
		if err != nil {
			return err.Error()
		}
		seen[s.Instance] = true
		if b.kernel.handles() != 3 || s.Instance == "old" || !s.Synced {
			return fmt.Sprintf("seen %v, %d handles", seen, b.kernel.handles())
		}
		return ""
	})
}

// TestHandover_podFails: while the successor cannot set a pod up, the pod's table diverts to the old agent, which goes on
// to accept.
func TestHandover_podFails(t *testing.T) {
	t.Parallel() // the test mostly waits
	b := newHandoverBench(t, "old")
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	p.failStep = "install"
	next := b.successor("new")
	<-time.After(listenerLinger + 3*pollEvery)
	if s := next.status(); s.Pods.Failed != 1 {
		t.Fatalf("the successor: %+v", s)
	}
	pingOnce(t, b.dial(p, 0))
}

// TestSuccessor_served: a successor with a pod that it could not set up serves all pods once nothing is diverted to the
// agent before it any more.
func TestSuccessor_served(t *testing.T) {
	now := time.Now()
	until := now.Add(handoverTTL)
	for _, tt := range []struct {
		name, failStep string
		after          time.Duration // from when on it may be served, before listenerLinger
	}{
		{"all pods", "", 0},
		{"a pod fails", "install", handoverTTL + 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, "", preferAll)
			b.attach("a", 1).failStep = tt.failStep
			b.start()
			s := successor{client: b.client}
			for _, at := range []time.Duration{0, handoverTTL, handoverTTL + 1, handoverTTL + listenerLinger, handoverTTL + 1 + listenerLinger} {
				if got, want := s.served(t.Context(), now.Add(at), until), at >= tt.after+listenerLinger; got != want {
					t.Errorf("after %v: served %t, want %t", at, got, want)
				}
			}
		})
	}
}

// TestManager_succeeds: when an agent that manages the node again has taken the place of its earlier proxies.
func TestManager_succeeds(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	now := time.Now()
	b.a.legacies.add(b.proxy("a").px, now)
	until := b.a.legacies.divertedUntil()
	m := &b.a.manager
	want := func(what string, at time.Time, want bool) {
		t.Helper()
		if got := m.succeeds(at); got != want {
			t.Errorf("%s: %t", what, got)
		}
	}
	want("no round was done", until.Add(1), false)
	m.synced.Store(true)
	m.put("/netns/a", &pod{state: podReady})
	want("all pods are set up", now, true)
	m.put("/netns/b", &pod{state: podFailed})
	want("a pod failed", until, false)
	want("a pod failed, and nothing is diverted any more", until.Add(1), true)
}
