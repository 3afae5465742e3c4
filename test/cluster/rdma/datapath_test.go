// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

const (
	// kernelNS is the namespace of the pods on the kernel's datapath.
	kernelNS = "test-kernel"

	// revokedWithin bounds the end of a connection that a policy no longer allows.
	revokedWithin = 2 * time.Second
)

// datapath: pods whose interface is a child of the RNIC's are on the SMC-R of their nodes' kernels, by a policy.
// Agents that are deleted under load cost them nothing; a changed policy ends what it no longer allows; who
// cannot have it says so.
func datapath(s *suite) {
	carried, _ := s.pair(load) // by agents, on other interfaces
	server, loader, holder := s.kernelPods()
	s.onKernel(holder, server)
	s.verdictOf(carried.node, holder, carried, agentapi.CodeOK) // and with a pod of the other kind; the way back see KernelContact

	loaded, held := s.grows(loader, sum{}, 20), s.grows(holder, sum{}, 20)
	had := s.kernelConns(s.hw[0], server)
	s.deleteAgents()
	loaded, held = s.grows(loader, loaded, 20), s.grows(holder, held, 20)
	s.Logf("while agents were deleted and came back the kernel took %d connections on SMC-R; the longest of %d took %d ms, the longest exchange of %d %d ms",
		s.kernelConns(s.hw[0], server)-had, loaded.OK, loaded.WorstMillis, held.OK, held.WorstMillis)
	s.onKernel(holder, server)

	near := s.start(kernelNS, "near", s.plain)
	s.status(near, v1alpha1.PodStatusPending+": "+string(agentapi.CodePodFailed))
	s.must(s.once(near, server))
	s.revokes(holder, server)
	after, err := s.last(loader)
	s.must(err)
	if after.Failed > loaded.Failed+1 { // the one that was open then
		s.Errorf("%s has %+v when connections were ended, and had %+v", loader, after, loaded)
	}
	had = s.kernelConns(s.hw[0], server)
	loaded = s.grows(loader, after, 20)
	if n := s.kernelConns(s.hw[0], server) - had; n > 1 { // one may have been under way
		s.Errorf("of %d connections that no policy allows %d are on SMC-R", 20, n)
	}

	s.kernelPolicy(v1alpha1.DatapathKernelIfAvailable)
	s.agents(near, noDevice)
	s.status(loader, v1alpha1.PodStatusKernel)
	s.eventually("connections on the kernel's SMC-R again", func() error {
		if n := s.kernelConns(s.hw[0], server) - had; n < 10 {
			return fmt.Errorf("there were %d", n)
		}
		return nil
	})
	s.grows(loader, loaded, 20)
}

// kernelPods makes pods on the kernel's datapath: a server on one guest, and on the other a client that makes
// connections all the time and one that holds one.
func (s *suite) kernelPods() (server, loader, holder pod) {
	s.Helper()
	for _, n := range s.hw {
		s.capable(n.Name, "Available")
		s.macvlan(n)
	}
	s.capable(s.plain.Name, "Unavailable")
	ctx, cancel := context.WithTimeout(s.Context(), soon)
	defer cancel()
	s.must(s.c.KernelContact(ctx, s.hw[0], s.hw[1]))
	s.namespace(kernelNS)
	s.Cleanup(func() {
		out, err := s.c.Kubectl(context.Background(), "delete", "pods", "--all", "-n", kernelNS, "--timeout=1m")
		if err != nil {
			s.Error(out, err)
		}
		s.noPolicy(kernelNS)
	})
	s.kernelPolicy(v1alpha1.DatapathKernel)
	server = s.start(kernelNS, "server", s.hw[0].Node)
	s.status(server, v1alpha1.PodStatusKernel)
	loader = s.start(kernelNS, "client", s.hw[1].Node, load, server.address(), "--interval=100ms", "--bytes=16384", "--workers=1")
	holder = s.start(kernelNS, "holder", s.hw[1].Node, hold, server.address(), "--interval=50ms", "--bytes=16384")
	for _, p := range []pod{loader, holder} {
		s.status(p, v1alpha1.PodStatusKernel)
	}
	return server, loader, holder
}

