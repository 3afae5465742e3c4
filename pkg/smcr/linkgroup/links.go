// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// link is one queue pair between the two peers.
type link struct {
	index       LinkIndex
	id          llc.LinkID
	local, peer Endpoint
	peerUserID  uint32
	state       linkState
	born        uint64         // order in which links became ACTIVE
	asymmetric  bool           // shares an RNIC of one side with an older link
	queue       []message      // LLC messages that wait for the send budget
	ready       connQueue      // connections that write over this link and have something to send
	conns       int            // connections that write over this link, or are about to
	inflight    int            // SENDs that have not completed
	awaiting    int            // connections that depend on hearing of that at once
	waiting     time.Time      // when the SENDs in flight last made progress
	pace        pace           // of their acknowledgements
	heard       time.Time      // when the peer last sent something over it
	testSent    time.Time      // zero: no TEST LINK is unanswered
	testData    [16]byte       // of that TEST LINK
	proven      time.Time      // when the last TEST LINK that was answered was sent
	answer      time.Duration  // how long its answer took
	drainBy     time.Time      // DRAINING: when connections that still use it fail over
	deletion    llc.DeleteLink // DRAINING: what the peer is told once no connection uses it
	sent, recv  uint64         // stream bytes
}

// linkState is the life of a link.
//
//	DOWN --> WANTED --> FORMING --> ACTIVE --> DRAINING --> DOWN
//	           |           |          |                      ^
//	           +-----------+----------+----------------------+
type linkState uint8

const (
	linkDown     linkState = iota // no such link
	linkWanted                    // the shell was asked for a queue pair
	linkForming                   // the queue pair exists, its path is not proven
	linkActive                    // carries connections
	linkDraining                  // connections leave it, then the peer is told
)

func (s linkState) String() string {
	switch s {
	case linkWanted, linkForming:
		return "FORMING"
	case linkActive:
		return "ACTIVE"
	case linkDraining:
		return "DRAINING"
	case linkDown:
	}
	return "DOWN"
}

// isUp reports whether messages can be sent over the link in an established
// group.
func (l *link) isUp() bool { return l.state == linkActive || l.state == linkDraining }

// samePeer reports whether two links end at the same RNIC of the peer.
func (l *link) samePeer(e Endpoint) bool { return l.peer.GID == e.GID && l.peer.MAC == e.MAC }

// peerHalf is the peer's half of the link, for the shell.
func (l *link) peerHalf() *Endpoint {
	e := l.peer
	if e.Router == (rdma.MAC{}) {
		e.Router = l.local.Router
	}
	return &e
}

// LinkInfo describes a link.
type LinkInfo struct {
	Index       LinkIndex
	ID          llc.LinkID
	State       string
	Asymmetric  bool
	Local, Peer Endpoint
	UserID      uint32 // ours and the peer's, for displays
	PeerUserID  uint32
	Conns       int    // that write over it
	Sent, Recv  uint64 // stream bytes
}

// Links returns the links of the group that are not down.
func (g *Group) Links() []LinkInfo {
	var infos []LinkInfo
	for i := range g.links {
		if l := &g.links[i]; l.state > linkWanted {
			infos = append(infos, LinkInfo{
				l.index, l.id, l.state.String(), l.asymmetric, l.local, l.peer, g.userID(l), l.peerUserID, l.conns, l.sent, l.recv,
			})
		}
	}
	return infos
}

// Redundancy tells how many RNICs a group can lose (RFC 7609 §2.2.1).
type Redundancy uint8

// Redundancies.
const (
	Single          Redundancy = iota // one link
	Symmetric                         // two links or more that share no RNIC
	AsymmetricLocal                   // the second link shares our RNIC: the peer has two
	AsymmetricPeer                    // the second link shares the peer's RNIC: we have two
)

func (r Redundancy) String() string {
	switch r {
	case Single:
		return "SINGLE"
	case Symmetric:
		return "SYMMETRIC"
	case AsymmetricLocal:
		return "ASYMMETRIC LOCAL"
	case AsymmetricPeer:
		return "ASYMMETRIC PEER"
	}
	return fmt.Sprintf("Redundancy(%d)", uint8(r))
}

// Redundancy returns the redundancy of the group's ACTIVE links.
func (g *Group) Redundancy() Redundancy {
	symmetric, odd := g.countLinks()
	switch {
	case symmetric > 1:
		return Symmetric
	case odd == nil:
		return Single
	}
	for i := range g.links {
		if l := &g.links[i]; l != odd && l.state == linkActive && l.local.RNIC == odd.local.RNIC {
			return AsymmetricLocal
		}
	}
	return AsymmetricPeer
}

