// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// Role is our side of the group, fixed at first contact.
type Role uint8

// Roles.
const (
	Client Role = iota
	Server
)

func (r Role) String() string {
	if r == Server {
		return "server"
	}
	return "client"
}

// State is the life of a group.
//
//	Forming --> Active --> Draining --> Dead
//	   |          |                      ^
//	   +----------+----------------------+
type State uint8

// Group states.
const (
	Forming  State = iota // first contact
	Active                // data may flow
	Draining              // DELETE LINK for all links is under way
	Dead
)

func (s State) String() string {
	switch s {
	case Forming:
		return "FORMING"
	case Active:
		return "ACTIVE"
	case Draining:
		return "DRAINING"
	case Dead:
		return "DEAD"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Endpoint is one side of a link.
type Endpoint struct {
	QPN  rdma.QPN
	GID  rdma.GID
	MAC  rdma.MAC
	PSN  rdma.PSN // first that this side sends
	MTU  rdma.MTU
	RNIC uint8 // our own only: number of the device in the shell's list, below MaxRNICs
	// Router is the MAC address of the router between the two sides, version 2
	// only; zero if there is none. See [Endpoint.NextHop].
	Router rdma.MAC
	// SubnetBits is the length of the prefix of the subnet that GID is in, our own only; 0 if it is not known.
	SubnetBits uint8 `json:",omitempty"`
}

// crosses reports whether another endpoint is known to be in another subnet.
func (e Endpoint) crosses(other Endpoint) bool {
	row := rdma.GIDEntry{GID: e.GID, PrefixBits: int(e.SubnetBits)}
	return e.SubnetBits > 0 && !row.OnLink(other.GID)
}

// NextHop is the destination MAC address of packets to a peer's endpoint.
func (e Endpoint) NextHop() rdma.MAC {
	if e.Router != (rdma.MAC{}) {
		return e.Router
	}
	return e.MAC
}

// Config describes a group.
type Config struct {
	Role     Role
	Version  uint8  // of the protocol, as CLC settled it; 0 means 1
	Release  uint8  // of version 2; from 1 on MaxLinks and MaxConns are what CLC negotiated
	AllowRFC bool   // version 1: accept RFC 7609's dialect with RMBE eye catchers
	MaxLinks uint8  // at most this many, negotiated with the peer; 0 means DefaultMaxLinks
	MaxConns uint8  // at most this many; 0 means [MaxConns]
	UserID   uint32 // the low 24 bits of the link user IDs, for displays
	// Timers; 0 means the defaults in limits.go.
	IdleTimeout, CloseTimeout, TestLinkInterval time.Duration
	// ReleaseTimeout is how long a group without connections keeps its RMBs; 0: to
	// its end.
	ReleaseTimeout time.Duration
	Rand           *rand.Rand // alert tokens
}

// Group is a link group. See the package comment for who may call what.
//
// It consists of parts, each with its state; what one needs of another comes as an
// argument. The group takes input, gives it to the part that it concerns, and asks each of
// them for output and timers.
type Group struct {
	cfg Config
	terms
	state State
	err   error

	setup  setup
	links  linkTable
	adding adding
	growth growth
	side   side

	keys      keyTable
	ourKeys   announcement
	peerKeys  peerKeys
	afterLoss holdBack

	conns     connTable
	idleSince time.Time

	requests requests
	ending   ending
	last     lastWords

	out       outbox
	Discarded uint64 // messages that were dropped without harm
	LLCSent   uint64 // messages
	CDCSent   uint64
}

// New returns a group in state Forming.
func New(cfg Config) *Group {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	idle := IdleTimeoutClient
	if cfg.Role == Server {
		idle = IdleTimeoutServer
	}
	def(&cfg.IdleTimeout, idle)
	def(&cfg.CloseTimeout, CloseTimeout)
	def(&cfg.TestLinkInterval, TestLinkInterval)
	if cfg.MaxLinks == 0 {
		cfg.MaxLinks = DefaultMaxLinks
	}
	if cfg.MaxConns == 0 {
		cfg.MaxConns = MaxConns
	}
	if cfg.Version == 0 {
		cfg.Version = llc.Version1
	}
	invariant.Must(cfg.Version <= llc.Version2, "link group of an unknown version")
	return &Group{
		cfg: cfg, links: newLinkTable(), side: newSide(cfg.Role),
		terms: terms{
			role: cfg.Role, version: cfg.Version, release: cfg.Release, allowRFC: cfg.AllowRFC, offered: cfg.MaxLinks, userID: cfg.UserID,
			dialect: llc.DialectLinux, maxLinks: min(cfg.MaxLinks, MaxLinks), maxConns: min(int(cfg.MaxConns), MaxConns),
		},
	}
}

// Role returns our side.
func (g *Group) Role() Role { return g.role }

// Version returns the version of the protocol that the group speaks.
func (g *Group) Version() uint8 { return g.version }

// State returns the group's state.
func (g *Group) State() State { return g.state }

// Dialect returns the wire dialect; it is settled when the group is Active.
func (g *Group) Dialect() llc.Dialect { return g.dialect }

// Err returns why a dead group died; nil after an orderly end.
func (g *Group) Err() error { return g.err }

// Conns returns the number of connections.
func (g *Group) Conns() int { return g.conns.n }

// Usable reports whether a further connection can use the group.
func (g *Group) Usable() bool { return g.state == Active && g.conns.n < g.maxConns }

// Errors of input handling.
var (
	// ErrLink: the queue pair reported an error.
	ErrLink = errors.New("link failed")
	// ErrTestLink: the peer did not answer TEST LINK, or wrongly.
	ErrTestLink = errors.New("no valid answer to TEST LINK")
	// ErrStalled: nothing sent over the link was acknowledged for a while.
	ErrStalled = errors.New("no acknowledgements")
	// ErrProtocol: the peer sent what it may not send now.
	ErrProtocol = errors.New("protocol violation")
	// ErrExchangeTimeout: the peer did not answer an LLC request.
	ErrExchangeTimeout = errors.New("no answer to an LLC request")
	// ErrLinkDeleted: the peer deleted the link.
	ErrLinkDeleted = errors.New("peer deleted the link")
	// ErrLinkLeft: a connection of the peer failed over to another link.
	ErrLinkLeft = errors.New("peer has left the link")
	// ErrPeerDeleted: the peer ended the group.
	ErrPeerDeleted = errors.New("peer deleted the link group")
)

// fail ends the set-up or the group.
func (g *Group) fail(f SetupFault, err error) {
	switch g.state {
	case Forming:
		g.becomeDead(err)
		g.out.event(EventSetupFailed, &SetupError{Fault: f, Err: err})
	case Active:
		g.becomeDead(err)
	case Draining: // the peer may be gone before its answer is
		g.becomeDead(g.ending.err())
	case Dead:
	}
}

func (g *Group) becomeActive(now time.Time) {
	g.state = Active
	failed := g.setup.becomeDone() // the second link
	g.idleSince = now
	g.links.becomeActive(now, g.links.first())
	if failed {
		g.growth.schedule(g, now) // C.8, and C.7.1 for a client
	}
	for _, c := range g.conns.list {
		if c != nil && c.data.State() != cdc.Closed {
			c.start(c.data.SendBuffer())
		}
	}
	g.out.event(EventReady, nil)
}

// becomeDead resets every connection and drops the link.
func (g *Group) becomeDead(err error) {
	if g.state == Dead {
		return
	}
	wasForming := g.state == Forming
	g.state = Dead
	g.err = err
	g.stopExchanges()
	for i := range g.links.at {
		g.last.keep(&g.links.at[i])
		g.closeLink(&g.links.at[i])
	}
	for _, c := range g.conns.list {
		if c != nil {
			c.fail(time.Time{}) // of a dead group: it is over
		}
	}
	if !wasForming {
		g.out.event(EventDead, err)
	}
}

// becomeDraining ends all exchanges: nothing but the end of the group matters
// now.
func (g *Group) becomeDraining() {
	g.state = Draining
	if g.adding.isUnderWay() {
		g.closeLink(&g.links.at[g.adding.link])
	}
	g.side.dropSpare(g)
	g.stopExchanges()
}

func (g *Group) stopExchanges() {
	g.requests.clear()
	g.adding.becomeNone()
	g.side.forget()
	g.growth.stop()
}

// Terminate ends the group in order: DELETE LINK for all links (§3.5.4).
func (g *Group) Terminate(now time.Time, reason llc.DeleteReason) {
	switch g.state {
	case Forming:
		g.becomeDead(nil)
	case Active:
		g.side.groupEnds(g)
		g.becomeDraining()
		g.last.owe(reason)
		g.requests.add(exchange{kind: exchangeDeleteAll, deletion: llc.DeleteLink{Reason: reason}})
		g.requests.start(g, now)
	case Draining, Dead:
	}
}

// NextTimeout returns when HandleTimeout wants to be called.
func (g *Group) NextTimeout() (time.Time, bool) {
	var next time.Time
	earliest := func(t time.Time) {
		if !t.IsZero() && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	switch g.state {
	case Dead:
		return g.last.timeout()
	case Forming:
		earliest(g.setup.deadline)
		earliest(g.adding.deadline)
	case Active, Draining:
		earliest(g.ending.deadline)
		earliest(g.adding.deadline)
		if !g.isUnused() {
			earliest(g.growth.at)
		}
		earliest(g.side.spareTimeout())
		g.requests.nextTimeout(earliest)
		for i := range g.links.at {
			earliest(g.links.testDue(&g.links.at[i], g.cfg.TestLinkInterval))
			earliest(g.links.stallDue(&g.links.at[i], g.carriesExchange(&g.links.at[i])))
			earliest(g.links.at[i].drainBy)
		}
		if g.isUnused() {
			earliest(g.idleSince.Add(g.cfg.IdleTimeout))
			if g.cfg.ReleaseTimeout > 0 && g.keys.hasReleasable() {
				earliest(g.idleSince.Add(g.cfg.ReleaseTimeout))
			}
		}
		earliest(g.conns.retireAt)
		earliest(g.afterLoss.until)
		if t, ok := g.conns.closing.due(); ok {
			earliest(t)
		}
	}
	return next, !next.IsZero()
}

// HandleTimeout does what is due at now.
func (g *Group) HandleTimeout(now time.Time) {
	due := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	switch g.state {
	case Dead:
		g.last.expired(now, &g.terms, &g.out)
	case Forming:
		switch {
		case due(g.setup.deadline):
			g.setup.expired(g, now)
		case due(g.adding.deadline):
			g.adding.expired(g, now)
		}
	case Active, Draining:
		if due(g.ending.deadline) {
			g.becomeDead(ErrPeerDeleted)
			return
		}
		g.requests.timeout(g, now, due)
		g.linkTimeouts(now, due)
		for t, ok := g.conns.closing.due(); ok && due(t); t, ok = g.conns.closing.due() {
			g.conns.closing.head.expire(now)
		}
		if due(g.conns.retireAt) {
			g.conns.retireRMBs(g, now)
		}
		if due(g.afterLoss.until) {
			g.afterLoss.expired(g, now)
		}
		switch {
		case !g.isUnused():
		case due(g.idleSince.Add(g.cfg.IdleTimeout)):
			g.Terminate(now, llc.DeleteInactivity)
		case g.cfg.ReleaseTimeout > 0 && due(g.idleSince.Add(g.cfg.ReleaseTimeout)):
			g.keys.release(g)
		}
	}
}

// isUnused reports whether the group only waits for another connection.
// Connections that the peer does not end must not keep it forever.
func (g *Group) isUnused() bool { return g.state == Active && g.conns.n == g.conns.zombies }

// linkTimeouts looks after each link and the exchanges about them.
func (g *Group) linkTimeouts(now time.Time, due func(time.Time) bool) {
	if due(g.adding.deadline) {
		g.adding.expired(g, now)
	}
	if due(g.side.spareTimeout()) { // the server has no use for it now
		g.side.dropSpare(g)
		g.growth.schedule(g, now)
	}
	if g.growth.due(now) && !g.isUnused() { // without connections nobody gains by another link
		g.growth.expired(g, now)
	}
	for i := range g.links.at {
		l := &g.links.at[i]
		if due(l.drainBy) {
			g.drainExpired(now, l)
		}
		if g.links.testFailed(l, g.cfg.TestLinkInterval, g.tester(now)) {
			g.loseLink(now, l, llc.DeleteLostPath, FaultLink, ErrTestLink)
		}
		exchange := g.carriesExchange(l)
		if due(g.links.stallDue(l, exchange)) && g.links.isToBlame(l, l.waiting, l.patience(exchange), g.tester(now)) {
			g.loseLink(now, l, llc.DeleteLostPath, FaultLink, ErrStalled)
		}
	}
}

// carriesExchange reports whether an exchange waits for what comes over a link.
func (g *Group) carriesExchange(l *link) bool {
	return g.adding.via == l.place() || (g.requests.current() != nil && g.requests.via == l.place())
}

// HandleSent takes the completion of a SEND on a link. A link that was closed
// has none any more.
func (g *Group) HandleSent(now time.Time, index LinkIndex, id uint64) {
	if g.state == Dead {
		g.last.handleSent(index)
		return
	}
	l := &g.links.at[index]
	if l.state <= linkWanted {
		return // it was closed meanwhile: what was under way counts as lost
	}
	l.completed()
	if l.isStuck(now) {
		g.afterLoss.heard(now, g.keys.rmbs)
	}
	l.waiting = now
	if l.pace.completed(now); l.pace.done == 1 && l.state == linkActive && g.state == Active {
		g.links.balance(&g.conns)
	}
	if id == 0 {
		if g.state == Draining && l.place() == g.ending.via && l.inflight == 0 && len(l.queue) == 0 && (g.ending.byPeer || g.side.endsWhenDelivered()) {
			g.becomeDead(g.ending.err())
		}
		return
	}
	if c := g.conns.byToken(cdc.AlertToken(id)); c != nil && c.link == l.place() {
		c.handleSent()
	}
}

// Poll appends what the shell must do, in order.
func (g *Group) Poll(now time.Time, dst []Output) []Output {
	if g.afterLoss.lost {
		g.afterLoss.begin(now, g.keys.rmbs)
	}
	if g.state == Dead {
		g.last.begin(now)
	}
	g.requests.start(g, now)
	for i := range g.links.at {
		before := g.links.at[i].inflight
		g.LLCSent += g.links.at[i].pump(&g.out)
		g.links.at[i].sentSince(now, before)
	}
	dst = g.out.moveTo(dst)
	for i := range g.links.at {
		before := g.links.at[i].inflight
		dst = g.pumpData(dst, &g.links.at[i])
		g.links.at[i].sentSince(now, before)
	}
	return dst
}

// Idle reports whether Poll would return nothing.
func (g *Group) Idle() bool {
	if len(g.out.list) > 0 || g.requests.canStart(g) {
		return false
	}
	for m := g.links.present; m != 0; m &= m - 1 {
		if !g.links.at[bits.TrailingZeros8(m)].isIdle(g.state == Active) {
			return false
		}
	}
	return true
}
