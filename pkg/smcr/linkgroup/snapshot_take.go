// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"bytes"
	"errors"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// Snapshot returns all that the group knows. [Restore] makes the same group of it. The
// outputs are not in it: the shell takes them with Poll and carries them out before.
func (g *Group) Snapshot(now time.Time) Snapshot {
	invariant.Must(len(g.out.list) == 0, "snapshot of a link group whose outputs were not taken")
	peers := g.numberPeers()
	return Snapshot{
		Version: SnapshotVersion, Terms: g.termsSnapshot(), State: g.state, Err: snapshotError(g.err),
		Setup:  SetupSnapshot{Step: uint8(g.setup.step), Deadline: instant(now, g.setup.deadline), Failed: g.setup.failed},
		Links:  g.links.snapshot(now, &g.conns),
		Adding: g.adding.snapshot(now),
		Growth: GrowthSnapshot{Held: uint8(g.growth.forbids), Wait: g.growth.wait, At: instant(now, g.growth.at)},
		Side:   snapshotSide(now, g.side),

		Keys:      g.keys.snapshot(now, peers.forgotten),
		OurKeys:   g.ourKeys.snapshot(),
		PeerKeys:  PeerKeysSnapshot{PeerRMB: peers.number[g.peerKeys.token], Left: g.peerKeys.left},
		AfterLoss: HoldSnapshot{Lost: g.afterLoss.lost, Until: instant(now, g.afterLoss.until)},

		Conns:     g.conns.snapshot(now, peers),
		IdleSince: instant(now, g.idleSince),
		Requests:  g.requests.snapshot(now),
		Ending:    EndingSnapshot{ByPeer: g.ending.byPeer, Via: uint8(g.ending.via), Deadline: instant(now, g.ending.deadline)},
		Last:      g.last.snapshot(now),
		Discarded: g.Discarded, LLCSent: g.LLCSent, CDCSent: g.CDCSent,
	}
}

// peerNumbers are the numbers of the peer's RMBs in a snapshot.
type peerNumbers struct {
	number    map[*rtoken]int // 0: of nil
	forgotten []*rtoken       // which the table does not have
}

func (g *Group) numberPeers() peerNumbers {
	p := peerNumbers{number: make(map[*rtoken]int, len(g.keys.peers)+1)}
	for _, t := range g.keys.peers {
		p.add(t)
	}
	inTable := len(p.number)
	note := func(t *rtoken) {
		if t != nil && p.add(t) {
			p.forgotten = append(p.forgotten, t)
		}
	}
	note(g.peerKeys.token)
	for _, c := range g.conns.list {
		if c != nil {
			note(c.peerRMB)
		}
	}
	invariant.Must(inTable == len(g.keys.peers), "an RMB of the peer is twice in the table")
	return p
}

// add gives the next number; false: the RMB has one.
func (p *peerNumbers) add(t *rtoken) bool {
	if p.number[t] != 0 {
		return false
	}
	p.number[t] = len(p.number) + 1
	return true
}

// errorNumbers are the errors that a snapshot can tell of, by their bit.
var errorNumbers = [...]error{ErrLink, ErrTestLink, ErrStalled, ErrProtocol, ErrExchangeTimeout, ErrLinkDeleted, ErrLinkLeft, ErrPeerDeleted}

func snapshotError(err error) ErrorSnapshot {
	if err == nil {
		return ErrorSnapshot{}
	}
	s := ErrorSnapshot{Text: err.Error()}
	for i, e := range errorNumbers {
		if errors.Is(err, e) {
			s.Is |= 1 << i
		}
	}
	return s
}

func (t *terms) termsSnapshot() TermsSnapshot {
	return TermsSnapshot{
		Role: t.role, Version: t.version, Release: t.release, AllowRFC: t.allowRFC, Offered: t.offered, UserID: t.userID,
		Dialect: t.dialect, MaxLinks: t.maxLinks, MaxConns: t.maxConns, BigEndian: t.bigEndian,
	}
}

func (t *linkTable) snapshot(now time.Time, conns *connTable) LinksSnapshot {
	s := LinksSnapshot{Last: t.last, Births: t.births, LastID: t.lastID}
	for i := range t.at {
		l := &t.at[i]
		s.At[i] = LinkSnapshot{
			ID: l.id, State: uint8(l.state), Local: l.local, Peer: l.peer, PeerUserID: l.peerUserID, Born: l.born,
			Inflight: l.inflight, UntilLong: l.untilLong, Health: l.healthSnapshot(now), DrainBy: instant(now, l.drainBy), Deletion: l.deletion,
			Sent: l.sent, Recv: l.recv,
		}
		for _, m := range l.queue {
			s.At[i].Queue = append(s.At[i].Queue, bytes.Clone(m.bytes()))
		}
		for c := l.ready.head; c != nil; c = c.next {
			if conns.list[c.slot] == c { // one that was released has nothing to say
				s.At[i].Ready = append(s.At[i].Ready, c.slot)
			}
		}
	}
	return s
}

// bytes is the message as it is sent.
func (m *message) bytes() []byte {
	if m.long != nil {
		return m.long
	}
	return m.short[:]
}

