// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// qp is a queue pair.
type qp struct {
	pd             *pd
	num            rdma.QPN
	sendCQ, recvCQ *cq
	limits         wq.Limits
	maxSends       int

	// state is what Modify made it, or ERR since something said so.
	state atomic.Uint32
	// told says what its user has been told of the end of its connection, on an iWARP device: there, flushed requests complete
	// before an event says why.
	told atomic.Uint32

	mu  sync.Mutex
	ibv *ibvQP      // nil: closed
	rtr rdma.QPAttr // the last transition to RTR
	cm  *cmID       // that connects it, on an iWARP device

	closing bool // nothing connects it any more
	refuses bool // Refuse has taken the device's queue pair to RTR
}

var _ rdma.QP = (*qp)(nil)

// CreateQP implements [rdma.PD].
func (p *pd) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	if cfg.MaxSGE == 0 {
		cfg.MaxSGE = 1
	}
	c, d := p.ctx, p.ctx.dev
	send, ok1 := cfg.SendCQ.(*cq)
	recv, ok2 := cfg.RecvCQ.(*cq)
	if !ok1 || !ok2 || send.ctx != c || recv.ctx != c {
		return nil, fmt.Errorf("create queue pair: completion queues of this context are needed: %w", rdma.ErrInvalid)
	}
	if cfg.MaxSendWR < 1 || cfg.MaxSendWR > d.attr.MaxSendWR || cfg.MaxRecvWR < 1 || cfg.MaxRecvWR > d.attr.MaxRecvWR ||
		cfg.MaxSGE < 1 || cfg.MaxSGE > d.attr.MaxSGE {
		return nil, fmt.Errorf("create queue pair with %d sends, %d receives, %d SGEs (device limits %d, %d, %d): %w",
			cfg.MaxSendWR, cfg.MaxRecvWR, cfg.MaxSGE, d.attr.MaxSendWR, d.attr.MaxRecvWR, d.attr.MaxSGE, rdma.ErrInvalid)
	}
	q := &qp{pd: p, sendCQ: send, recvCQ: recv, limits: wq.LimitsOf(d.attr, cfg.MaxSGE), maxSends: cfg.MaxSendWR}
	var broken []failure
	defer func() { told(broken) }()
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.closed || c.closed || send.closing || recv.closing {
		return nil, fmt.Errorf("create queue pair: %w", rdma.ErrClosed)
	}
	err := d.before("create_qp")
	if err == nil {
		q.ibv, err = ibvCreateQP(p.handle, send.ibv, recv.ibv, cfg, d.inline)
	}
	if err != nil {
		return nil, fmt.Errorf("create queue pair with %s (device limit %d): %w", d.name, d.limits.qps, verbError(err))
	}
	q.num, q.ibv.wantsSGE = q.ibv.num, d.siw
	// What is left of another one that had this number is not for this one's user.
	broken = q.purge(func(*rdma.WC) bool { return false })
	p.qps[q] = struct{}{}
	send.users.Add(1)
	recv.users.Add(1)
	c.tabMu.Lock()
	c.qps[q.num] = q
	c.tabMu.Unlock()
	return q, nil
}

// purge drops the completions of the queue pair that keep does not want.
func (q *qp) purge(keep func(*rdma.WC) bool) []failure {
	f := func(w *rdma.WC) bool { return w.QPN != q.num || keep(w) }
	broken := q.sendCQ.collect(f)
	if q.recvCQ != q.sendCQ {
		broken = append(broken, q.recvCQ.collect(f)...)
	}
	return broken
}

// Num implements [rdma.QP].
func (q *qp) Num() rdma.QPN { return q.num }

// State implements [rdma.QP]. It asks the device whether the queue pair failed:
// not all of them tell.
func (q *qp) State() rdma.QPState {
	s := q.known()
	if s != rdma.QPRTR && s != rdma.QPRTS {
		return s
	}
	q.mu.Lock()
	failed := q.ibv != nil && q.ibv.failed()
	q.mu.Unlock()
	if failed {
		q.fail(rdma.EventQPFatal, errors.New("the device put it into ERR"))
	}
	return q.known()
}

func (q *qp) known() rdma.QPState { return rdma.QPState(q.state.Load()) }

// mark notes that the queue pair is in ERR; false if that was known.
func (q *qp) mark() bool {
	for {
		s := q.known()
		if s == rdma.QPError || s == rdma.QPReset {
			return false
		}
		if q.state.CompareAndSwap(uint32(s), uint32(rdma.QPError)) {
			return true
		}
	}
}

