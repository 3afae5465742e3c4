// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
)

// DecisionReason says why a connection may or may not be accelerated.
type DecisionReason uint8

// Decision reasons.
const (
	ReasonNoPolicy DecisionReason = iota // no policy selects the pod
	ReasonOptedOut                       // the pod is not opted in
	ReasonPeer                           // policies select the pod, but not this peer
	ReasonExcluded                       // the peer is among the exclusions
	ReasonPort                           // pod and peer are selected, the port is not
	ReasonMatch                          // a policy selects the connection
)

func (r DecisionReason) String() string {
	switch r {
	case ReasonNoPolicy:
		return "no policy selects the pod"
	case ReasonOptedOut:
		return "the pod is not opted in"
	case ReasonPeer:
		return "no policy of the pod selects the peer's address"
	case ReasonExcluded:
		return "the peer's address is excluded by the policy"
	case ReasonPort:
		return "no policy of the pod selects the port"
	case ReasonMatch:
		return "selected by the policy"
	}
	return fmt.Sprintf("decision reason %d", uint8(r))
}

// Decision is the answer of [Node.Decide].
type Decision struct {
	Accelerate bool
	// Required says that without SMC-R the connection is to be reset.
	Required bool
	// Policy is the policy that selects the connection. If none does, it is the one that
	// comes nearest: for example, one that selects pod and peer, but not the port.
	Policy string
	Reason DecisionReason
}

// Decide says whether a connection of the pod may use SMC-R. The peer is the other side's
// address with the port of the service, as a policy is about both directions:
//
//	10.0.0.1:40000 -> 10.0.0.2:6379
//	Decide(the pod with 10.0.0.1, 10.0.0.2:6379)  its outbound connection
//	Decide(the pod with 10.0.0.2, 10.0.0.1:6379)  the same, inbound to the other pod
//
// The first policy that selects the connection decides. In a configuration file at most
// one policy selects a connection; in a cluster the policies are in the order of their
// rank.
func (n *Node) Decide(pod Pod, peer netip.AddrPort) Decision {
	d := Decision{Reason: ReasonNoPolicy}
	nearer := func(r DecisionReason, policy string) {
		if r > d.Reason {
			d.Reason, d.Policy = r, policy
		}
	}
	policies := n.Policies
	if n.InCluster() {
		c, ok := n.podConfig(pod)
		if !ok {
			return Decision{Reason: ReasonOptedOut}
		}
		policies = c.Policies
	}
	addr := peer.Addr().Unmap().WithZone("")
	for i := range policies {
		p := &policies[i]
		switch {
		case !p.Pods.Matches(pod):
		case !p.hasPeer(addr):
			nearer(ReasonPeer, p.Name)
		case len(p.Except) > 0 && anyPrefix(p.Except, addr):
			nearer(ReasonExcluded, p.Name)
		case !p.hasPort(peer.Port()):
			nearer(ReasonPort, p.Name)
		default:
			return Decision{Accelerate: true, Required: p.Mode == ModeRequired, Policy: p.Name, Reason: ReasonMatch}
		}
	}
	return d
}

// podConfig returns the configuration of a pod of a cluster; ok is false if the pod is not
// opted in.
func (n *Node) podConfig(pod Pod) (_ PodConfig, ok bool) {
	c, ok := n.Pods[PodName{pod.Namespace, pod.Name}]
	if ok && c.UID != "" && pod.UID != "" && c.UID != pod.UID {
		return PodConfig{}, false // the configuration is for another pod of the same name
	}
	return c, ok
}

// SettingsFor returns the settings of a pod.
func (n *Node) SettingsFor(pod Pod) Settings {
	if c, ok := n.podConfig(pod); ok {
		return c.Settings
	}
	return n.settings()
}

// settings are the settings of a pod that no policy selects.
func (n *Node) settings() Settings {
	return Settings{RMBEBytes: n.RMBEBytes, SendBufferBytes: n.SendBufferBytes, Budget: n.PodBudget, Versions: n.Versions}
}

// PoliciesFor returns the policies that select the pod.
func (n *Node) PoliciesFor(pod Pod) []Policy {
	if n.InCluster() {
		c, _ := n.podConfig(pod)
		return c.Policies
	}
	var out []Policy
	for _, p := range n.Policies {
		if p.Pods.Matches(pod) {
			out = append(out, p)
		}
	}
	return out
}

// VersionOf returns the version of a policy that selects the pod; "" if the policy has no peer selectors.
func (n *Node) VersionOf(pod Pod, policy string) string {
	for _, p := range n.PoliciesFor(pod) {
		if p.Name == policy {
			return p.Version
		}
	}
	return ""
}

// HasVersion says whether a policy of that version selects the pod. The connections that the policy selected before, and selects no
// more, are then those with pods that its peer selectors do not find any more. The version "" says nothing.
func (n *Node) HasVersion(pod Pod, version string) bool {
	return version != "" && slices.ContainsFunc(n.PoliciesFor(pod), func(p Policy) bool { return p.Version == version })
}

