// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"fmt"
	"slices"

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

// policies: a policy that leaves out a peer, or a port, ends the connection that is open on RDMA
// devices, and users learn why; the next ones are plain TCP, until the policy is gone.
func policies(s *suite) {
	server, client := s.pair(hold)
	s.leaveOut(server, client, fmt.Sprintf("{peers: {cidrs: [10.0.0.0/8], except: [%s/32]}}", server.ip))
	server, client = s.pair(hold)
	s.leaveOut(server, client, fmt.Sprintf("{peers: {cidrs: [10.0.0.0/8]}, ports: [{port: 1, endPort: %d}]}", port-1))
}

// leaveOut applies a policy that leaves out the connections of a client to a server.
func (s *suite) leaveOut(server, client pod, spec string) {
	s.Helper()
	defer s.delete(client) // its connection is at its end
	s.policy(server.ns, spec)
	defer s.noPolicy(server.ns)
	s.eventually("the end of the connection of "+client.String(), func() error {
		now, err := s.last(client)
		if err == nil && !now.Ended {
			err = fmt.Errorf("it goes on: %+v", now)
		}
		return err
	})
	s.verdict(client, server, agentapi.CodeNoPolicy)
	s.changed(server, client)
}

// changed fails the test unless an agent says that a changed policy ended a connection: that of
// the client, or of the server, which may have been the first to hear of it.
func (s *suite) changed(server, client pod) {
	s.Helper()
	var seen []agentapi.Decision
	for _, node := range []string{client.node, server.node} {
		e, err := s.explainOn(node, client.ip, server.address())
		s.must(err)
		seen = append(seen, e.Recent...)
	}
	if !slices.ContainsFunc(seen, func(d agentapi.Decision) bool { return d.Reason == agentapi.CodePolicyChange }) {
		s.Errorf("no agent says why the connection ended: %+v", seen)
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
