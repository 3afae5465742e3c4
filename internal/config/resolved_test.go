// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// TestResolved: what is in force of a policy before and after the controller has resolved its peer selectors. What is in force is
// written as mode, generation and addresses.
func TestResolved(t *testing.T) {
	policy := func(uid string, generation int64, app string, changes ...func(*v1alpha1.SMCRPolicy)) *v1alpha1.SMCRPolicy {
		p := smcrPolicy("p", 0, func(s *v1alpha1.SMCRPolicySpec) {
			s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{
				MatchLabels: map[string]v1alpha1.LabelValue{"app": v1alpha1.LabelValue(app)},
			}}}}
		})
		p.UID, p.Generation = types.UID(uid), generation
		for _, c := range changes {
			c(&p)
		}
		return &p
	}
	required := func(p *v1alpha1.SMCRPolicy) { p.Spec.Mode = v1alpha1.ModeRequired }
	networks := func(p *v1alpha1.SMCRPolicy) {
		p.Spec.Peers = &v1alpha1.PolicyPeers{CIDRs: []v1alpha1.CIDR{"10.1.0.0/16"}}
	}
	bad := func(p *v1alpha1.SMCRPolicy) { p.Spec.Peers.CIDRs = []v1alpha1.CIDR{"x"} }
	seen := func(p *v1alpha1.SMCRPolicy) { p.Status.ObservedGeneration = p.Generation }
	pending := func(p *v1alpha1.SMCRPolicy) { seen(p); p.Status.PeersGeneration = new(int64) }
	slice := func(number int, uid string, generation int64, addrs ...string) v1alpha1.SMCRPeerSlice {
		yes := true
		return v1alpha1.SMCRPeerSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "shop", Name: fmt.Sprintf("p-%d", number), OwnerReferences: []metav1.OwnerReference{{UID: types.UID(uid), Controller: &yes}},
			},
			Policy: "p", PolicyGeneration: generation, Addresses: addrs,
		}
	}
	type step struct {
		policy  *v1alpha1.SMCRPolicy // nil: there is none
		slices  []v1alpha1.SMCRPeerSlice
		want    string
		waiting bool
	}
	running := step{nil, nil, "", false} // the pod, under the built-in policy
	both := func(p *v1alpha1.SMCRPolicy) { p.Spec.Peers.CIDRs = []v1alpha1.CIDR{"10.1.0.0/16"} }
	slicesOf := func(s ...v1alpha1.SMCRPeerSlice) []v1alpha1.SMCRPeerSlice { return s }
	web := step{policy("u", 1, "web"), slicesOf(slice(0, "u", 1, "10.0.0.1")), "Prefer 1 [10.0.0.1]", false}
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"new, as the pod is", []step{{policy("u", 1, "web"), nil, "Prefer 1 []", true}, {policy("u", 1, "web"), nil, "Prefer 1 []", true}, web}},
		{"new, as the pod is, with networks", []step{
			{policy("u", 1, "web", required, both), nil, "Required 1 10.1.0.0/16 []", true},
			{policy("u", 1, "web", required, both), slicesOf(slice(0, "u", 1, "10.0.0.1")), "Required 1 10.1.0.0/16 [10.0.0.1]", false},
		}},
		{"new, as the pod is, and changed", []step{
			{policy("u", 1, "web"), nil, "Prefer 1 []", true},
			{policy("u", 2, "web", required), nil, "Required 2 []", true},
			{policy("u", 3, "db"), nil, "Required 2 []", true},
			{policy("u", 3, "db"), slicesOf(slice(0, "u", 3, "10.0.0.3")), "Prefer 3 [10.0.0.3]", false},
		}},
		{"new, as the pod is, with slices of another one", []step{{policy("v", 1, "web"), web.slices, "Prefer 1 []", true}}},
		{"new", []step{running, {policy("u", 1, "web"), nil, "", true}, {policy("u", 1, "web"), nil, "", true}, web}},
		{"new, and Required", []step{
			running,
			{policy("u", 1, "web", required, both), nil, "", true},
			{policy("u", 1, "web", required), slicesOf(slice(0, "u", 1, "10.0.0.1")), "Required 1 [10.0.0.1]", false},
		}},
		{"new, and many", []step{
			running,
			{policy("u", 1, "web"), slicesOf(slice(1, "u", 1, "10.0.0.2")), "", true},
			{policy("u", 1, "web"), slicesOf(slice(0, "u", 1, "10.0.0.1"), slice(1, "u", 1, "10.0.0.2")), "Prefer 1 [10.0.0.1 10.0.0.2]", false},
		}},
		{"no pod selected", []step{{policy("u", 1, "web"), slicesOf(slice(0, "u", 1)), "Prefer 1 []", false}}},
		{"other selectors", []step{
			web,
			{policy("u", 2, "db"), web.slices, "Prefer 1 [10.0.0.1]", true},
			{policy("u", 2, "db"), slicesOf(slice(0, "u", 1, "10.0.0.1"), slice(1, "u", 2, "10.0.0.2")), "Prefer 1 [10.0.0.1]", true},
			{policy("u", 2, "db"), slicesOf(slice(0, "u", 2), slice(1, "u", 2, "10.0.0.2")), "Prefer 2 [10.0.0.2]", false},
		}},
		{"the slices are ahead of the policy", []step{
			web,
			{policy("u", 1, "web"), slicesOf(slice(0, "u", 2, "10.0.0.9")), "Prefer 1 [10.0.0.1]", true},
			{policy("u", 2, "db"), slicesOf(slice(0, "u", 2, "10.0.0.9")), "Prefer 2 [10.0.0.9]", false},
		}},
		{"one slice is ahead of the policy", []step{
			web,
			{policy("u", 1, "web", pending), slicesOf(slice(0, "u", 1, "10.0.0.7"), slice(1, "u", 2, "10.0.0.9")), "Prefer 1 [10.0.0.1]", true},
		}},
		{"another mode", []step{web, {policy("u", 2, "web", required), web.slices, "Required 2 [10.0.0.1]", true}}},
		{"somebody deletes the slices", []step{web, {policy("u", 1, "web"), nil, "Prefer 1 [10.0.0.1]", true}}},
		{"networks become selectors", []step{
			{policy("u", 1, "", networks), nil, "Prefer 1 10.1.0.0/16 []", false},
			{policy("u", 2, "web"), nil, "Prefer 1 10.1.0.0/16 []", true},
			{policy("u", 2, "web"), slicesOf(slice(0, "u", 2, "10.0.0.1")), "Prefer 2 [10.0.0.1]", false},
		}},
		{"selectors become networks", []step{web, {policy("u", 2, "", networks), nil, "Prefer 2 10.1.0.0/16 []", false}}},
		{"replaced by the same", []step{
			web,
			{policy("v", 1, "web"), web.slices, "Prefer 1 [10.0.0.1]", true},
			{policy("v", 1, "web"), nil, "Prefer 1 [10.0.0.1]", true},
			{policy("v", 1, "web"), slicesOf(slice(0, "v", 1, "10.0.0.2")), "Prefer 1 [10.0.0.2]", false},
		}},
		{"replaced by another one", []step{web, {policy("v", 1, "db"), web.slices, "Prefer 1 [10.0.0.1]", true}}},
		{"deleted, and made anew", []step{web, {nil, nil, "", false}, {policy("v", 1, "web"), web.slices, "", true}}},
		{"fewer slices than before", []step{{
			policy("u", 2, "db", required, pending), slicesOf(slice(0, "u", 2, "10.0.0.2"), slice(1, "u", 1, "10.0.0.9")), "Required 2 [10.0.0.2]", false,
		}}},
		{"replaced, with fewer slices than before", []step{
			web,
			{policy("v", 1, "db", required), slicesOf(slice(0, "v", 1, "10.0.0.2"), slice(1, "u", 1, "10.0.0.9")), "Prefer 1 [10.0.0.1]", true},
			{policy("v", 1, "db", required, pending), slicesOf(slice(0, "v", 1, "10.0.0.2"), slice(1, "u", 1, "10.0.0.9")), "Required 1 [10.0.0.2]", false},
		}},
		{"an older controller wrote the first slice", []step{
			web,
			{policy("u", 2, "db", seen), slicesOf(slice(0, "u", 2, "10.0.0.2"), slice(1, "u", 1, "10.0.0.9")), "Prefer 1 [10.0.0.1]", true},
			{policy("u", 2, "db", seen), slicesOf(slice(0, "u", 2, "10.0.0.2"), slice(1, "u", 2, "10.0.0.3")), "Prefer 2 [10.0.0.2 10.0.0.3]", false},
		}},
		{"corrected", []step{
			web,
			{policy("u", 2, "web", bad), web.slices, "bad", false},
			{policy("u", 3, "web"), web.slices, "Prefer 3 [10.0.0.1]", true},
		}},
		{"changed before the agent began", []step{{policy("u", 2, "web", required), web.slices, "Required 2 [10.0.0.1]", true}}},
		{"of no use", []step{web, {policy("u", 2, "web", bad), web.slices, "bad", false}}},
		{"an older controller has not seen it", []step{web, {policy("u", 2, "db"), nil, "Prefer 1 [10.0.0.1]", true}}},
		{"an older controller found no pod", []step{web, {policy("u", 2, "db", seen), nil, "Prefer 2 []", false}}},
		{"an older controller has yet to write", []step{web, {policy("u", 2, "db", seen), web.slices, "Prefer 1 [10.0.0.1]", true}}},
		{"an older controller wrote another slice", []step{{policy("u", 1, "db", seen), slicesOf(slice(3, "u", 1, "10.0.0.3")), "Prefer 1 [10.0.0.3]", false}}},
		{"this controller has seen it, and has yet to write", []step{web, {policy("u", 2, "db", pending), nil, "Prefer 1 [10.0.0.1]", true}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var inForce Objects
			for i, s := range tt.steps {
				now := Objects{Pods: []PodObject{shopPod()}, PeerSlices: s.slices}
				if s.policy != nil {
					now.Policies = append(now.Policies, *s.policy)
				}
				inForce = Resolved(now, inForce)
				if got := inForceOf(t, inForce); got != s.want || (len(inForce.Unresolved) > 0) != s.waiting {
					t.Errorf("step %d: in force is %q, want %q; not resolved: %d", i, got, s.want, len(inForce.Unresolved))
				}
			}
		})
	}
}

