// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// statuses is what a table row expects of the conditions: "Type=Status Reason".
func statuses(st v1alpha1.SMCRPolicyStatus) map[string]string {
	out := map[string]string{}
	for _, c := range st.Conditions {
		out[c.Type] = string(c.Status) + " " + c.Reason
	}
	return out
}

func everyPod(s *v1alpha1.SMCRPolicySpec) {
	s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{}}}}
}

// resolvedPolicy is the policy of TestAggregate, as its slices have it.
func resolvedPolicy() *v1alpha1.SMCRPolicy {
	p := newPolicy("shop", "p")
	p.Generation = 3
	return p
}

func TestAggregate(t *testing.T) {
	peerSlice := func(name string, generation int64) v1alpha1.SMCRPeerSlice {
		s := newSlice(newPolicy("shop", "p"), 0, nil, 0)
		s.Name, s.PolicyGeneration = name, generation
		return *s
	}
	pod := func(name string, edits ...func(*corev1.Pod)) corev1.Pod {
		p := newPod("shop", name, "n1", "10.0.0.1")
		p.Labels["app"] = "web"
		for _, e := range edits {
			e(p)
		}
		return *p
	}
	link := func(pod string, state v1alpha1.LinkState, r v1alpha1.Redundancy) v1alpha1.SMCRLink {
		l := newLink("l", "n1", "shop", pod)
		l.Status.State, l.Status.Redundancy = state, r
		return *l
	}
	const good = "True AllAccelerated"
	for _, tt := range []struct {
		name  string
		spec  func(*v1alpha1.SMCRPolicySpec)
		view  namespaceView
		pods  v1alpha1.PolicyPods
		links v1alpha1.LinkGroupCounts
		want  map[string]string // conditions that are not as of a policy with one enabled pod and no link
		says  string            // in the message of Ready or Degraded
	}{
		{
			name: "an enabled pod", view: namespaceView{pods: []corev1.Pod{pod("a", optedIn("Enabled"))}},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, want: map[string]string{"Ready": good}, says: "1 opted-in pod may use SMC-R",
		},
		{
			name: "peers that are not resolved", view: namespaceView{
				pods: []corev1.Pod{pod("a", optedIn("Enabled"))}, slices: []v1alpha1.SMCRPeerSlice{peerSlice("p-0", 2), peerSlice("p-1", 3)},
			},
			spec: everyPod, pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, want: map[string]string{"Ready": "False PeersPending"}, says: "not resolved",
		},
		{
			name: "peers that are resolved, though no pod is one", view: namespaceView{
				pods: []corev1.Pod{pod("a", optedIn("Enabled"))}, slices: []v1alpha1.SMCRPeerSlice{peerSlice("p-0", 3)},
			},
			spec: everyPod, pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, want: map[string]string{"Ready": good},
		},
		{
			name: "more peers than slices have room for, which comes before refused", view: namespaceView{
				pods: []corev1.Pod{pod("a", optedIn("Refused: REQUIRED"))}, slices: []v1alpha1.SMCRPeerSlice{*newSlice(resolvedPolicy(), 0, nil, 7)},
			},
			spec: everyPod, pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Refused: 1},
			want: map[string]string{"Ready": "False TooManyPeers", "Degraded": "True PodsRefused"}, says: "7 addresses more than the 16384",
		},
		{
			name: "no pods", pods: v1alpha1.PolicyPods{},
			want: map[string]string{"Ready": "False NoPods"}, says: "selects no running pod of namespace shop",
		},
		{
			name: "pods that do not count", view: namespaceView{pods: []corev1.Pod{
				pod("host", optedIn("Enabled"), func(p *corev1.Pod) { p.Spec.HostNetwork = true }),
				pod("done", optedIn("Enabled"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
				pod("starting", optedIn("Enabled"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }),
				pod("ending", optedIn("Enabled"), func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }),
				pod("other", optedIn("Enabled"), labelled("app", "db")),
			}},
			spec: selecting("web"), want: map[string]string{"Ready": "False NoPods"},
		},
		{
			name: "opted in by the namespace", view: namespaceView{annotations: map[string]string{v1alpha1.AnnotationEnabled: "true"}, pods: []corev1.Pod{pod("a")}},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Pending: 1}, want: map[string]string{"Ready": "False PodsPending"},
		},
		{
			name: "opted in by a claim, on which only agents report", view: namespaceView{
				annotations: map[string]string{v1alpha1.AnnotationEnabled: "false"}, pods: []corev1.Pod{
					pod("claims", claims("Enabled")),
					pod("fails", claims("Fallback: POD_DEVICE")),
					pod("claims, and is out", claims("Enabled"), func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = "false" }),
					pod("claims none"),
				},
			},
			pods: v1alpha1.PolicyPods{Matched: 4, OptedIn: 2, Accelerated: 1, Fallback: 1},
			want: map[string]string{"Ready": "False PodsFallback", "Degraded": "True PodsFallback"}, says: "1 of 2 opted-in pods on plain TCP: POD_DEVICE (1)",
		},
		{
			name: "a status that was copied into the template of pods that are not opted in", view: namespaceView{pods: []corev1.Pod{
				pod("a", func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationStatus] = "Enabled" }),
			}},
			pods: v1alpha1.PolicyPods{Matched: 1}, want: map[string]string{"Ready": "False NotOptedIn"},
		},
		{
			name: "a status that is no agent's", view: namespaceView{pods: []corev1.Pod{
				pod("a", optedIn("Fallback: "+strings.Repeat("X", 40<<10))), pod("b", optedIn("Fallback: \xff")), pod("c", optedIn("Fallback: 0x03050000")),
				pod("d", optedIn("enabled")),
			}},
			pods: v1alpha1.PolicyPods{Matched: 4, OptedIn: 4, Fallback: 3, Pending: 1},
			want: map[string]string{"Ready": "False PodsFallback", "Degraded": "True PodsFallback"}, says: "3 of 4 opted-in pods on plain TCP: UNKNOWN (2), 0x03050000 (1)\n",
		},
		{
			name: "junk means off", view: namespaceView{annotations: map[string]string{v1alpha1.AnnotationEnabled: "true"}, pods: []corev1.Pod{
				pod("a", func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = "True" }),
			}},
			pods: v1alpha1.PolicyPods{Matched: 1}, want: map[string]string{"Ready": "False NotOptedIn"}, says: "annotate the pods or namespace shop with smcr.io/enabled=true",
		},
		{
			name: "refused connections are not plain TCP", view: namespaceView{pods: []corev1.Pod{pod("a", optedIn("Enabled")), pod("b", optedIn("Refused: REQUIRED"))}},
			pods: v1alpha1.PolicyPods{Matched: 2, OptedIn: 2, Accelerated: 1, Refused: 1},
			want: map[string]string{"Ready": "False PodsRefused", "Degraded": "True PodsRefused"},
			says: "the connections of 1 of 2 opted-in pods are refused, because a policy requires SMC-R: REQUIRED (1)",
		},
		{
			name: "some refused, some plain TCP", view: namespaceView{pods: []corev1.Pod{pod("a", optedIn("Fallback: NO_OPTION")), pod("b", optedIn("Refused: REQUIRED, older connections live"))}},
			pods: v1alpha1.PolicyPods{Matched: 2, OptedIn: 2, Fallback: 1, Refused: 1},
			want: map[string]string{"Ready": "False PodsRefused", "Degraded": "True PodsRefused"}, says: "1 pod with refused connections; 1 pod on plain TCP",
		},
		{
			name: "fallback counts more than pending", view: namespaceView{pods: []corev1.Pod{
				pod("a", optedIn("Enabled")), pod("b", optedIn("Fallback: NO_OPTION")), pod("c", optedIn("Fallback")), pod("d", optedIn("Pending: NOT_ATTACHED")),
			}},
			pods: v1alpha1.PolicyPods{Matched: 4, OptedIn: 4, Accelerated: 1, Fallback: 2, Pending: 1},
			want: map[string]string{"Ready": "False PodsFallback", "Degraded": "True PodsFallback"}, says: "2 of 4 opted-in pods on plain TCP: NO_OPTION (1), UNKNOWN (1)",
		},
		{
			name: "pods on both datapaths", view: namespaceView{pods: []corev1.Pod{
				pod("a", optedIn("Enabled")), pod("b", optedIn("Enabled: KERNEL")), pod("c", optedIn("Enabled: KERNEL")),
			}},
			pods: v1alpha1.PolicyPods{Matched: 3, OptedIn: 3, Accelerated: 3, Kernel: 2}, want: map[string]string{"Ready": good}, says: "3 opted-in pods may use SMC-R",
		},
		{
			name: "the agent is back, and has not said so of a pod whose kernel carried on",
			view: namespaceView{pods: []corev1.Pod{pod("a", optedIn(v1alpha1.PodStatusKernelNoAgent))}},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1, Kernel: 1}, want: map[string]string{"Ready": good}, says: "1 opted-in pod may use SMC-R",
		},
		{
			name: "no agent answers, of a pod on the kernel's datapath",
			view: namespaceView{agentGone: map[string]bool{"n1": true}, pods: []corev1.Pod{pod("a", optedIn("Enabled: KERNEL")), pod("b", optedIn("Enabled: KERNEL, no agent"))}},
			pods: v1alpha1.PolicyPods{Matched: 2, OptedIn: 2, Pending: 2},
			want: map[string]string{"Ready": "False PodsPending", "Degraded": "True AgentsMissing"}, says: "no agent answers on 1 node with selected pods: n1",
		},
		{
			name: "no agent answers", view: namespaceView{agentGone: map[string]bool{"n1": true}, pods: []corev1.Pod{pod("a", optedIn("Enabled"))}},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Pending: 1},
			want: map[string]string{"Ready": "False PodsPending", "Degraded": "True AgentsMissing"}, says: "no agent answers on 1 node with selected pods: n1",
		},
		{
			name: "links of all kinds", view: namespaceView{
				pods: []corev1.Pod{pod("a", optedIn("Enabled"))},
				links: []v1alpha1.SMCRLink{
					link("a", v1alpha1.LinkActive, v1alpha1.RedundancySymmetric), link("a", v1alpha1.LinkActive, v1alpha1.RedundancyAsymmetric),
					link("a", v1alpha1.LinkActive, v1alpha1.RedundancySingle), link("a", v1alpha1.LinkEstablishing, v1alpha1.RedundancyNone),
					link("a", v1alpha1.LinkDown, v1alpha1.RedundancyNone), link("a", v1alpha1.LinkDown, v1alpha1.RedundancySymmetric),
					link("of-another-policy", v1alpha1.LinkActive, v1alpha1.RedundancySymmetric),
				},
			},
			pods:  v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1},
			links: v1alpha1.LinkGroupCounts{Total: 6, Active: 3, Establishing: 1, Down: 2, Symmetric: 2, Asymmetric: 1, Single: 1},
			want:  map[string]string{"Ready": good, "LinksRedundant": "False NotRedundant", "Degraded": "True LinksDown"},
			says:  "2 link groups down",
		},
		{
			name: "a link group that ends in good order", view: namespaceView{
				pods: []corev1.Pod{pod("a", optedIn("Enabled"))},
				links: []v1alpha1.SMCRLink{func() v1alpha1.SMCRLink {
					l := link("a", v1alpha1.LinkDown, v1alpha1.RedundancyNone)
					l.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonEnding}}
					return *trimLink(&l)
				}()},
			},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, links: v1alpha1.LinkGroupCounts{Total: 1}, want: map[string]string{"Ready": good},
		},
		{
			name: "a link group without a link", view: namespaceView{
				pods: []corev1.Pod{pod("a", optedIn("Enabled"))},
				links: []v1alpha1.SMCRLink{func() v1alpha1.SMCRLink {
					l := link("a", v1alpha1.LinkDown, v1alpha1.RedundancyNone)
					l.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: "NoActiveLink"}}
					return *trimLink(&l)
				}()},
			},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, links: v1alpha1.LinkGroupCounts{Total: 1, Down: 1},
			want: map[string]string{"Ready": good, "Degraded": "True LinksDown"},
		},
		{
			name: "nodes with one RNIC", view: namespaceView{
				oneRNIC: map[string]bool{"n1": true}, pods: []corev1.Pod{pod("a", optedIn("Enabled"))},
				links: []v1alpha1.SMCRLink{link("a", v1alpha1.LinkActive, v1alpha1.RedundancySingle)},
			},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, links: v1alpha1.LinkGroupCounts{Total: 1, Active: 1, Single: 1},
			want: map[string]string{"Ready": good, "LinksRedundant": "False OneRNIC"},
		},
		{
			name: "a peer with one RNIC", view: namespaceView{
				oneRNIC: map[string]bool{"n2": true}, pods: []corev1.Pod{pod("a", optedIn("Enabled"))},
				links: []v1alpha1.SMCRLink{func() v1alpha1.SMCRLink {
					l := link("a", v1alpha1.LinkActive, v1alpha1.RedundancyAsymmetric)
					l.Status.Peer = "n2"
					return l
				}()},
			},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, links: v1alpha1.LinkGroupCounts{Total: 1, Active: 1, Asymmetric: 1},
			want: map[string]string{"Ready": good, "LinksRedundant": "False OneRNIC"},
		},
		{
			name: "a node with one RNIC, and one that lost its second", view: namespaceView{
				oneRNIC: map[string]bool{"n2": true}, pods: []corev1.Pod{pod("a", optedIn("Enabled"))},
				links: []v1alpha1.SMCRLink{link("a", v1alpha1.LinkActive, v1alpha1.RedundancySingle)},
			},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, links: v1alpha1.LinkGroupCounts{Total: 1, Active: 1, Single: 1},
			want: map[string]string{"Ready": good, "LinksRedundant": "False NotRedundant"},
		},
		{
			name: "a device that the pod has for itself", view: namespaceView{
				oneRNIC: map[string]bool{"n1": true}, pods: []corev1.Pod{pod("a", optedIn("Enabled"))},
				links: []v1alpha1.SMCRLink{func() v1alpha1.SMCRLink {
					l := link("a", v1alpha1.LinkActive, v1alpha1.RedundancySingle)
					l.Status.PCIAddresses = "0000:3b:00.2"
					return l
				}()},
			},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, links: v1alpha1.LinkGroupCounts{Total: 1, Active: 1, Single: 1},
			want: map[string]string{"Ready": good, "LinksRedundant": "False NotRedundant"},
		},
		{
			name: "single links are all that is wanted", spec: func(s *v1alpha1.SMCRPolicySpec) { s.LinkRedundancy = v1alpha1.LinksSingle },
			view: namespaceView{
				pods:  []corev1.Pod{pod("a", optedIn("Enabled"))},
				links: []v1alpha1.SMCRLink{link("a", v1alpha1.LinkActive, v1alpha1.RedundancySingle)},
			},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, links: v1alpha1.LinkGroupCounts{Total: 1, Active: 1, Single: 1},
			want: map[string]string{"Ready": good, "LinksRedundant": "True AsWanted"},
		},
		{
			name: "links that pods share count for the policy that the agent names",
			view: namespaceView{
				pods: []corev1.Pod{pod("a", optedIn("Enabled"))},
				links: []v1alpha1.SMCRLink{func() v1alpha1.SMCRLink {
					l := link("*", v1alpha1.LinkActive, v1alpha1.RedundancySymmetric)
					l.Status.Policy = "p"
					return l
				}(), link("*", v1alpha1.LinkActive, v1alpha1.RedundancySymmetric)},
			},
			pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1}, links: v1alpha1.LinkGroupCounts{Total: 1, Active: 1, Symmetric: 1},
			want: map[string]string{"Ready": good, "LinksRedundant": "True AsWanted"},
		},
		{
			name: "an invalid policy selects nothing",
			spec: func(s *v1alpha1.SMCRPolicySpec) {
				s.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{"a b": "c"}
				s.Peers = &v1alpha1.PolicyPeers{CIDRs: []v1alpha1.CIDR{"10.0.0.300/8"}}
			},
			view: namespaceView{pods: []corev1.Pod{pod("a", optedIn("Enabled"))}},
			want: map[string]string{
				"Accepted": "False Invalid", "Ready": "False NotAccepted", "LinksRedundant": "Unknown NotAccepted",
				"Degraded": "Unknown NotAccepted", "Conflicting": "Unknown NotAccepted",
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newPolicy("shop", "p")
			if tt.spec != nil {
				tt.spec(&p.Spec)
			}
			p.Generation = 3
			v := tt.view
			v.name, v.policies = "shop", []*policy{compile(p)}
			st := aggregate(&v, metav1.Now())["p"]
			want := map[string]string{
				"Accepted": "True Valid", "LinksRedundant": "Unknown NoLinkGroups", "Degraded": "False Healthy", "Conflicting": "False NoConflict",
			}
			for k, w := range tt.want {
				want[k] = w
			}
			if d := cmp.Diff(want, statuses(st)); d != "" {
				t.Errorf("conditions (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.pods, st.Pods); d != "" {
				t.Errorf("pods (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.links, st.LinkGroups); d != "" {
				t.Errorf("link groups (-want +got):\n%s", d)
			}
			text := ""
			for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionDegraded} {
				c := meta.FindStatusCondition(st.Conditions, kind)
				text += c.Message + "\n"
				if c.ObservedGeneration != 3 || st.ObservedGeneration != 3 {
					t.Errorf("observedGeneration of %s is %d, of the status %d, want 3", kind, c.ObservedGeneration, st.ObservedGeneration)
				}
			}
			if !strings.Contains(text, tt.says) {
				t.Errorf("the messages lack %q:\n%s", tt.says, text)
			}
		})
	}
}

