// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// newLink takes a slot and a queue pair; nil when all slots are taken.
func (l *linux) newLink(r *rnic) *linuxLink {
	for i := range l.slots {
		if l.slots[i] != nil {
			continue
		}
		lk := &linuxLink{slot: i, rnic: r, local: l.w.newEndpoint(r), heard: l.now()}
		l.slots[i] = lk
		l.p.newQP(l.side, i, r, lk.local)
		for _, o := range l.rmbs {
			l.register(o, lk)
		}
		return lk
	}
	return nil
}

// nextID is the number of a new link, which the server gives.
func (l *linux) nextID() llc.LinkID {
	for {
		l.lastID++
		taken := l.lastID == 0
		for _, lk := range l.allLinks() {
			taken = taken || lk.id == l.lastID
		}
		if !taken {
			return l.lastID
		}
	}
}

func (l *linux) qp(lk *linuxLink) *qp { return l.p.qp(l.side, lk.slot) }

func (l *linux) connect(lk *linuxLink, peer linkgroup.Endpoint) {
	if l.isV2() {
		peer.Router = l.w.router()
	}
	lk.peer = peer
	l.qp(lk).connect(peer)
}

// clearLink destroys a link.
func (l *linux) clearLink(lk *linuxLink) {
	if l.slots[lk.slot] != lk {
		return
	}
	l.slots[lk.slot] = nil
	if q := l.qp(lk); q != nil {
		q.close()
	}
	for _, r := range l.rmbs {
		r.keys[lk.slot] = 0
	}
	for _, t := range l.tokens.list {
		t.known[lk.slot] = false
	}
	if rest := l.allLinks(); len(rest) == 1 {
		rest[0].asymmetric = false
	}
	if l.ending == lk { // it does not wait for its word to arrive
		l.die(l.now())
	}
}

// spare is an RNIC for a further link; that of lk itself if there is no other.
// An asymmetric link keeps none from being used, since it goes when a symmetric
// one comes.
func (l *linux) spare(lk *linuxLink) (r *rnic, other bool) {
	r = l.w.anyRNIC(l.peer(), func(r *rnic) bool {
		for _, o := range l.allLinks() {
			if o.rnic == r && !o.asymmetric {
				return true
			}
		}
		return false
	})
	if r == nil {
		return lk.rnic, false
	}
	return r, true
}

func addLinkFrom(e linkgroup.Endpoint, id llc.LinkID) llc.AddLink {
	return llc.AddLink{Dialect: llc.DialectLinux, MAC: e.MAC, GID: e.GID, QPN: e.QPN, Link: id, MTU: e.MTU, PSN: e.PSN}
}

// serverAdd offers a link, on the same RNIC if there is no other.
func (l *linux) serverAdd(f *linuxFlow) {
	lk := l.main()
	var n *linuxLink
	if lk != nil && (len(l.allLinks()) < 2 || l.asymmetricLink() != nil) {
		if r, other := l.spare(lk); other || len(l.allLinks()) < 2 {
			n = l.newLink(r)
		}
	}
	asked := l.asked
	l.asked = nil
	if n == nil {
		if asked != nil && l.slots[asked.slot] == asked {
			l.send(asked, llc.RequestAddLink{Header: llc.Header{Response: true}})
		}
		l.endAdd(f, nil, false)
		return
	}
	n.id = l.nextID()
	offer := addLinkFrom(n.local, n.id)
	offer.Ext = l.extension(lk, n)
	l.send(lk, offer)
	l.await(f, linuxAnswerWait, isResponse(llc.TypeAddLink), func(m llc.Message) {
		a, ok := m.(llc.AddLink)
		if !ok || a.Reject || l.slots[n.slot] != n || !lk.active {
			l.endAdd(f, n, false)
			return
		}
		samePeer := a.GID == lk.peer.GID && a.MAC == lk.peer.MAC
		if samePeer && n.rnic == lk.rnic {
			l.w.fault("%v: %v makes a parallel link", l, m)
		}
		n.asymmetric = samePeer || n.rnic == lk.rnic
		l.connect(n, linkgroup.Endpoint{QPN: a.QPN, GID: a.GID, MAC: a.MAC, PSN: a.PSN, MTU: a.MTU})
		if l.isV2() {
			l.tokens.learnPairs(lk, n, a.Ext.Pairs)
			l.serverConfirm(f, lk, n)
			return
		}
		l.serverKeys(f, lk, n, l.usedRMBs())
	})
	f.deleted = func(m llc.DeleteLink) { // this one only is kept
		l.remote(linuxDelete, m, func(f *linuxFlow) { l.recvDeleteLink(f, lk, m) })
		f.answer(nil)
	}
}

