// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// operator says whose operator has taken a link out of service: the group adds no other link in its
// place until that side allows new links, or one of that side's ports comes up. A client does not
// remember what the server's operator did, because a client can only ask for links.
type operator uint8

const (
	noOperator operator = iota
	peersOperator
	ourOperator
)

func (o operator) String() string {
	switch o {
	case noOperator:
		return "nobody"
	case peersOperator:
		return "the peer's operator"
	case ourOperator:
		return "our operator"
	}
	return fmt.Sprintf("operator(%d)", uint8(o))
}

// growth says whether and when a group tries to have another link.
type growth struct {
	forbids operator      // who keeps links from being added
	wait    time.Duration // until a failed second link is tried again
	at      time.Time     // of that; zero: it is not tried again
}

// isForbidden reports whether an operator keeps links from being added.
func (h *growth) isForbidden() bool { return h.forbids != noOperator }

// forbid stops the group from adding links if an operator has deleted one.
func (h *growth) forbid(why llc.DeleteReason, by operator) {
	if why == llc.DeleteOperator {
		h.forbids = max(h.forbids, by)
		h.at = time.Time{}
	}
}

// allow lets the group add links again, whoever forbade it.
func (h *growth) allow() { h.forbids = noOperator }

// allowNow is allow, and the next failure is the first one.
func (h *growth) allowNow() { h.forbids, h.wait = noOperator, 0 }

// peerAllows ends at the server what the client's operator began: the client asks for a link.
func (h *growth) peerAllows() {
	if h.forbids == peersOperator {
		h.forbids = noOperator
	}
}

// later sets the timer after which a failed second link is tried once more (C.8), each
// time later.
func (h *growth) later(now time.Time) {
	h.wait = min(max(2*h.wait, AddLinkRetryMin), AddLinkRetryMax)
	h.at = now.Add(h.wait)
}

// stop forgets the timer.
func (h *growth) stop() { h.at = time.Time{} }

// postpone sets the timer to the shortest time, as something else is to be done first.
func (h *growth) postpone(now time.Time) { h.at = now.Add(AddLinkRetryMin) }

// due reports whether another link is to be tried now.
func (h *growth) due(now time.Time) bool { return !h.at.IsZero() && !now.Before(h.at) }

// reset begins anew: there is another link.
func (h *growth) reset() { h.wait, h.at = 0, time.Time{} }

// schedule sets the timer if the group can gain by another link.
func (h *growth) schedule(g *Group, now time.Time) {
	if g.state != Active || g.maxLinks < 2 || h.isForbidden() || g.Redundancy() == Symmetric {
		return
	}
	h.later(now)
}

// retry tries once more to get another link.
func (h *growth) retry(g *Group) {
	h.stop()
	g.side.retry(g)
}

// expired is what the timer means.
func (h *growth) expired(g *Group, now time.Time) {
	if g.adding.isUnderWay() || g.requests.has(exchangeAskDelete) {
		h.postpone(now) // what is under way may end without a link; or the server may still count with the one that was lost
		return
	}
	h.retry(g)
}

// AllowLinks lets the group add links again after an operator has taken one out
// of service with DeleteLink.
func (g *Group) AllowLinks() {
	g.growth.allowNow()
	if g.adding.isUnderWay() {
		g.adding.tryAgain() // the exchange may have had to do without a port that is up now
		return
	}
	g.growth.retry(g)
}