// kernelPolicy makes or changes the policy of the pods on the kernel's datapath.
func (s *suite) kernelPolicy(d v1alpha1.Datapath) {
	s.Helper()
	s.policy(kernelNS, fmt.Sprintf(ofKernel, d, "peers: {cidrs: [10.0.0.0/8]}, ports: []"))
}

// capable waits until an SMCRNode says whether its pods can have the kernel's datapath.
func (s *suite) capable(node, want string) {
	s.Helper()
	s.eventually("kernelPath "+want+" of "+node, func() error {
		var o v1alpha1.SMCRNode
		if err := s.get("", node, &o); err != nil {
			return err
		}
		for _, c := range o.Status.Capabilities {
			if c.Name == "kernelPath" && c.State == want {
				return nil
			}
		}
		return fmt.Errorf("its capabilities are %+v", o.Status.Capabilities)
	})
}

// macvlan lets the node's new pods have a child of the RNIC's interface until the scenario ends.
func (s *suite) macvlan(n *guest.Node) {
	s.Helper()
	undo, err := s.c.RNICPods(s.Context(), n)
	s.must(err)
	s.Cleanup(func() {
		if err := undo(context.Background()); err != nil {
			s.Error(err)
		}
	})
	s.eventually("the plugin in "+guest.RNICNetwork+" of "+n.Name, func() error {
		text, err := n.Guest.Run(s.Context(), "cat", guest.RNICNetwork)
		if err == nil && !strings.Contains(text, "smcr-cni") {
			err = fmt.Errorf("it is %s", text)
		}
		return err
	})
}

// kernelConns is how many connections on SMC-R the kernel has had as server in a pod.
func (s *suite) kernelConns(n *guest.Node, p pod) uint64 {
	s.Helper()
	return s.kernelCounters(n, p).ServerV2
}

// kernelCounters are what the kernel has counted in a pod.
func (s *suite) kernelCounters(n *guest.Node, p pod) smcnl.Counters {
	s.Helper()
	ns, err := n.Guest.Shell(s.Context(), fmt.Sprintf(`for ns in $(ls /run/netns); do
		if nsenter --net=/run/netns/$ns ip -4 -o address | grep -q ' %s/'; then echo $ns; fi; done`, p.ip))
	s.must(err)
	text, err := n.Guest.Run(s.Context(), "nsenter", "--net="+path.Join("/run/netns", strings.TrimSpace(ns)), "kernelsmc")
	s.must(err)
	var k struct{ Counters smcnl.Counters }
	s.must(json.Unmarshal([]byte(text), &k))
	return k.Counters
}

// onKernel waits until the agents of both ends show the connection of a client that holds one as one on SMC-R
// of the kernel, in a link group of the kernel.
func (s *suite) onKernel(holder, server pod) {
	s.Helper()
	to := netip.MustParseAddrPort(server.address())
	for _, p := range []pod{holder, server} {
		s.eventually("a connection of "+p.String()+" on the kernel's SMC-R", func() error {
			var conns agentapi.Conns
			var links agentapi.Links
			if err := errors.Join(s.p.Ask(s.Context(), p.node, &conns, "conns"), s.p.Ask(s.Context(), p.node, &links, "links")); err != nil {
				return err
			}
			for _, c := range conns.Conns {
				in := func(g agentapi.LinkGroup) bool { return g.Datapath == "Kernel" && g.ID == c.LinkGroup }
				if c.Pod == p.String() && c.Datapath == "Kernel" && c.Mode == "SMC-R" && c.Source.Addr().String() == holder.ip && c.Dest == to && slices.ContainsFunc(links.LinkGroups, in) {
					return nil
				}
			}
			return fmt.Errorf("there are %+v in %+v", conns.Conns, links.LinkGroups)
		})
	}
	s.eventually("SMCRLinks of both kernels", func() error { return s.kernelLinks([2]pod{server, holder}) })
	e, err := s.explain(holder, server)
	s.must(err)
	if e.Code != agentapi.CodeOK || !strings.Contains(e.Verdict, "of the pod's kernel") {
		s.Errorf("explain says %s: %s", e.Code, e.Verdict)
	}
}

