// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"fmt"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// policyName is the name of the policies of scenarios.
const policyName = "of-the-test"

// policy makes or changes the policy of a namespace.
func (s *suite) policy(ns, spec string) {
	s.Helper()
	s.must(s.c.Apply(s.Context(), fmt.Sprintf("{apiVersion: smcr.io/v1alpha1, kind: SMCRPolicy, metadata: {name: %s, namespace: %s}, spec: %s}", policyName, ns, spec)))
}

// noPolicy deletes it, also after a failure.
func (s *suite) noPolicy(ns string) {
	s.Helper()
	if _, err := s.c.Kubectl(context.WithoutCancel(s.Context()), "delete", "smcrpolicy", "-n", ns, policyName, "--ignore-not-found"); err != nil {
		s.Error(err)
	}
}

// transports: a policy that wants the other kind of device leaves pods on TCP, with the reason, and
// one that wants this kind does not.
func transports(s *suite) {
	server, client := s.pair(load)
	defer s.noPolicy(server.ns)
	for _, tt := range []struct {
		transport v1alpha1.Transport
		status    string
		code      agentapi.Code
	}{
		{v1alpha1.TransportSoftwareRoCE, v1alpha1.PodStatusFallback + ": " + string(agentapi.CodeTransport), agentapi.CodeTransport},
		{v1alpha1.TransportHardware, v1alpha1.PodStatusEnabled, agentapi.CodeOK},
	} {
		s.policy(server.ns, fmt.Sprintf("{transports: [%s], peers: {cidrs: [10.0.0.0/8]}}", tt.transport))
		for _, p := range []pod{server, client} {
			s.status(p, tt.status)
		}
		s.verdict(client, server, tt.code)
	}
	s.link(client, v1alpha1.RedundancySymmetric)
}