// fail deals with a queue pair that is in ERR for a reason of its own, once.
func (q *qp) fail(kind rdma.EventKind, why error) {
	first := q.mark()
	if q.pd.ctx.dev.attr.Stream {
		first = q.told.Swap(toldWhy) < toldWhy
	}
	if first {
		q.tell(kind, why)
	}
}

// accuse tells that the queue pair failed because its peer asked for memory that it has
// no right to. That it failed a flushed request may have told before the device says why.
func (q *qp) accuse(event string) {
	q.mark()
	q.mu.Lock()
	own := q.known() != rdma.QPError || q.refuses // reset meanwhile, or what Refuse is for
	q.mu.Unlock()
	if !own {
		q.tell(rdma.EventQPFatal, fmt.Errorf("%s: %w", event, rdma.ErrPeerAccess))
	}
}

// died is fail after mark, for what a completion told.
func (q *qp) died(s rdma.Status) {
	kind := rdma.EventQPFatal
	if s == rdma.StatusRetryExceeded {
		kind = rdma.EventPathDown
	}
	if !q.pd.ctx.dev.attr.Stream || q.told.Swap(toldWhy) < toldWhy {
		q.tell(kind, errors.New(s.String()))
	}
}

func (q *qp) tell(kind rdma.EventKind, why error) {
	q.mu.Lock()
	err := fmt.Errorf("queue pair %v to %v: %w", q.num, q.rtr.DestQPN, why)
	if q.pd.ctx.dev.attr.Stream {
		err = fmt.Errorf("queue pair %v: %w", q.num, why)
	}
	q.flush()
	q.mu.Unlock()
	q.pd.ctx.events.Post(rdma.AsyncEvent{Kind: kind, QPN: q.num, Err: err})
}

// flush has the device complete what was posted to a queue pair in ERR. Some,
// rxe among them, look at receives only when they are told. The caller has mu.
func (q *qp) flush() {
	if q.ibv != nil && q.known() == rdma.QPError {
		_ = q.ibv.toState(rdma.QPError) // it is there already
	}
}

// Modify implements [rdma.QP]. In the transition to RTR the kernel asks the
// neighbour table for the peer's MAC address, and waits for the answer of a peer
// that is not in it; Path.DMAC cannot be handed to it. See [rdma.PathResolver].
func (q *qp) Modify(a rdma.QPAttr) error {
	var broken []failure
	defer func() { told(broken) }()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ibv == nil {
		return fmt.Errorf("modify queue pair %v: %w", q.num, rdma.ErrClosed)
	}
	from := q.known()
	if err := q.check(from, &a); err != nil {
		return fmt.Errorf("modify queue pair %v from %v to %v: %w", q.num, from, a.State, err)
	}
	q.refuses = false
	q.told.Store(toldWhy) // its user ends it
	if a.State == rdma.QPInit {
		q.told.Store(toldNothing)
	}
	d := q.pd.ctx.dev
	var err error
	switch a.State {
	case rdma.QPReset, rdma.QPError:
		// Marked first, so that nobody takes the flushed requests for a failure.
		q.state.Store(uint32(a.State))
		err = q.ibv.toState(a.State)
	case rdma.QPInit:
		err = q.ibv.toInit(d.port, a.Access)
	case rdma.QPRTR:
		a.Path = d.classed(a.Path)
		err = q.ibv.toRTR(d.port, &a, reads(a.ReadsServed, min(maxReadsServed, d.limits.readsServed)))
	case rdma.QPRTS:
		err = q.ibv.toRTS(&a, reads(a.ReadsAsked, min(maxReadsAsked, d.limits.readsStarted)))
	}
	if err != nil {
		q.state.CompareAndSwap(uint32(a.State), uint32(from))
		return fmt.Errorf("modify queue pair %v from %v to %v: %w", q.num, from, a.State, pathError(a.Path.DGID, err))
	}
	switch a.State {
	case rdma.QPReset:
		broken = q.purge(func(*rdma.WC) bool { return false })
	case rdma.QPRTR:
		q.rtr = a
		fallthrough
	case rdma.QPInit, rdma.QPRTS:
		q.state.CompareAndSwap(uint32(from), uint32(a.State)) // unless it failed meanwhile
	case rdma.QPError:
	}
	return nil
}

