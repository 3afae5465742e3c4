// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"context"
	cryptorand "crypto/rand"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// qp is a queue pair: its owner owns all but the embedded part, which knows its own rules.
type qp struct {
	tcpqp.QP
	m *iwarp.QP

	reserved *SSP          // whose request alone may be accepted on it
	asking   bool          // an initiator's start-up is under way
	streamed bool          // an initiator's ConnectOptions.Streamed
	taken    tcpqp.Taken   // the connection of an initiator
	before   uint64        // FPDUs that a responder has received on former connections
	leaving  bool          // Disconnect was here: what was posted before is still sent
	wait     chan struct{} // closed when decided says so; nil: nobody waits
	decided  func() bool
	over     chan struct{} // closed when there is no connection any more; nil: nobody waits for that

	nudge nudge
}

// nudge is when an initiator looks whether its peer sleeps.
type nudge struct {
	at     time.Time // zero: not any more
	n      int       // times so far
	rx, tx uint64    // FPDUs when start-up was over
}

var _ softdev.Carrier = (*qp)(nil)

// newQP makes a queue pair.
func (d *Device) newQP(c softdev.QPConfig) (softdev.Carrier, error) {
	var seed [32]byte
	_, _ = cryptorand.Read(seed[:]) // never fails
	m, err := iwarp.NewQP(iwarp.QPConfig{
		Num:       c.Num,
		MaxSendWR: c.MaxSendWR,
		MaxRecvWR: c.MaxRecvWR,
		MaxSGE:    c.MaxSGE,
		MaxInline: softdev.MaxInline,
		Memory:    c.Memory,
		Rand:      rand.New(rand.NewChaCha8(seed)),
	})
	if err != nil {
		return nil, err
	}
	q := &qp{m: m}
	q.Init(d.host, m)
	return q, nil
}

// CheckModify implements [softdev.Carrier].
func (q *qp) CheckModify(rdma.QPAttr) error { return nil }

// Transmit implements [softdev.Carrier].
func (q *qp) Transmit(now time.Time) {
	if q.asking && q.m.Phase() == iwarp.PhaseOpen {
		q.asking = false
		if !q.streamed {
			q.DelayTx(now.Add(firstDelay))
			q.DelayEnd(now.Add(minStay))
			s := q.m.Stats()
			q.nudge = nudge{at: now.Add(firstNudge), rx: s.RxFPDUs, tx: s.TxFPDUs}
		}
	}
	q.nudgePeer(now)
	if q.leaving && q.m.State() == rdma.QPRTS && q.Drained() {
		_ = q.m.Disconnect(now) // allowed from there
	}
	q.QP.Transmit(now)
	q.tell()
}

// nudgePeer sends an empty WRITE to a peer that was sent something and has said nothing yet, a
// few times: Linux's siw may have slept through what came first.
func (q *qp) nudgePeer(now time.Time) {
	g := &q.nudge
	if g.at.IsZero() || now.Before(g.at) {
		return
	}
	s := q.m.Stats()
	if g.n == maxNudges || s.RxFPDUs > g.rx || !q.Attached() {
		g.at = time.Time{}
		return
	}
	if s.TxFPDUs > g.tx {
		q.m.Nudge()
	}
	g.n++
	g.at = now.Add(firstNudge << g.n)
}

// Retry implements [softdev.Carrier].
func (q *qp) Retry() time.Time {
	at := q.QP.Retry()
	if at.IsZero() || !q.nudge.at.IsZero() && q.nudge.at.Before(at) {
		return q.nudge.at
	}
	return at
}

// Drop implements [softdev.Carrier].
func (q *qp) Drop() {
	q.QP.Drop()
	q.nudge.at = time.Time{}
	q.leaving = false
	q.tell()
}

// tell wakes who waits for the end of start-up, or of the connection.
func (q *qp) tell() {
	if q.wait != nil && (q.Dead() || q.decided()) {
		close(q.wait)
		q.wait, q.decided = nil, nil
	}
	if q.over != nil && (q.Dead() || !q.Attached()) {
		close(q.over)
		q.over = nil
	}
}

// await makes the channel that is closed when the queue pair is dead or decided.
func (q *qp) await(decided func() bool) <-chan struct{} {
	q.wait, q.decided = make(chan struct{}), decided
	return q.wait
}

// find returns the device's queue pair that r is.
func (d *Device) find(r rdma.QP) (*qp, error) {
	q, ok := r.(*qp)
	if !ok {
		return nil, fmt.Errorf("queue pair is %T, of another device: %w", r, rdma.ErrInvalid)
	}
	if c, _ := d.base.Find(q.Num()).(*qp); c != q {
		return nil, fmt.Errorf("queue pair %v is closed, or of another device: %w", q.Num(), rdma.ErrClosed)
	}
	return q, nil
}

// ready refuses a queue pair that cannot be connected now. s is the [SSP] that the connection
// comes by, if any.
func (q *qp) ready(s *SSP) error {
	switch {
	case q.Dead():
		return fmt.Errorf("queue pair %v: %w", q.Num(), rdma.ErrClosed)
	case q.m.State() != rdma.QPInit:
		return fmt.Errorf("queue pair %v is in %v, want %v: %w", q.Num(), q.m.State(), rdma.QPInit, rdma.ErrState)
	case q.Attached() || q.wait != nil:
		return fmt.Errorf("queue pair %v is being connected: %w", q.Num(), rdma.ErrState)
	case q.reserved != nil && q.reserved != s:
		return fmt.Errorf("queue pair %v belongs to a Socket Service Point: %w", q.Num(), rdma.ErrState)
	}
	return nil
}

// Disconnect ends the connection of a queue pair in order: what was posted is done first, also
// the peer's READs. Then our half ends, and the queue pair goes to ERR.
func (d *Device) Disconnect(r rdma.QP) error {
	q, err := d.find(r)
	if err != nil {
		return fmt.Errorf("disconnect: %w", err)
	}
	q.Lock()
	defer q.Unlock()
	if q.Dead() {
		return fmt.Errorf("disconnect queue pair %v: %w", q.Num(), rdma.ErrClosed)
	}
	if s := q.m.State(); s != rdma.QPRTS {
		return fmt.Errorf("disconnect queue pair %v in %v: %w", q.Num(), s, rdma.ErrState)
	}
	q.leaving = true
	q.Step(time.Now())
	return nil
}

// AwaitEnd waits until the connection of a queue pair has ended in both directions, after
// [Device.Disconnect] or what the peer did. A queue pair that is closed before resets the connection if
// something of the peer is still unread, and that may overtake our last bytes.
func (d *Device) AwaitEnd(ctx context.Context, r rdma.QP) error {
	q, err := d.find(r)
	if err != nil {
		return fmt.Errorf("await end: %w", err)
	}
	q.Lock()
	if q.wait != nil {
		q.Unlock()
		return fmt.Errorf("await end of queue pair %v, which is being connected: %w", q.Num(), rdma.ErrState)
	}
	if q.over == nil {
		q.over = make(chan struct{})
	}
	over := q.over
	q.tell()
	q.Unlock()
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("await end of queue pair %v: %w", q.Num(), context.Cause(ctx))
	}
}

// QPStats returns the protocol's counters of a queue pair of this device.
func (d *Device) QPStats(n rdma.QPN) (iwarp.Stats, bool) {
	q, ok := d.base.Find(n).(*qp)
	if !ok {
		return iwarp.Stats{}, false
	}
	q.Lock()
	defer q.Unlock()
	return q.m.Stats(), true
}
