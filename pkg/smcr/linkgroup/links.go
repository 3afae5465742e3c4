// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// linkTable has the places of a group's links. It knows no role and no time.
type linkTable struct {
	at      [MaxLinks]link
	present uint8      // bit set of those that are not down
	last    LinkIndex  // taken last
	births  uint64     // links that became ACTIVE
	lastID  llc.LinkID // server: assigned last
}

func newLinkTable() linkTable {
	t := linkTable{}
	for i := range t.at {
		t.at[i].index = LinkIndex(i)
	}
	return t
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
	for i := range g.links.at {
		if l := &g.links.at[i]; l.state > linkWanted {
			infos = append(infos, LinkInfo{
				l.index, l.id, l.state.String(), l.asymmetric, l.local, l.peer, g.linkUserID(l), l.peerUserID, l.conns, l.sent, l.recv,
			})
		}
	}
	return infos
}

// EndsOnlyAt reports whether all ACTIVE links end at the peer's RNIC that an endpoint
// belongs to. A link that is being added counts for nothing: the peer may not have it yet.
func (g *Group) EndsOnlyAt(peer Endpoint) bool {
	for i := range g.links.at {
		if l := &g.links.at[i]; l.state == linkActive && (l.peer.GID != peer.GID || l.peer.MAC != peer.MAC) {
			return false
		}
	}
	return true
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
func (g *Group) Redundancy() Redundancy { return g.links.redundancy() }

// RNICsInUse returns the set of our RNICs, bit n for number n, that carry
// links. One that carries an asymmetric link only is not in it: it is free for
// the symmetric link that replaces the asymmetric one.
func (g *Group) RNICsInUse() uint8 { return g.links.rnics(g.state == Forming) }

// closeLink destroys the link's queue pair: afterwards the peer cannot write
// over it, and nothing of it completes any more.
func (g *Group) closeLink(l *link) {
	if l.state == linkDown {
		return
	}
	wanted := l.state == linkWanted
	if l.isUp() && g.state == Active {
		g.afterLoss.linkLost()
	}
	g.links.becomeDown(l)
	if !wanted {
		g.out.put(Output{Kind: OutCloseLink, Link: l.index})
	}
}

// TestLinks asks the peer on each link whether it still has the group. A link on
// which it does not answer is lost.
func (g *Group) TestLinks(now time.Time) {
	for i := range g.links.at {
		if l := &g.links.at[i]; g.state == Active && l.isUp() && l.testSent.IsZero() {
			g.tester(now).test(l)
		}
	}
}

func (g *Group) tester(now time.Time) tester {
	return tester{now: now, rand: g.cfg.Rand, header: g.header(false)}
}

// ProvenSince reports whether the peer has answered a TEST LINK of a time or later.
func (g *Group) ProvenSince(t time.Time) bool {
	return slices.ContainsFunc(g.links.at[:], func(l link) bool {
		return l.isUp() && !l.proven.Before(t)
	})
}

// AwaitsSent reports whether anything depends on hearing of completed SENDs of
// a link at once. If not, it is enough that HandleSent is told of them before
// messages and timers, and now and then.
func (g *Group) AwaitsSent(index LinkIndex) bool {
	l := &g.links.at[index]
	return l.inflight > 0 &&
		(l.awaiting > 0 || g.state != Active || l.state != linkActive || len(l.queue) > 0 || l.inflight >= patientSends)
}

// LocalEndpoint returns our half of the group's oldest link.
func (g *Group) LocalEndpoint() Endpoint {
	if l := g.links.oldest(); l != nil {
		return l.local
	}
	return g.links.first().local
}

// FindLink finds the link whose half at the peer an Accept with F=0 names
// (§3.5.2.3).
func (g *Group) FindLink(qpn rdma.QPN, gid rdma.GID, mac rdma.MAC) (LinkIndex, bool) {
	for i := range g.links.at {
		if l := &g.links.at[i]; g.state == Active && l.isUp() && l.peer.QPN == qpn && l.peer.GID == gid && l.peer.MAC == mac {
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

// in is the link in a place; nil: none.
func (t *linkTable) in(p place) *link {
	if p == noPlace {
		return nil
	}
	return &t.at[p-1]
}

// first is the link of the first contact while the group forms.
func (t *linkTable) first() *link { return &t.at[0] }

// byID finds a link by the number that it has on the wire.
func (t *linkTable) byID(id llc.LinkID) *link {
	for i := range t.at {
		if l := &t.at[i]; l.state > linkWanted && l.id == id && l.id != 0 {
			return l
		}
	}
	return nil
}

// lastWithID is byID with links that are down, but whose place nobody has
// taken.
func (t *linkTable) lastWithID(id llc.LinkID) *link {
	if l := t.byID(id); l != nil || id == 0 {
		return l
	}
	for i := range t.at {
		if l := &t.at[i]; l.state == linkDown && l.id == id {
			return l
		}
	}
	return nil
}

// other returns a link for LLC messages other than l: an ACTIVE one if
// there is one. Any will do, since messages name the link they are about.
func (t *linkTable) other(l *link) *link {
	var draining *link
	for i := range t.at {
		switch o := &t.at[i]; {
		case o == l:
		case o.state == linkActive:
			return o
		case o.state == linkDraining && draining == nil:
			draining = o
		}
	}
	return draining
}

// free finds a place for another link, with nothing of the last one there: nil if all
// are taken. A CLC message on its way may name RTokens of the last one. For its sake
// too, places are taken in turn.
func (t *linkTable) free() *link {
	for range t.at {
		t.last = (t.last + 1) % MaxLinks
		l := &t.at[t.last]
		if l.state != linkDown {
			continue
		}
		*l = link{index: l.index}
		return l
	}
	return nil
}

// nextID assigns a link number. None is used again before all of them
// were (§2.2.4), so that nobody takes a new link for one being cleaned up.
func (t *linkTable) nextID(cleaning func(llc.LinkID) bool) llc.LinkID {
	for {
		t.lastID++
		if id := t.lastID; id != 0 && t.byID(id) == nil && !cleaning(id) {
			return id
		}
	}
}

// count returns how many ACTIVE links share no RNIC with an older one, and the link that does,
// if there is one. That asymmetric link does not count towards the negotiated maximum, and there
// may be one only (§2.2.2).
func (t *linkTable) count() (symmetric int, asymmetric *link) {
	for i := range t.at {
		switch l := &t.at[i]; {
		case l.state != linkActive:
		case l.asymmetric:
			asymmetric = l
		default:
			symmetric++
		}
	}
	return symmetric, asymmetric
}

// classify finds the asymmetric links anew after a link came or went: of two links that share an RNIC it is the one
// across subnets, which depends on both, or else the younger one. For example, with an RNIC of each side in each of
// two subnets, of which the server's RNIC 0 came up last:
//
//	        client          server
//	link 1  RNIC 0 -------- RNIC 1    across subnets; symmetric while it is alone
//	link 2  RNIC 0 -------- RNIC 0    shares the client's RNIC 0: link 1 is asymmetric now
//	link 3  RNIC 1 -------- RNIC 1    replaces link 1
//
// If more links are symmetric where age alone counts, it does. Linux looks at no subnets, so with a client of it link 3
// may have RNIC 1 of the client and 0 of the server, once link 2 has RNIC 1 of both: then link 2 is asymmetric.
func (t *linkTable) classify() {
	older := t.classifyBy(byAge)
	if t.classifyBy(bySubnets) < older {
		t.classifyBy(byAge)
	}
}

// classifyBy is classify if of two links the one that comes first in an order is symmetric. It returns how
// many are.
func (t *linkTable) classifyBy(order func(a, b *link) int) (symmetric int) {
	var places [MaxLinks]*link
	links := places[:0]
	for i := range t.at {
		if l := &t.at[i]; l.state == linkActive {
			links = append(links, l)
		}
	}
	slices.SortFunc(links, order)
	for i := range t.at {
		t.at[i].asymmetric = false
	}
	for i, l := range links {
		l.asymmetric = slices.ContainsFunc(links[:i], func(o *link) bool { return !o.asymmetric && l.sharesRNIC(o) })
		if !l.asymmetric {
			symmetric++
		}
	}
	return symmetric
}

func byAge(a, b *link) int { return cmp.Compare(a.born, b.born) }

// bySubnets orders links within a subnet before those across.
func bySubnets(a, b *link) int {
	switch {
	case a.crosses() == b.crosses():
		return byAge(a, b)
	case b.crosses():
		return -1
	}
	return 1
}

// gainsBy reports whether there is one more symmetric link once a new one is ACTIVE.
func (t *linkTable) gainsBy(l *link) bool {
	before, _ := t.count()
	state := l.state
	l.state, l.born = linkActive, t.births+1
	t.classify()
	after, _ := t.count()
	l.state, l.born = state, 0
	t.classify()
	return after > before
}

// oldest returns the oldest ACTIVE link, nil if there is none.
func (t *linkTable) oldest() *link {
	var oldest *link
	for i := range t.at {
		if l := &t.at[i]; l.state == linkActive && (oldest == nil || l.born < oldest.born) {
			oldest = l
		}
	}
	return oldest
}

// allCross reports whether all ACTIVE links are across subnets.
func (t *linkTable) allCross() bool {
	return !slices.ContainsFunc(t.at[:], func(l link) bool { return l.state == linkActive && !l.crosses() })
}

// isParallel reports whether another link joins the same two RNICs, which is
// not permitted (§2.2.1). During first contact the first link counts.
func (t *linkTable) isParallel(l *link, forming bool) bool {
	for i := range t.at {
		if o := &t.at[i]; o != l && (o.isUp() || forming && o == t.first()) && o.local.RNIC == l.local.RNIC && o.samePeer(l.peer) {
			return true
		}
	}
	return false
}

// rnics is the set of our RNICs, bit n for number n, that carry links. One that carries
// an asymmetric link only is not in it.
func (t *linkTable) rnics(forming bool) uint8 {
	var set uint8
	for i := range t.at {
		l := &t.at[i]
		if (l.isUp() && !l.asymmetric) || (forming && l == t.first()) {
			set |= 1 << l.local.RNIC
		}
	}
	return set
}

// redundancy is the redundancy of the group's ACTIVE links.
func (t *linkTable) redundancy() Redundancy {
	symmetric, odd := t.count()
	switch {
	case symmetric > 1:
		return Symmetric
	case odd == nil:
		return Single
	}
	for i := range t.at {
		if l := &t.at[i]; l != odd && l.state == linkActive && l.local.RNIC == odd.local.RNIC {
			return AsymmetricLocal
		}
	}
	return AsymmetricPeer
}

// reaches reports whether we can write to the RMB over any link.
func (t *linkTable) reaches(r *rtoken) bool {
	for i := range t.at {
		if l := &t.at[i]; l.isUp() && r.knows(l.index) {
			return true
		}
	}
	return false
}

// becomeWanted asks for a queue pair: the place is taken.
func (t *linkTable) becomeWanted(l *link) {
	l.state = linkWanted
	t.present |= 1 << l.index
}

// becomeForming gives a link its queue pair.
func (t *linkTable) becomeForming(l *link, local Endpoint) {
	l.state = linkForming
	l.local = local
	t.present |= 1 << l.index
}

// becomeActive makes a link carry connections after both sides have confirmed it.
func (t *linkTable) becomeActive(now time.Time, l *link) {
	l.state = linkActive
	l.heard = now
	t.births++
	l.born = t.births
	t.classify()
}

// becomeDraining takes a link out of service: connections are to leave it, and m says to
// the peer what has become of it.
func (t *linkTable) becomeDraining(now time.Time, l *link, m llc.DeleteLink) {
	l.state = linkDraining
	l.drainBy = now.Add(DrainTimeout)
	l.deletion = m
	t.classify()
}

// becomeKept ends becomeDraining: the link is needed.
func (t *linkTable) becomeKept(l *link) {
	l.state = linkActive
	l.drainBy = time.Time{}
}

// becomeDown empties the place of a link whose queue pair goes.
func (t *linkTable) becomeDown(l *link) {
	l.state = linkDown
	t.present &^= 1 << l.index
	l.queue = nil
	for !l.ready.empty() {
		l.ready.pop()
	}
	l.inflight, l.untilLong = 0, 0
	l.drainBy = time.Time{}
	l.reset()
}

// best chooses the link for a connection that must leave one: where it can
// write at all, symmetric before asymmetric, then the least loaded.
func (t *linkTable) best(c *Conn, not *link, forming bool) *link {
	var best *link
	cost := func(l *link) int {
		n := l.conns
		if l.asymmetric {
			n += maxSlots
		}
		if l.state == linkDraining {
			n += 2 * maxSlots
		}
		if !c.canUse(l) {
			n += 4 * maxSlots
		}
		return n
	}
	for i := range t.at {
		if l := &t.at[i]; l != not && (l.isUp() || (forming && l == t.first())) && (best == nil || cost(l) < cost(best)) {
			best = l
		}
	}
	return best
}