// main is the link that new ones are compared with.
func (l *linux) main() *linuxLink {
	if lk := l.any(l.asymmetricLink()); lk != nil {
		return lk
	}
	return l.any(nil)
}

// usedRMBs are those that the peer must know on a new link.
func (l *linux) usedRMBs() []*linuxRMB {
	var s []*linuxRMB
	for _, r := range l.rmbs {
		if r.owners[0] != "" {
			s = append(s, r)
		}
	}
	return s
}

// continuation carries the next keys.
func (l *linux) continuation(lk, n *linuxLink, untold []*linuxRMB) (llc.AddLinkContinuation, []*linuxRMB) {
	m := llc.AddLinkContinuation{Link: n.id, Remaining: uint8(len(untold))}
	k := min(len(untold), len(m.Pairs))
	for i, r := range untold[:k] {
		m.Pairs[i] = llc.RTokenPair{Reference: rdma.RKey(r.keys[lk.slot]), New: llc.RToken{RKey: rdma.RKey(r.keys[n.slot]), VAddr: r.addr}}
	}
	return m, untold[k:]
}

func isContinuation(response bool, id llc.LinkID) func(*linuxLink, llc.Message) bool {
	return func(_ *linuxLink, m llc.Message) bool {
		c, ok := m.(llc.AddLinkContinuation)
		return ok && c.Response == response && c.Link == id
	}
}

// serverKeys exchanges keys until both sides have no more, once at least.
func (l *linux) serverKeys(f *linuxFlow, lk, n *linuxLink, untold []*linuxRMB) {
	m, rest := l.continuation(lk, n, untold)
	l.send(lk, m)
	l.await(f, linuxAnswerWait, isContinuation(true, n.id), func(m llc.Message) {
		c, ok := m.(llc.AddLinkContinuation)
		if !ok || l.slots[n.slot] != n || !lk.active {
			l.endAdd(f, n, false)
			return
		}
		l.tokens.learnPairs(lk, n, c.Pairs[:c.N()])
		if len(rest) > 0 || !c.Last() {
			l.serverKeys(f, lk, n, rest)
			return
		}
		l.serverConfirm(f, lk, n)
	})
	f.orDrop(l)
}

// serverConfirm proves the path of a further link.
func (l *linux) serverConfirm(f *linuxFlow, lk, n *linuxLink) {
	l.qp(n).transmit()
	l.send(n, l.confirmLink(n, false))
	l.await(f, linuxNewLinkWait, func(on *linuxLink, m llc.Message) bool {
		return on == n && m.IsResponse() && m.Type() == llc.TypeConfirmLink
	}, func(m llc.Message) { l.confirmed2(f, lk, n, m) })
	f.orDrop(l)
}

// extension is what ADD LINK of version 2 has besides the link: all keys at once.
func (l *linux) extension(lk, n *linuxLink) llc.AddLinkExt {
	if !l.isV2() {
		return llc.AddLinkExt{}
	}
	x := llc.AddLinkExt{Direct: !l.w.cfg.Routed, TargetGID: n.local.GID}
	for _, r := range l.usedRMBs() {
		x.Pairs = append(x.Pairs, llc.RTokenPair{
			Reference: rdma.RKey(r.keys[lk.slot]), New: llc.RToken{RKey: rdma.RKey(r.keys[n.slot]), VAddr: r.addr},
		})
	}
	return x
}