func (h *health) healthSnapshot(now time.Time) HealthSnapshot {
	return HealthSnapshot{
		Waiting: instant(now, h.waiting),
		Slowest: h.pace.slowest, Done: h.pace.done, Mark: h.pace.mark, Since: instant(now, h.pace.since),
		Heard: instant(now, h.heard), TestSent: instant(now, h.testSent), TestData: h.testData,
		Proven: instant(now, h.proven), Answer: h.answer,
	}
}

func (a *adding) snapshot(now time.Time) AddingSnapshot {
	s := AddingSnapshot{
		Step: uint8(a.step), Link: a.link, Via: uint8(a.via), Fresh: a.fresh, Request: a.request, RMBs: slices.Clone(a.rmbs),
		PeerLeft: a.peerLeft, Since: instant(now, a.since), Deadline: instant(now, a.deadline), Again: a.again,
	}
	s.Request.Ext.Pairs = slices.Clone(s.Request.Ext.Pairs)
	return s
}

func snapshotSide(now time.Time, s side) SideSnapshot {
	switch s := s.(type) {
	case *server:
		return SideSnapshot{AskedVia: uint8(s.asked.via), AskedGID: s.asked.gid}
	case *client:
		return SideSnapshot{Spare: uint8(s.spare), SpareUntil: instant(now, s.spareUntil)}
	}
	return SideSnapshot{}
}

func (k *keyTable) snapshot(now time.Time, forgotten []*rtoken) KeysSnapshot {
	s := KeysSnapshot{Last: k.last, Gone: slices.Clone(k.gone)}
	for _, r := range k.rmbs {
		s.RMBs = append(s.RMBs, r.snapshot(now))
	}
	for _, t := range k.peers {
		s.Peers = append(s.Peers, PeerRMBSnapshot{Tokens: t.tokens, Known: t.known, Former: t.former})
	}
	for _, t := range forgotten {
		s.Forgotten = append(s.Forgotten, PeerRMBSnapshot{Tokens: t.tokens, Known: t.known, Former: t.former})
	}
	return s
}

func (r *rmb) snapshot(now time.Time) RMBSnapshot {
	s := RMBSnapshot{
		ID: r.id, ElementSize: r.elementSize, Retired: r.retired, Tokens: r.tokens, Registered: r.registered, State: uint8(r.state),
		Elements: make([]ElementSnapshot, len(r.elements)),
	}
	for i, e := range r.elements {
		s.Elements[i] = ElementSnapshot{Held: e.held, Stale: e.stale, Freed: instant(now, e.freed)}
	}
	return s
}

func (a *announcement) snapshot() AnnouncementSnapshot {
	return AnnouncementSnapshot{
		List: append([]llc.LinkRToken(nil), a.list[:a.n]...), Told: a.told, Continued: a.continued, Links: a.links,
	}
}

func (t *connTable) snapshot(now time.Time, peers peerNumbers) ConnsSnapshot {
	s := ConnsSnapshot{RetireAt: instant(now, t.retireAt)}
	for _, c := range t.list {
		if c != nil {
			s.List = append(s.List, c.snapshot(now, peers))
		}
	}
	for c := t.closing.head; c != nil; c = c.clockNext {
		s.Closing = append(s.Closing, c.slot)
	}
	return s
}

func (c *Conn) snapshot(now time.Time, peers peerNumbers) ConnSnapshot {
	return ConnSnapshot{
		Slot: c.slot, Token: c.token,
		Link: uint8(c.link), Target: uint8(c.target), Awaits: uint8(c.awaits), Named: uint8(c.named), PeerLink: uint8(c.peerLink),
		CameTo: c.cameTo, Endpoint: c.endpoint, Data: c.data.Snapshot(), RMB: c.rmb.id, Element: c.element,
		PeerRMB: peers.number[c.peerRMB], Offset: c.offset, PeerSize: c.peerSize, PeerToken: c.peerTok,
		Deadline: instant(now, c.deadline), Since: instant(now, c.since), Done: c.done, Zombie: c.zombie, Replaced: c.replaced,
		Writes: c.writes, MessagesSent: c.messagesSent, MessagesRecv: c.messagesRecv,
	}
}

func (q *requests) snapshot(now time.Time) RequestsSnapshot {
	s := RequestsSnapshot{
		Sent: q.sent, Began: instant(now, q.began), Expiry: instant(now, q.expiry), Resend: instant(now, q.resend), Via: uint8(q.via),
	}
	for _, f := range q.line {
		s.Line = append(s.Line, ExchangeSnapshot{
			Kind: uint8(f.kind), RMBs: slices.Clone(f.rmbs), Tries: f.tries, HoldUntil: instant(now, f.notBefore),
			Deletion: f.deletion, Fresh: f.fresh,
		})
	}
	return s
}

func (w *lastWords) snapshot(now time.Time) LastWordsSnapshot {
	return LastWordsSnapshot{
		Known: w.known, Owed: w.owed, Reason: w.reason, Again: instant(now, w.again), Until: instant(now, w.until),
		Links: w.links, Inflight: w.inflight,
	}
}
