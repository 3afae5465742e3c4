// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// holder says whose operator took a link out of service: no other one takes its
// place until that side allows it, or one of its ports comes up. A client need not
// remember what the server's operator did: it can only ask.
type holder uint8

const (
	heldByNobody holder = iota
	heldByPeer
	heldByUs
)

// growth says whether and when a group tries to have another link.
type growth struct {
	held holder        // whether an operator keeps links from being added
	wait time.Duration // until a failed second link is tried again
	at   time.Time     // zero: it is not
}

// isHeld reports whether an operator keeps links from being added.
func (h *growth) isHeld() bool { return h.held != heldByNobody }

// hold stops the group from adding links if an operator has deleted one.
func (h *growth) hold(why llc.DeleteReason, by holder) {
	if why == llc.DeleteOperator {
		h.held = max(h.held, by)
		h.at = time.Time{}
	}
}

// release ends hold.
func (h *growth) release() { h.held = heldByNobody }

// peerReleases ends at the server what the client's operator began: it asks for a
// link.
func (h *growth) peerReleases() {
	if h.held == heldByPeer {
		h.held = heldByNobody
	}
}

// later sets the timer after which a failed second link is tried once more (C.8), each
// time later.
func (h *growth) later(now time.Time) {
	h.wait = min(max(2*h.wait, AddLinkRetryMin), AddLinkRetryMax)
	h.at = now.Add(h.wait)
}

// reset begins anew: there is another link.
func (h *growth) reset() { h.wait, h.at = 0, time.Time{} }

// scheduleRetry sets the timer after which a failed second link is tried once
// more (C.8), each time later.
func (g *Group) scheduleRetry(now time.Time) {
	r := g.Redundancy()
	if g.state != Active || g.maxLinks < 2 || g.growth.isHeld() || r == Symmetric || !g.side.mayRetry(r) {
		return
	}
	g.growth.later(now)
}

// retryAdd tries once more to get another link.
func (g *Group) retryAdd() {
	g.growth.at = time.Time{}
	g.side.retry(g)
}

// AllowLinks lets the group add links again after an operator has taken one out
// of service with DeleteLink.
func (g *Group) AllowLinks() {
	g.growth.release()
	g.growth.wait = 0
	if g.adding.isUnderWay() {
		g.adding.again = true // the exchange may have had to do without a port that is up now
		return
	}
	g.retryAdd()
}
