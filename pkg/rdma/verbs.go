// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"time"
)

// Device is an RDMA device with one port, shared by everyone who opens it.
type Device interface {
	// Name is the device's name, as in "rocep1s0f0" or "soft0".
	Name() string
	// Attr returns the device's capabilities; they do not change.
	Attr() DeviceAttr
	// Port returns the port's state now.
	Port() PortAttr
	// GIDs returns the port's GID table now. A provider that has a choice puts
	// the GID first that it was opened for.
	GIDs() []GIDEntry
	// Open gives a context that owns what is created from it.
	Open() (Context, error)
}

// Context is one user's open device.
type Context interface {
	Device() Device
	// AllocPD makes a protection domain: keys and queue pairs of one domain
	// do not work with another's.
	AllocPD() (PD, error)
	// CreateCQ makes a completion queue of at least depth entries.
	CreateCQ(depth int) (CQ, error)
	// Events delivers asynchronous events. The channel is bounded; a reader
	// that does not keep up loses the oldest port events, never QP events of
	// a queue pair it still owns. It is closed by Close.
	Events() <-chan AsyncEvent
	// Close destroys all that the context still owns.
	Close() error
}

// IdlePoller is a [Context] whose provider has a goroutine that waits for
// packets, and may poll for a moment instead.
type IdlePoller interface {
	// OnIdle has the provider call f, with none of its locks held, when it has
	// delivered completions of this context and is about to wait. While f
	// returns true the provider looks for packets and calls f again, and does
	// not wait; it may bound for how long. f must not block, and is not called by
	// two goroutines at a time, of whichever queue the completions were. Set it
	// before the first completion.
	OnIdle(f func() bool)
}

// PathResolver is a [Context] whose queue pairs need the MAC address of the next
// hop in the transition to RTR, and otherwise wait for it there.
type PathResolver interface {
	// ResolvePath finds the address out, so that Modify has it at hand. It may
	// block for seconds, and Close waits for it.
	ResolvePath(Path) error
}

// PD is a protection domain.
type PD interface {
	// AllocMR maps size bytes of zeroed memory outside the Go heap, rounded
	// up to whole pages, and registers them.
	AllocMR(sizeBytes int, access Access) (MR, error)
	// RegMR registers length bytes at off of another region's memory here too, with
	// keys and rights of their own, which open nothing beside these bytes; 0, 0: all of
	// the region. Several devices of one provider can so reach the same memory, and
	// a peer a part of it. The memory is unmapped with the last of its regions.
	RegMR(of MR, off, length int, access Access) (MR, error)
	// CreateQP makes an RC queue pair in state RESET.
	CreateQP(cfg QPConfig) (QP, error)
	// Close fails while regions or queue pairs exist.
	Close() error
}

// MR is a registered memory region.
type MR interface {
	// Bytes is the memory. It must not be used after the last region with it
	// is closed.
	Bytes() []byte
	// Addr is the address that work requests and peers use for Bytes()[0]. It is
	// the region's own, also where several have the same memory, and says nothing
	// of where the memory is, but for its place in a page: peers learn it.
	Addr() uint64
	LKey() LKey
	RKey() RKey
	// Close deregisters first, so that no packet can touch the memory through
	// this region, and then unmaps it unless another region has it.
	Close() error
}

// Discarder is an [MR] whose memory is not pinned, so that pages of it can be given back.
type Discarder interface {
	// Discard makes the n bytes at off zero, and gives back the pages that lie among them, which
	// take no memory until somebody touches them. Meanwhile nobody may use the bytes, no work
	// request that is under way and no peer: what they write is lost. After an error the bytes
	// may be as they were.
	Discard(off, n int) error
}

// WriteCounter is an [MR] that counts what peers write into it.
type WriteCounter interface {
	// CountWrites begins to count, for each block of so many bytes of the region, which are a power of
	// two. It comes once, before a peer knows the region.
	CountWrites(blockBytes int)
	// Written returns how many bytes peers have written into a block, by WRITEs through this region, or
	// are about to: a WRITE is counted as a whole before its first byte is there. One that the peer
	// repeats with another work request is counted again.
	Written(block int) uint64
}

// Holder is a [PD] that can keep peers from its memory for a moment.
type Holder interface {
	// Hold calls f while no request of a peer reads or writes memory of the domain; they are late
	// and not lost. f must not use the queue pairs of the domain, nor hold another domain that
	// somebody holds who waits for this one.
	Hold(f func())
}

// CQ is a completion queue.
type CQ interface {
	// Poll moves up to len(dst) completions to dst. It never blocks.
	// A CQ that overran returns ErrCQOverrun for good; one that was closed,
	// also by the end of its device, still returns what it had, and then
	// ErrClosed.
	Poll(dst []WC) (int, error)
	// Arm asks for one notification at the next completion; with
	// solicitedOnly only for completions of sends with SendSolicited at the
	// peer, and for errors; without DeviceAttr.Solicited, for all receives.
	Arm(solicitedOnly bool) error
	// Notify has a token after the completion that Arm asked for.
	Notify() <-chan struct{}
	// OnNotify has the provider call f instead of leaving a token: in a
	// goroutine of the provider, or in the one that posts, with none of the
	// provider's locks held. f must not block; it may poll, arm and post. It
	// may be called without reason, and what it arms may be armed when it has
	// returned: the provider looks then for what came before. Set it before the
	// first Arm.
	OnNotify(f func())
	// Resize gives the queue room for depth completions at least, DeviceAttr.MaxCQE
	// at most, while it is in use; what is in it stays, and room that it has, too. An
	// error leaves the queue as it was: ErrNotSupported where the device cannot do it.
	Resize(depth int) error
	Close() error
}

