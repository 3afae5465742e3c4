// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"cmp"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// QPConfig describes a queue pair to be made.
type QPConfig struct {
	Num       rdma.QPN
	MaxSendWR int
	MaxRecvWR int
	MaxSGE    int // per send, at most [MaxSGE]; 0: 1
	MaxInline int // at most [MaxInlineLimit]
	Memory    wq.Memory
	// ACKDelay is how long the acknowledgement of a few bytes may wait for a
	// request to travel with; 0: not at all. It must be far below the peer's
	// ACK timeout.
	ACKDelay time.Duration
	Window   int // request packets in flight, at most [MaxWindow]; 0: [DefaultWindow]
}

// Validate reports what is wrong with the configuration.
func (c *QPConfig) Validate() error {
	switch {
	case c.Num > rdma.MaxQPN:
		return fmt.Errorf("queue pair number %#x has more than 24 bits: %w", uint32(c.Num), rdma.ErrInvalid)
	case c.MaxSendWR < 1 || c.MaxSendWR > MaxQueue:
		return fmt.Errorf("send queue of %d entries, want 1 to %d: %w", c.MaxSendWR, MaxQueue, rdma.ErrInvalid)
	case c.MaxRecvWR < 1 || c.MaxRecvWR > MaxQueue:
		return fmt.Errorf("receive queue of %d entries, want 1 to %d: %w", c.MaxRecvWR, MaxQueue, rdma.ErrInvalid)
	case c.MaxSGE < 0 || c.MaxSGE > MaxSGE:
		return fmt.Errorf("%d SGEs, want at most %d: %w", c.MaxSGE, MaxSGE, rdma.ErrInvalid)
	case c.MaxInline < 0 || c.MaxInline > MaxInlineLimit:
		return fmt.Errorf("%d inline bytes, want at most %d: %w", c.MaxInline, MaxInlineLimit, rdma.ErrInvalid)
	case c.Window < 0 || c.Window > MaxWindow:
		return fmt.Errorf("window of %d packets, want at most %d: %w", c.Window, MaxWindow, rdma.ErrInvalid)
	case c.Memory == nil:
		return fmt.Errorf("no memory: %w", rdma.ErrInvalid)
	}
	return nil
}

// Stats counts what happened since the queue pair was made.
type Stats struct {
	TxPackets, TxBytes     uint64 // bytes: payload
	RxPackets, RxBytes     uint64
	TxMessages, RxMessages uint64 // completed; a WRITE is received as one for each packet
	Retransmits            uint64 // request packets sent again
	Timeouts               uint64
	Probes                 uint64 // early retransmissions of one packet
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
// concurrent use; whoever holds the device's queue pair owns the QP.
//
// States and what works in them (IBTA 10.3.1):
//
//	RESET  nothing
//	INIT   PostRecv
//	RTR    PostRecv, responder
//	RTS    PostRecv, PostSend, responder, requester
//	ERR    posted requests complete as flushed; the ACK of what was taken
//	       before, or the NAK that tells the peer about our reason, still
//	       leaves, everything that arrives is dropped
//
// PSNs are 24 bits on the wire and 64 bits here, so that old and new never
// have to be told apart by wrapping arithmetic but at the packet's entry.
type QP struct {
	cfg  QPConfig
	attr rdma.QPAttr // attr.State is the state
	mtu  int

	req requester
	rsp responder

	limits wq.Limits // of sends
	wcs    wq.Completions
	events wq.Events
	stats  Stats
}

// NewQP makes a queue pair in state RESET. It makes all the memory that the
// queue pair will use.
func NewQP(c QPConfig) (*QP, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("make queue pair %v: %w", c.Num, err)
	}
	if c.MaxSGE == 0 {
		c.MaxSGE = 1
	}
	if c.Window == 0 {
		c.Window = DefaultWindow
	}
	q := &QP{cfg: c, limits: wq.Limits{
		SGEs: c.MaxSGE, Inline: c.MaxInline, Message: MaxMessage, WriteImm: true, Read: true, SendImm: true,
		Solicited: true,
	}}
	q.req.queue = newSendQueue(wq.RingSize(c.MaxSendWR), c.MaxInline)
	q.rsp.ring = make([]recvWQE, wq.RingSize(c.MaxRecvWR))
	q.wcs = wq.NewCompletions(c.MaxSendWR, c.MaxRecvWR)
	return q, nil
}

// Limits returns what work requests of the queue pair may ask for. They are constant.
func (q *QP) Limits() wq.Limits { return q.limits }

// Num returns the queue pair number.
func (q *QP) Num() rdma.QPN { return q.cfg.Num }

// State returns the state.
func (q *QP) State() rdma.QPState { return q.attr.State }

// Attr returns the state and the attributes given so far.
func (q *QP) Attr() rdma.QPAttr { return q.attr }

// Stats returns the counters.
func (q *QP) Stats() Stats { return q.stats }

