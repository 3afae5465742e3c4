// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
)

// overlap names a connection that both policies select; "" if there is none.
func overlap(a, b *Policy) string {
	if !a.Pods.intersects(&b.Pods) {
		return ""
	}
	port, ok := portsIntersect(a.Ports, b.Ports)
	if !ok {
		return ""
	}
	peer, ok := peersIntersect(a, b)
	if !ok {
		return ""
	}
	return fmt.Sprintf("peer %v, port %d", peer, port)
}

// intersects says whether a pod can match both selectors.
func (s *PodSelector) intersects(o *PodSelector) bool {
	return patternsIntersect(s.Namespaces, o.Namespaces) && patternsIntersect(s.Names, o.Names) &&
		patternsIntersect(s.Interfaces, o.Interfaces)
}

func patternsIntersect(a, b []string) bool {
	if len(a) == 0 || len(b) == 0 {
		return true
	}
	for _, x := range a {
		for _, y := range b {
			if patternIntersects(x, y) {
				return true
			}
		}
	}
	return false
}

// patternIntersects says whether a string matches both patterns. For example, web-* and
// *-1 have web-1 in common. reach[j] says whether a string matches both y[:j] and the part
// of x that was read so far.
func patternIntersects(x, y string) bool {
	reach := make([]bool, len(y)+1)
	reach[0] = true
	for j := 1; j <= len(y) && y[j-1] == '*'; j++ {
		reach[j] = true
	}
	for i := 1; i <= len(x); i++ {
		next := make([]bool, len(y)+1)
		for j := 0; j <= len(y); j++ {
			xs := x[i-1] == '*'
			ys := j > 0 && y[j-1] == '*'
			next[j] = (xs && (reach[j] || j > 0 && next[j-1])) ||
				(ys && (reach[j] || next[j-1])) ||
				(j > 0 && reach[j-1] && (xs || ys || x[i-1] == y[j-1]))
		}
		reach = next
	}
	return reach[len(y)]
}

func portsIntersect(a, b []PortRange) (uint16, bool) {
	all := []PortRange{{1, 65535}}
	if len(a) == 0 {
		a = all
	}
	if len(b) == 0 {
		b = all
	}
	for _, x := range a {
		for _, y := range b {
			if first := max(x.First, y.First); first <= min(x.Last, y.Last) {
				return first, true
			}
		}
	}
	return 0, false
}

// peersIntersect returns a prefix whose addresses both policies select.
func peersIntersect(a, b *Policy) (netip.Prefix, bool) {
	except := make([]netip.Prefix, 0, len(a.Except)+len(b.Except))
	except = append(append(except, a.Except...), b.Except...)
	for _, x := range peersOrAll(a.Peers) {
		for _, y := range peersOrAll(b.Peers) {
			if !x.Overlaps(y) {
				continue
			}
			if y.Bits() > x.Bits() {
				x = y // the longer one is the intersection
			}
			if left, ok := remainder(x, except); ok {
				return left, true
			}
		}
	}
	return netip.Prefix{}, false
}

func peersOrAll(ps []netip.Prefix) []netip.Prefix {
	if len(ps) > 0 {
		return ps
	}
	return []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
}

// remainder finds a part of p that no exclusion overlaps. It halves p until a half has no
// exclusion inside. Each exclusion inside p costs at most as many halvings as its length
// has bits.
func remainder(p netip.Prefix, except []netip.Prefix) (netip.Prefix, bool) {
	var inside []netip.Prefix
	for _, e := range except {
		if !e.Overlaps(p) {
			continue
		}
		if e.Bits() <= p.Bits() {
			return netip.Prefix{}, false
		}
		inside = append(inside, e)
	}
	if len(inside) == 0 {
		return p, true
	}
	low, high := halves(p)
	if left, ok := remainder(low, inside); ok {
		return left, true
	}
	return remainder(high, inside)
}

func halves(p netip.Prefix) (low, high netip.Prefix) {
	bits := p.Bits() + 1
	low = netip.PrefixFrom(p.Addr(), bits)
	b := p.Addr().AsSlice()
	b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	a, _ := netip.AddrFromSlice(b)
	return low, netip.PrefixFrom(a, bits)
}