// reads returns how many RDMA READs may wait for their answer: what the user says, or
// the default.
func reads(asked uint8, byDefault int) int {
	if asked == 0 {
		return byDefault
	}
	return int(asked)
}

// pathError says what an error about a path means, nil if there is none.
func pathError(to rdma.GID, err error) error {
	if errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) || errors.Is(err, syscall.ENODATA) {
		return fmt.Errorf("no route to, or no answer for the MAC address of %v: %w", to.Addr(), err)
	}
	return verbError(err)
}

// check refuses what IBTA does, or the port.
func (q *qp) check(from rdma.QPState, a *rdma.QPAttr) error {
	switch {
	case a.State == rdma.QPReset:
		return nil
	case q.pd.ctx.dev.attr.Stream && (a.State == rdma.QPRTR || a.State == rdma.QPRTS):
		return fmt.Errorf("the device connects it: %w", rdma.ErrNotSupported)
	case a.State == rdma.QPError && from != rdma.QPReset:
		return nil
	case a.State == rdma.QPInit && (from == rdma.QPReset || from == rdma.QPInit):
		return nil
	case a.State == rdma.QPRTR && from == rdma.QPInit:
		return q.checkRTR(a)
	case a.State == rdma.QPRTS && from == rdma.QPRTR:
		if a.SQPSN > rdma.PSNMask || a.Timeout > 31 || a.RetryCount > 7 || a.RNRRetry > 7 {
			return fmt.Errorf("PSN %#x, timeout code %d, retries %d, RNR retries %d: %w",
				uint32(a.SQPSN), a.Timeout, a.RetryCount, a.RNRRetry, rdma.ErrInvalid)
		}
		if most := q.pd.ctx.dev.attr.MaxReadsAsked; int(a.ReadsAsked) > most {
			return fmt.Errorf("%d READs outstanding, of %d: %w", a.ReadsAsked, most, rdma.ErrInvalid)
		}
		return nil
	}
	return rdma.ErrState
}

func (q *qp) checkRTR(a *rdma.QPAttr) error {
	switch now := q.pd.ctx.dev.now.Load(); {
	case !a.MTU.Valid():
		return fmt.Errorf("path MTU code %d: %w", uint8(a.MTU), rdma.ErrInvalid)
	case a.MTU > now.attr.ActiveMTU:
		return fmt.Errorf("path MTU %v is above the port's %v: %w", a.MTU, now.attr.ActiveMTU, rdma.ErrInvalid)
	case a.DestQPN > rdma.MaxQPN || a.RQPSN > rdma.PSNMask || a.MinRNRTimer > 31:
		return fmt.Errorf("destination %#x, PSN %#x, RNR timer code %d: %w", uint32(a.DestQPN), uint32(a.RQPSN), a.MinRNRTimer, rdma.ErrInvalid)
	case int(a.ReadsServed) > q.pd.ctx.dev.attr.MaxReadsServed:
		return fmt.Errorf("%d READs served, of %d: %w", a.ReadsServed, q.pd.ctx.dev.attr.MaxReadsServed, rdma.ErrInvalid)
	}
	return q.pd.ctx.dev.checkPath(&a.Path)
}

// checkPath refuses what cannot be sent to.
func (d *Device) checkPath(p *rdma.Path) error {
	for _, g := range d.now.Load().gids {
		if g.Index != p.SGIDIndex {
			continue
		}
		from, to := g.GID.Addr(), p.DGID.Addr()
		if from.Is4() != to.Is4() || to.IsUnspecified() || to.IsMulticast() {
			return fmt.Errorf("destination %v cannot be reached from %v: %w", to, from, rdma.ErrInvalid)
		}
		return nil
	}
	return fmt.Errorf("GID index %d is not in use: %w", p.SGIDIndex, rdma.ErrInvalid)
}

// classed gives a path without a traffic class that of the device.
func (d *Device) classed(p rdma.Path) rdma.Path {
	if p.TrafficClass == 0 {
		p.TrafficClass = d.class
	}
	return p
}

