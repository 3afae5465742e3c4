// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"net/netip"
	"slices"
)

// Selection is a set of destinations of a pod that policies select, or with
// Exclude take out again.
type Selection struct {
	Prefix  netip.Prefix
	Ports   []PortRange // none: all
	Exclude bool
}

// Outbound returns the destinations that are to be diverted for the pod. An
// exclusion holds against every selection, so it is used only where a single
// policy selects the pod; otherwise one policy's exclusion would take out what
// another one selects, and the prefixes are split instead.
func (n *Node) Outbound(pod Pod) []Selection {
	ps := n.PoliciesFor(pod)
	var out []Selection
	for _, p := range ps {
		for _, q := range peersOrAll(p.Peers) {
			if len(ps) == 1 {
				out = append(out, Selection{Prefix: q, Ports: p.Ports})
				continue
			}
			for _, part := range subtract(nil, q, p.Except) {
				out = append(out, Selection{Prefix: part, Ports: p.Ports})
			}
		}
		if len(ps) == 1 {
			for _, e := range p.Except {
				out = append(out, Selection{Prefix: e, Exclude: true})
			}
		}
	}
	return out
}

// InboundPorts returns the ports of the pod whose SYNs with the option are to
// be diverted, or all.
func (n *Node) InboundPorts(pod Pod) (ports []PortRange, all bool) {
	for _, p := range n.PoliciesFor(pod) {
		if len(p.Ports) == 0 {
			return nil, true
		}
		ports = append(ports, p.Ports...)
	}
	return merge(ports), false
}

// merge joins ranges that overlap or touch.
func merge(rs []PortRange) []PortRange {
	slices.SortFunc(rs, func(a, b PortRange) int { return cmp.Compare(a.First, b.First) })
	var out []PortRange
	for _, r := range rs {
		if n := len(out); n > 0 && int(r.First) <= int(out[n-1].Last)+1 {
			out[n-1].Last = max(out[n-1].Last, r.Last)
		} else {
			out = append(out, r)
		}
	}
	return out
}

// subtract appends the parts of p outside the exclusions.
func subtract(out []netip.Prefix, p netip.Prefix, except []netip.Prefix) []netip.Prefix {
	var inside []netip.Prefix
	for _, e := range except {
		if !e.Overlaps(p) {
			continue
		}
		if e.Bits() <= p.Bits() {
			return out
		}
		inside = append(inside, e)
	}
	if len(inside) == 0 {
		return append(out, p)
	}
	low, high := halves(p)
	return subtract(subtract(out, low, inside), high, inside)
}