// confirmed2 is the answer to the CONFIRM LINK of a further link.
func (l *linux) confirmed2(f *linuxFlow, lk, n *linuxLink, m llc.Message) {
	a, ok := m.(llc.ConfirmLink)
	if ok && (a.Link != n.id || a.QPN != n.peer.QPN || a.GID != n.peer.GID) {
		l.w.fault("%v: %v is not for link %d", l, m, n.id)
	}
	if !ok || l.slots[n.slot] != n {
		if lk.active {
			l.send(lk, llc.DeleteLink{Link: n.id, Reason: llc.DeleteLostPath})
		}
		l.endAdd(f, n, false)
		return
	}
	l.endAdd(f, n, true)
}

// endAdd ends the set-up of a link. A symmetric one replaces an asymmetric one.
func (l *linux) endAdd(f *linuxFlow, n *linuxLink, ok bool) {
	if n != nil && !ok {
		l.clearLink(n)
	}
	if ok {
		n.active, n.heard = true, l.now()
		l.w.trace("%v %v: link %d is active, asymmetric=%t", l.w.Elapsed(), l, n.id, n.asymmetric)
		if a := l.asymmetricLink(); a != nil && a != n && !n.asymmetric && l.role == linkgroup.Server {
			l.queue = append(l.queue, &linuxFlow{kind: linuxDelete, run: func(f *linuxFlow) { l.deleteLink(f, a, llc.DeleteAsymmetric) }})
		}
	}
	if l.step == linuxSecondLink {
		l.becomeUp()
	}
	l.endFlow(f)
}

func (l *linux) asymmetricLink() *linuxLink {
	for _, lk := range l.allLinks() {
		if lk.active && lk.asymmetric {
			return lk
		}
	}
	return nil
}

// clientAdd answers the offer of a link.
func (l *linux) clientAdd(f *linuxFlow, via *linuxLink, m llc.AddLink) {
	lk := l.main()
	if lk == nil {
		lk = via
	}
	r, other := l.spare(lk)
	samePeer := m.GID == lk.peer.GID && m.MAC == lk.peer.MAC
	var n *linuxLink
	if m.MTU.Valid() && (other || !samePeer) && (other || len(l.allLinks()) < 2) {
		n = l.newLink(r)
	}
	if n == nil {
		l.clientReject(f, lk, nil, m)
		return
	}
	n.id = m.Link
	n.asymmetric = samePeer || !other
	l.connect(n, linkgroup.Endpoint{QPN: m.QPN, GID: m.GID, MAC: m.MAC, PSN: m.PSN, MTU: m.MTU})
	a := addLinkFrom(n.local, n.id)
	a.Response, a.Ext = true, l.extension(lk, n)
	l.send(lk, a)
	if l.isV2() {
		l.tokens.learnPairs(lk, n, m.Ext.Pairs)
		l.clientConfirm(f, lk, n, m)
		return
	}
	l.clientKeys(f, lk, n, l.usedRMBs(), m)
}

// clientReject refuses the offer of a link, also when it has been accepted before: whatever
// ended the set-up.
func (l *linux) clientReject(f *linuxFlow, lk, n *linuxLink, offer llc.AddLink) {
	offer.Dialect, offer.Response, offer.Reject, offer.Reason, offer.Ext = llc.DialectLinux, true, true, llc.RejectNoAlternatePath, llc.AddLinkExt{}
	if lk.active {
		l.send(lk, offer)
	}
	l.endAdd(f, n, false)
}