// UnresolvedFor names the policies that select the pod and are not in force as they are now: see [Resolved].
func (n *Node) UnresolvedFor(pod Pod) []string {
	c, _ := n.podConfig(pod)
	return c.Unresolved
}

// OnlyPeersMoved says whether two states of a pod's policies differ in nothing but the addresses of selected pods, and the
// latter requires SMC-R of no connection of which the former does not.
func OnlyPeersMoved(was, is []Policy) bool {
	if len(was) != len(is) {
		return false
	}
	required := false // by a policy of lower rank
	for i := len(is) - 1; i >= 0; i-- {
		a, b := was[i], is[i]
		if required && !containsAll(b.Addresses, a.Addresses) || b.Mode == ModeRequired && !containsAll(a.Addresses, b.Addresses) {
			return false
		}
		required = required || b.Mode == ModeRequired
		if a.selectsAll() != b.selectsAll() {
			return false
		}
		a.Addresses, a.NoPeers = b.Addresses, b.NoPeers
		if !reflect.DeepEqual(a, b) {
			return false
		}
	}
	return true
}

// containsAll says whether all of the addresses are in set. Both are sorted.
func containsAll(set, addrs []netip.Addr) bool {
	for _, a := range addrs {
		if _, found := slices.BinarySearchFunc(set, a, netip.Addr.Compare); !found {
			return false
		}
	}
	return true
}

// selectsAll says whether all addresses are among the peers, without regard to Except.
func (p *Policy) selectsAll() bool { return !p.NoPeers && len(p.Peers) == 0 && len(p.Addresses) == 0 }

// DatapathFor returns what carries the connections of a pod, as the first policy that selects it wants, or
// DatapathAgent if there is none. It is DatapathAgent, too, if one of the policies has mode Required, as nobody
// refuses connections that the kernel makes plain TCP; overruled says so then, and is "" otherwise.
func (n *Node) DatapathFor(pod Pod) (d Datapath, overruled string) {
	return datapathOf(n.PoliciesFor(pod))
}

func datapathOf(ps []Policy) (d Datapath, overruled string) {
	if len(ps) == 0 || ps[0].Datapath == DatapathAgent {
		return DatapathAgent, ""
	}
	for _, p := range required(ps) {
		return DatapathAgent, fmt.Sprintf("policy %s wants datapath %v, and policy %s, which selects the pod too, has mode Required, which needs datapath Agent", ps[0].Name, ps[0].Datapath, p.Name)
	}
	return ps[0].Datapath, ""
}

// PolicyNames returns the names of all policies: in a cluster as NAMESPACE/NAME, sorted,
// and only of those that select a pod of the node.
func (n *Node) PolicyNames() []string {
	var out []string
	for _, p := range n.Policies {
		out = append(out, p.Name)
	}
	for pod, c := range n.Pods {
		for _, p := range c.Policies {
			if p.Name != DefaultPolicy {
				out = append(out, pod.Namespace+"/"+p.Name)
			}
		}
	}
	if n.InCluster() {
		slices.Sort(out)
		out = slices.Compact(out)
	}
	return out
}

// hasPeer says whether the address is among the peers. It does not look at Except.
func (p *Policy) hasPeer(a netip.Addr) bool {
	if p.NoPeers {
		return false
	}
	if _, found := slices.BinarySearchFunc(p.Addresses, a, netip.Addr.Compare); found {
		return true
	}
	return anyPrefix(p.Peers, a) && (len(p.Peers) > 0 || len(p.Addresses) == 0)
}

// Matches says whether the selector selects the pod.
func (s PodSelector) Matches(pod Pod) bool {
	return anyPattern(s.Namespaces, pod.Namespace) &&
		anyPattern(s.Names, pod.Name) &&
		anyPattern(s.Interfaces, pod.Interface)
}

func (p *Policy) hasPort(port uint16) bool {
	for _, r := range p.Ports {
		if r.Contains(port) {
			return true
		}
	}
	return len(p.Ports) == 0
}

// anyPrefix says whether a prefix of the list contains the address. It is true for an
// empty list, which means no restriction.
func anyPrefix(ps []netip.Prefix, a netip.Addr) bool {
	for _, p := range ps {
		if p.Contains(a) {
			return true
		}
	}
	return len(ps) == 0
}

func anyPattern(patterns []string, s string) bool {
	for _, p := range patterns {
		if matchPattern(p, s) {
			return true
		}
	}
	return len(patterns) == 0
}

// matchPattern says whether s matches a pattern in which * stands for any characters,
// also none. It backtracks to the last star only, so it takes len(p)*len(s) steps at
// most.
func matchPattern(p, s string) bool {
	star, mark := -1, 0
	i, j := 0, 0
	for j < len(s) {
		switch {
		case i < len(p) && p[i] == '*':
			star, mark = i, j
			i++
		case i < len(p) && p[i] == s[j]:
			i++
			j++
		case star >= 0:
			mark++
			i, j = star+1, mark
		default:
			return false
		}
	}
	for i < len(p) && p[i] == '*' {
		i++
	}
	return i == len(p)
}
