// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"cmp"
	"container/list"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// Stack is one SMC-R instance with its link groups (RFC 7609 A.2.1). Each link
// group has a protection domain of its own: what belongs to it cannot be reached
// with the keys of another one, of this stack or of others. Its methods may be called
// from any goroutine.
type Stack struct {
	cfg     Config
	idKey   [32]byte // see peerIDFor
	rnics   []*rnic  // the list is replaced, with the turn, and not changed
	retired []*rnic  // whose places others have; guarded by the turn
	closing chan struct{}
	wg      sync.WaitGroup

	tcpWatch *tcpWatch
	halfOpen halfOpen

	// turn guards what follows, and all machines. Application goroutines only
	// try it on the data path; see the package comment.
	turn        sync.Mutex
	rand        *rand.Rand
	account     account
	groups      map[uint32]*group
	byParty     map[party][]*group
	timers      timers
	idle        list.List // of groups, see noteIdle
	conns       map[*Conn]struct{}
	closed      bool
	trespassers trespassers
	empty       chan struct{} // closed when the stack is closed and has no connections
	alarm       time.Time     // when the stack's goroutine looks at timers next
	// sweepAt is when completed SENDs are looked for, though nobody waits for
	// them; zero: none are in flight.
	sweepAt time.Time
	// answering is the connection whose program was last given a small
	// message, answers how many in a row.
	answering *Conn
	answers   int
	// touched are the groups that have something to do, expired those whose
	// timers are being seen to.
	touched   []*group
	expired   []*group
	lingering []*link // that the peer may still speak to, the oldest first
	outs      []linkgroup.Output
	stats     Stats // of the past; LLCSent and CDCSent without those of live groups

	clcSent atomic.Uint64
	polls   atomic.Uint64 // AnswerPolls
	polled  atomic.Uint64 // AnswersPolled
	// dirty is the queue of connections whose positions moved.
	dirty atomic.Pointer[Conn]
	// poured is a connection whose program may answer soon.
	poured atomic.Pointer[Conn]
	// wake gets the stack's goroutine to look at timers and queues again.
	wake chan struct{}
	// ready says that a completion queue called: there is something in it.
	ready atomic.Bool
	// heard says that a peer needs no more waiting for, for Close.
	heard chan struct{}
}

// lastGroupID numbers link groups uniquely in the process.
var lastGroupID atomic.Uint32 //nolint:gochecknoglobals // a process-wide counter is what makes the IDs unique in the process

// errStackClosed ends what a closed stack was asked to do.
var errStackClosed = fmt.Errorf("smcr: stack is closed: %w", net.ErrClosed)

// errNoDevice: all devices are gone.
var errNoDevice = errors.New("smcr: no RDMA device is left")

// NewStack opens the devices and starts the stack's goroutine.
func NewStack(cfg Config) (*Stack, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.setDefaults()
	var seed, idKey [32]byte
	if _, err := crand.Read(seed[:]); err != nil {
		return nil, fmt.Errorf("random seed: %w", err)
	}
	if _, err := crand.Read(idKey[:]); err != nil {
		return nil, fmt.Errorf("random key: %w", err)
	}
	s := &Stack{
		cfg:         cfg,
		idKey:       idKey,
		closing:     make(chan struct{}),
		rand:        rand.New(rand.NewChaCha8(seed)),
		groups:      map[uint32]*group{},
		byParty:     map[party][]*group{},
		conns:       map[*Conn]struct{}{},
		wake:        make(chan struct{}, 1),
		empty:       make(chan struct{}),
		heard:       make(chan struct{}, 1),
		trespassers: trespassers{},
	}
	for i, d := range cfg.Devices {
		r, err := s.openRNIC(i, d)
		if err != nil {
			return nil, errors.Join(err, s.closeRNICs())
		}
		s.rnics = append(s.rnics, r)
	}
	s.account = account{budget: cfg.MemoryBytes, outer: cfg.Account}
	var err error
	if s.tcpWatch, err = newTCPWatch(s); err != nil {
		return nil, errors.Join(err, s.closeRNICs())
	}
	s.halfOpen.init(cfg.MaxHalfOpen)
	s.ready.Store(true) // the first step arms the queues
	for _, r := range s.rnics {
		s.wg.Go(r.watch)
	}
	s.wg.Go(s.tcpWatch.run)
	s.wg.Go(s.run)
	return s, nil
}

// closeRNICs closes the devices, which ends their watchers.
func (s *Stack) closeRNICs() error {
	var err error
	for _, r := range slices.Concat(s.rnics, s.retired) {
		err = errors.Join(err, r.ctx.Close())
	}
	return err
}

