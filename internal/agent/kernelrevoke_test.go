// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// fakeRevocations are the connections of a fakeSMC's pods.
type fakeRevocations struct {
	asked  []linux.OptionFilterConfig
	known  [][]uint64
	next   kernelpath.Revocation // the answer
	failed error
}

func (s *fakeSMC) revoke(_ podNet, f linux.OptionFilterConfig, allowed []uint64) (kernelpath.Revocation, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &s.revoking
	r.asked, r.known = append(r.asked, f), append(r.known, allowed)
	answer := r.next
	r.next.Ended = nil // they are
	return answer, r.failed
}

// looks is how often connections were looked at.
func (s *fakeSMC) looks() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.revoking.asked)
}

// A pod that was deleted without grace loses its policies, too, but no policy changed.
func TestKernelRevoke_podGone(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	b.cfg.Gone = func(config.Pod) bool { return true }
	b.start()
	local, peer := netip.MustParseAddrPort("192.0.2.7:80"), netip.MustParseAddrPort("198.51.100.1:40000")
	s.change(func() {
		s.revoking.next = kernelpath.Revocation{Ended: []kernelpath.Ended{{Role: smcnl.Client, TCPConn: linux.TCPConn{Local: local, Peer: peer}}}}
	})
	b.policies("policies:\n- {name: all, datapath: Kernel, ports: [81]}\n")
	e := value(b.client.Explain(t.Context(), local.Addr().String(), peer.String()))(t)
	if len(e.Recent) != 1 || e.Recent[0].Mode != agentapi.ModeEnded || e.Recent[0].Reason != agentapi.CodeDraining {
		t.Errorf("decisions %+v", e.Recent)
	}
}

// A changed policy ends connections by its filter at once, and says which.
func TestKernelRevoke_policyChanges(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	b.start()
	before := s.looks()
	if before == 0 {
		t.Error("connections that an earlier agent's filter let be were not looked at")
	}
	local, peer := netip.MustParseAddrPort("192.0.2.7:80"), netip.MustParseAddrPort("198.51.100.1:40000")
	server := kernelpath.Ended{Role: smcnl.Server, TCPConn: linux.TCPConn{Local: local, Peer: peer}}
	client := kernelpath.Ended{Role: smcnl.Client, TCPConn: linux.TCPConn{Local: local, Peer: peer}}
	s.change(func() { s.revoking.next = kernelpath.Revocation{Ended: []kernelpath.Ended{server, client}} })
	b.policies("policies:\n- {name: all, datapath: Kernel, ports: [81]}\n")
	var last linux.OptionFilterConfig
	s.change(func() { last = s.revoking.asked[len(s.revoking.asked)-1] })
	if s.looks() == before || last.Allows(peer.Addr(), 80) || !last.Allows(peer.Addr(), 81) {
		t.Errorf("looked %d times after %d, by %+v", s.looks(), before, last)
	}
	for _, want := range []agentapi.Decision{
		{Direction: agentapi.Inbound, Source: peer.Addr(), Dest: local},
		{Direction: agentapi.Outbound, Source: local.Addr(), Dest: peer},
	} {
		e := value(b.client.Explain(t.Context(), want.Source.String(), want.Dest.String()))(t)
		if len(e.Recent) != 1 {
			t.Fatalf("decisions %+v, want that of %v to %v", e.Recent, want.Source, want.Dest)
		}
		if d := e.Recent[0]; d.Pod != "test/a" || d.Direction != want.Direction || d.Mode != agentapi.ModeEnded || d.Reason != agentapi.CodePolicyChange {
			t.Errorf("decision %+v, want %+v", d, want)
		}
	}
	if text := value(b.client.Metrics(t.Context()))(t); !strings.Contains(text, `kube_smcr_ended_total{reason="POLICY_CHANGE"} 2`) {
		t.Error("the metrics do not count them")
	}
	if a := b.attachment("a"); a.Detail != "" || a.State != agentapi.StateReady {
		t.Errorf("attachment %+v", a)
	}
}

// While rendezvous are under way, connections are looked at in each round, but those that are known to be
// allowed.
func TestKernelRevoke_unsettled(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	s.revoking.next = kernelpath.Revocation{Unsettled: true, Allowed: []uint64{7}}
	b.attach("a", 1)
	b.start()
	n := s.looks()
	eventually(t, func() string {
		if s.looks() < n+2 {
			return "not looked at again"
		}
		return ""
	})
	s.change(func() {
		if last := s.revoking.known[len(s.revoking.known)-1]; !slices.Equal(last, []uint64{7}) {
			t.Errorf("known are %v", last)
		}
	})
}

// Connections that cannot be ended are told of, and tried again.
func TestKernelRevoke_problem(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	s.revoking.next, s.revoking.failed = kernelpath.Revocation{Left: 3}, errors.New("no rights")
	b.attach("a", 1)
	b.start()
	if a := b.attachment("a"); a.State != agentapi.StateReady || !strings.Contains(a.Detail, "3 connections on SMC-R live on") || !strings.Contains(a.Detail, "no rights") {
		t.Errorf("attachment %+v", a)
	}
	s.change(func() { s.revoking.next, s.revoking.failed = kernelpath.Revocation{}, nil })
	eventually(t, func() string { return b.attachment("a").Detail })
}

