// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// flow is an LLC exchange that we start. One is under way at a time, because
// Linux drops requests that cross (§3.5.5.3 allows more).
type flow struct {
	kind   flowKind
	rmb    RMBID
	reason llc.DeleteReason
	tries  int // answers that asked for a retry
}

type flowKind uint8

const (
	flowConfirmRKey flowKind = iota
	flowDeleteRKey
	flowDeleteAll
)

func (k flowKind) String() string {
	switch k {
	case flowConfirmRKey:
		return "CONFIRM RKEY"
	case flowDeleteRKey:
		return "DELETE RKEY"
	case flowDeleteAll:
		return "DELETE LINK"
	}
	return fmt.Sprintf("flowKind(%d)", uint8(k))
}

// ConfirmRMB tells the peer about an RMB (§3.5.5.2.1); EventRMBConfirmed or
// EventRMBRefused follows, at once if it is confirmed already.
func (g *Group) ConfirmRMB(id RMBID) {
	r := g.rmb(id)
	switch {
	case r == nil || r.state == rmbDeleting || g.state != Active:
		g.out = append(g.out, Output{Kind: OutEvent, Event: EventRMBRefused, RMB: id})
	case r.state == rmbConfirmed:
		g.out = append(g.out, Output{Kind: OutEvent, Event: EventRMBConfirmed, RMB: id})
	case r.state == rmbNew:
		r.state = rmbConfirming
		g.startFlow(flow{kind: flowConfirmRKey, rmb: id})
	}
}

// IsConfirmed reports whether the peer knows the RMB.
func (g *Group) IsConfirmed(id RMBID) bool {
	r := g.rmb(id)
	return r != nil && r.state == rmbConfirmed
}

func (g *Group) startFlow(f flow) {
	if len(g.flows) >= maxFlows {
		return // every RMB has at most two flows waiting, so this cannot be
	}
	g.flows = append(g.flows, f)
}

// canPumpFlows reports whether the first waiting flow can start.
func (g *Group) canPumpFlows() bool {
	return !g.flowSent && len(g.flows) > 0 && (g.state == Active || g.state == Draining)
}

// pumpFlows sends the first waiting flow's request.
func (g *Group) pumpFlows(now time.Time) {
	if !g.canPumpFlows() {
		return
	}
	g.flowVia = g.llcLink()
	g.sendRequest()
	g.flowSent = true
	g.flowExpiry = now.Add(FlowTimeout)
	g.flowResend = time.Time{}
	if g.flows[0].kind != flowDeleteAll {
		g.flowResend = now.Add(ResendInterval)
	}
}

// sendRequest sends the request of the flow under way.
func (g *Group) sendRequest() {
	f, l := g.flows[0], g.flowVia
	switch f.kind {
	case flowConfirmRKey:
		l.send(llc.ConfirmRKey{This: llc.RToken(g.rmb(f.rmb).token(l))})
	case flowDeleteRKey:
		m := llc.DeleteRKey{Count: 1}
		m.RKeys[0] = g.rmb(f.rmb).token(l).RKey
		l.send(m)
	case flowDeleteAll:
		l.send(llc.DeleteLink{All: true, Orderly: true, Reason: f.reason})
	}
}

// endRKeyFlow finishes the flow under way if the answer is for its RMB;
// another one answers a request that was sent again.
func (g *Group) endRKeyFlow(kind flowKind, key rdma.RKey) (flow, bool) {
	if g.flowSent && g.flows[0].kind == kind && g.rmb(g.flows[0].rmb).token(g.flowVia).RKey != key {
		g.Discarded++
		return flow{}, false
	}
	return g.endFlow(kind)
}

// endFlow finishes the flow under way if it is of this kind.
func (g *Group) endFlow(kind flowKind) (flow, bool) {
	if !g.flowSent || g.flows[0].kind != kind {
		g.Discarded++
		return flow{}, false
	}
	f := g.flows[0]
	g.flows = g.flows[1:]
	g.flowSent = false
	return f, true
}

func (g *Group) handleConfirmRKeyReply(m llc.ConfirmRKey) {
	f, ok := g.endRKeyFlow(flowConfirmRKey, m.This.RKey)
	if !ok {
		return
	}
	r := g.rmb(f.rmb)
	ev := EventRMBConfirmed
	switch {
	case !m.Negative:
		r.state = rmbConfirmed
	case m.Retry && f.tries < maxRKeyRetries: // the peer's configuration is changing: again at once (A.3.5, C bit)
		f.tries++
		g.startFlow(f)
		return
	default:
		r.state = rmbNew
		ev = EventRMBRefused
	}
	g.out = append(g.out, Output{Kind: OutEvent, Event: ev, RMB: f.rmb})
}

func (g *Group) handleDeleteRKeyReply(m llc.DeleteRKey) {
	// A negative answer means that the peer did not know the key: logged by
	// nobody, harmless (A.3.7).
	if f, ok := g.endRKeyFlow(flowDeleteRKey, m.RKeys[0]); ok {
		g.removeRMB(f.rmb)
	}
}

// handleConfirmRKey remembers a new RMB of the peer and echoes the message.
func (g *Group) handleConfirmRKey(l *link, m llc.ConfirmRKey) {
	m.Response = true
	if !g.learnToken(l.index, RToken(m.This)) {
		m.Negative = true
	}
	l.send(m)
}

// handleDeleteRKey forgets RMBs of the peer and echoes the message, with a
// mask of those it did not know.
func (g *Group) handleDeleteRKey(l *link, m llc.DeleteRKey) {
	m.Response = true
	m.ErrorMask = 0
	for i := range min(int(m.Count), len(m.RKeys)) {
		if !g.forgetToken(l.index, m.RKeys[i]) {
			m.Negative = true
			m.ErrorMask |= 0x80 >> i
		}
	}
	l.send(m)
}
