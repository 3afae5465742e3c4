// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Memory resolves addresses of work requests and packets to registered
// memory of the queue pair's protection domain. The machine keeps a slice
// only while it works on one message; [QP.ForgetMemory] makes it drop them.
type Memory interface {
	// Local returns the memory of an SGE, or StatusLocalProtect. With write
	// the region needs LocalWrite.
	Local(sge rdma.SGE, write bool) ([]byte, rdma.Status)
	// Remote returns the n bytes at addr of the region that rkey opens, if
	// it grants acc and holds them all.
	Remote(rkey rdma.RKey, addr uint64, n uint32, acc rdma.Access) ([]byte, bool)
}

// QPConfig describes a queue pair to be made.
type QPConfig struct {
	Num       rdma.QPN
	MaxSendWR int
	MaxRecvWR int
	MaxSGE    int // per send, at most [MaxSGE]; 0: 1
	MaxInline int // at most [MaxInlineLimit]
	Memory    Memory
	Window    int // request packets in flight; 0: [DefaultWindow]
}

// Completion is a work completion and where it belongs.
type Completion struct {
	WC   rdma.WC
	Send bool // for the send CQ, otherwise the receive CQ
	Wake bool // solicited or an error: wakes a CQ that was armed for solicited only
}

// TxPacket is a packet to be sent: Hdr[:HdrLen], the pieces Payload[:Segs],
// Pad zero bytes and the ICRC, which is the sender's to compute. The pieces
// are registered memory, or the queue pair's own for inline data: send before
// calling another method of the queue pair.
type TxPacket struct {
	Hdr        [MaxHeaderLen]byte
	HdrLen     int
	Payload    [MaxSGE][]byte
	Segs       int
	PayloadLen int
	Pad        int
}

// UDPLen returns the length of the UDP payload, ICRC included.
func (t *TxPacket) UDPLen() int { return t.HdrLen + t.PayloadLen + t.Pad + ICRCLen }

// Stats counts what happened since the queue pair was made.
type Stats struct {
	TxPackets, TxBytes     uint64 // bytes: payload
	RxPackets, RxBytes     uint64
	TxMessages, RxMessages uint64
	Retransmits            uint64 // packets sent again
	Timeouts               uint64
	RNRReceived, RNRSent   uint64
	NAKSeqReceived         uint64
	NAKSeqSent             uint64
	NAKErrReceived         uint64 // the codes that end a queue pair
	NAKErrSent             uint64
	Duplicates             uint64 // requests received again
	Ghosts                 uint64 // responses to nothing outstanding
	Bad                    uint64 // dropped for other reasons
}

// QP is one RC queue pair: requester and responder. It is not safe for
// concurrent use; whoever holds the device's queue pair owns it.
type QP struct {
	attr rdma.QPAttr
}

// NewQP makes a queue pair in state RESET.
func NewQP(c QPConfig) (*QP, error) { return &QP{}, nil }

// State returns the state.
func (q *QP) State() rdma.QPState { return q.attr.State }

// Attr returns the attributes given so far.
func (q *QP) Attr() rdma.QPAttr { return q.attr }

// Modify changes the state.
func (q *QP) Modify(now time.Time, a rdma.QPAttr) error { return nil }

// ForgetMemory drops the memory that the machine has resolved. The owner of
// the memory calls it, under the queue pair's lock, after a region is taken
// out of the table and before it is unmapped.
func (q *QP) ForgetMemory() {}

// PostSend queues sends.
func (q *QP) PostSend(now time.Time, wrs []rdma.SendWR) (int, error) { return 0, nil }

// PostRecv queues receive buffers.
func (q *QP) PostRecv(wrs []rdma.RecvWR) (int, error) { return 0, nil }

// HandlePacket takes a packet for this queue pair whose ICRC is right.
func (q *QP) HandlePacket(now time.Time, p *Packet) {}

// HandleTimeout does what is due.
func (q *QP) HandleTimeout(now time.Time) {}

// NextTimeout returns when HandleTimeout is due next.
func (q *QP) NextTimeout() (time.Time, bool) { return time.Time{}, false }

// PollTx fills dst with packets to send now.
func (q *QP) PollTx(now time.Time, dst []TxPacket) int { return 0 }

// PollWC moves completions to dst.
func (q *QP) PollWC(dst []Completion) int { return 0 }

// PollEvent returns the next asynchronous event.
func (q *QP) PollEvent() (rdma.AsyncEvent, bool) { return rdma.AsyncEvent{}, false }

// Stats returns the counters.
func (q *QP) Stats() Stats { return Stats{} }
