// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// A conflict is another policy that selects one of the same pods and wants what cannot be had
// together with what this policy wants. There are two kinds:
//
//   - Both have the same priority, and settings of the pod differ: age or name decides
//     which one holds.
//   - The first policy of the pod wants datapath Kernel, and another one, of any priority,
//     has mode Required, which only datapath Agent can keep: the pod is on Agent.
type conflict struct {
	other *v1alpha1.SMCRPolicy
	what  string // the fields that differ; "" for the second kind
}

// findConflicts returns the conflicts of each policy. Each of sets has the policies that select
// one pod, at least one, in the order of their rank.
func findConflicts(sets [][]*policy) map[*policy][]conflict {
	out := map[*policy][]conflict{}
	type pair struct{ a, b *policy }
	note := func(p pair, what string) {
		out[p.a] = append(out[p.a], conflict{p.b.obj, what})
		out[p.b] = append(out[p.b], conflict{p.a.obj, what})
	}
	overruled, compared := map[pair]bool{}, map[pair]bool{} // pairs that were looked at
	for _, set := range sets {
		for _, b := range set[1:] {
			if p := (pair{set[0], b}); !overruled[p] && overrules(&b.obj.Spec, &p.a.obj.Spec) {
				overruled[p] = true
				note(p, "")
			}
		}
		for i, a := range set {
			for _, b := range set[i+1:] {
				if a.obj.Spec.Priority != b.obj.Spec.Priority {
					break // sorted by priority: the following ones have another priority too
				}
				p := pair{a, b}
				if compared[p] {
					continue
				}
				compared[p] = true
				if what := differences(&a.obj.Spec, &b.obj.Spec); what != "" {
					note(p, what)
				}
			}
		}
	}
	for _, cs := range out {
		slices.SortFunc(cs, func(a, b conflict) int { return strings.Compare(a.other.Name, b.other.Name) })
	}
	return out
}

// overrules says whether a policy with mode Required keeps a pod off the datapath Kernel that the
// first policy of the pod wants: on that datapath nobody refuses connections that the kernel
// makes plain TCP.
func overrules(p, first *v1alpha1.SMCRPolicySpec) bool {
	return wantsKernel(first) && p.Mode == v1alpha1.ModeRequired
}

func wantsKernel(p *v1alpha1.SMCRPolicySpec) bool {
	return p.Datapath == v1alpha1.DatapathKernel || p.Datapath == v1alpha1.DatapathKernelIfAvailable
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
	differ("datapath", a.Datapath != b.Datapath)
	differ("mode", a.Mode != b.Mode && portsIntersect(a.Ports, b.Ports) && mayShareAPeer(a.Peers, b.Peers))
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
	for _, x := range a {
		for _, y := range b {
			if max(x.Port, y.Port) <= min(lastPort(x), lastPort(y)) {
				return true
			}
		}
	}
	return false
}

// mayShareAPeer says whether an address may be a peer of both. The answer is yes where it is not
// known: if one has selectors or the agents' default peers, and if no single network of except,
// but several together, contain all that both have in common.
func mayShareAPeer(a, b *v1alpha1.PolicyPeers) bool {
	if a == nil || b == nil || len(a.CIDRs) == 0 || len(b.CIDRs) == 0 || len(a.Selectors) > 0 || len(b.Selectors) > 0 {
		return true
	}
	except := append(prefixes(a.Except), prefixes(b.Except)...)
	others := prefixes(b.CIDRs)
	for _, x := range prefixes(a.CIDRs) {
		for _, y := range others {
			if !x.Overlaps(y) {
				continue
			}
			both := x // of two networks that overlap the smaller one is in the other
			if y.Bits() > x.Bits() {
				both = y
			}
			if !slices.ContainsFunc(except, func(e netip.Prefix) bool { return e.Overlaps(both) && e.Bits() <= both.Bits() }) {
				return true
			}
		}
	}
	return false
}

// prefixes are the networks of a list, without those that cannot be parsed. compile has reported
// these, and a policy with a mistake selects no pods.
func prefixes(cidrs []v1alpha1.CIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, c := range cidrs {
		if p, err := netip.ParsePrefix(string(c)); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// conflictMessage names the conflicting policies: first those whose mode excludes a datapath,
// then those of the same priority, with the fields in which they differ and the policy that
// comes first.
func conflictMessage(p *v1alpha1.SMCRPolicy, all []conflict) string {
	var differing []conflict
	var sentences []string
	excluding := map[string]bool{}
	for _, c := range all {
		if c.what != "" {
			differing = append(differing, c)
		} else {
			excluding[c.other.Name] = true
		}
	}
	if len(excluding) > 0 {
		who, what, wants := some(excluding), "mode Required", "datapath "+string(p.Spec.Datapath)
		if p.Spec.Mode == v1alpha1.ModeRequired {
			what, wants = "datapath Kernel or KernelIfAvailable", "mode Required"
		}
		sentences = append(sentences, fmt.Sprintf("has %s and selects pods of %s with %s: these are on datapath Agent, which mode Required needs", wants, who, what))
	}
	if len(differing) > 0 {
		sentences = append(sentences, sameRank(p, differing))
	}
	return strings.Join(sentences, "; ")
}

// sameRank is the part of a message that is about policies of the same priority.
func sameRank(p *v1alpha1.SMCRPolicy, cs []conflict) string {
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
