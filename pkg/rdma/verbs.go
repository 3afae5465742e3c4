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
	// delivered completions of this context and is about to wait for packets. While f
	// returns true the provider polls for packets instead, and calls f again; it may
	// bound for how long. f must not block. It is never called by two goroutines at
	// a time, even if completions of several queues were delivered. Set it before the
	// first completion.
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
	// RegMR makes another region of memory that has one already: of the length bytes
	// at off of the region of, or of all its bytes if both are 0. The new region has keys and
	// rights of its own, which open only these bytes. So several devices of one provider
	// can reach the same memory, and a peer a part of it. The memory is unmapped with
	// the last of its regions.
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
	// Addr is the address that work requests and peers use for Bytes()[0]. Each region
	// has its own, even if several have the same memory. Since peers learn it, it tells
	// nothing of where the memory lies in the process, except the offset in a page.
	Addr() uint64
	LKey() LKey
	RKey() RKey
	// Close deregisters first, so that no packet can touch the memory through
	// this region, and then unmaps the memory unless another region has it, too.
	Close() error
}

// Discarder is an [MR] whose memory is not pinned, so that pages of it can be given back.
type Discarder interface {
	// Discard makes the n bytes at off zero, and gives the pages that lie wholly among them back to
	// the system until somebody touches them again. While it runs nobody may use the bytes, neither
	// a work request nor a peer: what these write is lost. After an error the bytes may be as they
	// were.
	Discard(off, n int) error
}

// WriteCounter is an [MR] that counts what peers write into it.
type WriteCounter interface {
	// CountWrites begins to count, separately for each block of blockBytes, a power of two, of the
	// region. Call it once, before a peer knows the region.
	CountWrites(blockBytes int)
	// Written returns how many bytes peers have written into a block by WRITEs through this region. A WRITE
	// is counted as a whole before its first byte is there, and again if the peer repeats it with another
	// work request.
	Written(block int) uint64
}

// Holder is a [PD] that can keep peers from its memory for a moment.
type Holder interface {
	// Hold calls f while no request of a peer reads or writes memory of the domain: requests that arrive
	// meanwhile are served later, and none is lost. f must not use the queue pairs of the domain. If
	// f holds another domain, all users must hold the domains in the same order, or they wait for each
	// other for ever.
	Hold(f func())
}

// CQ is a completion queue.
type CQ interface {
	// Poll moves up to len(dst) completions to dst. It never blocks.
	// A CQ that overran returns ErrCQOverrun from then on. A CQ that was closed,
	// by Close or by the end of its device, first returns the completions that it
	// still has, and then ErrClosed.
	Poll(dst []WC) (int, error)
	// Arm asks for one notification at the next completion. With solicitedOnly only
	// errors count, and receives that the peer sent with SendSolicited; a device without
	// DeviceAttr.Solicited cannot tell these and counts all receives.
	Arm(solicitedOnly bool) error
	// Notify has a token after the completion that Arm asked for.
	Notify() <-chan struct{}
	// OnNotify has the provider call f instead of leaving a token: in a
	// goroutine of the provider, or in the one that posts, with none of the
	// provider's locks held. f must not block; it may poll, arm and post. f may be
	// called without a completion. A call of Arm in f may take effect only when f has
	// returned; the provider then looks for completions that came before that. Set f
	// before the first Arm.
	OnNotify(f func())
	// Resize makes room for at least depth completions, while the queue is in use. It
	// never makes the queue smaller, and completions in it stay. depth is at most
	// DeviceAttr.MaxCQE. An error leaves the queue as it was; it is ErrNotSupported if
	// the device cannot resize queues.
	Resize(depth int) error
	Close() error
}

// QPConfig describes a queue pair to be made.
type QPConfig struct {
	SendCQ, RecvCQ CQ
	MaxSendWR      int
	MaxRecvWR      int
	MaxSGE         int // per send work request; receives have SGE and Spill
}

// QP is an RC queue pair.
type QP interface {
	Num() QPN
	// State returns the state. It may have to ask the device, so it is not for the data path.
	State() QPState
	// Modify moves the queue pair to attr.State with the attributes of that
	// transition (see QPAttr); the others are ignored. A transition that IBTA
	// does not allow is an error and changes nothing. With DeviceAttr.Stream Modify
	// does not make the transition to RTS: a connection of the provider does.
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
	// Silence is for devices that refuse by themselves what arrives in ERR: they are silent
	// until Refuse or Close. On other devices it does nothing. Call it before the queue pair
	// goes to ERR.
	Silence()
	// Refuse has a queue pair in ERR answer the peer's next request with a refusal, until
	// Modify or Close; a device that remembers the last request that it dropped refuses that
	// one at once. For its user the queue pair stays in ERR, and requests that have not
	// completed will not complete. Refuse may block for seconds, and the peer must be
	// reachable. Some devices refuse only one request; since that refusal may get lost,
	// call Refuse again to have them refuse another one. The error is ErrNotSupported if the
	// device cannot refuse.
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
	MinRNRTimer uint8 // 5-bit code of IBTA table 46, sent in RNR NAKs: how long the peer waits before it repeats
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
	OpWriteImm // completes as OpWriteImm or as OpWrite: libibverbs does not tell them apart
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
	SendInvalidate                       // on OpSend, with DeviceAttr.SendWithInv: delivery invalidates the peer's key InvKey
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
	SGL        []SGE  // gathered; for OpRead one entry, which is filled; see DeviceAttr.ReadSinkWrite
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
	// Spill takes the rest of a message that does not fit into SGE. If its length
	// is 0, every message must fit. Several work requests may share the memory of
	// Spill where long messages are rare: a later message overwrites an earlier one.
	Spill SGE
}

// WC is a work completion.
type WC struct {
	ID      uint64
	Status  Status
	Op      Opcode
	HasImm  bool
	Solicit bool   // the packet had the solicited event bit, with DeviceAttr.WCDetails
	Bytes   uint32 // received, or read, in bytes; valid on success
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
	EventQPFatal                       // a QP went to ERR, and not by Modify; comes again if the reason turns out later to be ErrPeerAccess
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
