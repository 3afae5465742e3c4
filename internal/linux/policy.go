// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// A PortRange is the ports from First to Last, both included.
type PortRange struct {
	First, Last uint16
}

// An OutboundRule selects destinations, or excludes them.
type OutboundRule struct {
	Prefix  netip.Prefix
	Ports   []PortRange // none: all ports
	Exclude bool        // an exclusion beats every selection, in any order
}

// RedirectConfig says what is diverted to the agent in one pod's namespace.
type RedirectConfig struct {
	// Mark is the socket mark of the agent's connections and listeners
	// towards the network. They are never diverted.
	Mark uint32
	// AppMark is the socket mark of the agent's connections to the
	// application under a client's address (see DialFrom); what carries it
	// is routed to loopback. It differs from Mark.
	AppMark uint32
	// PlainMark, unless 0, is the mark of the agent's connections towards the network
	// that must not offer SMC-R. They are never diverted either, and the program that
	// writes the option does not know this mark.
	PlainMark uint32
	// OutboundPort is where the agent listens for diverted connections of the
	// application, on 127.0.0.1 and, unless IPv4Only, ::1 of the pod's namespace.
	OutboundPort uint16
	// InboundPort is where the agent's transparent listener waits for
	// diverted connections from the network, on 127.0.0.1 and, unless IPv4Only, ::1.
	InboundPort uint16
	// IPv4Only says that the agent listens on 127.0.0.1 only, as the namespace has no IPv6 on
	// loopback. Then no IPv6 connection can be diverted: those to destinations in Outbound are
	// refused, unless Hold leaves the verdict to the agent, and those from the network go to
	// the application. A program learns of the refusal only if loopback has IPv6 after all.
	IPv4Only bool
	// Outbound selects the destinations. None: nothing is diverted.
	Outbound []OutboundRule
	// InboundAll diverts SYNs with the option to every port, otherwise only
	// to those in Inbound.
	InboundAll bool
	Inbound    []PortRange
	// InboundExcept are clients whose SYNs are not diverted, but for those to the
	// ports in InboundAlways.
	InboundExcept []netip.Addr
	InboundAlways []PortRange
	// WhenCaught is what happens to connections to selected destinations while the set
	// "caught" has an element, because another program redirects connections.
	WhenCaught WhenCaught
	// Required are the destinations whose SYNs CaughtDrop drops. It is used with
	// CaughtDrop only.
	Required []OutboundRule
	// Untracked excludes connections that are not diverted from connection tracking. It
	// must not be set while another program has rules in the namespace, which may need
	// connection tracking.
	Untracked bool
	// Hold, unless nil, makes SYNs to the selected destinations wait in a queue. Whoever has
	// the queue decides which are diverted. Nil: all are.
	Hold *HoldConfig
	// FailOpenTTL is how long diversion outlives the last Renew.
	// Default: DefaultFailOpenTTL.
	FailOpenTTL time.Duration
}

// WhenCaught is what happens to connections that would be diverted.
type WhenCaught int

// What happens to them.
const (
	// CaughtDirect lets them go directly to their destination.
	CaughtDirect WhenCaught = iota
	// CaughtDrop drops SYNs to Required destinations. The kernel repeats them, and by
	// then the agent has decided what to do. The others go directly to their destination.
	CaughtDrop
	// CaughtDivert diverts them all the same. It is for an agent that resets all of them.
	CaughtDivert
)

