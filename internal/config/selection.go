// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
)

// Selection is a set of destinations of a pod that are to be diverted, or, with Exclude,
// that are not although another Selection contains them.
type Selection struct {
	Prefix  netip.Prefix
	Ports   []PortRange // none: all
	Exclude bool
}

// Outbound returns the destinations that are to be diverted for a pod, which is given once for each of its
// interfaces, as these have one redirection.
//
// An exclusion is for all selections. So exclusions are returned only if a single policy
// selects the pod. With two policies, for example 10.0.0.0/8 except 10.1.0.0/16, and
// 10.1.0.0/16, the exclusion of the first would take out what the second selects: then the
// prefixes are split instead.
//
// If the exact set would be too large for a redirection, a larger set of destinations is
// returned. For each diverted connection [Node.Decide] decides exactly.
func (n *Node) Outbound(pods ...Pod) []Selection { return outbound(n.policiesFor(pods)) }

// policiesFor returns the policies that select one of the pods, each once.
func (n *Node) policiesFor(pods []Pod) (out []Policy) {
	if len(pods) == 1 {
		return n.PoliciesFor(pods[0])
	}
	for _, pod := range pods {
		for _, p := range n.PoliciesFor(pod) {
			if !slices.ContainsFunc(out, func(q Policy) bool { return p.Name == q.Name && reflect.DeepEqual(p, q) }) {
				out = append(out, p)
			}
		}
	}
	return out
}

// OutboundRequired returns the destinations of policies with mode Required. They are the
// ones to divert when SMC-R is not possible: their connections must be reset, while all
// others go directly. As with Outbound, the set may be larger than the policies select.
func (n *Node) OutboundRequired(pods ...Pod) []Selection {
	return outbound(required(n.policiesFor(pods)))
}

// ErrTooMany is the error of [Node.Exactly] for a set that is too large for a pod's kernel.
var ErrTooMany = errors.New("more networks and ports than its kernel can be told: use fewer, wider ones")

// Exactly returns the peers of the pod, with the ports of the service, on whichever side that is: what
// Outbound returns, unless the exact set is too large. Then it is returned with [ErrTooMany]. It is for the pod's kernel,
// which asks nobody to decide exactly.
func (n *Node) Exactly(pods ...Pod) (sel []Selection, err error) {
	if sel = exact(n.policiesFor(pods)); !fits(sel) {
		err = fmt.Errorf("the policies of %v select %w", pods[0], ErrTooMany)
	}
	return sel, err
}

func outbound(ps []Policy) []Selection { return bounded(exact(ps)) }

func exact(ps []Policy) []Selection {
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
	return out
}

// destinations are the peers as prefixes, without regard to Except.
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

// fits says whether selections fit the limits of a redirection.
func fits(sel []Selection) bool {
	ranges, distinct := 0, 0 // of ports: in all selections together, and at most so many different ones
	for _, s := range sel {
		ranges += max(1, len(s.Ports))
	}
	for _, ports := range portLists(sel) {
		distinct += max(1, len(ports))
	}
	return len(sel) <= maxSelections && ranges <= maxSelectionRanges && len(sel)*(2*distinct+1) <= maxSelectionBlocks
}

// portLists are the different lists of ports of what is not excluded.
func portLists(sel []Selection) (lists [][]PortRange) {
	for _, s := range sel {
		same := func(ports []PortRange) bool { return slices.Equal(ports, s.Ports) }
		if !s.Exclude && !slices.ContainsFunc(lists, same) {
			lists = append(lists, s.Ports)
		}
	}
	return lists
}

// bounded widens selections until they fit the limits of a redirection.
func bounded(sel []Selection) []Selection {
	if fits(sel) {
		return sel
	}
	var (
		all       []netip.Prefix
		excluded  []Selection
		portLists = portLists(sel)
	)
	for _, s := range sel {
		if s.Exclude {
			excluded = append(excluded, s)
		} else {
			all = append(all, s.Prefix)
		}
	}
	if len(excluded) > maxSelections/2 {
		excluded = nil // they are carried as plain TCP
	}
	all = joined(all)
	if len(portLists) == 1 { // with adjacent prefixes joined, the selections may fit
		n, ports := len(all)+len(excluded), portLists[0]
		if n <= maxSelections && n*len(ports) <= maxSelectionRanges && n*(2*len(ports)+1) <= maxSelectionBlocks {
			return selections(all, ports, excluded)
		}
	}
	// Give up the ports, and widen the networks bit by bit.
	for bits := 127; len(all)+len(excluded) > maxSelections; bits-- {
		for i, p := range all {
			// bits is for IPv6. IPv4 addresses have 96 bits less, so bits 127 is /31 there.
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

// joined sorts prefixes, drops those that are inside others, and joins two that are the
// halves of a shorter prefix.
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
func (n *Node) InboundPorts(pods ...Pod) (ports []PortRange, all bool) {
	return inboundPorts(n.policiesFor(pods))
}

// InboundPortsRequired returns the ports of policies with mode Required, which are the ones
// to divert when SMC-R is not possible.
func (n *Node) InboundPortsRequired(pods ...Pod) (ports []PortRange, all bool) {
	return inboundPorts(required(n.policiesFor(pods)))
}

// required returns the policies with mode Required.
func required(ps []Policy) []Policy {
	return slices.DeleteFunc(slices.Clone(ps), func(p Policy) bool { return p.Mode != ModeRequired })
}

func inboundPorts(ps []Policy) (ports []PortRange, all bool) {
	for _, p := range ps {
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
