// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestRefusals(t *testing.T) {
	at := func(d time.Duration) time.Time { return time.Unix(1000, 0).Add(d) }
	one, two := errors.New("one"), errors.New("two")
	var r refusals
	for i, step := range []struct {
		err error
		at  time.Duration
		log bool
	}{
		{one, 0, true},
		{one, time.Second, false},
		{two, 2 * time.Second, false},
		{one, refusalPause + time.Second, true},
		{one, refusalPause + 2*time.Second, false},
		{one, 2 * refusalShown, true},
	} {
		if got := r.note(step.err, at(step.at)); got != step.log {
			t.Errorf("step %d: to be logged %t, want %t", i, got, step.log)
		}
	}
	if r.recent(at(2*refusalShown)) == "" || r.recent(at(4*refusalShown)) != "" {
		t.Error("a refusal is not shown, or for ever")
	}
}

// TestStackHooks_shared: what a device refuses is counted for all pods that share the stack, and said of their namespace: the pod
// for which the stack was made may be gone.
func TestStackHooks_shared(t *testing.T) {
	s := newSharing(t)
	var hooks smcr.Hooks
	s.a.cfg.newStack = func(c smcr.Config) (stack, error) {
		hooks = c.Hooks
		return &fakeStack{}, nil
	}
	first, second := s.pod("x", "first", nil), s.pod("x", "second", nil)
	s.open(first)
	s.open(second)
	before := second.shortage()
	hooks.Failed("set up link group", rdma.ErrNoResources)
	mem := fallback{code: agentapi.CodeOf(clc.ReasonMem)}
	if got := second.fallbackOf(smcr.Info{Reason: clc.ReasonMem}, before); got != mem {
		t.Errorf("%+v, want %+v", got, mem)
	}
	if log := s.log.String(); !strings.Contains(log, "pod=x/*") || strings.Contains(log, "first") {
		t.Errorf("log: %s", log)
	}
	alone := s.pod("x", "alone", func(px *proxy) { px.settings.Shared = false })
	s.open(alone)
	hooks.Failed("set up link group", rdma.ErrNoResources)
	if got := alone.shortage().device; got != 1 {
		t.Errorf("a pod with a stack of its own has %d refusals, want 1", got)
	}
}

// TestStackHooks_pathMTU: the log says to whom large packets do not pass, and what to set.
func TestStackHooks_pathMTU(t *testing.T) {
	s := newSharing(t)
	px := s.pod("x", "alone", nil)
	m := smcr.PathMTU{
		Peer: netip.MustParseAddr("10.0.0.7"), PeerGID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.7")), Device: "soft0",
		Lost: rdma.MTU4096, Next: rdma.MTU2048,
	}
	hooks := px.stackHooks(nil)
	hooks.PathMTU(m)
	for _, want := range []string{"level=WARN", "soft.mtu", "peer=10.0.0.7", "rnic=192.0.2.7", "device=soft0", "pathMTU=4096", "next=2048"} {
		if log := s.log.String(); !strings.Contains(log, want) {
			t.Errorf("no %s in the log: %s", want, log)
		}
	}
	m.Lost, m.Next = rdma.MTU256, 0
	hooks.PathMTU(m)
	if log := s.log.String(); !strings.Contains(log, "plain TCP for ten minutes") {
		t.Errorf("log: %s", log)
	}
}