// QPConfig describes a queue pair to be made.
type QPConfig struct {
	SendCQ, RecvCQ CQ
	MaxSendWR      int
	MaxRecvWR      int
	MaxSGE         int // per work request, sends; receives have two
}

// QP is an RC queue pair.
type QP interface {
	Num() QPN
	// State may ask the device: it is not for the data path.
	State() QPState
	// Modify moves the queue pair to attr.State with the attributes of that
	// transition (see QPAttr); the others are ignored. A transition that IBTA
	// does not allow is an error and changes nothing. With DeviceAttr.Stream the
	// provider makes the transition to RTS.
	Modify(attr QPAttr) error
	// PostSend queues work requests in order and returns how many were
	// taken; fewer than len(wrs) only with an error. Allowed in RTS; in ERR
	// the requests complete with StatusFlushed. The slices inside wrs belong
	// to the caller again when it returns; the memory they address must stay
	// unchanged until the completion.
	PostSend(wrs []SendWR) (int, error)
	// PostRecv queues receive buffers; allowed from INIT on.
	PostRecv(wrs []RecvWR) (int, error)
	// Close destroys the queue pair: afterwards no packet of it touches
	// memory, and outstanding requests do not complete.
	Close() error
}

// Refuser is a [QP] that can do more in ERR than drop what its peer sends. A peer that
// repeats its requests without end, as Linux's soft RoCE does, never learns from
// silence that they are in vain.
type Refuser interface {
	// Silence has a device that refuses by itself what comes in ERR say nothing until
	// Refuse or Close. To others it means nothing. It is called before ERR.
	Silence()
	// Refuse has a queue pair in ERR answer the peer's next request with a refusal,
	// and at once what it dropped before if it knows that, until Modify or Close. For
	// its user it stays in ERR, and what has not completed before does not any more. It
	// may block for seconds, and needs the peer to be reachable. Some devices refuse one
	// request and are silent then: called again, it has them refuse another one, because
	// a refusal may get lost. ErrNotSupported says that this device cannot.
	Refuse() error
}

// QPState is a queue pair's state (IBTA 10.3.1).
type QPState uint8

// Queue pair states.
//
//	RESET --> INIT --> RTR --> RTS
//	  ^        |        |       |      any error, or Modify
//	  |        +--------+-------+--> ERR
//	  +--- Modify(RESET), from every state
//
// With DeviceAttr.Stream there is no RTR: a queue pair in INIT takes receives, and is in
// RTS when it is connected.
const (
	QPReset QPState = iota
	QPInit          // receives may be posted
	QPRTR           // ready to receive: the responder works
	QPRTS           // ready to send: the requester works too
	QPError         // everything outstanding is flushed
)

func (s QPState) String() string {
	switch s {
	case QPReset:
		return "RESET"
	case QPInit:
		return "INIT"
	case QPRTR:
		return "RTR"
	case QPRTS:
		return "RTS"
	case QPError:
		return "ERR"
	}
	return fmt.Sprintf("QPState(%d)", uint8(s))
}

// QPAttr are the attributes of a transition; the comments say which state
// takes which.
type QPAttr struct {
	State QPState

	// INIT
	Access Access // what peers may do through this queue pair

	// RTR
	Path        Path
	DestQPN     QPN
	RQPSN       PSN // first PSN expected from the peer
	MTU         MTU
	MinRNRTimer uint8 // 5-bit code of IBTA table 46, sent in RNR NAKs
	ReadsServed uint8 // the peer's RDMA READs that may wait for their answer; 0: the device's default

	// RTS
	SQPSN      PSN   // first PSN sent
	Timeout    uint8 // ACK timeout 4.096 us * 2^Timeout; 0: none
	RetryCount uint8 // retransmissions before the queue pair fails, 0 to 7
	RNRRetry   uint8 // RNR retries, 0 to 6; 7: without end
	ReadsAsked uint8 // our RDMA READs that may wait for their answer; 0: the device's default
}

// Path says how packets reach the peer.
type Path struct {
	SGIDIndex    int // row of the local GID table
	DGID         GID
	DMAC         MAC // next hop; software providers do not need it
	HopLimit     uint8
	TrafficClass uint8
	FlowLabel    uint32
}

// Opcode is the operation of a work request or completion.
type Opcode uint8

// Operations.
const (
	OpSend Opcode = iota
	OpWrite
	OpWriteImm // completes as itself or as OpWrite, which libibverbs does not tell apart
	OpRead
	OpRecv         // completion: a SEND arrived
	OpRecvWriteImm // completion: a WRITE with immediate arrived
)

