// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
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
	Role       Role
	Version    uint8  // of the protocol, as CLC settled it; 0 means 1
	Release    uint8  // of version 2; from 1 on MaxLinks and MaxConns are what CLC negotiated
	AllowRFC   bool   // version 1: accept RFC 7609's dialect with RMBE eye catchers
	MaxLinks   uint8  // at most this many, negotiated with the peer; 0 means DefaultMaxLinks
	MaxConns   uint8  // at most this many; 0 means [MaxConns]
	UserID     uint32 // the low 24 bits of the link user IDs, for displays
	SendBuffer uint32 // bytes, of each connection
	// Timers; 0 means the defaults in limits.go.
	IdleTimeout, CloseTimeout, TestLinkInterval time.Duration
	// ReleaseTimeout is how long a group without connections keeps its RMBs; 0: to
	// its end.
	ReleaseTimeout time.Duration
	Rand           *rand.Rand // alert tokens
}

// Group is a link group. See the package comment for who may call what.
type Group struct {
	cfg      Config
	state    State
	step     setupStep
	deadline time.Time // of step
	dialect  llc.Dialect
	maxLinks uint8
	maxConns int
	err      error

	links      [MaxLinks]link
	present    uint8      // bit set of those that are not down
	lastSlot   LinkIndex  // taken last
	births     uint64     // links that became ACTIVE
	lastLinkID llc.LinkID // server: assigned last
	adding     adding
	spare      *link // client: what our hint to the server is about
	spareUntil time.Time
	deleting   llc.LinkID    // waitDeleteReply: the second link that failed
	held       holder        // whether an operator keeps links from being added
	asked      request       // server: the client's REQUEST ADD LINK
	retryWait  time.Duration // until a failed second link is tried again
	retryAt    time.Time

	rmbs     []*rmb
	nextRMB  RMBID
	rmbsGone []RMBID
	rtokens  []*rtoken

	conns     []*Conn // by token slot
	nconns    int
	slots     [(maxSlots + 63) / 64]uint64 // bit set of those taken
	closing   clocks
	zombies   int       // connections given up whose RMBE the peer has not released
	retireAt  time.Time // when something is to be done about the oldest
	lostLink  bool      // until holdRMBEs
	heldUntil time.Time // RMBEs that are not in use
	idleSince time.Time

	flows      []flow // the first one is under way once flowSent
	flowSent   bool
	flowBegan  time.Time
	flowExpiry time.Time
	flowResend time.Time // zero: not sent again
	flowVia    *link     // that carried the request
	others     otherTokens
	confirming confirming
	deleted    bool  // the peer ended the group; dead once our answer is delivered
	lastWord   *link // that carries this answer, or our own DELETE LINK
	peerKnows  bool  // the peer has said that the group ends, or that it has heard so
	last       lastWords

	out       []Output
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
	g := &Group{
		cfg: cfg, dialect: llc.DialectLinux,
		maxLinks: min(cfg.MaxLinks, MaxLinks), maxConns: min(int(cfg.MaxConns), MaxConns),
	}
	for i := range g.links {
		g.links[i].index = LinkIndex(i)
	}
	return g
}

// Role returns our side.
func (g *Group) Role() Role { return g.cfg.Role }

// Version returns the version of the protocol that the group speaks.
func (g *Group) Version() uint8 { return g.cfg.Version }

// State returns the group's state.
func (g *Group) State() State { return g.state }

// Dialect returns the wire dialect; it is settled when the group is Active.
func (g *Group) Dialect() llc.Dialect { return g.dialect }

// Err returns why a dead group died; nil after an orderly end.
func (g *Group) Err() error { return g.err }

// Conns returns the number of connections.
func (g *Group) Conns() int { return g.nconns }

// Usable reports whether a further connection can use the group.
func (g *Group) Usable() bool { return g.state == Active && g.nconns < g.maxConns }

// event queues an event.
func (g *Group) event(kind EventKind, err error) {
	g.out = append(g.out, Output{Kind: OutEvent, Event: kind, Err: err})
}

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
	// ErrFlowTimeout: the peer did not answer an LLC request.
	ErrFlowTimeout = errors.New("no answer to an LLC request")
	// ErrLinkDeleted: the peer deleted the link.
	ErrLinkDeleted = errors.New("peer deleted the link")
	// ErrPeerDeleted: the peer ended the group.
	ErrPeerDeleted = errors.New("peer deleted the link group")
)