func TestAggregate_namesWhatIsInvalid(t *testing.T) {
	p := newPolicy("shop", "p", func(s *v1alpha1.SMCRPolicySpec) {
		s.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{"a b": "c"}
		s.Peers = &v1alpha1.PolicyPeers{
			Except:    []v1alpha1.CIDR{"10.0.0.300/8"},
			Selectors: []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{MatchExpressions: []v1alpha1.LabelRequirement{{Key: "x", Operator: "Near"}}}}},
		}
	})
	v := namespaceView{name: "shop", policies: []*policy{compile(p)}}
	got := meta.FindStatusCondition(aggregate(&v, metav1.Now())["p"].Conditions, v1alpha1.ConditionAccepted).Message
	for _, want := range []string{"spec.podSelector: ", "a b", "spec.peers.except[0]: want a network such as 10.0.0.0/8", "spec.peers.selectors[0].podSelector: ", "Near"} {
		if !strings.Contains(got, want) {
			t.Errorf("the message lacks %q:\n%s", want, got)
		}
	}
}

// The time of a condition is that of its last change, and what did not change is
// not written.
func TestAggregate_isStable(t *testing.T) {
	p := newPolicy("shop", "p")
	pods := []corev1.Pod{*newPod("shop", "a", "n", "10.0.0.1")}
	optedIn("Fallback: X")(&pods[0])
	look := func(now time.Time) v1alpha1.SMCRPolicyStatus {
		return aggregate(&namespaceView{name: "shop", policies: []*policy{compile(p)}, pods: pods}, metav1.NewTime(now))["p"]
	}
	t0 := time.Unix(1000, 0)
	p.Status = look(t0)
	if d := cmp.Diff(p.Status, look(t0.Add(time.Hour))); d != "" {
		t.Errorf("nothing happened in an hour, and yet (-before +after):\n%s", d)
	}
	optedIn("Enabled")(&pods[0])
	now := look(t0.Add(time.Hour))
	for kind, want := range map[string]time.Time{v1alpha1.ConditionReady: t0.Add(time.Hour), v1alpha1.ConditionAccepted: t0} {
		if c := meta.FindStatusCondition(now.Conditions, kind); !c.LastTransitionTime.Time.Equal(want) {
			t.Errorf("%s turned at %v, want %v", kind, c.LastTransitionTime, want)
		}
	}
}

func TestTopReasons(t *testing.T) {
	all := map[string]int32{"RARE": 1, "OFTEN": 9}
	for i := range maxReasons {
		all[fmt.Sprintf("R%02d", i)] = 2
	}
	got := topReasons(all)
	if len(got) != maxReasons || got[0].Reason != "OFTEN" || got[1].Reason != "R00" || got[maxReasons-1].Reason != "R14" {
		t.Errorf("reasons are %v, want the %d most frequent, equal ones by name", got, maxReasons)
	}
}
