// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/netip"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// # IPv6 that comes later
//
// In a cluster of IPv4 only, container runtimes switch IPv6 off in pods, on loopback, too, where the agent
// listens. The interface of a further network may bring it:
//
//	the proxy starts          there is no ::1: it listens on 127.0.0.1 only
//	net1 comes, with IPv6     nobody listens on ::1: connections to IPv6 destinations go
//	                          directly or, where SMC-R is required, nowhere
//	update, or the            listens on ::1, too; from now on these connections are
//	heartbeat's next look     diverted as all are

// mostListeners is how many listeners a listenerSet may have: one for each family.
const mostListeners = 2

// noIPv6Detail says why no connection of IPv6 is on SMC-R in a pod.
const noIPv6Detail = "it is one of IPv6, which the pod does not have on its loopback interface (net.ipv6.conf.lo.disable_ipv6), or the agent found no port there"

// lacks reports whether there is no listener for the connections to an address.
func (set *listenerSet) lacks(addr netip.Addr) bool { return addr.Is6() && set.lacksIPv6() }

// lacksIPv6 reports whether a listener for IPv6 is missing.
func lacksIPv6(px *proxy) bool { return px.in.lacksIPv6() || px.out.lacksIPv6() }

// listenIPv6 opens the listeners for IPv6 that are missing, if the pod has IPv6 by now. A table that diverts to
// them is the caller's to install.
func listenIPv6(px *proxy) {
	px.leaving.Lock() // a successor listens on the same port
	defer px.leaving.Unlock()
	if px.draining.Load() || px.released.Load() {
		return
	}
	for _, set := range []*listenerSet{px.in, px.out} {
		if !set.lacksIPv6() {
			continue
		}
		l, err := px.net.listenIPv6(px.life, set.control, set.wanted, set.port)
		if err != nil {
			if !errors.Is(err, errNoIPv6) {
				px.log.Debug("no listener for IPv6 yet", "door", set.dir, "err", err) // a program has the port, perhaps
			}
			return
		}
		if !set.add(l) {
			return
		}
		px.tasks.Go(func() { px.accept(set, mostListeners-1) })
		px.log.Info("the pod has IPv6 now, and its connections are diverted, too", "door", set.dir)
	}
}

// divertIPv6 is listenIPv6 for the heartbeat: IPv6 may come without a record that changes.
func divertIPv6(px *proxy) {
	if !lacksIPv6(px) {
		return
	}
	if listenIPv6(px); lacksIPv6(px) {
		return
	}
	if err := px.updateTable(); err != nil && !errors.Is(err, linux.ErrClosed) {
		px.log.Warn("redirection not updated; the old one stays in force until that works", "err", err)
		px.tableStale.Store(true) // the manager's next round tries again
	}
}

// withoutIPv6 are the rules of IPv4, and with them those of IPv6 that are required to be on SMC-R: what cannot be
// diverted goes directly, but is not let through where it must not be.
func withoutIPv6(rules, required []linux.OutboundRule) (out []linux.OutboundRule) {
	for _, r := range rules {
		if r.Prefix.Addr().Is4() {
			out = append(out, r)
		}
	}
	for _, r := range required {
		if r.Prefix.Addr().Is6() {
			out = append(out, r)
		}
	}
	return out
}
