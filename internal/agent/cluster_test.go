// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// clusterBench is an agent whose configuration is made of objects.
type clusterBench struct {
	*bench
	peers   []string              // that the selectors of policy p select; owned by the test
	waiting []v1alpha1.SMCRPolicy // for the controller; owned by the test
	mu      sync.Mutex            // guards what is below
	node    *config.Node
	stacks  []smcr.Config
}

// newClusterBench opts the pods in that are named, and has the policies for
// namespace test.
func newClusterBench(t testing.TB, pods string, policies ...v1alpha1.SMCRPolicy) *clusterBench {
	t.Helper()
	c := &clusterBench{bench: newBench(t, "  defaultPeers: {cidrs: [127.0.0.0/8]}\n", "")}
	c.set(pods, policies...)
	c.cfg.Node = c.node
	c.cfg.Load = func() (*config.Node, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.node, nil
	}
	c.cfg.newStack = func(cfg smcr.Config) (stack, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.stacks = append(c.stacks, cfg)
		return c.stack, nil
	}
	return c
}

// set replaces the objects; apply tells the agent.
func (c *clusterBench) set(pods string, policies ...v1alpha1.SMCRPolicy) {
	c.t.Helper()
	base := value(config.ParseOn(config.Machine{Cluster: true}, "test", []byte(c.text)))(c.t)
	yes := "true"
	o := config.Objects{Policies: policies, Unresolved: c.waiting}
	if c.peers != nil {
		o.PeerSlices = []v1alpha1.SMCRPeerSlice{{ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: "p-0"}, Policy: "p", Addresses: c.peers}}
	}
	for _, name := range strings.Fields(pods) {
		o.Pods = append(o.Pods, config.PodObject{Namespace: "test", Name: name, Enabled: &yes})
	}
	n, _, bad := config.FromObjects(base, o)
	if len(bad) > 0 {
		c.t.Fatal(bad)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.node = n
}

func (c *clusterBench) apply(pods string, policies ...v1alpha1.SMCRPolicy) {
	c.t.Helper()
	c.set(pods, policies...)
	c.reload <- struct{}{}
}

func (c *clusterBench) made() []smcr.Config {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]smcr.Config(nil), c.stacks...)
}

func (c *clusterBench) waitState(name, state, detail string) {
	c.t.Helper()
	eventually(c.t, func() string {
		if a := c.attachment(name); a.State != state || !strings.Contains(a.Detail, detail) {
			return fmt.Sprintf("%s is %s (%s), want %s (%s)", name, a.State, a.Detail, state, detail)
		}
		return ""
	})
}

func testPolicy(change func(*v1alpha1.SMCRPolicySpec)) v1alpha1.SMCRPolicy {
	p := v1alpha1.SMCRPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: "p"}}
	change(&p.Spec)
	return p
}

func explain(c *clusterBench, pod string, dst netip.AddrPort) agentapi.Explanation {
	c.t.Helper()
	return value(c.client.Explain(c.t.Context(), "test/"+pod, dst.String()))(c.t)
}

func TestCluster_optIn(t *testing.T) {
	c := newClusterBench(t, "")
	p := c.attach("a", 1)
	p.dst = c.server()
	var view View
	c.cfg.Observe = func(v View) { view = v }
	c.start()
	c.waitState("a", agentapi.StateIdle, "not opted in")
	if e := explain(c, "a", p.dst); e.Code != agentapi.CodeOptedOut || e.Advice == "" {
		t.Errorf("explanation %+v", e)
	}
	if s := c.status(); len(s.Problems) > 0 {
		t.Errorf("problems %v, though nobody opted in", s.Problems)
	}

	c.apply("a")
	c.waitState("a", agentapi.StateReady, "")
	eventually(t, func() string {
		if n, _ := c.cfg.Load(); view.Applied() != n {
			return "not applied"
		}
		return ""
	})
	stays := c.dial(p, 0)
	pingOnce(t, stays)
	c.apply("") // live connections end
	wantReset(t, stays)
	c.waitState("a", agentapi.StateIdle, "not opted in")
	eventually(t, func() string {
		if d := view.Decisions(); len(d) == 0 || d[0].Reason != agentapi.CodePolicyChange {
			return fmt.Sprintf("decisions %+v", d)
		}
		return ""
	})
}

