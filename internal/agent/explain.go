// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"container/list"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// decisions are the last decisions, one for each pod, direction, source address and destination.
// When there are maxDecisions, the oldest is forgotten.
type decisions struct {
	mu    sync.Mutex // guards what is below
	order *list.List // of *agentapi.Decision, the latest first
	byKey map[decisionKey]*list.Element
}

type decisionKey struct {
	pod       string
	direction agentapi.Direction
	source    netip.Addr
	dest      netip.AddrPort
}

func newDecisions() *decisions {
	return &decisions{order: list.New(), byKey: map[decisionKey]*list.Element{}}
}

// record keeps d, and reports whether d is new: the first decision for its pod and addresses, or
// different from the one before.
func (s *decisions) record(d agentapi.Decision) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := decisionKey{d.Pod, d.Direction, d.Source, d.Dest}
	d.Count = 1
	if e, ok := s.byKey[key]; ok {
		old := e.Value.(*agentapi.Decision)
		same := old.Mode == d.Mode && old.Reason == d.Reason && old.Policy == d.Policy
		if same {
			d.Count = old.Count + 1
		}
		*old = d
		s.order.MoveToFront(e)
		return !same
	}
	if s.order.Len() >= maxDecisions {
		last := s.order.Back()
		o := last.Value.(*agentapi.Decision)
		delete(s.byKey, decisionKey{o.Pod, o.Direction, o.Source, o.Dest})
		s.order.Remove(last)
	}
	s.byKey[key] = s.order.PushFront(&d)
	return true
}

// find returns the decisions for connections from one of the sources to dst,
// the latest first.
func (s *decisions) find(sources []netip.Addr, dst netip.AddrPort) []agentapi.Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := []agentapi.Decision{}
	for e := s.order.Front(); e != nil; e = e.Next() {
		d := e.Value.(*agentapi.Decision)
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
	out := make([]agentapi.Decision, 0, s.order.Len())
	for e := s.order.Front(); e != nil; e = e.Next() {
		out = append(out, *e.Value.(*agentapi.Decision))
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

// bypasses mirrors the negative caches of all pods for the API. The kernel has the real caches,
// whose entries expire by themselves.
type bypasses struct {
	mu  sync.Mutex // guards all
	all map[bypassKey]agentapi.Bypass
}

type bypassKey struct {
	pod  string
	dest netip.AddrPort
}

func (b *bypasses) add(x agentapi.Bypass, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.all) >= maxBypasses {
		b.expire(now)
	}
	if len(b.all) < maxBypasses {
		b.all[bypassKey{x.Pod, x.Dest}] = x
	}
}

func (b *bypasses) expire(now time.Time) {
	for k, x := range b.all {
		if !now.Before(x.Until) {
			delete(b.all, k)
		}
	}
}

// forget drops the entries of a pod.
func (b *bypasses) forget(pod string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range b.all {
		if k.pod == pod {
			delete(b.all, k)
		}
	}
}

func (b *bypasses) get(pod string, dst netip.AddrPort, now time.Time) *agentapi.Bypass {
	b.mu.Lock()
	defer b.mu.Unlock()
	x, ok := b.all[bypassKey{pod, dst}]
	if !ok || !now.Before(x.Until) {
		return nil
	}
	return &x
}

func (b *bypasses) list(now time.Time) []agentapi.Bypass {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expire(now)
	out := make([]agentapi.Bypass, 0, len(b.all))
	for _, x := range b.all {
		out = append(out, x)
	}
	slices.SortFunc(out, func(x, y agentapi.Bypass) int { return x.Until.Compare(y.Until) })
	return out
}
