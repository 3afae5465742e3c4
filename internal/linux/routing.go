// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routingSteps bring the answers of an application, whose peer is a socket of
// this machine that was bound to the client's address, to loopback: "ip rule
// fwmark M lookup T", "local default dev lo table T", for both families.
func routingSteps(ns *NetNS, mark uint32) []Step {
	var steps []Step
	for _, fam := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		// What an earlier agent left may serve connections that it still has,
		// and stays when this one fails.
		var inherited bool
		steps = append(steps,
			Step{
				Name: "look for an earlier agent's rule " + familyName(fam),
				Do: inNetlink(ns, func(h *netlink.Handle) (err error) {
					inherited, err = hasRule(h, fam)
					return err
				}),
			},
			Step{
				Name: "add local route to table " + familyName(fam),
				Do:   inNetlink(ns, func(h *netlink.Handle) error { return addLocalRoute(h, fam) }),
				Undo: unless(&inherited, inNetlink(ns, func(h *netlink.Handle) error { return sweepRoutes(h, fam) })),
			},
			Step{
				Name: "add rule for marked packets " + familyName(fam),
				Do:   inNetlink(ns, func(h *netlink.Handle) error { return replaceRule(h, fam, mark) }),
				Undo: unless(&inherited, inNetlink(ns, func(h *netlink.Handle) error { _, err := sweepRules(h, fam); return err })),
			})
	}
	return steps
}

// unless returns f, which does nothing if *skip is true by then.
func unless(skip *bool, f func() error) func() error {
	return func() error {
		if *skip {
			return nil
		}
		return f()
	}
}

// inNetlink returns f with a route netlink handle of ns.
func inNetlink(ns *NetNS, f func(*netlink.Handle) error) func() error {
	return func() error {
		return ns.Do(func() error {
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return fmt.Errorf("open route netlink: %w", err)
			}
			defer h.Close()
			return f(h)
		})
	}
}

func familyName(fam int) string {
	if fam == netlink.FAMILY_V4 {
		return "(IPv4)"
	}
	return "(IPv6)"
}

// noFamily tells that the kernel was started without IPv6: there is nothing
// to carry, so nothing is missing.
func noFamily(fam int, err error) bool {
	return fam == netlink.FAMILY_V6 && errors.Is(err, unix.EAFNOSUPPORT)
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

func addLocalRoute(h *netlink.Handle, fam int) error {
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
	if err := h.RouteReplace(localRoute(lo.Attrs().Index, fam)); err != nil && !noFamily(fam, err) {
		return err
	}
	return nil
}

// ipv6Off tells whether IPv6 is switched off on loopback, as runtimes do it in
// the pods of clusters with IPv4 only; the kernel refuses routes there.
func ipv6Off() bool {
	b, err := os.ReadFile("/proc/sys/net/ipv6/conf/lo/disable_ipv6")
	return err != nil || strings.TrimSpace(string(b)) == "1"
}

// replaceRule makes the one rule of ours that there is the one for mark. A rule
// of an earlier agent that is right stays untouched: without it, answers to
// connections that are handed over would go to the network.
func replaceRule(h *netlink.Handle, fam int, mark uint32) error {
	_, kept, err := deleteRules(h, fam, func(r netlink.Rule) bool { return r.Mark == mark })
	if err != nil || kept > 0 {
		return err
	}
	rule := netlink.NewRule()
	rule.Family, rule.Mark, rule.Table, rule.Priority = fam, mark, routeTable, rulePriority
	if err := h.RuleAdd(rule); err != nil && !noFamily(fam, err) {
		return err
	}
	return nil
}

// hasRule tells whether there is a rule of ours.
func hasRule(h *netlink.Handle, fam int) (bool, error) {
	_, kept, err := deleteRules(h, fam, func(netlink.Rule) bool { return true })
	return kept > 0, err
}

// hasRules tells whether there is a rule of ours, of either family.
func hasRules(ns *NetNS) (has bool, err error) {
	err = inNetlink(ns, func(h *netlink.Handle) error {
		for _, fam := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			one, err := hasRule(h, fam)
			if err != nil {
				return err
			}
			has = has || one
		}
		return nil
	})()
	return has, err
}

// sweepRules deletes our rules and tells how many there were.
func sweepRules(h *netlink.Handle, fam int) (int, error) {
	deleted, _, err := deleteRules(h, fam, func(netlink.Rule) bool { return false })
	return deleted, err
}

// deleteRules deletes our rules but those to keep, and counts both.
func deleteRules(h *netlink.Handle, fam int, keep func(netlink.Rule) bool) (deleted, kept int, err error) {
	rules, err := h.RuleList(fam)
	if noFamily(fam, err) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("list rules %s: %w", familyName(fam), err)
	}
	for _, r := range rules {
		switch {
		case r.Table != routeTable || r.Priority != rulePriority:
			continue
		case keep(r):
			kept++
			continue
		}
		r.Family = fam
		if err := h.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
			return deleted, kept, fmt.Errorf("delete rule %s: %w", familyName(fam), err)
		}
		deleted++
	}
	return deleted, kept, nil
}

// sweepRoutes deletes our local route.
func sweepRoutes(h *netlink.Handle, fam int) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback interface: %w", err)
	}
	err = h.RouteDel(localRoute(lo.Attrs().Index, fam))
	if err == nil || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) || noFamily(fam, err) {
		return nil
	}
	return fmt.Errorf("delete local route %s: %w", familyName(fam), err)
}

// sweepRouting removes what routingSteps put into ns.
func sweepRouting(ns *NetNS) error {
	return inNetlink(ns, func(h *netlink.Handle) error {
		var errs []error
		for _, fam := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			_, err := sweepRules(h, fam)
			errs = append(errs, err, sweepRoutes(h, fam))
		}
		return errors.Join(errs...)
	})()
}