// Modify moves the queue pair to a.State with the attributes that belong to
// that transition. A transition that IBTA does not allow is an error and
// changes nothing.
func (q *QP) Modify(now time.Time, a rdma.QPAttr) error {
	from := q.attr.State
	switch {
	case a.State == rdma.QPReset:
		q.becomeReset()
		return nil
	case a.State == rdma.QPError && from != rdma.QPReset:
		q.becomeError()
		q.rsp.nak = nakNone
		return nil
	case a.State == rdma.QPInit && (from == rdma.QPReset || from == rdma.QPInit):
		q.attr.State = rdma.QPInit
		q.attr.Access = a.Access
		return nil
	case a.State == rdma.QPRTR && from == rdma.QPInit:
		return q.becomeRTR(a)
	case a.State == rdma.QPRTS && from == rdma.QPRTR:
		return q.becomeRTS(now, a)
	}
	return fmt.Errorf("queue pair %v from %v to %v: %w", q.cfg.Num, from, a.State, rdma.ErrState)
}

// becomeReset forgets everything; outstanding requests do not complete.
func (q *QP) becomeReset() {
	q.attr = rdma.QPAttr{}
	q.mtu = 0
	q.req = q.req.cleared()
	q.rsp = responder{ring: q.rsp.ring}
	q.wcs.Clear()
	q.events = wq.Events{}
}

func (q *QP) becomeRTR(a rdma.QPAttr) error {
	switch {
	case !a.MTU.Valid():
		return fmt.Errorf("queue pair %v to RTR: path MTU code %d: %w", q.cfg.Num, uint8(a.MTU), rdma.ErrInvalid)
	case a.DestQPN > rdma.MaxQPN || a.RQPSN > rdma.PSNMask:
		return fmt.Errorf("queue pair %v to RTR: number of more than 24 bits: %w", q.cfg.Num, rdma.ErrInvalid)
	case a.MinRNRTimer > 31:
		return fmt.Errorf("queue pair %v to RTR: RNR timer code %d: %w", q.cfg.Num, a.MinRNRTimer, rdma.ErrInvalid)
	}
	if a.ReadsServed > MaxReads {
		return fmt.Errorf("queue pair %v to RTR: %d READs served, want at most %d: %w", q.cfg.Num, a.ReadsServed, MaxReads, rdma.ErrInvalid)
	}
	q.attr.State = rdma.QPRTR
	q.attr.Path = a.Path
	q.attr.DestQPN = a.DestQPN
	q.attr.RQPSN = a.RQPSN
	q.attr.MTU = a.MTU
	q.attr.MinRNRTimer = a.MinRNRTimer
	q.attr.ReadsServed = cmp.Or(a.ReadsServed, MaxReads)
	q.mtu = a.MTU.Bytes()
	q.rsp.psn = psnBase + uint64(a.RQPSN)
	return nil
}

func (q *QP) becomeRTS(_ time.Time, a rdma.QPAttr) error {
	switch {
	case a.SQPSN > rdma.PSNMask:
		return fmt.Errorf("queue pair %v to RTS: PSN of more than 24 bits: %w", q.cfg.Num, rdma.ErrInvalid)
	case a.Timeout > 31 || a.RetryCount > 7 || a.RNRRetry > 7:
		return fmt.Errorf("queue pair %v to RTS: timeout code %d, retries %d, RNR retries %d: %w",
			q.cfg.Num, a.Timeout, a.RetryCount, a.RNRRetry, rdma.ErrInvalid)
	}
	if a.ReadsAsked > MaxReads {
		return fmt.Errorf("queue pair %v to RTS: %d READs outstanding, want at most %d: %w", q.cfg.Num, a.ReadsAsked, MaxReads, rdma.ErrInvalid)
	}
	q.attr.State = rdma.QPRTS
	q.attr.SQPSN = a.SQPSN
	q.attr.Timeout = a.Timeout
	q.attr.RetryCount = a.RetryCount
	q.attr.RNRRetry = a.RNRRetry
	q.attr.ReadsAsked = cmp.Or(a.ReadsAsked, MaxReads)
	q.req.start(psnBase+uint64(a.SQPSN), q.cfg.Window, &q.attr)
	return nil
}

// becomeError flushes everything outstanding (IBTA 10.3.1.6). An ACK or NAK that
// is still to be sent stays.
func (q *QP) becomeError() {
	if q.attr.State == rdma.QPError {
		return
	}
	q.attr.State = rdma.QPError
	q.flushSends()
	q.flushRecvs()
}

// fail is becomeError for a reason of our own.
func (q *QP) fail(kind rdma.EventKind, err error) {
	if q.attr.State == rdma.QPError {
		return
	}
	q.becomeError()
	q.events.Push(rdma.AsyncEvent{Kind: kind, QPN: q.cfg.Num, Err: err})
}

