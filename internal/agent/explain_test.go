// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

func TestDecisions_bounded(t *testing.T) {
	s := newDecisions()
	d := agentapi.Decision{Pod: "p", Source: netip.MustParseAddr("192.0.2.1")}
	for i := range maxDecisions + 10 {
		d.Dest = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), uint16(i))
		if !s.record(d) {
			t.Fatalf("decision %d is no news", i)
		}
	}
	if s.order.Len() != maxDecisions || len(s.byKey) != maxDecisions {
		t.Errorf("%d decisions, %d keys", s.order.Len(), len(s.byKey))
	}
	if s.record(d) {
		t.Error("the same decision again is news")
	}
	if got := s.find([]netip.Addr{d.Source}, d.Dest); len(got) != 1 || got[0].Count != 2 {
		t.Errorf("found %+v", got)
	}
	d.Reason = "MEM"
	if !s.record(d) {
		t.Error("another reason is no news")
	}
}

func TestBypasses_bounded(t *testing.T) {
	b := bypasses{all: map[bypassKey]agentapi.Bypass{}}
	now := time.Unix(1000, 0)
	x := agentapi.Bypass{Pod: "p", Until: now.Add(time.Second)}
	for i := range maxBypasses + 10 {
		x.Dest = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), uint16(i))
		b.add(x, now)
	}
	if len(b.all) != maxBypasses {
		t.Errorf("%d entries", len(b.all))
	}
	if b.get("p", netip.MustParseAddrPort("192.0.2.2:5"), now) == nil {
		t.Error("entry is missing")
	}
	if b.get("p", netip.MustParseAddrPort("192.0.2.2:5"), x.Until) != nil || len(b.list(x.Until)) != 0 {
		t.Error("entries do not end")
	}
}

func TestLogLimiter(t *testing.T) {
	var l logLimiter
	now := time.Unix(1000, 0)
	passed := 0
	for range logBurst + 20 {
		if ok, _ := l.allow(now); ok {
			passed++
		}
	}
	ok, dropped := l.allow(now.Add(time.Second))
	if passed != logBurst || !ok || dropped != 20 {
		t.Errorf("%d passed; a second later %t after %d left out", passed, ok, dropped)
	}
}

// The latest decision is first, even if the same decision was made before. When there are too many
// decisions, the one that was made least recently goes.
func TestDecisions_order(t *testing.T) {
	s := newDecisions()
	dest := func(n int) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), uint16(n)) }
	source := netip.MustParseAddr("192.0.2.1")
	for n := range maxDecisions {
		s.record(agentapi.Decision{Pod: "p", Source: source, Dest: dest(n)})
	}
	s.record(agentapi.Decision{Pod: "p", Source: source, Dest: dest(0)})
	s.record(agentapi.Decision{Pod: "p", Source: source, Dest: dest(maxDecisions)})
	list := s.list()
	if len(list) != maxDecisions || list[0].Dest != dest(maxDecisions) || list[1].Dest != dest(0) || list[1].Count != 2 {
		t.Errorf("%d decisions, first %+v", len(list), list[:2])
	}
	for n, want := range map[int]int{0: 1, 1: 0, 2: 1} {
		if got := s.find([]netip.Addr{source}, dest(n)); len(got) != want {
			t.Errorf("destination %d: %+v", n, got)
		}
	}
	// Another pod, direction or source has a decision of its own.
	last := dest(maxDecisions)
	s.record(agentapi.Decision{Pod: "q", Source: source, Dest: last})
	s.record(agentapi.Decision{Pod: "p", Direction: "inbound", Source: source, Dest: last})
	s.record(agentapi.Decision{Pod: "p", Source: source.Next(), Dest: last})
	if one, both := s.find([]netip.Addr{source}, last), s.find([]netip.Addr{source, source.Next()}, last); len(one) != 3 || len(both) != 4 {
		t.Errorf("%d decisions of one source, %d of two", len(one), len(both))
	}
}

// Entries that the kernel has forgotten by itself are not shown, nor are those of pods that are gone.
func TestBypasses_end(t *testing.T) {
	b := bypasses{all: map[bypassKey]agentapi.Bypass{}}
	now := time.Unix(1000, 0)
	dest := netip.MustParseAddrPort("192.0.2.2:80")
	b.add(agentapi.Bypass{Pod: "late", Dest: dest, Until: now.Add(2 * time.Second)}, now)
	b.add(agentapi.Bypass{Pod: "early", Dest: dest, Until: now.Add(time.Second)}, now)
	b.add(agentapi.Bypass{Pod: "gone", Dest: dest, Until: now.Add(time.Second)}, now)
	b.forget("gone")
	if l := b.list(now); len(l) != 2 || l[0].Pod != "early" || l[1].Pod != "late" {
		t.Errorf("bypasses %+v", l)
	}
	if b.get("early", dest, now.Add(time.Second-1)) == nil || b.get("early", dest, now.Add(time.Second)) != nil || b.get("gone", dest, now) != nil {
		t.Error("a bypass is not shown, or longer than it holds")
	}
	if l := b.list(now.Add(time.Second)); len(l) != 1 || l[0].Pod != "late" {
		t.Errorf("bypasses %+v", l)
	}
}