func (l *linux) clientKeys(f *linuxFlow, lk, n *linuxLink, untold []*linuxRMB, offer llc.AddLink) {
	l.await(f, linuxAnswerWait, isContinuation(false, n.id), func(m llc.Message) {
		c, ok := m.(llc.AddLinkContinuation)
		if !ok || l.slots[n.slot] != n || !lk.active {
			l.clientReject(f, lk, n, offer)
			return
		}
		l.tokens.learnPairs(lk, n, c.Pairs[:c.N()])
		a, rest := l.continuation(lk, n, untold)
		a.Response = true
		l.send(lk, a)
		if len(rest) > 0 || !c.Last() {
			l.clientKeys(f, lk, n, rest, offer)
			return
		}
		l.clientConfirm(f, lk, n, offer)
	})
	f.orDrop(l)
}

// clientConfirm waits for the proof of a further link's path. DELETE LINK, of whatever link
// or of all, it takes for the end of this one, and says yes to it.
func (l *linux) clientConfirm(f *linuxFlow, lk, n *linuxLink, offer llc.AddLink) {
	l.await(f, linuxNewLinkWait, func(on *linuxLink, m llc.Message) bool {
		return on == n && !m.IsResponse() && m.Type() == llc.TypeConfirmLink
	}, func(m llc.Message) {
		if m == nil || l.slots[n.slot] != n {
			if lk.active {
				l.send(lk, llc.DeleteLink{Link: n.id, Reason: llc.DeleteLostPath})
			}
			l.clientReject(f, lk, n, offer)
			return
		}
		l.qp(n).transmit()
		l.send(n, l.confirmLink(n, true))
		l.endAdd(f, n, true)
	})
	f.deleted = func(m llc.DeleteLink) {
		m.Response = true
		if lk.active {
			l.send(lk, m)
		}
		l.clientReject(f, lk, n, offer)
	}
}

// linkDown is the loss of a link: its connections move, or the group ends.
func (l *linux) linkDown(lk *linuxLink) {
	if l.step == linuxDead || l.slots[lk.slot] != lk {
		return
	}
	if !lk.active {
		l.clearLink(lk) // its set-up finds out
		if l.step < linuxSecondLink {
			l.die(l.now())
		}
		return
	}
	lk.active = false
	to := l.any(lk)
	l.w.trace("%v %v: link %d is down", l.w.Elapsed(), l, lk.id)
	if to == nil || l.ending == lk {
		l.die(l.now())
		return
	}
	l.switchConns(lk, to)
	l.clearLink(lk)
	if l.role == linkgroup.Client {
		l.send(to, llc.DeleteLink{Link: lk.id, Orderly: true, Reason: llc.DeleteLostPath})
		return
	}
	id := lk.id
	l.queue = append(l.queue, &linuxFlow{kind: linuxDelete, run: func(f *linuxFlow) { l.requestDelete(f, nil, id, llc.DeleteLostPath) }})
	l.w.after(linuxAddAgain, l.wantLink)
}

// switchConns moves the connections of a link.
func (l *linux) switchConns(from, to *linuxLink) {
	for _, c := range l.order {
		if c.link == from {
			c.switchTo(to)
		}
	}
}

// deleteLink ends a link in order: connections first.
func (l *linux) deleteLink(f *linuxFlow, lk *linuxLink, why llc.DeleteReason) {
	to := l.any(lk)
	if l.slots[lk.slot] != lk || to == nil {
		l.endFlow(f)
		return
	}
	lk.active = false
	l.switchConns(lk, to)
	l.requestDelete(f, lk, lk.id, why)
}

// requestDelete tells the client, and destroys the link when it has answered.
func (l *linux) requestDelete(f *linuxFlow, lk *linuxLink, id llc.LinkID, why llc.DeleteReason) {
	end := func(llc.Message) {
		if lk != nil {
			l.clearLink(lk)
		}
		l.endFlow(f)
	}
	to := l.any(lk)
	if to == nil {
		end(nil)
		return
	}
	l.send(to, llc.DeleteLink{Link: id, Orderly: true, Reason: why})
	l.await(f, linuxAnswerWait, isResponse(llc.TypeDeleteLink), end)
}