// countLinks returns how many ACTIVE links share no RNIC with an older one,
// and the one that does, if there is one: it does not count towards the
// negotiated maximum, and there may be one only (§2.2.2).
func (g *Group) countLinks() (symmetric int, asymmetric *link) {
	for i := range g.links {
		switch l := &g.links[i]; {
		case l.state != linkActive:
		case l.asymmetric:
			asymmetric = l
		default:
			symmetric++
		}
	}
	return symmetric, asymmetric
}

// classify finds the asymmetric links anew after a link came or went: of two
// links that share an RNIC it is the younger one.
func (g *Group) classify() {
	for i := range g.links {
		g.links[i].asymmetric = false
	}
	for age := uint64(1); age <= g.births; {
		l := g.bornFrom(age)
		if l == nil {
			return
		}
		l.asymmetric = g.sharesRNIC(l)
		age = l.born + 1
	}
}

// bornFrom returns the oldest ACTIVE link that is not older than age.
func (g *Group) bornFrom(age uint64) *link {
	var oldest *link
	for i := range g.links {
		if l := &g.links[i]; l.state == linkActive && l.born >= age && (oldest == nil || l.born < oldest.born) {
			oldest = l
		}
	}
	return oldest
}

// sharesRNIC reports whether a link shares an RNIC of either side with an
// older symmetric one.
func (g *Group) sharesRNIC(l *link) bool {
	for i := range g.links {
		o := &g.links[i]
		if o == l || o.state != linkActive || o.asymmetric || (l.born != 0 && o.born > l.born) {
			continue
		}
		if o.local.RNIC == l.local.RNIC || o.samePeer(l.peer) {
			return true
		}
	}
	return false
}

// isParallel reports whether another link joins the same two RNICs, which is
// not permitted (§2.2.1).
func (g *Group) isParallel(l *link) bool {
	for i := range g.links {
		if o := &g.links[i]; o != l && o.isUp() && o.local.RNIC == l.local.RNIC && o.samePeer(l.peer) {
			return true
		}
	}
	return false
}

// RNICsInUse returns the set of our RNICs, bit n for number n, that carry
// links. One that carries an asymmetric link only is not in it: it is free for
// the symmetric link that replaces the asymmetric one.
func (g *Group) RNICsInUse() uint8 {
	var set uint8
	for i := range g.links {
		l := &g.links[i]
		if (l.isUp() && !l.asymmetric) || (g.state == Forming && l == g.firstLink()) {
			set |= 1 << l.local.RNIC
		}
	}
	return set
}

// firstLink is the link of the first contact while the group forms.
func (g *Group) firstLink() *link { return &g.links[0] }

// linkByID finds a link by the number that it has on the wire.
func (g *Group) linkByID(id llc.LinkID) *link {
	for i := range g.links {
		if l := &g.links[i]; l.state > linkWanted && l.id == id && l.id != 0 {
			return l
		}
	}
	return nil
}

// otherLink returns a link for LLC messages other than l: an ACTIVE one if
// there is one. Any will do, since messages name the link they are about.
func (g *Group) otherLink(l *link) *link {
	var draining *link
	for i := range g.links {
		switch o := &g.links[i]; {
		case o == l:
		case o.state == linkActive:
			return o
		case o.state == linkDraining && draining == nil:
			draining = o
		}
	}
	return draining
}

// freeSlot returns a place for another link, with nothing of the last one
// there but its RTokens: a CLC message on its way may name them. For its sake
// too, places are taken in turn.
func (g *Group) freeSlot() *link {
	for range g.links {
		g.lastSlot = (g.lastSlot + 1) % MaxLinks
		l := &g.links[g.lastSlot]
		if l.state != linkDown {
			continue
		}
		*l = link{index: l.index}
		for _, t := range g.rtokens {
			t.retire(l.index)
		}
		return l
	}
	return nil
}

// nextLinkID assigns a link number. None is used again before all of them
// were (§2.2.4), so that nobody takes a new link for one being cleaned up.
func (g *Group) nextLinkID() llc.LinkID {
	for {
		g.lastLinkID++
		if id := g.lastLinkID; id != 0 && g.linkByID(id) == nil && !g.isDeleting(id) {
			return id
		}
	}
}

