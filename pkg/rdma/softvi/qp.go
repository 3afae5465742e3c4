// SPDX-License-Identifier: Apache-2.0

package softvi

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

// qp is a queue pair: its owner owns all but the embedded part, which knows its own rules.
type qp struct {
	tcpqp.QP
	m *vitcp.QP

	abort context.CancelCauseFunc // ends the call that is being made; nil: none is
	wait  chan struct{}           // closed when the connection is over; nil: nobody waits

	leaving atomic.Bool // Disconnect was here: what was posted before is still sent
}

var _ softdev.Carrier = (*qp)(nil)

// newQP makes a queue pair.
func (d *Device) newQP(c softdev.QPConfig) (softdev.Carrier, error) {
	m, err := vitcp.NewQP(vitcp.QPConfig{
		Num:       c.Num,
		MaxSendWR: c.MaxSendWR,
		MaxRecvWR: c.MaxRecvWR,
		MaxSGE:    c.MaxSGE,
		MaxInline: softdev.MaxInline,
		Memory:    c.Memory,
	})
	if err != nil {
		return nil, err
	}
	q := &qp{m: m}
	q.Init(d.host, m)
	return q, nil
}

// PostSend implements [rdma.QP]: nothing more when the connection ends.
func (q *qp) PostSend(wrs []rdma.SendWR) (int, error) {
	if q.leaving.Load() && q.State() == rdma.QPRTS {
		return 0, fmt.Errorf("post send to queue pair %v, which disconnects: %w", q.Num(), rdma.ErrState)
	}
	return q.QP.PostSend(wrs)
}

// PostRecv implements [rdma.QP]: the peer may wait for the news of a receive (§3.1, Notes on NOP).
func (q *qp) PostRecv(wrs []rdma.RecvWR) (int, error) {
	n, err := q.QP.PostRecv(wrs)
	if n > 0 {
		q.AskStep()
	}
	return n, err
}

// CheckModify implements [softdev.Carrier].
func (q *qp) CheckModify(rdma.QPAttr) error { return nil }

// Modified implements [softdev.Carrier].
func (q *qp) Modified(a rdma.QPAttr) {
	if a.State == rdma.QPError {
		q.giveUp(fmt.Errorf("queue pair %v was moved to %v: %w", q.Num(), a.State, rdma.ErrState))
	}
}

// Transmit implements [softdev.Carrier].
func (q *qp) Transmit(now time.Time) {
	if q.leaving.Load() && q.m.State() == rdma.QPRTS && q.Drained() {
		_ = q.m.Disconnect(now) // allowed from there
	}
	q.QP.Transmit(now)
	q.tell()
}

// Drop implements [softdev.Carrier].
func (q *qp) Drop() {
	q.QP.Drop()
	if q.Dead() {
		q.giveUp(fmt.Errorf("queue pair %v: %w", q.Num(), rdma.ErrClosed))
	} else {
		q.giveUp(fmt.Errorf("queue pair %v was reset: %w", q.Num(), rdma.ErrState))
	}
	q.tell()
}

// giveUp ends the call that is being made, if any.
func (q *qp) giveUp(err error) {
	if q.abort != nil {
		q.abort(err)
	}
}

// tell wakes who waits for the end of the connection.
func (q *qp) tell() {
	if q.wait != nil && (q.Dead() || q.m.State() != rdma.QPRTS) {
		close(q.wait)
		q.wait = nil
	}
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

// ready refuses a queue pair that cannot be connected now.
func (q *qp) ready() error {
	switch {
	case q.Dead():
		return fmt.Errorf("queue pair %v: %w", q.Num(), rdma.ErrClosed)
	case q.m.State() != rdma.QPInit:
		return fmt.Errorf("queue pair %v is in %v, want %v: %w", q.Num(), q.m.State(), rdma.QPInit, rdma.ErrState)
	case q.abort != nil:
		return fmt.Errorf("queue pair %v is being connected: %w", q.Num(), rdma.ErrState)
	}
	return nil
}

// posted is the number of receives that the peer is told of.
func (q *qp) posted() uint16 {
	q.Lock()
	defer q.Unlock()
	return q.m.Posted()
}

// begin starts the queue pair on a connection, which is closed if that fails.
func (q *qp) begin(c *net.TCPConn, t *vitcp.Terms, o *Options) (Terms, error) {
	now := time.Now()
	out := Terms{Attr: t.Attr, Security: t.Security, Timestamps: tcpqp.Timestamps(c)}
	t.MaxSegment = o.MaxSegment
	q.leaving.Store(false)
	err := q.ready()
	if err == nil {
		err = q.m.Start(now, *t)
	}
	if err == nil {
		if err = q.Attach(c); err != nil {
			q.m.HandleEnd(now, err)
		}
		q.Step(now)
	}
	if err != nil {
		_ = c.Close()
		return Terms{}, err
	}
	return out, nil
}

// Disconnect ends the connection of a queue pair in order: what was posted is sent, and
// acknowledged, and the peer's READs are answered. Then TCP is closed, and when the peer has closed it,
// too, the queue pair is in ERR and Disconnect returns. Nothing more can be posted from its
// beginning on.
//
// If the context ends first, the connection ends at once: what was not done is flushed, and the
// error says so. So does that of a connection that came to another end meanwhile: it is
// [vitcp.ErrPeerClosed] if the peer closed TCP before all was done. ErrState says that the queue pair
// is not connected, or not any more.
func (d *Device) Disconnect(ctx context.Context, r rdma.QP) error {
	q, err := d.find(r)
	if err != nil {
		return fmt.Errorf("disconnect: %w", err)
	}
	over, err := q.leave()
	if err != nil {
		return err
	}
	select {
	case <-over:
	case <-ctx.Done():
	}
	q.Lock()
	defer q.Unlock()
	switch {
	case q.Dead():
		return fmt.Errorf("disconnect queue pair %v: %w", q.Num(), rdma.ErrClosed)
	case q.m.State() == rdma.QPRTS:
		now := time.Now()
		_ = q.m.Modify(now, rdma.QPAttr{State: rdma.QPError}) // allowed from there
		q.Step(now)
		return fmt.Errorf("disconnect queue pair %v, whose peer did not take all that was posted: %w", q.Num(), context.Cause(ctx))
	case q.m.State() != rdma.QPError:
		return fmt.Errorf("disconnect queue pair %v, which was reset: %w", q.Num(), rdma.ErrState)
	case q.m.Err() != nil:
		return fmt.Errorf("disconnect: %w", q.m.Err())
	}
	return nil
}

// leave begins the end of the connection. Its channel is closed when that is over.
func (q *qp) leave() (<-chan struct{}, error) {
	q.Lock()
	defer q.Unlock()
	if q.Dead() {
		return nil, fmt.Errorf("disconnect queue pair %v: %w", q.Num(), rdma.ErrClosed)
	}
	if s := q.m.State(); s != rdma.QPRTS {
		return nil, fmt.Errorf("disconnect queue pair %v in %v: %w", q.Num(), s, rdma.ErrState)
	}
	q.leaving.Store(true)
	if q.wait == nil {
		q.wait = make(chan struct{})
	}
	over := q.wait
	q.Step(time.Now())
	return over, nil
}

// QPStats returns the protocol's counters of a queue pair of this device.
func (d *Device) QPStats(n rdma.QPN) (vitcp.Stats, bool) {
	q, ok := d.base.Find(n).(*qp)
	if !ok {
		return vitcp.Stats{}, false
	}
	q.Lock()
	defer q.Unlock()
	return q.m.Stats(), true
}