// recvDeleteLink is the peer's wish: for a server a request to do it, for a
// client an order.
func (l *linux) recvDeleteLink(f *linuxFlow, on *linuxLink, m llc.DeleteLink) {
	var lk *linuxLink
	for _, o := range l.allLinks() {
		if o.id == m.Link {
			lk = o
		}
	}
	server := l.role == linkgroup.Server
	switch {
	case m.All && server || lk != nil && l.any(lk) == nil && server:
		l.endFlow(f)
		l.send(on, llc.DeleteLink{All: true, Orderly: true, Reason: m.Reason})
		l.ending = on
	case m.All || lk != nil && l.any(lk) == nil:
		l.die(l.now())
	case lk == nil && server:
		l.endFlow(f) // ignored
	case lk == nil:
		m.Response, m.Reason = true, llc.DeleteUnknownLink
		l.send(on, m)
		l.endFlow(f)
	case server:
		l.deleteLink(f, lk, m.Reason)
		if m.Reason != llc.DeleteAsymmetric {
			l.w.after(linuxAddAgain, l.wantLink)
		}
	default:
		m.Response, m.Reason = true, 0
		l.send(on, m)
		to := l.any(lk)
		lk.active = false
		l.switchConns(lk, to)
		l.moveLLC(on, lk, to)
		l.clearLink(lk)
		l.endFlow(f)
	}
}

// moveLLC saves the answer that waits on the link it deletes.
func (l *linux) moveLLC(on, lk, to *linuxLink) {
	if on == lk {
		to.llcs = append(to.llcs, lk.llcs...)
		lk.llcs = nil
	}
}

// wantLink makes a server offer a link, and a client ask for one.
func (l *linux) wantLink() {
	if l.step != linuxUp || l.ending != nil || !l.mayAddLinks() {
		return
	}
	if l.role == linkgroup.Server {
		l.queue = append(l.queue, &linuxFlow{kind: linuxAdd, run: l.serverAdd})
		return
	}
	lk := l.any(nil)
	if lk == nil {
		return
	}
	if r, other := l.spare(l.main()); other {
		if l.isV2() {
			l.queue = append(l.queue, &linuxFlow{kind: linuxAdd, run: func(f *linuxFlow) { l.requestLink(f, r) }})
			return
		}
		e := linkgroup.Endpoint{GID: rdma.GID{14: byte(r.index), 15: byte(r.peer + 1)}, MAC: rdma.MAC{4: byte(r.index), 5: byte(r.peer + 1)}, MTU: rdma.MTU1024}
		l.send(lk, addLinkFrom(e, 0))
	}
}

// requestLink is how a client of version 2 asks for a link. It does nothing else
// until it has an answer.
func (l *linux) requestLink(f *linuxFlow, r *rnic) {
	lk := l.any(nil)
	if lk == nil {
		l.endFlow(f)
		return
	}
	l.send(lk, llc.RequestAddLink{GIDs: []rdma.GID{{14: byte(r.index), 15: byte(r.peer + 1)}}})
	l.await(f, linuxAnswerWait, func(_ *linuxLink, m llc.Message) bool {
		return m.Type() == llc.TypeAddLink && !m.IsResponse() || m.Type() == llc.TypeRequestAddLink && m.IsResponse()
	}, func(m llc.Message) {
		if a, ok := m.(llc.AddLink); ok && l.step == linuxUp {
			l.clientAdd(f, lk, a)
			return
		}
		l.endFlow(f)
	})
}

func (l *linux) linkFailed(_ time.Time, index int, _ error) {
	if lk := l.slots[index]; lk != nil {
		l.linkDown(lk)
	}
}

// port is an event of an RNIC: its links are lost, or it may carry one.
func (l *linux) port(_ time.Time, rnic int, up bool) {
	if l.step == linuxDead {
		return
	}
	if up {
		if len(l.allLinks()) < 2 || l.asymmetricLink() != nil {
			l.wantLink()
		}
		return
	}
	for _, lk := range l.allLinks() {
		if lk.rnic.index == rnic {
			l.linkDown(lk)
		}
	}
}
