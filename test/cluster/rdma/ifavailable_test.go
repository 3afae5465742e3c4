// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"strings"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// ofKernel is the spec of a policy with a datapath, and whom it selects.
const ofKernel = "{datapath: %s, isolation: Node, %s}"

// ifAvailable: with KernelIfAvailable pods whose interface is no child of the RNIC's are the agent's, which say
// why, and are on its SMC-R; on the node without devices they are on TCP.
func ifAvailable(s *suite) {
	server, dialer := s.pair(load)
	near := s.start(server.ns, "near", s.plain)
	s.policy(server.ns, fmt.Sprintf(ofKernel, "KernelIfAvailable", "peers: {cidrs: [10.0.0.0/8]}"))
	defer s.noPolicy(server.ns)
	s.agents(near, noDevice)
	s.agents(dialer, agentapi.CodeOK)
	s.verdict(dialer, server, agentapi.CodeOK)
	e, err := s.explain(dialer, server)
	s.must(err)
	if !strings.Contains(e.NotKernel, "macvlan") {
		s.Errorf("explain says of the kernel's datapath %q, want that the pod has no child of the RNIC's interface", e.NotKernel)
	}
}

// agents waits until a pod whose policy wants the kernel's datapath is said to be the agent's, with or without SMC-R.
func (s *suite) agents(p pod, code agentapi.Code) {
	s.Helper()
	want := v1alpha1.PodStatusEnabled
	if code != agentapi.CodeOK {
		want = v1alpha1.PodStatusFallback + ": " + string(code)
	}
	s.status(p, want)
	s.eventually("the reason why "+p.String()+" is not on the kernel's datapath", func() error {
		var all agentapi.Attachments
		if err := s.p.Ask(s.Context(), p.node, &all, "attachments"); err != nil {
			return err
		}
		for _, a := range all.Attachments {
			if a.Pod == p.String() && a.NotKernel != "" && a.Datapath == "" {
				return nil
			}
		}
		return fmt.Errorf("there are %+v", all.Attachments)
	})
}
