// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	crand "crypto/rand"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Stack is one SMC-R instance (RFC 7609 A.2.1). A Stack owns the opened devices with their
// completion queues, the link groups and what is left of those that ended, and the
// connections that SMC-R carries; the devices themselves are the caller's. The Stack's lock, the
// turn, guards all of them, and its goroutines see to devices, timers and TCP connections.
// Close ends them all. The methods of a Stack may be called from any goroutine.
//
// Each link group has a protection domain of its own: what belongs to a group cannot be
// reached with the keys of another one, of this stack or of others.
type Stack struct {
	cfg     Config
	idKey   [32]byte // see peerIDFor
	closing chan struct{}
	wg      sync.WaitGroup // of the goroutines

	tcpWatch *tcpWatch
	halfOpen halfOpen

	// turn guards the fields down to closed, what the types of the others say, and all
	// machines. Application goroutines only try the turn on the data path; see the package
	// comment.
	turn        sync.Mutex
	rand        *rand.Rand
	account     account
	trespassers trespassers
	devices     devices
	preferred   preferred
	pathMTUs    pathMTUs
	groups      groupTable
	lingering   lingering
	cooling     cooling
	conns       map[*Conn]struct{}
	rest        *Conn // the first of the connections that a step took from marks and left to the next one
	closed      bool

	empty chan struct{} // closed when the stack is closed and has no connections

	// Partly used without the turn.
	counters counters
	dialogue dialogue
	marks    marks
	alarm    alarm
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
		conns:       map[*Conn]struct{}{},
		empty:       make(chan struct{}),
		trespassers: trespassers{}, preferred: preferred{}, pathMTUs: pathMTUs{},
		devices: devices{rail: cfg.Rail},
	}
	for i, d := range cfg.Devices {
		r, err := s.openRNIC(i, d)
		if err != nil {
			return nil, errors.Join(err, s.devices.close())
		}
		s.devices.put(r)
	}
	s.account = account{budget: cfg.MemoryBytes, page: os.Getpagesize(), outer: cfg.Account}
	var err error
	if s.tcpWatch, err = newTCPWatch(s); err != nil {
		return nil, errors.Join(err, s.devices.close())
	}
	s.halfOpen.init(cfg.MaxHalfOpen)
	s.alarm.init()
	s.groups.init()
	s.lingering.init()
	s.marks.ready.Store(true) // the first step arms the queues
	for _, r := range s.devices.list {
		s.wg.Go(r.watch)
	}
	s.wg.Go(s.tcpWatch.run)
	s.wg.Go(s.run)
	return s, nil
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
	for _, g := range s.groups.byID {
		g.abandon() // the resets and DELETE LINK leave at once
	}
	open := make([]*Conn, 0, len(s.conns))
	for c := range s.conns {
		if c.life.opened { // a connection that is not belongs to its rendezvous, which ends too
			open = append(open, c)
		}
	}
	s.unlock()
	close(s.closing)
	s.awaitPeers()
	s.lock()
	for _, g := range s.groups.byID {
		g.finish()
	}
	s.unlock()
	for _, c := range open {
		_ = c.Close() // the connection was reset above; Close frees its memory
	}
	s.awaitEmpty()
	s.lock()
	s.lingering.closeAll()
	s.turn.Unlock()
	err := errors.Join(s.tcpWatch.close(), s.devices.close())
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

// awaitEmpty waits for the end of the last connection, and does meanwhile what others leave to the
// stack's goroutine, which has ended.
func (s *Stack) awaitEmpty() {
	for {
		select {
		case <-s.alarm.wake:
			s.runTimers()
		case <-s.empty:
			return
		}
	}
}

// lock takes the turn, waiting for it; unlock gives the turn up and sees to what
// came meanwhile. Only slow paths wait for the turn.
func (s *Stack) lock() { s.turn.Lock() }

func (s *Stack) unlock() {
	s.turn.Unlock()
	s.kick()
}

