// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	mdnetlink "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/undo"
)

// routingSteps route the packets that an application sends to the agent's socket under a
// client's address (see DialFrom) to loopback, instead of to the client: "ip rule fwmark M
// lookup T", "local default dev lo table T", for both families. An application whose listener
// is bound to an interface (SO_BINDTODEVICE) asks for a route by that interface, so that each
// has such a route, too. Its packets go by loopback all the same.
func routingSteps(ns *NetNS, mark uint32) []undo.Step {
	var steps []undo.Step
	for _, fam := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		// The route of an earlier agent stays if a later step fails: that agent may still
		// have connections that need the route.
		var inherited bool
		steps = append(steps,
			undo.Step{
				Name: "look for an earlier agent's rule " + familyName(fam),
				Do: func() error {
					return ns.Do(func() error {
						marks, err := ownRules(fam)
						inherited = len(marks) > 0
						return err
					})
				},
			},
			undo.Step{
				Name: "add local routes to table " + familyName(fam),
				Do:   inNetlink(ns, func(h *netlink.Handle) error { return addLocalRoutes(h, fam) }),
				Undo: unless(&inherited, inNetlink(ns, func(h *netlink.Handle) error { return sweepRoutes(h, fam) })),
			},
			undo.Step{
				Name: "add rule for marked packets " + familyName(fam),
				Do:   inNetlink(ns, func(h *netlink.Handle) error { return replaceRule(h, fam, mark) }),
				Undo: unless(&inherited, inNetlink(ns, func(h *netlink.Handle) error { return sweepRules(h, fam) })),
			})
	}
	return steps
}

// unless returns a function that calls f unless *skip is true at the time of the call.
func unless(skip *bool, f func() error) func() error {
	return func() error {
		if *skip {
			return nil
		}
		return f()
	}
}

// inNetlink returns a function that calls f with a route netlink handle of ns.
func inNetlink(ns *NetNS, f func(*netlink.Handle) error) func() error {
	return func() error { return withHandle(ns, f) }
}

func familyName(fam int) string {
	if fam == netlink.FAMILY_V4 {
		return "(IPv4)"
	}
	return "(IPv6)"
}

// noFamily tells whether err says that the kernel was started without IPv6: by EAFNOSUPPORT for rules, and for routes by
// EOPNOTSUPP, since nobody there takes the request. That is no
// error here: there are no IPv6 connections.
func noFamily(fam int, err error) bool {
	return fam == netlink.FAMILY_V6 && (errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP))
}

func localRoute(link int, fam int) *netlink.Route {
	dst := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if fam == netlink.FAMILY_V6 {
		dst = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return &netlink.Route{
		Family: fam, LinkIndex: link, Dst: dst, Table: routeTable,
		Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
	}
}

func addLocalRoutes(h *netlink.Handle, fam int) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback interface: %w", err)
	}
	if lo.Attrs().Flags&net.FlagUp == 0 {
		return errors.New("loopback interface is down: the CNI loopback plugin sets it up before pods start")
	}
	if fam == netlink.FAMILY_V6 && ipv6Off() {
		return nil
	}
	if err := h.RouteReplace(localRoute(lo.Attrs().Index, fam)); err != nil {
		if noFamily(fam, err) {
			return nil
		}
		return err
	}
	others, err := otherLinks(h)
	if err != nil && !errors.Is(err, ErrTooMuch) {
		return err
	}
	for _, index := range others {
		r := localRoute(index, fam)
		r.Priority = boundMetric + index
		_ = h.RouteReplace(r) // an interface that is down, or without the family, has no connections either
	}
	return nil
}

// updateLocalRoutes adds the routes by interfaces that have come, or come up, since.
func updateLocalRoutes(ns *NetNS) error {
	return inNetlink(ns, func(h *netlink.Handle) error {
		return errors.Join(addLocalRoutes(h, netlink.FAMILY_V4), addLocalRoutes(h, netlink.FAMILY_V6))
	})()
}

// ipv6Off tells whether IPv6 is switched off on loopback, as runtimes do it in
// the pods of clusters with IPv4 only; the kernel refuses routes there.
func ipv6Off() bool {
	b, err := os.ReadFile("/proc/sys/net/ipv6/conf/lo/disable_ipv6")
	return err != nil || strings.TrimSpace(string(b)) == "1"
}