// Validate returns a *ConfigError for the first field that cannot be used.
func (c RedirectConfig) Validate() error {
	bad := func(field, format string, args ...any) error {
		return &ConfigError{Field: field, Reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case c.Mark == 0:
		return bad("Mark", "must not be 0, the mark of unmarked sockets")
	case c.AppMark == 0:
		return bad("AppMark", "must not be 0, the mark of unmarked sockets")
	case c.Mark == c.AppMark:
		return bad("AppMark", "must differ from Mark (%#x): connections to the network would be routed to loopback", c.Mark)
	case c.PlainMark != 0 && (c.PlainMark == c.Mark || c.PlainMark == c.AppMark):
		return bad("PlainMark", "must differ from Mark (%#x) and AppMark (%#x)", c.Mark, c.AppMark)
	case c.OutboundPort == 0:
		return bad("OutboundPort", "must not be 0")
	case c.InboundPort == 0:
		return bad("InboundPort", "must not be 0")
	case c.InboundPort == c.OutboundPort:
		return bad("InboundPort", "must differ from OutboundPort (%d)", c.OutboundPort)
	case len(c.Inbound) > maxInboundRanges:
		return bad("Inbound", "has %d ranges, at most %d are allowed", len(c.Inbound), maxInboundRanges)
	case len(c.InboundExcept) > maxInboundExcept:
		return bad("InboundExcept", "has %d addresses, at most %d are allowed", len(c.InboundExcept), maxInboundExcept)
	case len(c.InboundAlways) > maxInboundRanges:
		return bad("InboundAlways", "has %d ranges, at most %d are allowed", len(c.InboundAlways), maxInboundRanges)
	}
	if ttl := c.ttl(); ttl < minFailOpenTTL || ttl > maxFailOpenTTL {
		return bad("FailOpenTTL", "is %v, must be between %v and %v", ttl, minFailOpenTTL, maxFailOpenTTL)
	}
	for i, p := range slices.Concat(c.Inbound, c.InboundAlways) {
		field := fmt.Sprintf("Inbound[%d]", i)
		if n := len(c.Inbound); i >= n {
			field = fmt.Sprintf("InboundAlways[%d]", i-n)
		}
		if p.First > p.Last {
			return bad(field, "runs from %d down to %d", p.First, p.Last)
		}
	}
	for i, a := range c.InboundExcept {
		if !a.IsValid() || a.Is4In6() {
			return bad(fmt.Sprintf("InboundExcept[%d]", i), "%v is no address of one family", a)
		}
	}
	if c.Hold != nil {
		if err := c.Hold.validate(c.Mark, c.AppMark, c.PlainMark); err != nil {
			return err
		}
	}
	if err := validOutbound("Outbound", c.Outbound); err != nil {
		return err
	}
	return validOutbound("Required", c.Required)
}

// validOutbound returns a *ConfigError for the first rule that cannot be used.
func validOutbound(field string, rules []OutboundRule) error {
	bad := func(field, format string, args ...any) error {
		return &ConfigError{Field: field, Reason: fmt.Sprintf(format, args...)}
	}
	if len(rules) > maxOutboundRules {
		return bad(field, "has %d rules, at most %d are allowed", len(rules), maxOutboundRules)
	}
	ranges := 0
	for i, r := range rules {
		if ranges += len(r.Ports); ranges > maxOutboundRanges {
			return bad(field, "has more than %d port ranges", maxOutboundRanges)
		}
		if !r.Prefix.IsValid() {
			return bad(fmt.Sprintf("%s[%d].Prefix", field, i), "is not a prefix")
		}
		if r.Prefix.Addr().Is4In6() {
			return bad(fmt.Sprintf("%s[%d].Prefix", field, i), "%v is IPv4 written as IPv6: write it as IPv4", r.Prefix)
		}
		for j, p := range r.Ports {
			if p.First > p.Last {
				return bad(fmt.Sprintf("%s[%d].Ports[%d]", field, i, j), "runs from %d down to %d", p.First, p.Last)
			}
		}
	}
	return nil
}

func (c RedirectConfig) ttl() time.Duration {
	if c.FailOpenTTL == 0 {
		return DefaultFailOpenTTL
	}
	return c.FailOpenTTL
}

// addrRange is the addresses from first to last, both included.
type addrRange struct {
	first, last netip.Addr
}

// A block is a rectangle of destinations: all addresses of a range, on all
// ports of a range.
type block struct {
	addrRange
	ports PortRange
}

// compile turns the rules of one address family into blocks that do not
// overlap, exclusions subtracted: the form that the kernel's interval sets
// accept. It cuts the ports at every boundary that a rule mentions and does
// interval arithmetic on the addresses of each piece.
//
// Link-local IPv6 destinations are never selected: their zone is lost on the
// way to the agent.
func compile(rules []OutboundRule, is4 bool) []block {
	linkLocal := netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfe, 0x80}), 10)
	rules = append(slices.Clip(rules), OutboundRule{Prefix: linkLocal, Exclude: true})
	var own []OutboundRule
	cuts := []uint32{0, 1 << 16}
	for _, r := range rules {
		if r.Prefix.Addr().Is4() != is4 {
			continue
		}
		if len(r.Ports) == 0 {
			r.Ports = []PortRange{{0, 1<<16 - 1}}
		}
		own = append(own, r)
		for _, p := range r.Ports {
			cuts = append(cuts, uint32(p.First), uint32(p.Last)+1)
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	var out []block
	var prev []addrRange
	for i := range len(cuts) - 1 {
		first, last := uint16(cuts[i]), uint16(cuts[i+1]-1)
		ranges := subtract(covering(own, first, false), covering(own, first, true))
		if i > 0 && slices.Equal(ranges, prev) { // the same addresses: one piece
			for j := range ranges {
				out[len(out)-len(ranges)+j].ports.Last = last
			}
			continue
		}
		prev = ranges
		for _, r := range ranges {
			out = append(out, block{r, PortRange{first, last}})
		}
	}
	return out
}

// covering returns the union of the address ranges of the rules that select (or exclude)
// port, sorted and merged.
func covering(rules []OutboundRule, port uint16, exclude bool) []addrRange {
	var rs []addrRange
	for _, r := range rules {
		hit := slices.ContainsFunc(r.Ports, func(p PortRange) bool { return p.First <= port && port <= p.Last })
		if hit && r.Exclude == exclude {
			rs = append(rs, prefixRange(r.Prefix))
		}
	}
	return mergeRanges(rs)
}

// mergeRanges sorts ranges of addresses and joins those that overlap or touch. It may
// change rs.
func mergeRanges(rs []addrRange) []addrRange {
	slices.SortFunc(rs, func(a, b addrRange) int { return a.first.Compare(b.first) })
	out := rs[:0]
	for _, r := range rs {
		if n := len(out); n > 0 {
			next := out[n-1].last.Next()
			if !next.IsValid() || r.first.Compare(next) <= 0 {
				if out[n-1].last.Less(r.last) {
					out[n-1].last = r.last
				}
				continue
			}
		}
		out = append(out, r)
	}
	return out
}

// subtract returns the addresses that are in a and not in b; both are sorted and merged.
func subtract(a, b []addrRange) []addrRange {
	var out []addrRange
	for _, r := range a {
		rest := true
		for _, x := range b {
			if x.last.Less(r.first) {
				continue
			}
			if r.last.Less(x.first) {
				break
			}
			if r.first.Less(x.first) {
				out = append(out, addrRange{r.first, x.first.Prev()})
			}
			if !x.last.Less(r.last) {
				rest = false
				break
			}
			r.first = x.last.Next()
		}
		if rest {
			out = append(out, r)
		}
	}
	return out
}

// prefixRange returns the first and the last address of a prefix.
func prefixRange(p netip.Prefix) addrRange {
	p = p.Masked()
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return addrRange{p.Addr(), last}
}

// mergePorts sorts ranges of ports and joins those that touch.
func mergePorts(in []PortRange) []PortRange {
	rs := slices.Clone(in)
	slices.SortFunc(rs, func(a, b PortRange) int { return int(a.First) - int(b.First) })
	var out []PortRange
	for _, r := range rs {
		if n := len(out); n > 0 && int(r.First) <= int(out[n-1].Last)+1 {
			out[n-1].Last = max(out[n-1].Last, r.Last)
			continue
		}
		out = append(out, r)
	}
	return out
}
