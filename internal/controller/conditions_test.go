// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// set makes a set of names.
func set(names ...string) map[string]bool {
	out := map[string]bool{}
	for _, n := range names {
		out[n] = true
	}
	return out
}

// TestConditions: which condition a policy's counts make, and what the condition's message says. Where
// several things are wrong, the worst one is the reason.
func TestConditions(t *testing.T) {
	pods := func(p v1alpha1.PolicyPods, reasons map[string]int32) sums { return sums{pods: p, reasons: reasons} }
	for _, tt := range []struct {
		name string
		sums sums
		of   func(*sums, *policy) metav1.Condition
		want string // "Status Reason"
		says string // in the message
	}{
		{
			"valid",
			sums{},
			(*sums).accepted,
			"True Valid", "the policy is valid",
		},
		{
			"no pod is selected",
			sums{},
			ready,
			"False NoPods", "podSelector selects no running pod of namespace shop",
		},
		{
			"nobody opted in", pods(v1alpha1.PolicyPods{Matched: 2}, nil), ready,
			"False NotOptedIn", "2 pods selected, none of them opted in",
		},
		{
			"pending", pods(v1alpha1.PolicyPods{Matched: 3, OptedIn: 3, Accelerated: 2, Pending: 1}, nil), ready,
			"False PodsPending", "1 of 3 opted-in pods not attached yet",
		},
		{
			"plain TCP comes before pending", pods(v1alpha1.PolicyPods{Matched: 2, OptedIn: 2, Fallback: 1, Pending: 1}, map[string]int32{"NO_OPTION": 1}), ready,
			"False PodsFallback", "1 of 2 opted-in pods on plain TCP: NO_OPTION (1)",
		},
		{
			"refused comes before pending", pods(v1alpha1.PolicyPods{Matched: 2, OptedIn: 2, Refused: 1, Pending: 1}, map[string]int32{"REQUIRED": 1}), ready,
			"False PodsRefused", "the connections of 1 of 2 opted-in pods are refused, because a policy requires SMC-R: REQUIRED (1)",
		},
		{
			"refused comes before plain TCP", pods(v1alpha1.PolicyPods{Matched: 3, OptedIn: 3, Refused: 2, Fallback: 1}, map[string]int32{"REQUIRED": 2, "NO_OPTION": 1}), ready,
			"False PodsRefused", "the connections of 2 of 3 opted-in pods are refused, because a policy requires SMC-R, and those of 1 are plain TCP: REQUIRED (2), NO_OPTION (1)",
		},
		{
			"all pods may use SMC-R", pods(v1alpha1.PolicyPods{Matched: 3, OptedIn: 2, Accelerated: 2}, nil), ready,
			"True AllAccelerated", "2 opted-in pods may use SMC-R",
		},
		{
			"no link group",
			sums{notRedundant: 1, oneRNIC: 1},
			(*sums).linksRedundant,
			"Unknown NoLinkGroups", "no link group",
		},
		{
			"less redundant than the nodes allow",
			sums{links: v1alpha1.LinkGroupCounts{Active: 3}, notRedundant: 1, oneRNIC: 1, oneRNICNodes: set("n1")},
			(*sums).linksRedundant,
			"False NotRedundant", "1 of 3 active link groups cannot lose any one RNIC, linkRedundancy wants that: see REDUNDANCY of kubectl get smcrlinks -l " + v1alpha1.LabelNamespace + "=shop",
		},
		{
			"nodes with one RNIC",
			sums{links: v1alpha1.LinkGroupCounts{Active: 1}, oneRNIC: 1, oneRNICNodes: set("n2", "n1")},
			(*sums).linksRedundant,
			"False OneRNIC", "1 of 1 active link group cannot lose any one RNIC, because their nodes have one: n1, n2;",
		},
		{
			"as redundant as wanted",
			sums{links: v1alpha1.LinkGroupCounts{Active: 2}},
			(*sums).linksRedundant,
			"True AsWanted", "2 active link groups as redundant as wanted",
		},
		{
			"healthy", pods(v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Pending: 1}, nil), (*sums).degraded,
			"False Healthy", "no link group is down and no pod fell back",
		},
		{
			"everything is wrong",
			sums{
				agentless: set("n2", "n1"), links: v1alpha1.LinkGroupCounts{Down: 3}, pods: v1alpha1.PolicyPods{Refused: 2, Fallback: 1},
			},
			(*sums).degraded,
			"True AgentsMissing", "no agent answers on 2 nodes with selected pods: n1, n2; 3 link groups down; 2 pods with refused connections; 1 pod on plain TCP",
		},
		{
			"link groups are down, and pods on plain TCP",
			sums{links: v1alpha1.LinkGroupCounts{Down: 1}, pods: v1alpha1.PolicyPods{Fallback: 1}},
			(*sums).degraded,
			"True LinksDown", "1 link group down; 1 pod on plain TCP",
		},
		{
			"refused connections",
			sums{pods: v1alpha1.PolicyPods{Refused: 1, Fallback: 1}},
			(*sums).degraded,
			"True PodsRefused", "1 pod with refused connections; 1 pod on plain TCP",
		},
		{
			"no conflict",
			sums{},
			(*sums).conflicting,
			"False NoConflict", "no policy of the same priority",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := tt.of(&tt.sums, compile(newPolicy("shop", "p")))
			if got := string(c.Status) + " " + c.Reason; got != tt.want {
				t.Errorf("%s: %s, want %s", c.Type, got, tt.want)
			}
			if !strings.Contains(c.Message, tt.says) {
				t.Errorf("%s: the message is %q, want one with %q", c.Type, c.Message, tt.says)
			}
		})
	}
}

