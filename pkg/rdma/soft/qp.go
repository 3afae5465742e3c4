// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// qp is a queue pair: its owner owns all but the embedded part, which knows its own rules.
type qp struct {
	softdev.QP
	dev *Device

	m      *rocev2.QP
	peer   netip.AddrPort
	flow   uint8 // of packets to the peer
	txICRC rocev2.ICRC
	burst  int    // packets that are made at a time, at most
	unsent *batch // what the wire did not take
	// answerAt is when Transmit goes on after answerBytes; zero: nothing is left behind.
	answerAt time.Time
}

var (
	_ softdev.Carrier = (*qp)(nil)
	_ rdma.Refuser    = (*qp)(nil)
)

// newQP makes a queue pair.
func (d *Device) newQP(c softdev.QPConfig) (softdev.Carrier, error) {
	m, err := rocev2.NewQP(rocev2.QPConfig{
		Num:       c.Num,
		MaxSendWR: c.MaxSendWR,
		MaxRecvWR: c.MaxRecvWR,
		MaxSGE:    c.MaxSGE,
		MaxInline: softdev.MaxInline,
		Memory:    c.Memory,
		Window:    d.cfg.WindowPackets,
		ACKDelay:  ackDelay,
	})
	if err != nil {
		return nil, err
	}
	return &qp{dev: d, m: m}, nil
}

// Machine implements [softdev.Carrier].
func (q *qp) Machine() softdev.Machine { return q.m }

// CheckModify implements [softdev.Carrier].
func (q *qp) CheckModify(a rdma.QPAttr) error {
	if a.State != rdma.QPRTR {
		return nil
	}
	if a.Path.SGIDIndex != 0 {
		return fmt.Errorf("GID index %d: %w", a.Path.SGIDIndex, rdma.ErrInvalid)
	}
	to := a.Path.DGID.Addr()
	if to.Is4() != q.dev.cfg.Addr.Is4() || to.IsUnspecified() || to.IsMulticast() {
		return fmt.Errorf("destination %v cannot be reached from %v: %w", to, q.dev.cfg.Addr, rdma.ErrInvalid)
	}
	if most := q.dev.maxMTU(); a.MTU > most {
		return fmt.Errorf("path MTU %v is above the port's %v: %w", a.MTU, most, rdma.ErrInvalid)
	}
	return nil
}

// Modified implements [softdev.Carrier].
func (q *qp) Modified(a rdma.QPAttr) {
	if a.State != rdma.QPRTR {
		return
	}
	local := q.dev.Addr()
	q.peer = netip.AddrPortFrom(a.Path.DGID.Addr(), local.Port())
	q.flow = flowOf(a.DestQPN)
	q.burst = burst(a.MTU.Bytes(), q.dev.wire.MaxSegments())
	q.txICRC = rocev2.NewICRC(rocev2.Addresses{
		Src: local.Addr(), SrcPort: q.dev.sourcePort(q.flow), Dst: q.peer.Addr(), DstPort: q.peer.Port(),
	})
}

// Silence implements [rdma.Refuser].
func (q *qp) Silence() {
	q.Lock()
	defer q.Unlock()
	q.m.Silence()
}

// Refuse implements [rdma.Refuser].
func (q *qp) Refuse() error {
	q.Lock()
	defer q.Unlock()
	if q.Dead() {
		return fmt.Errorf("refuse requests to queue pair %v: %w", q.Num(), rdma.ErrClosed)
	}
	if !q.m.Refuse() {
		return fmt.Errorf("refuse requests to queue pair %v in %v: %w", q.Num(), q.State(), rdma.ErrState)
	}
	q.Transmit(time.Now())
	return nil
}

// SayLast implements [softdev.Carrier]: it sends the acknowledgement that still waits for
// company, and refuses what had to wait for that: after this the peer would learn nothing.
func (q *qp) SayLast(now time.Time) {
	if s := q.m.State(); s == rdma.QPRTR || s == rdma.QPRTS {
		_ = q.m.Modify(now, rdma.QPAttr{State: rdma.QPError}) // allowed from there
		q.Transmit(now)
	}
	if q.m.Refuse() {
		q.Transmit(now)
	}
}

// Drop implements [softdev.Carrier]: what waits for the wire is as if it was lost.
func (q *qp) Drop() {
	q.answerAt = time.Time{}
	if q.unsent != nil {
		q.dev.putBatch(q.unsent)
		q.unsent = nil
	}
}

// Retry implements [softdev.Carrier].
func (q *qp) Retry() time.Time {
	if q.unsent == nil {
		return q.answerAt
	}
	return time.Now().Add(sendRetry)
}

// ForgetMemory implements [softdev.Carrier].
func (q *qp) ForgetMemory() {
	if q.unsent != nil {
		q.unsent.forget(nil, &q.txICRC)
	}
}