// fail ends the set-up or the group.
func (g *Group) fail(f SetupFault, err error) {
	switch g.state {
	case Forming:
		g.becomeDead(err)
		g.event(EventSetupFailed, &SetupError{Fault: f, Err: err})
	case Active:
		g.becomeDead(err)
	case Draining: // the peer may be gone before its answer is
		g.becomeDead(g.drainErr())
	case Dead:
	}
}

// drainErr is why a group in state Draining ends.
func (g *Group) drainErr() error {
	if g.deleted {
		return ErrPeerDeleted
	}
	return nil
}

func (g *Group) becomeActive(now time.Time) {
	failed := g.step == waitDeleteReply // the second link
	g.state = Active
	g.step = setupDone
	g.deadline = time.Time{}
	g.idleSince = now
	g.deleting = 0
	g.linkUp(now, g.firstLink())
	if failed {
		g.scheduleRetry(now) // C.8, and C.7.1 for a client
	}
	for _, c := range g.conns {
		if c != nil && c.data.State() != cdc.Closed {
			c.restart()
		}
	}
	g.event(EventReady, nil)
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
	for i := range g.links {
		g.last.keep(&g.links[i])
		g.closeLink(&g.links[i])
	}
	for _, c := range g.conns {
		if c != nil {
			c.fail(time.Time{}) // of a dead group: it is over
		}
	}
	if !wasForming {
		g.event(EventDead, err)
	}
}

// becomeDraining ends all exchanges: nothing but the end of the group matters
// now.
func (g *Group) becomeDraining() {
	g.state = Draining
	if g.adding.step != addNone {
		g.closeLink(&g.links[g.adding.link])
	}
	if g.spare != nil {
		g.closeLink(g.spare)
	}
	g.stopExchanges()
}

func (g *Group) stopExchanges() {
	g.flows, g.flowSent = nil, false
	g.adding, g.spare, g.asked = adding{}, nil, request{}
	g.retryAt = time.Time{}
}