// closeLink destroys the link's queue pair: afterwards the peer cannot write
// over it, and nothing of it completes any more.
func (g *Group) closeLink(l *link) {
	if l.state == linkDown {
		return
	}
	wanted := l.state == linkWanted
	if l.isUp() && g.state == Active {
		g.lostLink = true
	}
	l.state = linkDown
	g.present &^= 1 << l.index
	l.queue = nil
	for !l.ready.empty() {
		l.ready.pop()
	}
	l.inflight = 0
	l.pace = pace{}
	l.testSent, l.proven, l.drainBy = time.Time{}, time.Time{}, time.Time{}
	l.answer = 0
	if !wanted {
		g.out = append(g.out, Output{Kind: OutCloseLink, Link: l.index})
	}
}

// linkUp makes a link ACTIVE after both sides have confirmed it.
func (g *Group) linkUp(now time.Time, l *link) {
	l.state = linkActive
	l.heard = now
	g.births++
	l.born = g.births
	g.classify()
}

// testLink keeps the link proven (§4.5.3): it sends TEST LINK after silence
// and reports true when the link failed.
func (g *Group) testLink(now time.Time, l *link) bool {
	switch due := g.testDue(l); {
	case due.IsZero() || now.Before(due):
		return false
	case l.testSent.IsZero():
		g.sendTestLink(now, l)
		return false
	case !now.Before(l.testSent.Add(LastLinkTimeout)):
		return true
	}
	return g.isToBlame(now, l, l.testSent, TestLinkTimeout)
}

func (g *Group) sendTestLink(now time.Time, l *link) {
	l.testSent = now
	for i := range l.testData {
		l.testData[i] = byte(g.cfg.Rand.Uint32())
	}
	l.send(llc.TestLink{Header: g.header(false), UserData: l.testData})
}

// TestLinks asks the peer on each link whether it still has the group. A link on
// which it does not answer is lost.
func (g *Group) TestLinks(now time.Time) {
	for i := range g.links {
		if l := &g.links[i]; g.state == Active && l.isUp() && l.testSent.IsZero() {
			g.sendTestLink(now, l)
		}
	}
}

// ProvenSince reports whether the peer has answered a TEST LINK of a time or later.
func (g *Group) ProvenSince(t time.Time) bool {
	return slices.ContainsFunc(g.links[:], func(l link) bool {
		return l.isUp() && !l.proven.Before(t)
	})
}

// testDue is when testLink wants to be called.
func (g *Group) testDue(l *link) time.Time {
	switch {
	case !l.isUp():
		return time.Time{}
	case l.testSent.IsZero():
		return l.heard.Add(g.cfg.TestLinkInterval)
	}
	last := l.testSent.Add(LastLinkTimeout)
	if due := g.blameDue(l, l.testSent, TestLinkTimeout); !due.IsZero() && due.Before(last) {
		return due
	}
	return last
}

// blameDue is when something has to be done about a link that has been silent for
// so long and may be for as long as patience, zero if it is other links' turn.
//
// Which of two links is the dead one shows only when the other one is alive: if the
// peer is just slow, both are silent. And it must be alive in both directions, after
// this one has fallen silent. On a busy machine each side may find another one of two
// links slow, and if each gives up its own, the group ends. But then each asks over
// the link that is slow for the other one: the answer comes behind everything that
// was late on it, so it clears that link before it counts against this one. And if
// it is we who are slow, the answer is too, and this link has as long again.
func (g *Group) blameDue(l *link, since time.Time, patience time.Duration) (due time.Time) {
	for i := range g.links {
		if t, _ := g.witness(&g.links[i], l, since, patience); !t.IsZero() && (due.IsZero() || t.Before(due)) {
			due = t
		}
	}
	return due
}

// isToBlame reports whether a link is to be given up. If that does not show it asks
// the others whether they are alive, once that is due.
func (g *Group) isToBlame(now time.Time, l *link, since time.Time, patience time.Duration) bool {
	for i := range g.links {
		due, answered := g.witness(&g.links[i], l, since, patience)
		switch {
		case due.IsZero() || now.Before(due):
		case answered:
			return true
		default:
			g.sendTestLink(now, &g.links[i])
		}
	}
	return false
}

// witness is when another link counts against a silent one, because it has answered
// since, or is to be asked; zero while it owes its answer.
func (g *Group) witness(o, l *link, since time.Time, patience time.Duration) (due time.Time, answered bool) {
	ask := since.Add(patience / 2)
	switch {
	case o == l || o.state != linkActive:
		return time.Time{}, false
	case !o.proven.Before(ask):
		due = since.Add(patience)
		if again := o.proven.Add(2 * o.answer); again.After(due) {
			due = again
		}
		return due, true
	case o.testSent.IsZero():
		return ask, false
	}
	return time.Time{}, false
}