// replaceRule makes sure that there is exactly one rule of ours, for mark. If an earlier
// agent's rule is that one, it is not touched: without it even for a moment, answers to
// connections that are handed over would go to the network.
func replaceRule(h *netlink.Handle, fam int, mark uint32) error {
	marks, err := ownRules(fam)
	if err != nil {
		return err
	}
	right := ownRule(fam)
	right.Mark = mark
	if !slices.Contains(marks, mark) {
		if err := h.RuleAdd(right); err != nil && !noFamily(fam, err) {
			return err
		}
	}
	for _, m := range marks {
		if m == mark {
			continue
		}
		wrong := ownRule(fam)
		wrong.Mark = m
		if err := h.RuleDel(wrong); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete rule %s: %w", familyName(fam), err)
		}
	}
	return nil
}

// hasRules tells whether there is a rule of ours, of either family.
func hasRules(ns *NetNS) (has bool, err error) {
	err = ns.Do(func() error {
		for _, fam := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			marks, err := ownRules(fam)
			if err != nil {
				return err
			}
			has = has || len(marks) > 0
		}
		return nil
	})
	return has, err
}

// ownRules returns the marks of our rules in the thread's namespace. The kernel
// lists rules by their priority, so that only those before ours are read.
func ownRules(fam int) (marks []uint32, err error) {
	msg := nl.RtMsg{RtMsg: unix.RtMsg{Family: uint8(fam)}}
	err = dump(unix.NETLINK_ROUTE, unix.RTM_GETRULE, msg.Serialize(), newAllowance(), func(b []byte) (bool, error) {
		if len(b) < unix.SizeofRtMsg {
			return false, fmt.Errorf("rule of %d bytes", len(b))
		}
		ad, err := mdnetlink.NewAttributeDecoder(b[unix.SizeofRtMsg:])
		if err != nil {
			return false, err
		}
		var table, priority, mark uint32
		for ad.Next() {
			switch ad.Type() {
			case unix.FRA_TABLE:
				table = ad.Uint32()
			case unix.FRA_PRIORITY:
				priority = ad.Uint32()
			case unix.FRA_FWMARK:
				mark = ad.Uint32()
			}
		}
		if table == routeTable && priority == rulePriority {
			marks = append(marks, mark)
		}
		return priority <= rulePriority, ad.Err()
	})
	if noFamily(fam, err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list routing rules %s: %w", familyName(fam), err)
	}
	return marks, nil
}

func ownRule(fam int) *netlink.Rule {
	r := netlink.NewRule()
	r.Family, r.Table, r.Priority = fam, routeTable, rulePriority
	return r
}

// sweepRules deletes our rules, and leaves the rules of others.
func sweepRules(h *netlink.Handle, fam int) error {
	for range maxRuleDeletes {
		err := h.RuleDel(ownRule(fam))
		if errors.Is(err, unix.ENOENT) || noFamily(fam, err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("delete rule %s: %w", familyName(fam), err)
		}
	}
	return fmt.Errorf("delete rules %s: %w: %d have our number", familyName(fam), ErrTooMuch, maxRuleDeletes)
}

// sweepRoutes deletes our local routes.
func sweepRoutes(h *netlink.Handle, fam int) error {
	for range 1 + maxBoundLinks + maxRuleDeletes { // more than there are, as interfaces may have come and gone
		err := h.RouteDel(localRoute(0, fam))
		if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) || noFamily(fam, err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("delete local routes %s: %w", familyName(fam), err)
		}
	}
	return fmt.Errorf("delete local routes %s: %w: table %d", familyName(fam), ErrTooMuch, routeTable)
}

// sweepRouting removes what routingSteps put into ns.
func sweepRouting(ns *NetNS) error {
	return inNetlink(ns, func(h *netlink.Handle) error {
		var errs []error
		for _, fam := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			errs = append(errs, sweepRules(h, fam), sweepRoutes(h, fam))
		}
		return errors.Join(errs...)
	})()
}