// PostSend implements [rdma.QP].
func (q *qp) PostSend(wrs []rdma.SendWR) (int, error) {
	if q.pd.ctx.dev.siw && q.known() == rdma.QPError {
		return q.flushSends(wrs)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ibv == nil {
		return 0, fmt.Errorf("post send: %w", rdma.ErrClosed)
	}
	if s := q.known(); s != rdma.QPRTS && s != rdma.QPError {
		return 0, fmt.Errorf("post send in %v: %w", s, rdma.ErrState)
	}
	inline := q.pd.ctx.dev.inline
	done := 0
	for done < len(wrs) {
		n, sge := 0, 0
		var refused error
		for n < len(q.ibv.wrs) && done+n < len(wrs) {
			w := &wrs[done+n]
			if _, refused = q.limits.Check(w); refused != nil { // not every driver does
				break
			}
			sge = q.ibv.stageSend(n, sge, w, inline)
			n++
		}
		if n > 0 {
			taken, errno := q.ibv.postSend(n)
			done += taken
			if errno != 0 {
				return done, postError("send", errno)
			}
		}
		if refused != nil {
			return done, refused
		}
	}
	return done, nil
}

// flushSends completes what is posted to a queue pair in ERR, of which siw says nothing.
func (q *qp) flushSends(wrs []rdma.SendWR) (int, error) {
	q.mu.Lock()
	closed := q.ibv == nil
	q.mu.Unlock()
	if closed {
		return 0, fmt.Errorf("post send: %w", rdma.ErrClosed)
	}
	if len(wrs) > 0 {
		defer q.sendCQ.notified()
	}
	for i := range wrs {
		w := &wrs[i]
		_, err := q.limits.Check(w)
		if err == nil && !q.sendCQ.put(rdma.WC{ID: w.ID, Status: rdma.StatusFlushed, Op: w.Op, QPN: q.num}, q.maxSends) {
			err = rdma.ErrQueueFull
		}
		if err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

// PostRecv implements [rdma.QP].
func (q *qp) PostRecv(wrs []rdma.RecvWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ibv == nil {
		return 0, fmt.Errorf("post receive: %w", rdma.ErrClosed)
	}
	if s := q.known(); s == rdma.QPReset {
		return 0, fmt.Errorf("post receive in %v: %w", s, rdma.ErrState)
	}
	done := 0
	for done < len(wrs) {
		n, sge := 0, 0
		for n < len(q.ibv.wrs) && done+n < len(wrs) {
			sge = q.ibv.stageRecv(n, sge, &wrs[done+n])
			n++
		}
		taken, errno := q.ibv.postRecv(n)
		done += taken
		if errno != 0 {
			q.flush()
			return done, postError("receive", errno)
		}
	}
	q.flush() // the state as it is after posting: whoever marks it later flushes
	return done, nil
}

// postError says why a work request was not taken.
func postError(what string, errno syscall.Errno) error {
	if errno == syscall.ENOMEM || errno == syscall.ENOSPC || errno == syscall.EAGAIN {
		return rdma.ErrQueueFull
	}
	return fmt.Errorf("post %s: %w", what, verbError(errno))
}

// bar sees that nobody has the kernel connect the queue pair any more.
func (q *qp) bar() {
	q.mu.Lock()
	q.closing = true
	conn := q.cm
	q.mu.Unlock()
	if conn != nil {
		conn.bar()
	}
}

// Close implements [rdma.QP]. What arrived before completes also afterwards:
// the peer counts it as delivered.
func (q *qp) Close() error {
	q.bar()
	var broken []failure
	var conn *cmID
	defer func() {
		told(broken)
		if conn != nil { // after the queue pair, which rdma_cm ends else
			conn.close()
		}
	}()
	c := q.pd.ctx
	c.mu.Lock()
	defer c.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ibv == nil {
		return nil
	}
	conn, q.cm = q.cm, nil
	q.told.Store(toldWhy)
	if q.known() != rdma.QPReset {
		q.state.Store(uint32(rdma.QPError))
		_ = q.ibv.toState(rdma.QPError) // takes and acknowledges nothing any more
	}
	c.tabMu.Lock()
	delete(c.qps, q.num)
	c.tabMu.Unlock()
	broken = q.purge(func(*rdma.WC) bool { return true })
	err := q.ibv.destroy()
	q.ibv = nil
	broken = append(broken, q.purge(func(w *rdma.WC) bool { return w.Status == rdma.StatusSuccess })...)
	delete(q.pd.qps, q)
	q.sendCQ.users.Add(-1)
	q.recvCQ.users.Add(-1)
	c.events.Forget(q.num)
	if err != nil && !isGone(err) {
		return fmt.Errorf("close queue pair %v: %w", q.num, verbError(err))
	}
	return nil
}
