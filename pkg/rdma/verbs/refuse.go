// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

var _ rdma.Refuser = (*qp)(nil)

// Silence implements [rdma.Refuser]: devices say nothing in ERR.
func (q *qp) Silence() {}

// Refuse implements [rdma.Refuser]. Devices answer nothing for a queue pair in ERR.
// In RTR they do, and without rights and with a receive buffer of no bytes the answer
// to a request, whatever it is, is NAK. The way there is by RESET, where a queue pair
// forgets which PSN comes next: a wrong one would acknowledge what never arrived. So
// this is for soft RoCE, which tells the right one in ERR, and whose peers need it:
// other devices' requesters give up by themselves.
//
// With its NAK the queue pair is in ERR again, and says no more. If the NAK gets lost,
// Refuse has to be called again.
func (q *qp) Refuse() error {
	d := q.pd.ctx.dev
	if !d.soft {
		return fmt.Errorf("refuse requests to queue pair %v of %s: %w", q.num, d.name, rdma.ErrNotSupported)
	}
	q.mu.Lock()
	path := q.rtr.Path
	waits := q.refuses && q.ibv != nil && !q.ibv.failed()
	q.mu.Unlock()
	if waits {
		return nil
	}
	// The transition to RTR asks for the peer's MAC address. With the lock held
	// there is no time to wait for it.
	if err := q.pd.ctx.ResolvePath(path); err != nil {
		return err
	}
	var broken []failure
	defer func() { told(broken) }()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ibv == nil {
		return fmt.Errorf("refuse requests to queue pair %v: %w", q.num, rdma.ErrClosed)
	}
	if s := q.known(); s != rdma.QPError || q.rtr.State != rdma.QPRTR {
		return fmt.Errorf("refuse requests to queue pair %v in %v: %w", q.num, s, rdma.ErrState)
	}
	err := q.ibv.refuse(d.port, q.rtr, func() {
		broken = q.purge(func(*rdma.WC) bool { return false })
	})
	if err != nil {
		q.refuses = false
		_ = q.ibv.toState(rdma.QPError) // where its user thinks it is
		return fmt.Errorf("refuse requests to queue pair %v: %w", q.num, pathError(path.DGID, err))
	}
	q.refuses = true
	return nil
}

// refuse takes the queue pair from ERR to RTR, without rights. It calls reset when
// nothing that was posted before completes any more.
func (q *ibvQP) refuse(port uint8, a rdma.QPAttr, reset func()) (err error) {
	if a.RQPSN, err = q.expects(); err != nil {
		return err
	}
	if err := q.toState(rdma.QPReset); err != nil {
		return err
	}
	reset()
	if err := q.toInit(port, 0); err != nil {
		return err
	}
	q.stageRecv(0, 0, &rdma.RecvWR{})
	if _, errno := q.postRecv(1); errno != 0 {
		return errno
	}
	return q.toRTR(port, &a, 1)
}
