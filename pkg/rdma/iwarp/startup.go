// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Role is a side of MPA's start-up. It says nothing of who opened the TCP connection.
type Role uint8

// Roles.
const (
	Initiator Role = iota // sends the Request
	Responder             // answers it
)

// Startup says how a stream begins. Its zero value is an initiator with revision 2, CRC and
// the defaults of READs.
type Startup struct {
	Role Role
	Rev  uint8 // of the Request; 0: [Rev2]
	// NoCRC does without CRCs if the peer does so, too.
	NoCRC bool
	// PeerToPeer has the initiator send an empty message first, so that the responder may
	// begin (RFC 6581 §9).
	PeerToPeer bool
	// IRD is how many READs of the peer are served at a time, ORD how many may wait for
	// the peer; at most [MaxReads]. Both are lowered, and IRD raised, to what suits the
	// peer, but if they are Exact: then start-up fails. Both 0 and not Exact:
	// [DefaultReads].
	IRD, ORD int
	Exact    bool
	// PrivateData goes with the Request. Peers may take less than [MaxPrivateData]: see
	// [PortablePrivateData].
	PrivateData []byte
	// MaxULPDU is the longest ULPDU to be sent: see [MULPDU]. 0: [DefaultULPDU].
	MaxULPDU int
	// Timeout bounds the wait for the peer's frame; 0: no bound.
	Timeout time.Duration
	// Early is what was already read from the stream.
	Early []byte
}

func (s *Startup) validate() error {
	room := MaxPrivateData
	if s.Rev == Rev2 {
		room -= enhancedLen
	}
	switch {
	case s.Role > Responder:
		return fmt.Errorf("role %d: %w", s.Role, rdma.ErrInvalid)
	case s.Rev != Rev1 && s.Rev != Rev2:
		return fmt.Errorf("revision %d of MPA, want 1 or 2: %w", s.Rev, rdma.ErrInvalid)
	case s.PeerToPeer && s.Rev == Rev1:
		return fmt.Errorf("peer-to-peer with revision 1 of MPA, which does not have it: %w", rdma.ErrInvalid)
	case s.IRD < 0 || s.IRD > MaxReads || s.ORD < 0 || s.ORD > MaxReads:
		return fmt.Errorf("IRD %d and ORD %d, want at most %d: %w", s.IRD, s.ORD, MaxReads, rdma.ErrInvalid)
	case len(s.PrivateData) > room:
		return fmt.Errorf("%d bytes of private data, want at most %d: %w", len(s.PrivateData), room, rdma.ErrInvalid)
	case s.MaxULPDU < MinULPDU || s.MaxULPDU > MaxOwnULPDU:
		return fmt.Errorf("ULPDUs of %d bytes, want %d to %d: %w", s.MaxULPDU, MinULPDU, MaxOwnULPDU, rdma.ErrInvalid)
	case len(s.Early) > rxBufferLen:
		return fmt.Errorf("%d bytes read before, want at most %d: %w", len(s.Early), rxBufferLen, rdma.ErrInvalid)
	}
	return nil
}

// Request is what an initiator asks for, or a responder answered.
type Request struct {
	Frame        // the private data stays until the queue pair starts again
	IRD, ORD int // READs agreed on: of the peer that we serve; of ours that may wait
}

// Reply is a responder's answer.
type Reply struct {
	Reject      bool
	PrivateData []byte
}

// startup is the state of start-up.
type startup struct {
	Startup
	peer     Frame // the peer's frame, in the phases after it came
	peerData [MaxPrivateData]byte
	hasPeer  bool
	gated    bool // responder: nothing is sent before the first FPDU came (RFC 5044 §7.1.2)
}

