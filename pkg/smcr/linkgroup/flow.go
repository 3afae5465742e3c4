// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// flow is an LLC exchange that we start. One is under way at a time, because
// Linux drops requests that cross (RFC 7609 §3.5.5.3 allows more).
type flow struct {
	kind      flowKind
	rmbs      []RMBID        // CONFIRM RKEY: one; DELETE RKEY
	tries     int            // CONFIRM RKEY: answers that asked for a retry
	holdUntil time.Time      // of the next try; zero: now
	deletion  llc.DeleteLink // DELETE LINK
	fresh     bool           // ADD LINK: only over an RNIC that is not in use
}

type flowKind uint8

const (
	flowConfirmRKey flowKind = iota
	flowDeleteRKey
	flowAddLink    // server
	flowDeleteLink // server
	flowAskDelete  // client: a request that the server delete a link
	flowDeleteAll
)

func (k flowKind) String() string {
	switch k {
	case flowConfirmRKey:
		return "CONFIRM RKEY"
	case flowDeleteRKey:
		return "DELETE RKEY"
	case flowAddLink:
		return "ADD LINK"
	case flowDeleteLink, flowAskDelete, flowDeleteAll:
		return "DELETE LINK"
	}
	return fmt.Sprintf("flowKind(%d)", uint8(k))
}

// startFlow puts an exchange in line. Deletions go before what has not begun:
// the peer should not use a dead link longer than it must.
func (g *Group) startFlow(f flow) {
	if len(g.flows) >= maxFlows {
		return // every RMB has at most two flows waiting, so this cannot be
	}
	at := len(g.flows)
	if f.kind == flowDeleteLink || f.kind == flowAskDelete {
		at = 0
		for at < len(g.flows) && ((at == 0 && g.flowSent) || g.flows[at].kind == f.kind) {
			at++
		}
	}
	g.flows = append(g.flows, flow{})
	copy(g.flows[at+1:], g.flows[at:])
	g.flows[at] = f
}

// popFlow ends the flow under way.
func (g *Group) popFlow() flow {
	f := g.flows[0]
	g.flows = g.flows[1:]
	g.flowSent = false
	return f
}

// changing reports whether the server changes the configuration of links:
// RKeys must not change then (§3.5.5.3).
func (g *Group) changing() bool {
	return g.adding.step != addNone || (g.flowSent && g.flows[0].kind == flowDeleteLink)
}

// canPumpFlows reports whether the first waiting flow can start. A client's
// requests to delete links can flow at any time; all else waits for the end of
// the exchange that adds a link.
func (g *Group) canPumpFlows() bool {
	if g.flowSent || len(g.flows) == 0 || (g.state != Active && g.state != Draining) {
		return false
	}
	if !g.flows[0].holdUntil.IsZero() {
		return false
	}
	kind := g.flows[0].kind
	return g.adding.step == addNone || kind == flowAskDelete || kind == flowDeleteAll
}

// pumpFlows sends the first waiting flow's request.
func (g *Group) pumpFlows(now time.Time) {
	for g.canPumpFlows() {
		via := g.otherLink(nil)
		if via == nil {
			return
		}
		g.flowVia = via
		g.flowSent = true
		g.flowBegan = now
		g.flowExpiry = now.Add(FlowTimeout)
		g.flowResend = time.Time{}
		switch g.flows[0].kind {
		case flowAddLink:
			g.flowExpiry = time.Time{} // the exchange has deadlines of its own
			g.beginAdd(now, via, g.flows[0].fresh)
		case flowDeleteLink:
			g.sendDelete(now)
		case flowConfirmRKey, flowDeleteRKey, flowAskDelete:
			g.flowResend = now.Add(ResendInterval)
			g.sendRequest()
		case flowDeleteAll:
			g.flowResend = now.Add(DeleteAllInterval)
			g.sendRequest()
		}
	}
}

// sendDelete starts the deletion of a link at the server. One that the client
// asked for during another exchange has still to be taken out of service.
func (g *Group) sendDelete(now time.Time) {
	m := g.flows[0].deletion
	if l := g.linkByID(m.Link); l != nil && l.state == linkActive {
		if g.otherLink(l) == nil { // the last one meanwhile
			g.popFlow()
			g.Terminate(now, m.Reason)
			return
		}
		if !isUrgent(m) {
			g.popFlow()
			g.drain(now, l, m)
			return
		}
		g.leaveLink(now, l, fmt.Errorf("%w: %v", ErrLinkDeleted, m.Reason))
		g.addIfUseful()
		if !g.flowSent { // it carried this flow
			return
		}
	}
	g.flowResend = now.Add(ResendInterval)
	g.sendRequest()
}