// kernelLinks returns nil if there is an active SMCRLink of each guest's kernel, with the other guest, or with the RNIC of the other's
// pod of these.
func (s *suite) kernelLinks(pods [2]pod) error {
	var list v1alpha1.SMCRLinkList
	if err := s.p.Client.List(s.Context(), &list); err != nil {
		return err
	}
	for i, n := range s.hw {
		if !slices.ContainsFunc(list.Items, func(l v1alpha1.SMCRLink) bool {
			peer := l.Status.Peer == s.hw[1-i].Name || l.Status.Peer == pods[1-i].ip
			return l.Status.Node == n.Name && peer && l.Status.Datapath == string(v1alpha1.DatapathKernel) && l.Status.State == v1alpha1.LinkActive
		}) {
			return fmt.Errorf("%s has none: %+v", n.Name, list.Items)
		}
	}
	return nil
}

// deleteAgents deletes the agents of the guests, and waits for others.
func (s *suite) deleteAgents() {
	s.Helper()
	old := map[string]string{}
	for _, n := range s.hw {
		a, err := s.p.AgentPod(s.Context(), n.Name)
		s.must(err)
		old[n.Name] = a.Name
		_, err = s.c.Kubectl(s.Context(), "delete", "pod", "-n", product.Namespace, a.Name, "--wait=false")
		s.must(err)
	}
	for _, n := range s.hw {
		s.eventually("another agent of "+n.Name, func() error {
			pods, err := s.p.AgentPods(s.Context(), n.Name)
			if err == nil && (len(pods) != 1 || pods[0].Name == old[n.Name]) {
				err = fmt.Errorf("there are %d", len(pods))
			}
			return err
		})
	}
	s.must(s.accelerate(s.Context()))
}

// revokes changes the policy so that it no longer allows the connection that a pod holds, which ends in time,
// by the clock of the pod's node, and the agents say why.
func (s *suite) revokes(holder, server pod) {
	s.Helper()
	var o v1alpha1.SMCRPolicy
	s.must(s.get(holder.ns, policyName, &o))
	last := int32(port - 1)
	o.Spec.Ports = []v1alpha1.PolicyPort{{Port: 1, EndPort: &last}}
	asked := s.clock(s.hw[1])
	s.must(s.p.Client.Update(s.Context(), &o)) // kubectl would take a second of the two
	var ended time.Time
	s.eventually("the end of the connection of "+holder.String(), func() (err error) {
		ended, err = s.endedAt(holder)
		return err
	})
	took := ended.Sub(asked)
	s.Logf("the connection ended %v after the policy was changed", took.Round(time.Millisecond))
	if took > revokedWithin {
		s.Errorf("the connection ended %v after the policy was changed, want %v or less", took, revokedWithin)
	}
	s.changed(server, holder)
	s.must(s.once(holder, server))
}

// clock is the time that a node has.
func (s *suite) clock(n *guest.Node) time.Time {
	s.Helper()
	out, err := n.Guest.Run(s.Context(), "date", "--utc", "+%Y-%m-%dT%H:%M:%S.%NZ")
	s.must(err)
	at, err := time.Parse(time.RFC3339Nano, strings.TrimSpace(out))
	s.must(err)
	return at
}

// endedAt is when a client that holds a connection said that it had ended, by the clock of its node.
func (s *suite) endedAt(p pod) (time.Time, error) {
	one := int64(1)
	text, err := s.p.Clientset.CoreV1().Pods(p.ns).GetLogs(p.name, &corev1.PodLogOptions{TailLines: &one, Timestamps: true}).DoRaw(s.Context())
	if err != nil {
		return time.Time{}, err
	}
	at, line, _ := strings.Cut(string(text), " ")
	var now sum
	if err := json.Unmarshal([]byte(line), &now); err != nil {
		return time.Time{}, fmt.Errorf("log of %s: %q: %w", p, text, err)
	}
	if !now.Ended {
		return time.Time{}, fmt.Errorf("it goes on: %+v", now)
	}
	return time.Parse(time.RFC3339Nano, at)
}
