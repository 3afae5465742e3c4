// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// TestCompile: the error of a policy names every field that is wrong, and a policy with an error selects nothing.
func TestCompile(t *testing.T) {
	bad := &v1alpha1.LabelSelector{MatchExpressions: []v1alpha1.LabelRequirement{{Key: "app", Operator: "Sometimes"}}}
	peers := func(p v1alpha1.PolicyPeers) func(*v1alpha1.SMCRPolicySpec) {
		return func(s *v1alpha1.SMCRPolicySpec) { s.Peers = &p }
	}
	for _, tt := range []struct {
		name string
		edit func(*v1alpha1.SMCRPolicySpec)
		want []string
	}{
		{"empty", func(*v1alpha1.SMCRPolicySpec) {}, nil},
		{"good", peers(v1alpha1.PolicyPeers{CIDRs: []v1alpha1.CIDR{"10.0.0.0/8", "fd00::/8"}, Except: []v1alpha1.CIDR{"10.1.0.0/16"}, Selectors: []v1alpha1.PeerSelector{{}}}), nil},
		{"pods", func(s *v1alpha1.SMCRPolicySpec) { s.PodSelector = *bad }, []string{"spec.podSelector: "}},
		{"peers", peers(v1alpha1.PolicyPeers{
			Selectors: []v1alpha1.PeerSelector{{}, {PodSelector: bad, NamespaceSelector: bad}},
			CIDRs:     []v1alpha1.CIDR{"10.0.0.0/8", "10.0.0.1"}, Except: []v1alpha1.CIDR{"10.0.0.0/33"},
		}), []string{
			"spec.peers.selectors[1].podSelector: ", "spec.peers.selectors[1].namespaceSelector: ",
			"spec.peers.cidrs[1]: want a network such as 10.0.0.0/8: ", "spec.peers.except[0]: want a network",
		}},
		{"networks of IPv4 in IPv6", peers(v1alpha1.PolicyPeers{CIDRs: []v1alpha1.CIDR{"::ffff:10.0.0.0/104"}}), []string{
			"spec.peers.cidrs[0]: want a network such as 10.0.0.0/8: ::ffff:10.0.0.0/104 is IPv4 within IPv6",
		}},
		{"ports", func(s *v1alpha1.SMCRPolicySpec) {
			low, high := int32(80), int32(1<<16)
			s.Ports = []v1alpha1.PolicyPort{{Port: 1, EndPort: new(int32(1<<16 - 1))}, {Port: 0}, {Port: 1 << 16}, {Port: 90, EndPort: &low}, {Port: 90, EndPort: &high}}
		}, []string{"spec.ports[1]: want ports from 1 to 65535, and endPort not below port", "spec.ports[2]: ", "spec.ports[3]: ", "spec.ports[4]: "}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := compile(newPolicy("shop", "p", tt.edit))
			if (p.err != nil) != (tt.want != nil) {
				t.Fatalf("error %v", p.err)
			}
			for _, want := range tt.want {
				if !strings.Contains(p.err.Error(), want) {
					t.Errorf("%q is not in %q", want, p.err)
				}
			}
			if got := p.selects(newPod("shop", "a", "n", "")); got != (tt.want == nil) {
				t.Errorf("selects a pod: %t", got)
			}
		})
	}
}

// TestPolicy_mayHavePeersIn: without a selector of namespaces the peers are in the policy's own namespace.
func TestPolicy_mayHavePeersIn(t *testing.T) {
	labelled := &v1alpha1.LabelSelector{MatchLabels: map[string]v1alpha1.LabelValue{"team": "x"}}
	for _, tt := range []struct {
		name      string
		selectors []v1alpha1.PeerSelector
		own       bool // the namespace of the policy
		other     bool // another namespace
		team      bool // another namespace, with the label
	}{
		{"none", nil, false, false, false},
		{"own", []v1alpha1.PeerSelector{{}}, true, false, false},
		{"all", []v1alpha1.PeerSelector{{NamespaceSelector: &v1alpha1.LabelSelector{}}}, true, true, true},
		{"some", []v1alpha1.PeerSelector{{NamespaceSelector: labelled}}, false, false, true},
		{"own and some", []v1alpha1.PeerSelector{{NamespaceSelector: labelled}, {}}, true, false, true},
	} {
		p := compile(newPolicy("shop", "p", func(s *v1alpha1.SMCRPolicySpec) { s.Peers = &v1alpha1.PolicyPeers{Selectors: tt.selectors} }))
		own, other, team := p.mayHavePeersIn("shop", nil), p.mayHavePeersIn("bank", nil), p.mayHavePeersIn("lab", labels.Set{"team": "x"})
		if own != tt.own || other != tt.other || team != tt.team {
			t.Errorf("%s: own %t, other %t, with the label %t; want %t, %t, %t", tt.name, own, other, team, tt.own, tt.other, tt.team)
		}
	}
}

// TestCarries: which pods can use SMC-R at all.
func TestCarries(t *testing.T) {
	for name, tt := range map[string]struct {
		edit func(*corev1.Pod)
		want bool
	}{
		"runs":           {func(*corev1.Pod) {}, true},
		"pending":        {func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }, false},
		"ended":          {func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, false},
		"being deleted":  {func(p *corev1.Pod) { now := metav1.Now(); p.DeletionTimestamp = &now }, false},
		"host's network": {func(p *corev1.Pod) { p.Spec.HostNetwork = true }, false},
	} {
		p := newPod("shop", "a", "n", "10.0.0.1")
		tt.edit(p)
		if got := carries(p); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