// ForgetMemory drops the memory that the machine has resolved. The owner of
// the memory calls ForgetMemory after a region is taken out of the table and before
// the region is unmapped; what was not done yet is resolved, and refused, anew.
func (q *QP) ForgetMemory(time.Time) {
	q.req.forgetMemory()
	q.rsp.forgetMemory()
}

// HandlePacket takes a packet for this queue pair whose ICRC is right.
func (q *QP) HandlePacket(now time.Time, p *Packet) {
	info := p.BTH.OpCode.info()
	st := q.attr.State
	if st == rdma.QPError && info&opRequest != 0 && q.mtu != 0 {
		q.requestInError(p)
		return
	}
	if st != rdma.QPRTS && (st != rdma.QPRTR || info&opRequest == 0) {
		q.stats.Bad++
		return
	}
	q.stats.RxPackets++
	q.stats.RxBytes += uint64(len(p.Payload))
	if info&opRequest != 0 {
		q.handleRequest(p, info)
		if a := &q.rsp.ack; a.due {
			a.received(now, q.cfg.ACKDelay, len(p.Payload), info&opSend != 0, p.BTH.AckReq && len(p.Payload) == q.mtu)
		}
		return
	}
	q.handleResponse(now, p, info)
}

// PollTx fills dst with packets to send now, in order, as far as the window
// allows, and returns how many. Call PollTx until that is less than len(dst).
func (q *QP) PollTx(now time.Time, dst []TxPacket) int {
	switch q.attr.State {
	case rdma.QPReset, rdma.QPInit:
		return 0
	case rdma.QPRTR, rdma.QPError:
		return q.pollResponses(dst)
	case rdma.QPRTS:
	}
	n := q.pollResponses(dst)
	if q.attr.State != rdma.QPRTS || n == len(dst) {
		return n
	}
	if !q.rsp.ack.due || n+1 == len(dst) {
		return n + q.pollRequests(now, dst[n:])
	}
	// An ACK waits for company. If there is a request, the ACK goes along, behind the request:
	// the peer's program waits for the request.
	if m := q.pollRequests(now, dst[n:len(dst)-1]); m > 0 {
		n += m
		if q.rsp.ack.keep() {
			return n
		}
		q.putACK(&dst[n])
		n++
	}
	return n
}

// PollWC moves completions to dst, in order, and returns how many.
func (q *QP) PollWC(dst []wq.Completion) int { return q.wcs.Poll(dst) }

// PollEvent returns the next asynchronous event.
func (q *QP) PollEvent() (rdma.AsyncEvent, bool) { return q.events.Pop() }

// psnBase keeps the 64-bit PSNs away from zero, so that PSNs a little before
// the first one are still numbers.
const psnBase = 1 << 32

// wire returns the 24 bits of a PSN.
func wire(psn uint64) rdma.PSN { return rdma.PSN(psn) & rdma.PSNMask }

// near returns the 64-bit PSN closest to ref whose wire form is psn.
func near(ref uint64, psn rdma.PSN) uint64 {
	return ref + uint64(int64(psn.Sub(wire(ref))))
}

// packets returns how many packets a message of n bytes takes.
func packets(n uint32, mtu int) uint64 {
	if n == 0 {
		return 1
	}
	return (uint64(n) + uint64(mtu) - 1) / uint64(mtu)
}

// put starts a TxPacket with a header without extension.
func (q *QP) put(t *TxPacket, op OpCode, psn uint64, flags, ack uint32) {
	h := &t.Hdr
	w0 := uint32(op)<<24 | flags | PKey
	w1 := uint32(q.attr.DestQPN)
	w2 := uint32(wire(psn)) | ack
	h[0], h[1], h[2], h[3] = byte(w0>>24), byte(w0>>16), byte(w0>>8), byte(w0)
	h[4], h[5], h[6], h[7] = byte(w1>>24), byte(w1>>16), byte(w1>>8), byte(w1)
	h[8], h[9], h[10], h[11] = byte(w2>>24), byte(w2>>16), byte(w2>>8), byte(w2)
	t.HdrLen = bthLen
	t.Segs = 0
	t.PayloadLen = 0
	t.Pad = 0
	q.stats.TxPackets++
}

func (t *TxPacket) put32(v uint32) {
	invariant.Must(t.HdrLen+4 <= MaxHeaderLen, "rocev2: header longer than its room")
	h := t.Hdr[t.HdrLen : t.HdrLen+4]
	h[0], h[1], h[2], h[3] = byte(v>>24), byte(v>>16), byte(v>>8), byte(v)
	t.HdrLen += 4
}

func (t *TxPacket) putRETH(addr uint64, key rdma.RKey, n uint32) {
	t.put32(uint32(addr >> 32))
	t.put32(uint32(addr))
	t.put32(uint32(key))
	t.put32(n)
}

func (t *TxPacket) putAETH(s Syndrome, msn uint32) {
	t.put32(uint32(s)<<24 | msn&msnMask)
}
