// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// A conflict is another policy of the same priority that selects one of the same pods and has
// other settings for that pod.
type conflict struct {
	other *v1alpha1.SMCRPolicy
	what  string // the fields that differ
}

// findConflicts returns the conflicts of each policy. sets are the sets of
// policies that select one pod, in the order of their rank.
func findConflicts(sets [][]*policy) map[*policy][]conflict {
	out := map[*policy][]conflict{}
	type pair struct{ a, b *policy }
	seen := map[pair]bool{}
	for _, set := range sets {
		for i, a := range set {
			for _, b := range set[i+1:] {
				if a.obj.Spec.Priority != b.obj.Spec.Priority {
					break // sorted by priority: the following ones have another priority too
				}
				if seen[pair{a, b}] {
					continue
				}
				seen[pair{a, b}] = true
				if what := differences(&a.obj.Spec, &b.obj.Spec); what != "" {
					out[a] = append(out[a], conflict{b.obj, what})
					out[b] = append(out[b], conflict{a.obj, what})
				}
			}
		}
	}
	for _, cs := range out {
		slices.SortFunc(cs, func(a, b conflict) int { return strings.Compare(a.other.Name, b.other.Name) })
	}
	return out
}

// differences names the fields in which two policies contradict each other on a
// pod that both select: settings of the whole pod, and the mode of connections
// that both select.
func differences(a, b *v1alpha1.SMCRPolicySpec) string {
	var out []string
	differ := func(field string, different bool) {
		if different {
			out = append(out, field)
		}
	}
	differ("mode", a.Mode != b.Mode && portsIntersect(a.Ports, b.Ports))
	differ("buffers", !equality.Semantic.DeepEqual(a.Buffers, b.Buffers))
	differ("budget", !equality.Semantic.DeepEqual(a.Budget, b.Budget))
	differ("linkRedundancy", a.LinkRedundancy != b.LinkRedundancy)
	differ("transports", !sameSet(a.Transports, b.Transports))
	differ("isolation", a.Isolation != b.Isolation)
	differ("versions", !sameSet(a.Versions, b.Versions))
	return strings.Join(out, ", ")
}

func sameSet[T ~string](a, b []T) bool {
	if len(a) != len(b) {
		return false
	}
	for _, v := range a {
		if !slices.Contains(b, v) {
			return false
		}
	}
	return true
}

// portsIntersect says whether a port is in both lists. An empty list has all ports.
func portsIntersect(a, b []v1alpha1.PolicyPort) bool {
	if len(a) == 0 || len(b) == 0 {
		return true
	}
	last := func(p v1alpha1.PolicyPort) int32 {
		if p.EndPort != nil {
			return *p.EndPort
		}
		return p.Port
	}
	for _, x := range a {
		for _, y := range b {
			if max(x.Port, y.Port) <= min(last(x), last(y)) {
				return true
			}
		}
	}
	return false
}

// conflictMessage names the conflicting policies, the fields in which they differ, and
// which policy comes first.
func conflictMessage(p *v1alpha1.SMCRPolicy, cs []conflict) string {
	var parts []string
	for _, c := range cs[:min(len(cs), maxNames)] {
		first := p.Name
		if v1alpha1.CompareRank(c.other, p) < 0 {
			first = c.other.Name
		}
		parts = append(parts, fmt.Sprintf("%s (%s; %s comes first)", c.other.Name, c.what, first))
	}
	if more := len(cs) - maxNames; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
	}
	return "selects the same pods with the same priority and other settings: " + strings.Join(parts, ", ") +
		"; give one of them a higher spec.priority"
}