// pickRNIC returns a device whose number is not in the set, or nil if there is
// none: one with an active port, in the subnet of the peer's RNIC, on another
// rail than those in the set, with few links, in this order, and with a route to
// that RNIC if reach is given. If the
// link ends at that RNIC of the peer (bound), and some of our devices are in its
// subnet, only those will do: a link across subnets would depend on both of
// them. The first link of a group may take a port that is not active: an
// interface reports its carrier up to a second late.
func (s *Stack) pickRNIC(not uint8, peer rdma.GID, bound bool, reach *routes) *rnic {
	near := func(r *rnic) bool { return r.gids.onLink(peer) }
	bound = bound && slices.ContainsFunc(s.rnics, near)
	far := func(r *rnic) bool { return reach != nil && !reach[r.index].Found }
	rails := s.railsOf(not)
	fresh := func(r *rnic) bool { return !slices.Contains(rails, s.rail(r)) }
	var best *rnic
	for _, r := range s.rnics {
		if r.dead || not>>r.index&1 != 0 || bound && !near(r) || far(r) {
			continue
		}
		if best == nil || cmp.Or(compareBool(r.active(), best.active()), compareBool(near(r), near(best)), compareBool(fresh(r), fresh(best)), len(best.links)-len(r.links)) > 0 {
			best = r
		}
	}
	return best
}

// railsOf are the rails of a set of devices.
func (s *Stack) railsOf(set uint8) []int {
	var rails []int
	for _, r := range s.rnics {
		if set>>r.index&1 != 0 {
			rails = append(rails, s.rail(r))
		}
	}
	return rails
}

// rail is the rail of a device; without any it is a number that no other has.
func (s *Stack) rail(r *rnic) int {
	if s.cfg.Rail == nil {
		return int(r.index)
	}
	return s.cfg.Rail(r.dev.Name())
}

// compareBool orders false before true.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// completionQueueDepth allows for the groups that MaxConns can fill, each with
// so many slots.
func completionQueueDepth(cfg Config, d rdma.Device, slots int) int {
	groups := 16 + cfg.MaxConns/8
	return min(groups*slots, d.Attr().MaxCQE)
}

// Close resets what is left, waits for the stack's goroutines, for calls under
// way on its connections and, less than a second, for the answers of its peers,
// and frees its memory.
func (s *Stack) Close() error {
	s.lock()
	if s.closed {
		s.unlock()
		<-s.empty
		s.wg.Wait()
		return nil
	}
	s.closed = true
	s.checkEmpty()
	now := time.Now()
	for c := range s.conns {
		c.lc.Abort(now)
	}
	for _, g := range s.groups {
		g.abandon() // the resets and DELETE LINK leave at once
	}
	open := make([]*Conn, 0, len(s.conns))
	for c := range s.conns {
		if c.opened { // the others belong to their rendezvous, which ends too
			open = append(open, c)
		}
	}
	s.unlock()
	close(s.closing)
	s.awaitPeers()
	s.lock()
	for _, g := range s.groups {
		g.finish()
	}
	s.unlock()
	for _, c := range open {
		_ = c.Close() // it was reset above; this frees its memory
	}
	<-s.empty
	s.lock()
	for _, l := range s.lingering {
		l.close()
	}
	s.lingering = nil
	s.turn.Unlock()
	err := errors.Join(s.tcpWatch.close(), s.closeRNICs())
	s.wg.Wait()
	return err
}

// checkEmpty tells Close that the last connection is gone; the caller holds
// the turn.
func (s *Stack) checkEmpty() {
	if s.closed && len(s.conns) == 0 {
		close(s.empty)
	}
}

// lock takes the turn, waiting for it; unlock gives it up and sees to what
// came meanwhile. Only slow paths wait for the turn.
func (s *Stack) lock() { s.turn.Lock() }

func (s *Stack) unlock() {
	s.turn.Unlock()
	s.kick()
}

// poke makes the stack's goroutine run, for new timers.
func (s *Stack) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// markDirty puts a connection on the queue of those whose positions moved.
func (s *Stack) markDirty(c *Conn) {
	if c.dirty.Swap(true) {
		return
	}
	for {
		head := s.dirty.Load()
		c.nextDirty = head
		if s.dirty.CompareAndSwap(head, c) {
			return
		}
	}
}