// stallDue is when something has to be done about a link that owes
// acknowledgements. Its queue pair would take seconds to find out. That is right
// for the last link, on which connections depend; with another one it only costs
// time.
func (g *Group) stallDue(l *link) time.Time {
	if l.state != linkActive || l.inflight == 0 {
		return time.Time{}
	}
	return g.blameDue(l, l.waiting, g.patience(l))
}

// patience is how long a link may be silent. Nobody waits for one that carries
// nothing but its own messages, and a port that has just come up may drop those.
func (g *Group) patience(l *link) time.Duration {
	p := l.pace.patience()
	if exchange := g.adding.via == l || (g.flowSent && g.flowVia == l); l.conns == 0 && !exchange {
		p = max(p, QuietStallTimeout)
	}
	return p
}

// pace measures how long a link's SENDs wait for their acknowledgement, one at
// a time. Behind bulk data on a busy machine that may be long, which is no
// reason to give the link up.
type pace struct {
	slowest time.Duration // of late
	done    uint64        // SENDs that have completed
	mark    uint64        // measured: the one with this number; 0: none
	since   time.Time
}

// sent notes that n SENDs are in flight, the last of them since now.
func (p *pace) sent(now time.Time, n int) {
	if p.mark == 0 {
		p.mark, p.since = p.done+uint64(n), now
	}
}

// sentSince notes the SENDs that joined the given number in flight.
func (l *link) sentSince(now time.Time, before int) {
	if l.inflight == before {
		return
	}
	if before == 0 {
		l.waiting = now
	}
	l.pace.sent(now, l.inflight)
}

func (p *pace) completed(now time.Time) {
	if p.done++; p.done == p.mark {
		p.mark = 0
		p.slowest = max(p.slowest-p.slowest/8, now.Sub(p.since))
	}
}

// patience is how long a link of this pace may be silent.
func (p *pace) patience() time.Duration { return max(StallTimeout, 4*p.slowest) }

// message is an LLC message as Output has it: one that does not fit into short
// is in long.
type message struct {
	short [llc.Size]byte
	long  []byte
}

// send queues an LLC message on the link.
func (l *link) send(m llc.Message) {
	invariant.Must(l.state > linkWanted, "LLC message for a link without a queue pair")
	var q message
	if b := m.Append(q.short[:0]); len(b) > llc.Size {
		q.long = b
	}
	l.queue = append(l.queue, q)
}

func (g *Group) pumpLLC(l *link) {
	for len(l.queue) > 0 && l.inflight < SendBudget {
		l.inflight++
		g.out = append(g.out, Output{Kind: OutSend, Link: l.index, Msg: l.queue[0].short, Long: l.queue[0].long})
		l.queue[0] = message{}
		l.queue = l.queue[1:]
		g.LLCSent++
	}
}

// isIdle reports whether the link has nothing that can go out now.
func (l *link) isIdle(g *Group) bool {
	return (len(l.queue) == 0 || l.inflight >= SendBudget) &&
		(l.ready.empty() || g.state != Active || l.inflight >= SendBudget-llcReserve)
}

// AwaitsSent reports whether anything depends on hearing of completed SENDs of
// a link at once. If not, it is enough that HandleSent is told of them before
// messages and timers, and now and then.
func (g *Group) AwaitsSent(index LinkIndex) bool {
	l := &g.links[index]
	return l.inflight > 0 &&
		(l.awaiting > 0 || g.state != Active || l.state != linkActive || len(l.queue) > 0 || l.inflight >= patientSends)
}

// LocalEndpoint returns our half of the group's oldest link.
func (g *Group) LocalEndpoint() Endpoint {
	if l := g.bornFrom(0); l != nil {
		return l.local
	}
	return g.firstLink().local
}

// FindLink finds the link whose half at the peer an Accept with F=0 names
// (§3.5.2.3).
func (g *Group) FindLink(qpn rdma.QPN, gid rdma.GID, mac rdma.MAC) (LinkIndex, bool) {
	for i := range g.links {
		if l := &g.links[i]; g.state == Active && l.isUp() && l.peer.QPN == qpn && l.peer.GID == gid && l.peer.MAC == mac {
			return l.index, true
		}
	}
	return 0, false
}

// MatchesPeer reports whether an Accept with F=0 means this group.
func (g *Group) MatchesPeer(qpn rdma.QPN, gid rdma.GID, mac rdma.MAC) bool {
	_, ok := g.FindLink(qpn, gid, mac)
	return ok
}
