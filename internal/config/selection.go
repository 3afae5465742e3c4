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
//
// More may be returned than the policies select, where the exact set would be
// too large for a redirection: [Node.Decide] has the last word.
func (n *Node) Outbound(pod Pod) []Selection { return outbound(n.PoliciesFor(pod)) }

// OutboundRequired returns those of them that need SMC-R, where it is not to be
// had and the others are to be left alone. Here, too, Decide has the last word.
func (n *Node) OutboundRequired(pod Pod) []Selection {
	return outbound(slices.DeleteFunc(slices.Clone(n.PoliciesFor(pod)), func(p Policy) bool { return p.Mode != ModeRequired }))
}

func outbound(ps []Policy) []Selection {
	var out []Selection
	for _, p := range ps {
		if p.NoPeers {
			continue
		}
		for _, q := range p.destinations() {
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
	return bounded(out)
}

// destinations are the peers as prefixes, exclusions aside.
func (p *Policy) destinations() []netip.Prefix {
	if len(p.Addresses) == 0 {
		return peersOrAll(p.Peers)
	}
	out := slices.Clone(p.Peers)
	for _, a := range p.Addresses {
		if len(p.Peers) == 0 || !anyPrefix(p.Peers, a) {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return out
}

// bounded widens selections until a redirection can hold them.
func bounded(sel []Selection) []Selection {
	var (
		all       []netip.Prefix
		excluded  []Selection
		portLists [][]PortRange
		ranges    int // of ports, in all selections together
		distinct  int // at most so many different ones
	)
	for _, s := range sel {
		ranges += max(1, len(s.Ports))
		if s.Exclude {
			excluded = append(excluded, s)
			continue
		}
		all = append(all, s.Prefix)
		same := func(ports []PortRange) bool { return slices.Equal(ports, s.Ports) }
		if !slices.ContainsFunc(portLists, same) {
			portLists = append(portLists, s.Ports)
			distinct += max(1, len(s.Ports))
		}
	}
	if len(sel) <= maxSelections && ranges <= maxSelectionRanges && len(sel)*(2*distinct+1) <= maxSelectionBlocks {
		return sel
	}
	if len(excluded) > maxSelections/2 {
		excluded = nil // they are carried as plain TCP
	}
	all = joined(all)
	if len(portLists) == 1 { // neighbours joined, it may fit
		n, ports := len(all)+len(excluded), portLists[0]
		if n <= maxSelections && n*len(ports) <= maxSelectionRanges && n*(2*len(ports)+1) <= maxSelectionBlocks {
			return selections(all, ports, excluded)
		}
	}
	// All ports of wider and wider networks.
	for bits := 127; len(all)+len(excluded) > maxSelections; bits-- {
		for i, p := range all {
			// The two families are widened alike, as far as they are long.
			if b := max(0, bits-(128-p.Addr().BitLen())); p.Bits() > b {
				all[i] = netip.PrefixFrom(p.Addr(), b).Masked()
			}
		}
		all = joined(all)
	}
	return selections(all, nil, excluded)
}

func selections(prefixes []netip.Prefix, ports []PortRange, excluded []Selection) []Selection {
	var out []Selection
	for _, p := range prefixes {
		out = append(out, Selection{Prefix: p, Ports: ports})
	}
	return append(out, excluded...)
}

// joined sorts prefixes, drops those that lie in others, and makes one of two
// that are the halves of one.
func joined(ps []netip.Prefix) []netip.Prefix {
	slices.SortFunc(ps, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	out := ps[:0:0]
	for _, p := range ps {
		if n := len(out); n > 0 && out[n-1].Overlaps(p) {
			continue
		}
		out = append(out, p)
		for n := len(out); n > 1 && out[n-1].Bits() > 0; n = len(out) {
			parent := netip.PrefixFrom(out[n-1].Addr(), out[n-1].Bits()-1).Masked()
			if out[n-2].Bits() != out[n-1].Bits() || !parent.Contains(out[n-2].Addr()) {
				break
			}
			out = append(out[:n-2], parent)
		}
	}
	return out
}

// InboundPorts returns the ports of the pod whose SYNs with the option are to
// be diverted, or all.
func (n *Node) InboundPorts(pod Pod) (ports []PortRange, all bool) {
	for _, p := range n.PoliciesFor(pod) {
		if p.NoPeers {
			continue
		}
		if len(p.Ports) == 0 {
			return nil, true
		}
		ports = append(ports, p.Ports...)
	}
	if ports = merge(ports); len(ports) > maxInboundPorts {
		return nil, true
	}
	return ports, false
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