// kick sees to dirty connections and completions if the turn is free;
// otherwise its holder will, since it looks again after giving up the turn.
//
// Work may come as fast as it is done. A caller that it does not let go hands
// it to the stack's goroutine: it may be a device's, whose packets wait.
func (s *Stack) kick() {
	var start time.Time
	for (s.dirty.Load() != nil || s.ready.Load()) && s.turn.TryLock() {
		now := time.Now()
		s.step(now)
		s.turn.Unlock()
		if start.IsZero() {
			start = now
		} else if now.Sub(start) > maxKick {
			s.poke()
			return
		}
	}
}

// maxKick bounds how long a caller of kick works for others: a few rounds of
// bulk data.
const maxKick = time.Millisecond

// run is the stack's goroutine: it sees to timers.
func (s *Stack) run() {
	timer := time.NewTimer(idleWait)
	defer timer.Stop()
	for {
		timer.Reset(s.runTimers())
		select {
		case <-s.wake:
		case <-timer.C:
		case <-s.closing:
			return
		}
	}
}

// runTimers does what is due, and returns how long nothing more is.
func (s *Stack) runTimers() time.Duration {
	s.lock()
	defer s.unlock()
	now := time.Now()
	s.sweep(now)
	s.step(now)
	s.expire(now)
	s.endLingering(now)
	next := s.nextTimeout(now)
	s.alarm = now.Add(next)
	return next
}

// idleWait is how long the stack sleeps without timers.
const idleWait = time.Hour

// portChanged tells the groups about a port; the caller holds the turn.
func (s *Stack) portChanged(now time.Time, r *rnic, up bool) {
	for _, g := range s.groups {
		g.lg.HandlePort(now, r.index, up)
		g.flush(now)
	}
}

// maxSteps bounds the rounds of one step, so that one turn cannot last while
// completions keep coming.
const maxSteps = 4

// step moves everything that can move: completions in, positions in, work
// requests out. The caller holds the turn.
func (s *Stack) step(now time.Time) {
	for range maxSteps {
		if s.ready.Swap(false) {
			for _, r := range s.rnics {
				r.arm(now)
			}
		}
		more := false
		for _, r := range s.rnics {
			more = r.poll(now) || more
		}
		moved := s.takeDirty()
		s.flushTouched(now)
		if !more && !moved && !s.ready.Load() {
			return
		}
	}
	s.poke()
}

// touch puts a group on the list of those that step flushes.
func (s *Stack) touch(g *group) {
	if !g.touched {
		g.touched = true
		s.touched = append(s.touched, g)
	}
}

// flushTouched carries out what the groups on the list want.
func (s *Stack) flushTouched(now time.Time) {
	for i := 0; i < len(s.touched); i++ { // a group may put another one there
		g := s.touched[i]
		g.touched = false
		g.flush(now)
		s.touched[i] = nil
	}
	s.touched = s.touched[:0]
}

// drainOthers takes the completions of all devices but one, of all if that is nil.
func (s *Stack) drainOthers(now time.Time, but *rnic) {
	for _, r := range s.rnics {
		if r != but {
			r.drain(now)
		}
	}
}

// takeDirty tells the machines how far applications have come.
func (s *Stack) takeDirty() bool {
	c := s.dirty.Swap(nil)
	if c == nil {
		return false
	}
	for c != nil {
		next := c.nextDirty
		c.nextDirty = nil
		c.dirty.Store(false)
		c.sync()
		c = next
	}
	return true
}

// Stats returns the stack's counters.
func (s *Stack) Stats() Stats {
	s.lock()
	defer s.unlock()
	st := s.stats
	st.MemoryBytes = uint64(s.account.bytes)
	st.Groups = len(s.groups)
	st.Conns = len(s.conns)
	st.CLCSent = s.clcSent.Load()
	st.AnswerPolls, st.AnswersPolled = s.polls.Load(), s.polled.Load()
	for _, g := range s.groups {
		st.LLCSent += g.lg.LLCSent
		st.CDCSent += g.lg.CDCSent
	}
	for c := range s.conns {
		st.BytesSentSMCR += c.written()
		st.BytesRecvSMCR += c.consumed.Load()
	}
	return st
}

// LinkGroups describes the link groups.
func (s *Stack) LinkGroups() []GroupInfo {
	s.lock()
	defer s.unlock()
	infos := make([]GroupInfo, 0, len(s.groups))
	for _, g := range s.groups {
		infos = append(infos, g.info())
	}
	return infos
}

// Conns describes the connections that SMC-R carries.
func (s *Stack) Conns() []Info {
	s.lock()
	defer s.unlock()
	infos := make([]Info, 0, len(s.conns))
	for c := range s.conns {
		if c.opened {
			infos = append(infos, c.infoLocked())
		}
	}
	return infos
}
