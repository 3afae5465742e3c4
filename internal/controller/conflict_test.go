// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

func TestFindConflicts(t *testing.T) {
	mem := resource.MustParse("1Gi")
	type edit = func(*v1alpha1.SMCRPolicySpec)
	port := func(first, last int32) edit {
		return func(s *v1alpha1.SMCRPolicySpec) { s.Ports = []v1alpha1.PolicyPort{{Port: first, EndPort: &last}} }
	}
	kernel := func(s *v1alpha1.SMCRPolicySpec) {
		s.Datapath, s.Isolation = v1alpha1.DatapathKernel, v1alpha1.IsolationNode
	}
	required := func(s *v1alpha1.SMCRPolicySpec) { s.Mode = v1alpha1.ModeRequired }
	to := func(cidrs ...v1alpha1.CIDR) edit {
		return func(s *v1alpha1.SMCRPolicySpec) { s.Peers = &v1alpha1.PolicyPeers{CIDRs: cidrs} }
	}
	except := func(cidrs ...v1alpha1.CIDR) edit {
		return func(s *v1alpha1.SMCRPolicySpec) {
			if s.Peers == nil {
				s.Peers = &v1alpha1.PolicyPeers{}
			}
			s.Peers.Except = cidrs
		}
	}
	pods := func(s *v1alpha1.SMCRPolicySpec) { s.Peers.Selectors = []v1alpha1.PeerSelector{{}} }
	for _, tt := range []struct {
		name string
		a, b []edit
		want string // what they differ in
	}{
		{name: "equal"},
		{name: "another mode", b: []edit{required}, want: "mode"},
		{name: "another mode of other ports", a: []edit{port(80, 80)}, b: []edit{required, port(81, 90)}},
		{name: "another mode of some of the ports", a: []edit{port(80, 85)}, b: []edit{required, port(81, 90)}, want: "mode"},
		{name: "another mode of one of all ports", b: []edit{required, port(81, 90)}, want: "mode"},
		{name: "another mode for other peers", a: []edit{to("10.1.0.0/16", "fd00::/8")}, b: []edit{required, to("10.2.0.0/16", "10.3.0.0/16")}},
		{name: "another mode for some of the peers", a: []edit{to("10.1.0.0/16", "fd00::/8")}, b: []edit{required, to("192.0.2.0/24", "fd00::1/128")}, want: "mode"},
		{name: "another mode for peers that the first one excepts", a: []edit{to("10.0.0.0/8"), except("10.2.0.0/15")}, b: []edit{required, to("10.2.0.0/16")}},
		{name: "another mode for peers that the second one excepts", a: []edit{to("10.2.0.0/16")}, b: []edit{required, to("10.0.0.0/8"), except("10.2.0.0/16")}},
		{name: "another mode for peers of which some are excepted", a: []edit{to("10.0.0.0/8"), except("10.2.1.0/24")}, b: []edit{required, to("10.2.0.0/16")}, want: "mode"},
		{name: "another mode for the default peers", a: []edit{to("192.0.2.0/24")}, b: []edit{required}, want: "mode"},
		{name: "another mode for the default peers but some", a: []edit{to("192.0.2.0/24")}, b: []edit{required, except("192.0.2.0/24")}, want: "mode"},
		{name: "another mode for peers of selectors", a: []edit{to("10.1.0.0/16")}, b: []edit{required, to("10.2.0.0/16"), pods}, want: "mode"},
		{name: "another priority", a: []edit{func(s *v1alpha1.SMCRPolicySpec) { s.Priority = 1 }}, b: []edit{required}},
		{name: "another datapath", a: []edit{kernel}, b: nil, want: "datapath, isolation"},
		{name: "other pods", a: []edit{selecting("x")}, b: []edit{required, selecting("web")}},
		{name: "other buffers", b: []edit{func(s *v1alpha1.SMCRPolicySpec) { s.Buffers = &v1alpha1.PolicyBuffers{RMBE: "64Ki"} }}, want: "buffers"},
		{
			name: "the same memory, written otherwise", a: []edit{func(s *v1alpha1.SMCRPolicySpec) { s.Budget = &v1alpha1.PolicyBudget{Memory: &mem} }},
			b: []edit{func(s *v1alpha1.SMCRPolicySpec) {
				m := resource.MustParse("1024Mi")
				s.Budget = &v1alpha1.PolicyBudget{Memory: &m}
			}},
		},
		{
			name: "versions in another order",
			a:    []edit{func(s *v1alpha1.SMCRPolicySpec) { s.Versions = []v1alpha1.Version{"V1", "V2"} }},
			b:    []edit{func(s *v1alpha1.SMCRPolicySpec) { s.Versions = []v1alpha1.Version{"V2", "V1"} }},
		},
		{
			name: "everything",
			b: []edit{required, func(s *v1alpha1.SMCRPolicySpec) {
				s.LinkRedundancy, s.Isolation = v1alpha1.LinksSingle, v1alpha1.IsolationNamespace
				s.Transports, s.Versions = []v1alpha1.Transport{v1alpha1.TransportHardware}, []v1alpha1.Version{"V1"}
				s.Budget = &v1alpha1.PolicyBudget{Memory: &mem}
			}},
			want: "mode, budget, linkRedundancy, transports, isolation, versions",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newPolicy("shop", "a", tt.a...), newPolicy("shop", "b", tt.b...)
			pod := newPod("shop", "p", "n", "10.0.0.1")
			pod.Labels["app"] = "web"
			v := namespaceView{name: "shop", policies: []*policy{compile(b), compile(a)}, pods: []corev1.Pod{*pod}}
			got := aggregate(&v, metav1.Now())
			for name, other := range map[string]string{"a": "b", "b": "a"} {
				c := meta.FindStatusCondition(got[name].Conditions, v1alpha1.ConditionConflicting)
				if (c.Status == metav1.ConditionTrue) != (tt.want != "") {
					t.Errorf("%s is conflicting: %s, %s", name, c.Status, c.Message)
				}
				if want := fmt.Sprintf("%s (%s; a comes first)", other, tt.want); tt.want != "" && !strings.Contains(c.Message, want) {
					t.Errorf("%s is told %q, want %q in it", name, c.Message, want)
				}
			}
		})
	}
}