// Start begins the stream: an initiator sends its Request, a responder waits for one. The
// queue pair is in INIT; when start-up fails it still is, with its receives, and may start on
// another stream.
func (q *QP) Start(now time.Time, s Startup) error {
	if q.state != rdma.QPInit || q.phase != PhaseIdle && q.phase != PhaseFailed {
		return fmt.Errorf("start queue pair %v in %v, %v: %w", q.cfg.Num, q.state, q.phase, rdma.ErrState)
	}
	if s.Rev == 0 {
		s.Rev = Rev2
	}
	if s.MaxULPDU == 0 {
		s.MaxULPDU = DefaultULPDU
	}
	if !s.Exact && s.IRD == 0 && s.ORD == 0 {
		s.IRD, s.ORD = DefaultReads, DefaultReads
	}
	if err := s.validate(); err != nil {
		return fmt.Errorf("start queue pair %v: %w", q.cfg.Num, err)
	}
	q.err, q.rxEnded = nil, false
	q.start = startup{Startup: s}
	q.tx.begin(s.MaxULPDU)
	q.rx.begin()
	q.rx.w = copy(q.rx.buf, s.Early)
	q.start.Early = nil // the caller's
	q.deadline = time.Time{}
	if s.Timeout > 0 {
		q.deadline = now.Add(s.Timeout)
	}
	if s.Role == Responder {
		q.phase = PhaseWaitRequest
		return nil
	}
	q.phase = PhaseWaitReply
	f := Frame{CRC: !s.NoCRC, Rev: s.Rev, PrivateData: s.PrivateData}
	if s.Rev == Rev2 {
		f.IsEnhanced = true
		f.Enhanced = Enhanced{
			PeerToPeer: s.PeerToPeer, RTRWrite: s.PeerToPeer, RTRRead: s.PeerToPeer && s.ORD > 0,
			IRD: uint16(s.IRD), ORD: uint16(s.ORD),
		}
	}
	q.tx.greet(&f)
	q.start.PrivateData = nil // the caller's
	return nil
}

// Request returns what the peer asked for, on a responder from ASKED on, or answered, on
// an initiator, also if that was a refusal.
func (q *QP) Request() (Request, bool) {
	return Request{Frame: q.start.peer, IRD: q.rx.ird, ORD: q.tx.ord}, q.start.hasPeer
}

// SetMaxULPDU changes the longest ULPDU to be sent from the next segment on: when the
// peer's private data says that it wants other ones, or TCP's segments became others.
func (q *QP) SetMaxULPDU(n int) { q.tx.maxULPDU = min(max(n, MinULPDU), MaxOwnULPDU) }

// failStart ends start-up. The queue pair stays in INIT.
func (q *QP) failStart(err error) {
	q.phase = PhaseFailed
	q.err = err
	q.deadline = time.Time{}
}

// refuse is failStart that tells the peer why.
func (q *QP) refuse(code Code, err error) {
	q.tx.framing = Framing{CRC: !q.start.NoCRC || q.start.peer.CRC, Markers: q.start.peer.Markers}
	q.failStart(fmt.Errorf("queue pair %v: %w", q.cfg.Num, err))
	q.tx.sayTerminate(&Terminate{Code: code})
}

// handleStart looks for the peer's frame in what was received. It reports whether there is
// one.
func (q *QP) handleStart() bool {
	reply := q.phase == PhaseWaitReply
	b := q.rx.buf[q.rx.r:q.rx.w]
	if len(b) < StartLen {
		return false
	}
	n, err := FrameLen(b, reply)
	if err == nil && len(b) < n {
		return false
	}
	var f Frame
	if err == nil {
		f, err = ParseFrame(b[:n])
	}
	if err != nil {
		if reply {
			q.refuse(CodeStartup, err)
		} else {
			q.failStart(fmt.Errorf("queue pair %v: %w", q.cfg.Num, err))
		}
		return false
	}
	q.rx.r += n
	f.PrivateData = q.start.peerData[:copy(q.start.peerData[:], f.PrivateData)]
	q.start.peer, q.start.hasPeer = f, true
	q.deadline = time.Time{}
	if reply {
		q.handleReply(&f)
	} else {
		q.handleRequest(&f)
	}
	return true
}

// handleReply is an initiator's: the stream opens, or not.
func (q *QP) handleReply(f *Frame) {
	s := &q.start
	switch {
	case f.Reject:
		q.failStart(fmt.Errorf("queue pair %v: %w", q.cfg.Num, ErrRejected))
		return
	case f.Rev != s.Rev:
		q.failStart(fmt.Errorf("queue pair %v: Reply of revision %d to a Request of revision %d: %w", q.cfg.Num, f.Rev, s.Rev, ErrRevision))
		return
	case s.Rev == Rev2 && !f.IsEnhanced:
		q.refuse(CodeStartup, fmt.Errorf("reply without IRD and ORD: %w", ErrPrivateData))
		return
	}
	if !q.agreeReads(f) {
		q.refuse(CodeIRD, fmt.Errorf("IRD %d, ORD %d in the Reply, ours are %d and %d: %w",
			f.Enhanced.IRD, f.Enhanced.ORD, s.IRD, s.ORD, ErrReads))
		return
	}
	e := &f.Enhanced
	rtr := s.PeerToPeer && e.PeerToPeer
	if rtr && !e.RTRWrite && (!e.RTRRead || q.tx.ord == 0) {
		q.refuse(CodeRTR, ErrRTR)
		return
	}
	q.open(f)
	if !rtr {
		return
	}
	if e.RTRWrite {
		q.tx.emptyWrite()
	} else {
		q.tx.emptyRead(q.cfg.Rand)
	}
}

