// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// decisions are the last decisions, one for each pod, direction, source address and destination:
// maxDecisions at most.
type decisions struct {
	mu  sync.Mutex // guards all
	all *recent[decisionKey, agentapi.Decision]
}

type decisionKey struct {
	pod       string
	direction agentapi.Direction
	source    netip.Addr
	dest      netip.AddrPort
}

func newDecisions() *decisions {
	return &decisions{all: newRecent[decisionKey, agentapi.Decision](maxDecisions)}
}

// record keeps d, and reports whether d is new: the first decision for its pod and addresses, or
// different from the one before.
func (s *decisions) record(d agentapi.Decision) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := decisionKey{d.Pod, d.Direction, d.Source, d.Dest}
	old := s.all.get(key)
	same := old != nil && old.Mode == d.Mode && old.Reason == d.Reason && old.Policy == d.Policy
	d.Count = 1
	if same {
		d.Count += old.Count
	}
	s.all.put(d.Pod, key, d)
	return !same
}

// find returns the decisions for connections from one of the sources to dst,
// the latest first.
func (s *decisions) find(sources []netip.Addr, dst netip.AddrPort) []agentapi.Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := []agentapi.Decision{}
	for d := range s.all.all() {
		if d.Dest == dst && slices.Contains(sources, d.Source) {
			out = append(out, *d)
		}
	}
	return out
}

// list returns all decisions, the latest first.
func (s *decisions) list() []agentapi.Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]agentapi.Decision, 0, s.all.len())
	for d := range s.all.all() {
		out = append(out, *d)
	}
	return out
}

// logLimiter bounds the log records per second, and counts those that it drops. Without it a pod
// that connects to one address after the other would log a new decision for each.
type logLimiter struct {
	mu      sync.Mutex // guards what is below
	tokens  float64
	last    time.Time
	dropped int
}

// allow reports whether to log now, and how many records were dropped since the last that was
// logged.
func (l *logLimiter) allow(now time.Time) (ok bool, dropped int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last.IsZero() {
		l.tokens = logBurst
	} else {
		l.tokens = min(logBurst, l.tokens+now.Sub(l.last).Seconds()*logPerSecond)
	}
	l.last = now
	if l.tokens < 1 {
		l.dropped++
		return false, 0
	}
	l.tokens--
	dropped, l.dropped = l.dropped, 0
	return true, dropped
}

// bypasses mirrors the negative caches of all pods for the API, maxBypasses entries at most. The kernel has the real
// caches, whose entries expire by themselves.
type bypasses struct {
	mu  sync.Mutex // guards all
	all *recent[bypassKey, agentapi.Bypass]
	// making has pods' turns to change their negative caches.
	making turns
}

type bypassKey struct {
	pod  string
	dest netip.AddrPort
}

func newBypasses() *bypasses {
	return &bypasses{all: newRecent[bypassKey, agentapi.Bypass](maxBypasses)}
}

func (b *bypasses) add(x agentapi.Bypass) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all.put(x.Pod, bypassKey{x.Pod, x.Dest}, x)
}

// forget drops the entries of a pod.
func (b *bypasses) forget(pod string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all.forget(pod)
}

func (b *bypasses) get(pod string, dst netip.AddrPort, now time.Time) *agentapi.Bypass {
	b.mu.Lock()
	defer b.mu.Unlock()
	x := b.all.get(bypassKey{pod, dst})
	if x == nil || !now.Before(x.Until) {
		return nil
	}
	got := *x
	return &got
}

func (b *bypasses) list(now time.Time) []agentapi.Bypass {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all.dropIf(func(x *agentapi.Bypass) bool { return !now.Before(x.Until) })
	out := make([]agentapi.Bypass, 0, b.all.len())
	for x := range b.all.all() {
		out = append(out, *x)
	}
	slices.SortFunc(out, func(x, y agentapi.Bypass) int { return x.Until.Compare(y.Until) })
	return out
}