func ready(s *sums, p *policy) metav1.Condition { return s.ready(p, "shop") }

// TestConditions_invalid: a policy that is not valid has this one thing to say, in one line, and no
// other condition claims to know more.
func TestConditions_invalid(t *testing.T) {
	p := compile(newPolicy("shop", "p"))
	p.err = errors.Join(errors.New("spec.ports[0]: no"), errors.New("spec.ports[1]: no"))
	s := &sums{pods: v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Fallback: 1}, links: v1alpha1.LinkGroupCounts{Active: 1, Down: 1}, conflicts: make([]conflict, 1)}
	if c := s.accepted(p); c.Status != metav1.ConditionFalse || c.Reason != reasonInvalid ||
		c.Message != "spec.ports[0]: no; spec.ports[1]: no; the policy selects nothing until this is corrected" {
		t.Errorf("Accepted is %s %s: %q", c.Status, c.Reason, c.Message)
	}
	if c := s.ready(p, "shop"); c.Status != metav1.ConditionFalse || c.Reason != reasonNotAccepted {
		t.Errorf("Ready is %s %s", c.Status, c.Reason)
	}
	for _, c := range []metav1.Condition{s.linksRedundant(p), s.degraded(p), s.conflicting(p)} {
		if c.Status != metav1.ConditionUnknown || c.Reason != reasonNotAccepted || !strings.Contains(c.Message, "see the condition Accepted") {
			t.Errorf("%s is %s %s: %q", c.Type, c.Status, c.Reason, c.Message)
		}
	}
}

// TestListReasons: the most frequent reasons come first, and a message lists no more than maxNames.
func TestListReasons(t *testing.T) {
	n := map[string]int32{}
	for i := range maxNames + 2 {
		n[fmt.Sprintf("R%d", i)] = int32(i + 1)
	}
	if got, want := listReasons(n), "R6 (7), R5 (6), R4 (5), R3 (4), R2 (3)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// A message is as long as the API server accepts, and no letter is cut in two.
func TestCondition_fits(t *testing.T) {
	got := condition("Accepted", metav1.ConditionFalse, "Invalid", "x"+strings.Repeat("ü", maxMessage)).Message
	if len(got) != maxMessage-1 || !utf8.ValidString(got) {
		t.Errorf("the message has %d bytes, valid: %t", len(got), utf8.ValidString(got))
	}
}