// sendRequest sends the request of the flow under way.
func (g *Group) sendRequest() {
	f, l := &g.flows[0], g.flowVia
	switch f.kind {
	case flowConfirmRKey:
		g.sendConfirmRKey(l, g.rmb(f.rmbs[0]))
	case flowDeleteRKey:
		g.sendDeleteRKey(l, f)
	case flowDeleteLink, flowAskDelete:
		m := f.deletion
		m.Header = g.header(false)
		l.send(m)
	case flowDeleteAll:
		l.send(g.deleteAll(f.deletion.Reason))
	case flowAddLink:
	}
}

// flowTimeout looks after the request under way.
func (g *Group) flowTimeout(now time.Time, due func(time.Time) bool) {
	switch {
	case !g.flowSent:
		if len(g.flows) > 0 && due(g.flows[0].holdUntil) {
			g.flows[0].holdUntil = time.Time{}
		}
	case due(g.flowExpiry):
		g.flowExpired(now)
	case !due(g.flowResend):
	case g.flows[0].kind == flowDeleteAll && (g.flowVia.inflight > 0 || len(g.flowVia.queue) > 0):
		g.flowResend = now.Add(DeleteAllInterval) // what is under way arrives in its time
	case g.flows[0].kind == flowDeleteAll:
		g.repeatDeleteAll(now)
	default:
		g.flowResend = now.Add(ResendInterval)
		g.sendRequest()
	}
}

// repeatDeleteAll says once more that the group ends: see lastWords for why it may
// not have been heeded.
func (g *Group) repeatDeleteAll(now time.Time) {
	if !g.flowSent || g.flows[0].kind != flowDeleteAll {
		return
	}
	g.flowResend = now.Add(max(DeleteAllInterval, now.Sub(g.flowBegan))) // less and less often
	if len(g.flowVia.queue) == 0 {                                       // else the last one has not left yet
		g.sendRequest()
	}
}

// flowExpired is what a missing answer means (C.7.1): the link that carried
// the request has failed, and another one carries it again. But a Linux that
// is heard on the link is there: it drops what crosses with something of its
// own.
func (g *Group) flowExpired(now time.Time) {
	f, via := g.flows[0], g.flowVia
	if f.kind == flowDeleteAll {
		if g.otherLink(via) == nil {
			g.last.owed = false // it was repeated for long enough
			g.becomeDead(nil)
			return
		}
		g.dropLink(via, fmt.Errorf("%w: %v", ErrFlowTimeout, f.kind))
		return
	}
	if g.isKept() && g.adding.step != addNone {
		g.flowExpiry = now.Add(FlowTimeout)
		return
	}
	if g.dialect == llc.DialectLinux && via.heard.After(g.flowBegan) {
		g.giveUpFlow(f)
		return
	}
	g.loseLink(now, via, llc.DeleteLostPath, FaultLink, fmt.Errorf("%w: %v", ErrFlowTimeout, f.kind))
}

// isKept reports whether our request under way is one that the server keeps
// while it adds a link (§3.5.5.3.1): it has its time from the end of that.
func (g *Group) isKept() bool { return g.flowSent && g.flows[0].kind == flowAskDelete }

// giveUpFlow ends a flow that the peer does not answer although it is there.
func (g *Group) giveUpFlow(f flow) {
	switch f.kind {
	case flowConfirmRKey:
		g.popFlow()
		if r := g.rmb(f.rmbs[0]); r != nil {
			r.state = rmbNew
		}
		g.out = append(g.out, Output{Kind: OutEvent, Event: EventRMBRefused, RMB: f.rmbs[0]})
	case flowDeleteRKey:
		g.popFlow()
		for _, id := range f.rmbs {
			g.removeRMB(id)
		}
	case flowDeleteLink, flowAskDelete:
		g.endDelete(f.deletion.Link)
	case flowAddLink, flowDeleteAll:
	}
}
