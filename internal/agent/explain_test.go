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
	if s.all.len() != maxDecisions || s.all.order.Len() != maxDecisions {
		t.Errorf("%d decisions, %d keys", s.all.len(), s.all.order.Len())
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
	b := newBypasses()
	now := time.Unix(1000, 0)
	x := agentapi.Bypass{Pod: "p", Until: now.Add(time.Second)}
	for i := range maxBypasses + 10 {
		x.Dest = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), uint16(i))
		b.add(x)
	}
	if b.all.len() != maxBypasses {
		t.Errorf("%d entries", b.all.len())
	}
	if b.get("p", x.Dest, now) == nil {
		t.Error("entry is missing")
	}
	if b.get("p", netip.MustParseAddrPort("192.0.2.2:5"), now) != nil {
		t.Error("the oldest entry is there")
	}
	if b.get("p", x.Dest, x.Until) != nil || len(b.list(x.Until)) != 0 {
		t.Error("entries do not end")
	}
}

// TestAttack_decisionsOfOnePod: a pod that connects to one destination after the other, and has as many entered in its
// negative cache, takes neither from what is kept for other pods.
func TestAttack_decisionsOfOnePod(t *testing.T) {
	s, b := newDecisions(), newBypasses()
	now := time.Unix(1000, 0)
	source, dest := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddrPort("192.0.2.2:80")
	other := func() {
		s.record(agentapi.Decision{Pod: "other", Source: source, Dest: dest})
		b.add(agentapi.Bypass{Pod: "other", Dest: dest, Until: now.Add(time.Second)})
	}
	other()
	for i := range 5000 {
		to := netip.AddrPortFrom(netip.MustParseAddr("198.51.100.1"), uint16(i))
		s.record(agentapi.Decision{Pod: "greedy", Source: source.Next(), Dest: to})
		b.add(agentapi.Bypass{Pod: "greedy", Dest: to, Until: now.Add(time.Second)})
	}
	if got := s.find([]netip.Addr{source}, dest); len(got) != 1 || got[0].Count != 1 {
		t.Errorf("decisions of the other pod: %+v", got)
	}
	if b.get("other", dest, now) == nil {
		t.Error("the other pod's destination is not shown")
	}
	if s.all.len() != maxDecisions || b.all.len() != maxBypasses {
		t.Errorf("%d decisions, %d destinations", s.all.len(), b.all.len())
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
	b := newBypasses()
	now := time.Unix(1000, 0)
	dest := netip.MustParseAddrPort("192.0.2.2:80")
	b.add(agentapi.Bypass{Pod: "late", Dest: dest, Until: now.Add(2 * time.Second)})
	b.add(agentapi.Bypass{Pod: "early", Dest: dest, Until: now.Add(time.Second)})
	b.add(agentapi.Bypass{Pod: "gone", Dest: dest, Until: now.Add(time.Second)})
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