// TestCluster_gone: a pod that was deleted without grace has no configuration any more while its
// connections are still there. No policy changed, and the reason does not say so.
func TestCluster_gone(t *testing.T) {
	c := newClusterBench(t, "a")
	p := c.attach("a", 1)
	p.dst = c.server()
	var asked, gone atomic.Bool
	c.cfg.Gone = func(pod config.Pod) bool {
		asked.Store(true)
		return gone.Load() && pod.Name == "a"
	}
	c.start()
	stays := c.dial(p, 0)
	pingOnce(t, stays)
	if asked.Load() {
		t.Error("asked whether the pod is gone although nothing ended")
	}
	gone.Store(true)
	c.apply("")
	wantReset(t, stays)
	eventually(t, func() string {
		if e := explain(c, "a", p.dst); len(e.Recent) == 0 || e.Recent[0].Reason != agentapi.CodeDraining {
			return fmt.Sprintf("explanation %+v", e)
		}
		return ""
	})
	if text := value(c.client.Metrics(t.Context()))(t); strings.Contains(text, `reason="POLICY_CHANGE"`) {
		t.Error("a metric says that a policy changed")
	}
}

// TestCluster_settings: link groups are made with the settings of the policy,
// and made anew when these change.
func TestCluster_settings(t *testing.T) {
	c := newClusterBench(t, "a")
	p := c.attach("a", 1)
	p.dst = c.server()
	c.start()
	stays := c.dial(p, 0)
	pingOnce(t, stays)

	same := testPolicy(func(*v1alpha1.SMCRPolicySpec) {})
	c.apply("a", same) // the same settings: nothing happens to the connection
	eventually(t, func() string {
		if e := explain(c, "a", p.dst); e.Policy != "p" {
			return fmt.Sprintf("policy %q", e.Policy)
		}
		return ""
	})
	pingOnce(t, stays)

	conns := int32(3)
	c.apply("a", testPolicy(func(s *v1alpha1.SMCRPolicySpec) {
		s.Buffers = &v1alpha1.PolicyBuffers{RMBE: "64Ki", Send: "32Ki"}
		s.Budget = &v1alpha1.PolicyBudget{Connections: &conns}
		s.LinkRedundancy = v1alpha1.LinksSingle
		s.Versions = []v1alpha1.Version{v1alpha1.VersionV2}
	}))
	wantReset(t, stays)
	eventually(t, func() string {
		if e := explain(c, "a", p.dst); len(e.Recent) == 0 || e.Recent[0].Reason != agentapi.CodePolicyChange {
			return fmt.Sprintf("explanation %+v", e)
		}
		return ""
	})
	eventually(t, func() string { // the old run is shown until the new one is ready
		if b := c.attachment("a").Budget; b.Conns != 3 {
			return fmt.Sprintf("budget %+v", b)
		}
		return ""
	})
	made := c.made()
	if len(made) != 2 {
		t.Fatalf("%d stacks made, want 2", len(made))
	}
	if got := made[1]; got.RMBESizeBytes != 64<<10 || got.SendBufferBytes != 32<<10 || got.MaxConns != 3 || got.LinksPerGroup != 1 || got.Versions != smcr.VersionsV2 {
		t.Errorf("stack %+v", got)
	}
}

func TestCluster_transport(t *testing.T) {
	hardware := func(mode v1alpha1.PolicyMode) v1alpha1.SMCRPolicy {
		return testPolicy(func(s *v1alpha1.SMCRPolicySpec) {
			s.Mode, s.Transports = mode, []v1alpha1.Transport{v1alpha1.TransportHardware}
		})
	}
	c := newClusterBench(t, "a", hardware(v1alpha1.ModePrefer))
	p := c.attach("a", 1)
	p.dst = c.server()
	c.start()
	c.waitState("a", agentapi.StateIdle, "no RDMA device of the kind")
	if a := c.attachment("a"); a.Reason != agentapi.CodeTransport {
		t.Errorf("idle: %+v", a)
	}
	if e := explain(c, "a", p.dst); e.Code != agentapi.CodeTransport {
		t.Errorf("explanation %+v", e)
	}
	c.apply("a", hardware(v1alpha1.ModeRequired))
	c.waitState("a", agentapi.StateReady, "no RDMA device of the kind")
	if a := c.attachment("a"); a.Reason != agentapi.CodeTransport {
		t.Errorf("ready, as SMC-R is required: %+v", a)
	}
	c.dialReset(p, 0)
	eventually(t, func() string {
		e := explain(c, "a", p.dst)
		if len(e.Recent) == 0 || e.Recent[0].Reason != agentapi.CodeRequired || !strings.Contains(e.Recent[0].Detail, "TRANSPORT") {
			return fmt.Sprintf("explanation %+v", e)
		}
		return ""
	})
}