func (o Opcode) String() string {
	switch o {
	case OpSend:
		return "SEND"
	case OpWrite:
		return "RDMA_WRITE"
	case OpWriteImm:
		return "RDMA_WRITE_WITH_IMM"
	case OpRead:
		return "RDMA_READ"
	case OpRecv:
		return "RECV"
	case OpRecvWriteImm:
		return "RECV_RDMA_WITH_IMM"
	}
	return fmt.Sprintf("Opcode(%d)", uint8(o))
}

// SendFlags modify a send work request.
type SendFlags uint8

// Send flags. PostSend refuses others, those of another operation, and those that the
// device does not have.
const (
	SendSignaled   SendFlags = 1 << iota // completes in the send CQ even on success
	SendSolicited                        // sets the solicited event bit, with DeviceAttr.Solicited
	SendInline                           // memory is copied at posting and needs no LKey; up to MaxInline bytes
	SendInvalidate                       // on OpSend, with DeviceAttr.SendWithInv: the peer's key InvKey is dead when the message is delivered
	SendImm                              // on OpSend, with DeviceAttr.SendWithImm: Imm travels with the message; not with SendInvalidate
)

// SGE is one piece of registered memory.
type SGE struct {
	Addr   uint64
	Length uint32
	LKey   LKey
}

// SendWR is a send work request.
type SendWR struct {
	ID         uint64 // returned in WC.ID
	Op         Opcode // OpSend, OpWrite, OpWriteImm, OpRead
	Flags      SendFlags
	SGL        []SGE  // gathered; for OpRead one entry to be filled, of a region as DeviceAttr.ReadSinkWrite says
	Inline     []byte // the payload instead of SGL, with SendInline
	Imm        uint32 // OpWriteImm, or SendImm
	RemoteAddr uint64 // OpWrite, OpWriteImm, OpRead
	RKey       RKey
	InvKey     RKey // SendInvalidate
}

// RecvWR is a receive buffer. One SEND or WRITE with immediate takes one.
type RecvWR struct {
	ID  uint64
	SGE SGE
	// Spill takes what of a message does not fit into SGE; of length 0, the
	// message must fit. Several work requests may share it, where long messages
	// are rare: the later one then overwrites the earlier.
	Spill SGE
}

// WC is a work completion.
type WC struct {
	ID      uint64
	Status  Status
	Op      Opcode
	HasImm  bool
	Solicit bool   // the packet had the solicited event bit, with DeviceAttr.WCDetails
	Bytes   uint32 // received, or read; valid on success
	Imm     uint32
	QPN     QPN // the local queue pair
	SrcQP   QPN // the sender's, with DeviceAttr.WCDetails
	Vendor  uint32

	Invalidated bool // the SEND had SendInvalidate: InvKey, a key of ours, is dead
	InvKey      RKey
}

// Status tells how a work request ended.
type Status uint8

// Completion statuses (IBTA 11.6.2).
const (
	StatusSuccess          Status = iota
	StatusLocalLength             // message longer than the receive buffer, or local request too long
	StatusLocalProtect            // LKey, bounds or access of a local SGE
	StatusLocalQP                 // internal QP error
	StatusFlushed                 // the QP went to ERR before the request was done
	StatusRemoteInvalid           // peer: NAK invalid request
	StatusRemoteAccess            // peer: NAK remote access error
	StatusRemoteOp                // peer: NAK remote operational error
	StatusRetryExceeded           // no answer after all retransmissions
	StatusRNRRetryExceeded        // peer had no receive buffer after all RNR retries
)

func (s Status) String() string {
	names := [...]string{
		"success", "local length error", "local protection error", "local QP operation error",
		"work request flushed", "remote invalid request error", "remote access error",
		"remote operation error", "transport retry counter exceeded", "RNR retry counter exceeded",
	}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("Status(%d)", uint8(s))
}

// EventKind is the kind of an asynchronous event.
type EventKind uint8

// Asynchronous events.
const (
	EventPortActive   EventKind = iota // the port works (again)
	EventPortDown                      // the port lost its carrier or address
	EventQPFatal                       // a QP went to ERR for a reason of its own; told again when that was ErrPeerAccess and is known later
	EventPathDown                      // the peer of a QP cannot be reached
	EventDeviceFatal                   // the device is gone; close the context
	EventGIDChange                     // the port's GID table is another one; read it again
	EventDisconnected                  // the peer ended the connection of a QP in order, with DeviceAttr.Stream; the QP is in ERR
)

func (k EventKind) String() string {
	names := [...]string{"port active", "port down", "QP fatal", "path down", "device fatal", "GID table changed", "disconnected"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("EventKind(%d)", uint8(k))
}

// AsyncEvent is an event that belongs to no work request.
type AsyncEvent struct {
	Kind EventKind
	QPN  QPN // for QP and path events
	Err  error
}

// ACKTimeout returns the duration of an IBTA timeout code, 4.096 us * 2^code;
// 0 for code 0, which means that no timer runs.
func ACKTimeout(code uint8) time.Duration {
	if code == 0 {
		return 0
	}
	return 4096 * time.Nanosecond << (code & 31)
}