// Terminate ends the group in order: DELETE LINK for all links (§3.5.4).
func (g *Group) Terminate(now time.Time, reason llc.DeleteReason) {
	switch g.state {
	case Forming:
		g.becomeDead(nil)
	case Active:
		g.becomeDraining()
		g.last.owed, g.last.reason = true, reason
		g.startFlow(flow{kind: flowDeleteAll, deletion: llc.DeleteLink{Reason: reason}})
		g.pumpFlows(now)
		g.lastWord = g.flowVia
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
		return g.lateTimeout()
	case Forming:
		earliest(g.deadline)
		earliest(g.adding.deadline)
	case Active, Draining:
		earliest(g.deadline)
		earliest(g.adding.deadline)
		if !g.isUnused() {
			earliest(g.retryAt)
		}
		if g.spare != nil {
			earliest(g.spareUntil)
		}
		if g.flowSent {
			earliest(g.flowExpiry)
			earliest(g.flowResend)
		} else if len(g.flows) > 0 {
			earliest(g.flows[0].holdUntil)
		}
		for i := range g.links {
			earliest(g.testDue(&g.links[i]))
			earliest(g.stallDue(&g.links[i]))
			earliest(g.links[i].drainBy)
		}
		if g.isUnused() {
			earliest(g.idleSince.Add(g.cfg.IdleTimeout))
			if g.cfg.ReleaseTimeout > 0 && slices.ContainsFunc(g.rmbs, (*rmb).isReleasable) {
				earliest(g.idleSince.Add(g.cfg.ReleaseTimeout))
			}
		}
		earliest(g.retireAt)
		earliest(g.heldUntil)
		if t, ok := g.closing.due(); ok {
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
		g.lateExpired(now)
	case Forming:
		switch {
		case due(g.deadline):
			g.setupExpired(now)
		case due(g.adding.deadline):
			g.addExpired(now)
		}
	case Active, Draining:
		if due(g.deadline) {
			g.becomeDead(ErrPeerDeleted)
			return
		}
		g.flowTimeout(now, due)
		g.linkTimeouts(now, due)
		for t, ok := g.closing.due(); ok && due(t); t, ok = g.closing.due() {
			g.closing.head.expire(now)
		}
		if due(g.retireAt) {
			g.retireRMBs(now)
		}
		if due(g.heldUntil) {
			g.freeHeld()
		}
		switch {
		case !g.isUnused():
		case due(g.idleSince.Add(g.cfg.IdleTimeout)):
			g.Terminate(now, llc.DeleteInactivity)
		case g.cfg.ReleaseTimeout > 0 && due(g.idleSince.Add(g.cfg.ReleaseTimeout)):
			g.releaseRMBs()
		}
	}
}

// isUnused reports whether the group only waits for another connection.
// Connections that the peer does not end must not keep it forever.
func (g *Group) isUnused() bool { return g.state == Active && g.nconns == g.zombies }

// linkTimeouts looks after each link and the exchanges about them.
func (g *Group) linkTimeouts(now time.Time, due func(time.Time) bool) {
	if due(g.adding.deadline) {
		g.addExpired(now)
	}
	if g.spare != nil && due(g.spareUntil) { // the server has no use for it now
		g.closeLink(g.spare)
		g.spare = nil
		g.scheduleRetry(now)
	}
	switch {
	case !due(g.retryAt), g.isUnused(): // without connections nobody gains by another link
	case g.asksToDelete():
		g.retryAt = now.Add(AddLinkRetryMin) // the server may still count with the link that was lost
	default:
		g.retryAdd()
	}
	for i := range g.links {
		l := &g.links[i]
		if due(l.drainBy) {
			g.drainExpired(l)
		}
		if g.testLink(now, l) {
			g.loseLink(now, l, llc.DeleteLostPath, FaultLink, ErrTestLink)
		}
		if due(g.stallDue(l)) && g.isToBlame(now, l, l.waiting, g.patience(l)) {
			g.loseLink(now, l, llc.DeleteLostPath, FaultLink, ErrStalled)
		}
	}
}

// HandleSent takes the completion of a SEND on a link. A link that was closed
// has none any more.
func (g *Group) HandleSent(now time.Time, index LinkIndex, id uint64) {
	if g.state == Dead {
		g.last.inflight[index] = max(g.last.inflight[index]-1, 0)
		return
	}
	l := &g.links[index]
	if l.state <= linkWanted {
		return // it was closed meanwhile: what was under way counts as lost
	}
	l.inflight--
	l.waiting = now
	if l.pace.completed(now); l.pace.done == 1 && l.state == linkActive && g.state == Active {
		g.balance()
	}
	if id == 0 {
		if g.state == Draining && l == g.lastWord && l.inflight == 0 && len(l.queue) == 0 && (g.deleted || g.cfg.Role == Server) {
			// What the server decides is done when it is delivered (C.7.1).
			g.becomeDead(g.drainErr())
		}
		return
	}
	if c := g.conn(cdc.AlertToken(id)); c != nil && c.link == l {
		c.handleSent()
	}
}

// Poll appends what the shell must do, in order.
func (g *Group) Poll(now time.Time, dst []Output) []Output {
	if g.lostLink {
		g.holdRMBEs(now)
	}
	if g.state == Dead {
		g.beginLate(now)
	}
	g.pumpFlows(now)
	for i := range g.links {
		before := g.links[i].inflight
		g.pumpLLC(&g.links[i])
		g.links[i].sentSince(now, before)
	}
	dst = append(dst, g.out...)
	clear(g.out)
	g.out = g.out[:0]
	for i := range g.links {
		before := g.links[i].inflight
		dst = g.pumpData(dst, &g.links[i])
		g.links[i].sentSince(now, before)
	}
	return dst
}

// Idle reports whether Poll would return nothing.
func (g *Group) Idle() bool {
	if len(g.out) > 0 || g.canPumpFlows() {
		return false
	}
	for m := g.present; m != 0; m &= m - 1 {
		if !g.links[bits.TrailingZeros8(m)].isIdle(g) {
			return false
		}
	}
	return true
}