// TestCluster_bypassForgotten: a destination that was left alone is tried again
// when a policy requires SMC-R for it.
func TestCluster_bypassForgotten(t *testing.T) {
	c := newClusterBench(t, "a")
	c.stack.set(smcr.ModeTCP, clc.ReasonPeerNoSMC, nil)
	p := c.attach("a", 1)
	p.dst = c.server()
	c.start()
	exchange(t, c.dial(p, 0), 10)
	eventually(t, func() string {
		if e := explain(c, "a", p.dst); e.Bypassed == nil {
			return fmt.Sprintf("explanation %+v", e)
		}
		return ""
	})
	c.apply("a", testPolicy(func(s *v1alpha1.SMCRPolicySpec) { s.Mode = v1alpha1.ModeRequired }))
	eventually(t, func() string {
		forgot := 0
		p.redir.look(func() { forgot = p.redir.forgot })
		if e := explain(c, "a", p.dst); e.Bypassed != nil || forgot != 1 {
			return fmt.Sprintf("explanation %+v, forgot %d times", e, forgot)
		}
		return ""
	})
}

// TestCluster_unresolved: an explanation names the policies that wait for the controller.
func TestCluster_unresolved(t *testing.T) {
	c := newClusterBench(t, "a")
	c.attach("a", 1)
	c.start()
	dst := netip.MustParseAddrPort("127.0.0.9:80")
	if e := explain(c, "a", dst); len(e.Unresolved) > 0 {
		t.Errorf("explanation %+v", e)
	}
	c.waiting = []v1alpha1.SMCRPolicy{testPolicy(func(*v1alpha1.SMCRPolicySpec) {})}
	c.apply("a")
	eventually(t, func() string {
		if e := explain(c, "a", dst); !slices.Equal(e.Unresolved, []string{"p"}) {
			return fmt.Sprintf("explanation %+v", e)
		}
		return ""
	})
}

// TestCluster_bypassKept: a destination that was left alone stays so while pods that a policy selects as peers come and go, unless
// one of them is to be on SMC-R from now on.
func TestCluster_bypassKept(t *testing.T) {
	for _, tt := range []struct {
		mode   v1alpha1.PolicyMode
		forgot int
	}{
		{v1alpha1.ModePrefer, 0},
		{v1alpha1.ModeRequired, 1},
	} {
		t.Run(string(tt.mode), func(t *testing.T) {
			c := newClusterBench(t, "a")
			policy := testPolicy(func(s *v1alpha1.SMCRPolicySpec) {
				s.Mode, s.Peers = tt.mode, &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{}}}
			})
			other := testPolicy(func(s *v1alpha1.SMCRPolicySpec) { // of lower rank, for the destination that is left alone
				s.Peers = &v1alpha1.PolicyPeers{CIDRs: []v1alpha1.CIDR{"127.0.0.0/8"}}
			})
			other.Name, other.Spec.Priority = "q", -1
			c.peers = []string{"127.0.0.8"}
			c.set("a", policy, other)
			c.cfg.Node = c.node
			c.stack.set(smcr.ModeTCP, clc.ReasonPeerNoSMC, nil)
			p := c.attach("a", 1)
			p.dst = c.server()
			c.start()
			exchange(t, c.dial(p, 0), 10)
			eventually(t, func() string {
				if e := explain(c, "a", p.dst); e.Bypassed == nil {
					return fmt.Sprintf("explanation %+v", e)
				}
				return ""
			})
			c.peers = []string{"127.0.0.8", "127.0.0.9"}
			c.apply("a", policy, other)
			eventually(t, func() string {
				forgot, diverted := 0, false
				p.redir.look(func() {
					forgot = p.redir.forgot
					diverted = slices.ContainsFunc(p.redir.cfg.Outbound, func(r linux.OutboundRule) bool { return r.Prefix == netip.MustParsePrefix("127.0.0.9/32") })
				})
				if e := explain(c, "a", p.dst); !diverted || forgot != tt.forgot || (e.Bypassed == nil) != (tt.forgot > 0) {
					return fmt.Sprintf("the new peer is diverted: %v, forgot %d times, explanation %+v", diverted, forgot, e)
				}
				return ""
			})
		})
	}
}