// agreeReads lowers our READs to what the peer serves, and serves more if the peer needs it
// and we may (RFC 6581 §9.1).
func (q *QP) agreeReads(f *Frame) bool {
	s := &q.start
	q.rx.ird, q.tx.ord = s.IRD, s.ORD
	if !f.IsEnhanced {
		return true
	}
	if ird := int(f.Enhanced.IRD); ird != ReadsUnknown && ird < s.ORD {
		if s.Exact {
			return false
		}
		q.tx.ord = ird
	}
	if ord := int(f.Enhanced.ORD); ord != ReadsUnknown && ord > s.IRD {
		switch {
		case !s.Exact:
			q.rx.ird = min(ord, MaxReads)
		case s.Role == Initiator:
			return false
		}
		// A peer that learns of our IRD by the Reply lowers its ORD.
		return s.Role == Responder || ord <= q.rx.ird
	}
	return true
}

// handleRequest is a responder's: its user is to answer.
func (q *QP) handleRequest(f *Frame) {
	if f.Rev != Rev1 && f.Rev != Rev2 || f.Rev > q.start.Rev {
		reply := Frame{Reply: true, Reject: true, CRC: f.CRC, Rev: q.start.Rev}
		if reply.Rev == Rev2 {
			reply.IsEnhanced = true
			reply.Enhanced = Enhanced{IRD: uint16(q.start.IRD), ORD: uint16(q.start.ORD)}
		}
		q.failStart(fmt.Errorf("queue pair %v: Request of revision %d: %w", q.cfg.Num, f.Rev, ErrRevision))
		q.tx.greet(&reply)
		return
	}
	q.phase = PhaseAsked
	q.rx.ird, q.tx.ord = q.start.IRD, q.start.ORD
}

// Reply accepts or rejects what the peer asked for. After a rejection the stream is as
// before, if the peer leaves it open. An error that is not [rdma.ErrState] leaves the
// request there to be rejected.
func (q *QP) Reply(now time.Time, r Reply) error {
	if q.phase != PhaseAsked {
		return fmt.Errorf("reply on queue pair %v in %v: %w", q.cfg.Num, q.phase, rdma.ErrState)
	}
	s, ask := &q.start, &q.start.peer
	f := Frame{Reply: true, Reject: r.Reject, CRC: !s.NoCRC || ask.CRC, Rev: ask.Rev, PrivateData: r.PrivateData, IsEnhanced: ask.IsEnhanced}
	if n := f.Len() - StartLen; n > MaxPrivateData {
		return fmt.Errorf("%d bytes of private data, want at most %d: %w", n, MaxPrivateData, rdma.ErrInvalid)
	}
	if r.Reject {
		f.Enhanced = Enhanced{IRD: uint16(s.IRD), ORD: uint16(s.ORD)}
		q.failStart(fmt.Errorf("queue pair %v: we refused the connection", q.cfg.Num))
		q.tx.greet(&f)
		return nil
	}
	if !q.agreeReads(ask) {
		return fmt.Errorf("IRD %d in the Request, our ORD is %d: %w", ask.Enhanced.IRD, s.ORD, ErrReads)
	}
	f.Enhanced = Enhanced{IRD: uint16(q.rx.ird), ORD: uint16(q.tx.ord)}
	if ask.Enhanced.PeerToPeer {
		f.Enhanced.PeerToPeer = true
		f.Enhanced.RTRWrite = ask.Enhanced.RTRWrite
		f.Enhanced.RTRRead = !ask.Enhanced.RTRWrite && ask.Enhanced.RTRRead && q.rx.ird > 0
		if !f.Enhanced.RTRWrite && !f.Enhanced.RTRRead {
			q.refuse(CodeRTR, ErrRTR)
			return q.err
		}
	}
	q.tx.greet(&f)
	s.gated = true
	q.open(ask)
	q.process() // what came with the Request
	return nil
}

// open begins full operation. CRCs are used if one side wants them (RFC 5044 §7.1.1),
// markers if the peer does.
func (q *QP) open(peer *Frame) {
	q.phase = PhaseOpen
	q.state = rdma.QPRTS
	crc := !q.start.NoCRC || peer.CRC
	q.tx.framing = Framing{CRC: crc, Markers: peer.Markers}
	q.rx.crc = crc
}