// When they are looked at again after a filter changed.
func TestManager_revokeAgain(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		name string
		r    revoked
		want bool
	}{
		{"shortly after the change", revoked{until: now.Add(time.Second)}, true},
		{"long after it", revoked{until: now.Add(-time.Hour), lookAt: now.Add(-time.Hour)}, false},
		{"a handshake may be under way", revoked{until: now.Add(-time.Second), lookAt: now}, true},
		{"just looked for one", revoked{until: now.Add(-time.Second), lookAt: now.Add(time.Second)}, false},
		{"a rendezvous is under way", revoked{until: now.Add(-time.Second), unsettled: true}, true},
		{"a failure, a moment ago", revoked{until: now.Add(time.Second), problem: "no", retryAt: now.Add(time.Second)}, false},
		{"a failure, and it is time", revoked{until: now.Add(-time.Second), problem: "no", retryAt: now.Add(-time.Second)}, true},
	} {
		b, s := newKernelBench(t, kernelAll)
		a := newBare(t, b).a
		a.kernelPath.chooser = s
		p := &pod{atts: []cni.Attachment{{}}, kernel: &kernelPod{revoked: tt.r, log: b.cfg.Log}}
		a.manager.revokeAgain(p, linux.OptionFilterConfig{}, now)
		if got := s.looks() > 0; got != tt.want {
			t.Errorf("%s: looked at: %t", tt.name, got)
		}
	}
}

// An address that leaves the slices of a policy, and comes back or not, does not end connections, until the policy says something else.
func TestKernelRevoke_peerLeaves(t *testing.T) {
	c := newClusterBench(t, "a")
	s := newFakeSMC()
	c.cfg.smc = s
	base := c.node
	set := func(p selecting) {
		n := p.node(t, base, v1alpha1.DatapathKernel)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.node = n
	}
	x, y, z := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("192.0.2.8"), netip.MustParseAddr("192.0.2.9")
	set(selecting{1, 1, 80, []string{"192.0.2.7", "192.0.2.8"}})
	c.cfg.Node = c.node
	c.attach("a", 1)
	c.start()
	for _, step := range []struct {
		name    string
		p       selecting
		selects []netip.Addr // for new connections
		spares  []netip.Addr
	}{
		{"one leaves", selecting{1, 1, 80, []string{"192.0.2.7"}}, []netip.Addr{x}, []netip.Addr{x, y}},
		{"another comes", selecting{1, 1, 80, []string{"192.0.2.7", "192.0.2.9"}}, []netip.Addr{x, z}, []netip.Addr{x, y, z}},
		{"all leave", selecting{1, 1, 80, nil}, nil, []netip.Addr{x, y, z}},
		{"one comes back", selecting{1, 1, 80, []string{"192.0.2.8"}}, []netip.Addr{y}, []netip.Addr{x, y, z}},
		{"the policy changes, its peers are the old ones", selecting{2, 1, 80, []string{"192.0.2.7", "192.0.2.8"}}, []netip.Addr{x, y}, []netip.Addr{x, y}},
		{"its peers follow", selecting{2, 2, 80, []string{"192.0.2.8"}}, []netip.Addr{y}, []netip.Addr{y}},
		{"another port", selecting{3, 3, 81, []string{"192.0.2.8"}}, nil, nil},
	} {
		set(step.p)
		c.reload <- struct{}{}
		eventually(t, func() string { // the configuration may be loaded after a round that began before
			c.sync()
			cfg, _ := s.pod(1)
			var looked linux.OptionFilterConfig
			s.change(func() { looked = s.revoking.asked[len(s.revoking.asked)-1] })
			for _, a := range []netip.Addr{x, y, z} {
				if got := cfg.Filter.Allows(a, 80); got != slices.Contains(step.selects, a) {
					return fmt.Sprintf("%s: new connections with %v: %t", step.name, a, got)
				}
				if got := looked.Allows(a, 80); got != slices.Contains(step.spares, a) {
					return fmt.Sprintf("%s: live connections with %v: %t", step.name, a, got)
				}
			}
			return ""
		})
	}
}

// What is spared is bounded, and the newest has its place.
func TestRevoked_after(t *testing.T) {
	rules := func(first, n int) (out []linux.OutboundRule) {
		for i := first; i < first+n; i++ {
			out = append(out, linux.OutboundRule{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32)})
		}
		return out
	}
	said := [][]config.Policy{{{Version: "u/1"}}}
	r := revoked{said: said}
	for _, left := range [][]linux.OutboundRule{rules(0, maxSpared), rules(maxSpared, 1)} {
		r = r.after(said, linux.OptionFilterConfig{Peers: left}, linux.OptionFilterConfig{})
	}
	newest := rules(maxSpared, 1)[0].Prefix
	if n := len(r.spared); n != maxSpared || r.spared[0].Prefix != newest {
		t.Errorf("%d are spared, the first is %v, want %v", n, r.spared[0], newest)
	}
	if r = r.after([][]config.Policy{{{Version: "u/2"}}}, linux.OptionFilterConfig{Peers: rules(0, 1)}, linux.OptionFilterConfig{}); len(r.spared) != 0 {
		t.Errorf("%d are spared although the policy changed", len(r.spared))
	}
}