// kick sees to dirty connections and completions if the turn is free;
// otherwise the holder of the turn will, who looks for marks again after giving up the turn.
//
// Work may come as fast as it is done, and much of it at once. After maxKick the caller hands
// the rest to the stack's goroutine: the caller may be the goroutine of a device, whose packets
// wait.
func (s *Stack) kick() {
	var start time.Time
	for s.marks.any() && s.turn.TryLock() {
		now := time.Now()
		if start.IsZero() {
			start = now
		} else if now.Sub(start) > maxKick {
			s.turn.Unlock()
			s.alarm.poke()
			return
		}
		s.step(now, kickConns, kickGroups)
		s.turn.Unlock()
	}
}

// maxKick bounds how long a caller of kick works for others, a few rounds of bulk data: after that
// the caller begins no other step. A step of kick is short, as it sees to few connections and groups
// of those that have something to do:
//
//   - kickConns: more than a link takes messages of at once, so that they still go to the device
//     together;
//   - kickGroups: what a group posts the device may send before the caller goes on, which takes up to a
//     quarter of a millisecond.
const (
	maxKick    = time.Millisecond
	kickConns  = 64
	kickGroups = 8
)

// run is the stack's goroutine, which sees to timers.
func (s *Stack) run() {
	timer := time.NewTimer(idleWait)
	defer timer.Stop()
	for {
		timer.Reset(s.runTimers())
		select {
		case <-s.alarm.wake:
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
	s.devices.sweep(now)
	s.step(now, unbounded, unbounded) // timers are about what has not come, and nobody's packets wait
	s.groups.expire(now)
	s.boundIdle()
	s.lingering.expire(now)
	s.coolDown(now)
	next := s.nextTimeout(now)
	s.alarm.at = now.Add(next)
	return next
}

// nextTimeout is how long the stack's goroutine may sleep.
func (s *Stack) nextTimeout(now time.Time) time.Duration {
	next := now.Add(idleWait)
	if due, ok := s.groups.nextDue(); ok && due.Before(next) {
		next = due
	}
	if at := s.devices.sweepAt; !at.IsZero() && at.Before(next) {
		next = at
	}
	if at, ok := s.lingering.nextDue(); ok && at.Before(next) {
		next = at
	}
	if at := s.cooling.at; !at.IsZero() && at.Before(next) {
		next = at
	}
	return max(next.Sub(now), 0)
}

// idleWait is how long the stack sleeps without timers.
const idleWait = time.Hour

// portChanged tells the groups about a port; the caller holds the turn.
func (s *Stack) portChanged(now time.Time, r *rnic, up bool) {
	for _, g := range s.groups.byID {
		g.lg.HandlePort(now, r.index, up)
		g.flush(now)
	}
}

// maxSteps bounds the rounds of one step, so that one turn cannot last while
// completions keep coming.
const maxSteps = 4

// unbounded has a step see to all connections or groups.
const unbounded = math.MaxInt

// step moves everything that can move: completions in, positions in, work
// requests out; of so many groups in all, and in each round of so many connections. What is left
// is for the next step, which begins with it: there is a mark for that. The caller holds the turn.
func (s *Stack) step(now time.Time, conns, groups int) {
	for range maxSteps {
		if s.marks.ready.Swap(false) {
			s.devices.arm(now)
		}
		more := s.devices.poll(now)
		moved := s.takeDirty(conns)
		groups -= s.groups.flushTouched(now, groups)
		if s.rest != nil || len(s.groups.touched) > 0 {
			s.marks.ready.Store(true)
			return
		}
		if !more && !moved && !s.marks.ready.Load() {
			return
		}
	}
	s.alarm.poke()
}

// takeDirty tells the machines how far applications have come, of so many connections at most, and
// reports whether there was one.
func (s *Stack) takeDirty(most int) bool {
	c := s.rest
	if c == nil {
		c = s.marks.take()
	}
	if c == nil {
		return false
	}
	for ; c != nil && most > 0; most-- {
		next := c.mark.wipe()
		c.sync()
		c = next
	}
	s.rest = c
	return true
}

// LinkGroups describes the link groups.
func (s *Stack) LinkGroups() []GroupInfo {
	s.lock()
	defer s.unlock()
	infos := make([]GroupInfo, 0, len(s.groups.byID))
	for _, g := range s.groups.byID {
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
		if c.life.opened {
			infos = append(infos, c.infoLocked())
		}
	}
	return infos
}