// A policy with mode Required keeps pods from the datapath that another one wants, whatever their priorities,
// and both say so. That concerns the first policy of a pod only.
func TestFindConflicts_requiredAndKernel(t *testing.T) {
	kernel := func(priority int32, d v1alpha1.Datapath) *v1alpha1.SMCRPolicy {
		return newPolicy("shop", "fast", func(s *v1alpha1.SMCRPolicySpec) { s.Datapath, s.Priority = d, priority })
	}
	must := func(name string, priority int32) *v1alpha1.SMCRPolicy {
		return newPolicy("shop", name, func(s *v1alpha1.SMCRPolicySpec) { s.Mode, s.Priority = v1alpha1.ModeRequired, priority })
	}
	between := newPolicy("shop", "between", func(s *v1alpha1.SMCRPolicySpec) { s.Priority = 5 })
	for _, tt := range []struct {
		name     string
		policies []*v1alpha1.SMCRPolicy
		fast     string // in the message of fast, "": it has no conflict
		must     string
	}{
		{
			"of lower priority",
			[]*v1alpha1.SMCRPolicy{kernel(9, v1alpha1.DatapathKernel), between, must("must", 1)},
			"has datapath Kernel and selects pods of must with mode Required", "has mode Required and selects pods of fast with datapath Kernel or KernelIfAvailable",
		},
		{
			"if available",
			[]*v1alpha1.SMCRPolicy{kernel(9, v1alpha1.DatapathKernelIfAvailable), must("must", 1)},
			"has datapath KernelIfAvailable and selects", "these are on datapath Agent, which mode Required needs",
		},
		{
			"of the same priority",
			[]*v1alpha1.SMCRPolicy{kernel(1, v1alpha1.DatapathKernel), must("must", 1)},
			"mode Required needs; selects the same pods with the same priority and other settings: must (datapath, mode; fast comes first)", "selects pods of fast",
		},
		{"of higher priority", []*v1alpha1.SMCRPolicy{kernel(1, v1alpha1.DatapathKernel), must("must", 9)}, "", ""},
		{"not the first", []*v1alpha1.SMCRPolicy{between, kernel(1, v1alpha1.DatapathKernel), must("must", 0)}, "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := namespaceView{name: "shop", pods: []corev1.Pod{*newPod("shop", "p", "n", "10.0.0.1"), *newPod("shop", "q", "n", "10.0.0.2")}}
			for _, p := range tt.policies {
				v.policies = append(v.policies, compile(p))
			}
			got := aggregate(&v, metav1.Now())
			for name, want := range map[string]string{"fast": tt.fast, "must": tt.must} {
				c := meta.FindStatusCondition(got[name].Conditions, v1alpha1.ConditionConflicting)
				if (c.Status == metav1.ConditionTrue) != (want != "") || !strings.Contains(c.Message, want) || strings.Count(c.Message, "Kernel and selects") > 1 {
					t.Errorf("%s is conflicting: %s, %s; want %q", name, c.Status, c.Message, want)
				}
			}
		})
	}
}

// TestConflictMessage: at most maxNames policies are named, each with the one that comes first.
func TestConflictMessage(t *testing.T) {
	p := newPolicy("shop", "m")
	var cs []conflict
	for i := range maxNames + 2 {
		cs = append(cs, conflict{newPolicy("shop", fmt.Sprintf("p%02d", i)), "mode"})
	}
	cs[0].other = newPolicy("shop", "a")
	got := conflictMessage(p, cs)
	for _, want := range []string{"a (mode; a comes first)", "p01 (mode; m comes first)", "and 2 more; give one of them a higher spec.priority"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in %q", want, got)
		}
	}
	if strings.Contains(got, fmt.Sprintf("p%02d", maxNames)) {
		t.Errorf("more than %d names in %q", maxNames, got)
	}
	if got := conflictMessage(p, cs[:1]); strings.Contains(got, "more") {
		t.Errorf("%q", got)
	}
}
