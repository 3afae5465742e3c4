// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"fmt"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
)

// hostNS is the namespace of the pods in the nodes' own network.
const hostNS = "test-host"

// hostNetwork: pods in the nodes' own network are on their kernels' SMC-R, by their own annotation and a policy, and talk with
// those that agents carry. One without the annotation is left alone, and one of a node without SMC-R says why. Agents that are
// deleted cost them nothing, and a changed policy ends what it no longer allows.
func hostNetwork(s *suite) {
	carried, _ := s.pair(load) // by agents
	for _, n := range s.hw {
		s.capable(n.Name, "Available")
	}
	s.namespace(hostNS)
	s.Cleanup(func() {
		out, err := s.c.Kubectl(context.Background(), "delete", "pods", "--all", "-n", hostNS, "--timeout=1m")
		if err != nil {
			s.Error(out, err)
		}
		s.noPolicy(hostNS)
	})
	s.policy(hostNS, fmt.Sprintf(ofKernel, v1alpha1.DatapathKernel, "peers: {cidrs: [10.0.0.0/8]}, ports: []"))
	server := s.hostPod("server", s.hw[0], true)
	s.status(server, v1alpha1.PodStatusKernel)
	holder := s.hostPod("holder", s.hw[1], true, hold, server.address(), "--interval=50ms", "--bytes=16384")
	s.status(holder, v1alpha1.PodStatusKernel)
	s.onKernel(holder, server)
	s.verdictOf(carried.node, holder, carried, agentapi.CodeOK)

	bare := s.hostPod("bare", s.hw[1], false, hold, server.address(), "--interval=50ms", "--bytes=16384")
	s.grows(bare, sum{}, 1)
	if conns, missing := s.connsOf(bare); len(conns) != 0 || missing != "" {
		s.Errorf("a pod without the annotation has %+v, and what may be missing: %q", conns, missing)
	}

	held := s.grows(holder, sum{}, 20)
	s.deleteAgents()
	s.grows(holder, held, 20)
	s.onKernel(holder, server)
	s.revokes(holder, server)
}

// hostPod makes a pod in the network of a node.
func (s *suite) hostPod(name string, n *guest.Node, enabled bool, args ...string) pod {
	s.Helper()
	o := podObject(hostNS, name, args...)
	o.Spec.NodeName, o.Spec.HostNetwork = n.Name, true
	if enabled {
		o.Annotations = map[string]string{v1alpha1.AnnotationEnabled: "true"}
	}
	return s.run(o, n.Node)
}

// connsOf are the connections of a pod that the agent of its node knows, and why some may be missing.
func (s *suite) connsOf(p pod) (out []agentapi.Conn, missing string) {
	s.Helper()
	var all agentapi.Conns
	s.must(s.p.Ask(s.Context(), p.node, &all, "conns"))
	for _, c := range all.Conns {
		if c.Pod == p.String() {
			out = append(out, c)
		}
	}
	return out, all.Problem
}