// A pod that leaves the datapath has no connections on it.
func TestKernelRevoke_leaves(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	s.sockets[1] = true
	b.start()
	b.policies(preferAll)
	eventually(t, func() string {
		s.mu.Lock()
		defer s.mu.Unlock()
		if n := len(s.revoking.asked); n == 0 || len(s.revoking.asked[n-1].Peers) > 0 {
			return "not looked at by a filter that allows nothing"
		}
		return ""
	})
}

// kernelPeers is a policy for a pod's kernel with the first n peers of 10.0.0.0/16.
func kernelPeers(n int) string {
	var cidrs []string
	for i := range n {
		cidrs = append(cidrs, fmt.Sprintf("10.0.%d.%d/32", i/100, 2*(i%100)))
	}
	return "policies:\n- {name: all, datapath: Kernel, ports: [80], peers: {cidrs: [" + strings.Join(cidrs, ", ") + "]}}\n"
}

// mustBeWithheld looks whether a pod's new connections are TCP, as its policies want too much, and its live ones are those of allowed
// and not of refused.
func (b *bench) mustBeWithheld(s *fakeSMC, name string, inode uint64, allowed, refused netip.Addr) {
	b.t.Helper()
	if a := b.attachment(name); a.State != agentapi.StateFailed || a.Datapath != "" || !strings.Contains(a.Detail, "more networks and ports") {
		b.t.Errorf("attachment %+v", a)
	}
	if e := value(b.client.Explain(b.t.Context(), "test/"+name, netip.AddrPortFrom(allowed, 80).String()))(b.t); e.Code != agentapi.CodePodFailed || !strings.Contains(e.Verdict, "plain TCP") {
		b.t.Errorf("explanation %+v", e)
	}
	if cfg, ok := s.pod(inode); !ok || len(cfg.Filter.Peers) > 0 {
		b.t.Errorf("chosen %t, new connections by %+v", ok, cfg.Filter)
	}
	s.change(func() {
		if n := len(s.revoking.asked); n == 0 || !s.revoking.asked[n-1].Allows(allowed, 80) || s.revoking.asked[n-1].Allows(refused, 80) {
			b.t.Errorf("live connections were looked at %d times, the last time not by what the policies say", n)
		}
	})
}

// Policies that select more than a pod's kernel can be told leave no filter of an earlier policy in force.
func TestKernelRevoke_tooMuch(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	b.start()
	first, none := netip.MustParseAddr("10.0.0.0"), netip.MustParseAddr("10.0.200.1")
	if cfg, _ := s.pod(1); !cfg.Filter.Allows(none, 80) {
		t.Errorf("attached %+v", cfg)
	}
	b.policies(kernelPeers(257))
	b.mustBeWithheld(s, "a", 1, first, none)
	s.change(func() { s.revoking.next, s.revoking.failed = kernelpath.Revocation{Left: 3}, errors.New("no rights") })
	b.policies(kernelPeers(258))
	if a := b.attachment("a"); !strings.Contains(a.Detail, "more networks and ports") || !strings.Contains(a.Detail, "3 connections on SMC-R live on") {
		t.Errorf("attachment %+v", a)
	}
	s.change(func() { s.revoking.next, s.revoking.failed = kernelpath.Revocation{}, nil })
	b.policies(kernelPeers(1))
	if cfg, _ := s.pod(1); !cfg.Filter.Allows(first, 80) || cfg.Filter.Allows(none, 80) {
		t.Errorf("of what can be told again: %+v", cfg)
	}
	if a := b.attachment("a"); a.State != agentapi.StateReady || a.Detail != "" {
		t.Errorf("attachment %+v", a)
	}
}

// So it is of a pod that an earlier agent attached. What was not attached is left alone.
func TestKernelRevoke_tooMuchInherited(t *testing.T) {
	b, s := newKernelBench(t, kernelPeers(257))
	all := linux.OptionFilterConfig{Peers: []linux.OutboundRule{{Prefix: netip.MustParsePrefix("10.0.0.0/8")}}}
	s.pins, s.pods[1] = true, kernelpath.PodConfig{Filter: all}
	b.attach("a", 1)
	b.attach("b", 2)
	b.start()
	b.mustBeWithheld(s, "a", 1, netip.MustParseAddr("10.0.0.0"), netip.MustParseAddr("10.0.200.1"))
	if _, ok := s.pod(2); ok {
		t.Error("a pod was attached with nothing to tell its kernel")
	}
	if a := b.attachment("b"); a.State != agentapi.StateFailed || a.Datapath != "" {
		t.Errorf("attachment %+v", a)
	}
}