// TestResolved_newPod: a policy that is as new as a pod gives the pod its settings and datapath before its peers are known. Where
// the pod ran before, or another one that the policy selects, both wait.
func TestResolved_newPod(t *testing.T) {
	p := smcrPolicy("p", 0, func(s *v1alpha1.SMCRPolicySpec) {
		s.Datapath, s.Isolation = v1alpha1.DatapathKernel, v1alpha1.IsolationNamespace
		s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{}}}}
		s.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{"app": "web"}
	})
	p.Generation = 1
	no := "false"
	pod := func(name string, changes ...func(*PodObject)) PodObject {
		o := shopPod("app=web")
		o.Name, o.UID = name, "uid-"+name
		for _, c := range changes {
			c(&o)
		}
		return o
	}
	host := func(o *PodObject) { o.HostNetwork = true }
	optedOut := func(o *PodObject) { o.Enabled = &no }
	unlabelled := func(o *PodObject) { o.Labels = nil }
	for _, tt := range []struct {
		name      string
		before    []PodObject
		now       []PodObject // of these web is looked at
		want      Datapath
		wantHosts int
	}{
		{"new", nil, []PodObject{pod("web")}, DatapathKernel, 0},
		{"new, in the node's network", nil, []PodObject{pod("web", host)}, DatapathKernel, 1},
		{"beside others", []PodObject{pod("db", unlabelled)}, []PodObject{pod("db", unlabelled), pod("web")}, DatapathKernel, 0},
		{"in the place of another one", []PodObject{pod("old")}, []PodObject{pod("web")}, DatapathKernel, 0},
		{"just opted in", []PodObject{pod("web", optedOut)}, []PodObject{pod("web")}, DatapathKernel, 0},
		{"ran before", []PodObject{pod("web")}, []PodObject{pod("web")}, DatapathAgent, 0},
		{"ran before with other labels", []PodObject{pod("web", unlabelled)}, []PodObject{pod("web")}, DatapathAgent, 0},
		{"beside one that ran before", []PodObject{pod("old")}, []PodObject{pod("old"), pod("web")}, DatapathAgent, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := Resolved(Objects{Pods: tt.before}, Objects{})
			for range 2 {
				o = Resolved(Objects{Pods: tt.now, Policies: []v1alpha1.SMCRPolicy{p}}, o)
				n, _, _ := FromObjects(clusterBase(t, ""), o)
				web := Pod{Namespace: "shop", Name: "web"}
				d, _ := n.DatapathFor(web)
				if shared := n.SettingsFor(web).Shared; d != tt.want || shared != (d == DatapathKernel) || len(n.HostPods) != tt.wantHosts {
					t.Errorf("datapath %v, want %v; settings of the policy: %t; pods in the node's network: %v", d, tt.want, shared, n.HostPods)
				}
				if len(n.UnresolvedFor(web)) != 1 {
					t.Error("the policy does not wait")
				}
			}
		})
	}
}

// inForceOf says what is in force of policy p.
func inForceOf(t *testing.T, o Objects) string {
	t.Helper()
	n, _, bad := FromObjects(clusterBase(t, ""), o)
	if len(bad) > 0 {
		return "bad"
	}
	id := Pod{Namespace: "shop", Name: "web-0"}
	if names := n.UnresolvedFor(id); len(names) != len(o.Unresolved) {
		t.Errorf("%v of %d policies of the pod are not resolved", names, len(o.Unresolved))
	}
	p := n.PoliciesFor(id)[0]
	if p.Name == DefaultPolicy {
		return ""
	}
	var words []string
	for _, q := range p.Peers {
		words = append(words, q.String())
	}
	words = append([]string{p.Mode.String(), fmt.Sprint(o.Policies[0].Generation)}, append(words, fmt.Sprint(p.Addresses))...)
	if !slices.IsSortedFunc(p.Addresses, netip.Addr.Compare) || p.NoPeers != (len(p.Peers)+len(p.Addresses) == 0) {
		t.Errorf("policy %+v", p)
	}
	return strings.Join(words, " ")
}
