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

// decisions are the last decisions for each pair of pod and peer, the oldest
// forgotten first.
type decisions struct {
	mu    sync.Mutex // guards what is below
	order *list.List // of *agentapi.Decision, the latest first
	byKey map[decisionKey]*list.Element
}

type decisionKey struct {
	pod, direction string
	source         netip.Addr
	dest           netip.AddrPort
}

func newDecisions() *decisions {
	return &decisions{order: list.New(), byKey: map[decisionKey]*list.Element{}}
}

// record keeps d and says whether it is news: the first of its kind, or
// different from the last one.
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

// gate lets through so many log records a second, and counts the others: a pod
// that walks through addresses is news with each of them.
type gate struct {
	mu      sync.Mutex // guards what is below
	tokens  float64
	last    time.Time
	dropped int
}

// pass says whether to log now, and how many were left out since the last
// time.
func (g *gate) pass(now time.Time) (ok bool, dropped int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.last.IsZero() {
		g.tokens = logBurst
	} else {
		g.tokens = min(logBurst, g.tokens+now.Sub(g.last).Seconds()*logPerSecond)
	}
	g.last = now
	if g.tokens < 1 {
		g.dropped++
		return false, 0
	}
	g.tokens--
	dropped, g.dropped = g.dropped, 0
	return true, dropped
}

// bypasses is what the negative caches of all pods hold, for show: the truth
// is in the kernel, where the entries end by themselves.
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

// forget drops what is known of a pod.
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
