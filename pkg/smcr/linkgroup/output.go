// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// LinkIndex is a link's place in its group, 0 to MaxLinks-1; unlike the link
// number on the wire it is known before the peer has agreed.
type LinkIndex uint8

// OutputKind says what the shell must do.
type OutputKind uint8

// Outputs.
const (
	// OutReceive: move the link's queue pair to INIT and RTR towards Peer and
	// post RecvDepth receive buffers.
	OutReceive OutputKind = iota
	// OutTransmit: move the link's queue pair to RTS.
	OutTransmit
	// OutWrite: RDMA WRITE, unsignaled: gather Local from the connection's
	// send buffer to RemoteAddr.
	OutWrite
	// OutSend: SEND Long or, if that is nil, Msg; signaled and solicited, with
	// work request ID ID. AwaitsSent says whether its completion is waited for.
	OutSend
	// OutCloseLink: destroy the link's queue pair.
	OutCloseLink
	// OutEvent: tell whoever waits.
	OutEvent
)

func (k OutputKind) String() string {
	names := [...]string{"receive", "transmit", "write", "send", "close link", "event"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("OutputKind(%d)", uint8(k))
}

// Output is one thing to do. Which fields count depends on Kind.
type Output struct {
	Kind  OutputKind
	Link  LinkIndex
	Event EventKind

	Peer  *Endpoint // OutReceive; EventWantLink: what is known of the peer's half; never nil there
	Fresh bool      // EventWantLink: an RNIC that carries a link already will not do

	Conn       *Conn // OutWrite, OutSend of a CDC message, connection events
	Local      [2]cdc.Span
	RemoteAddr uint64
	RKey       rdma.RKey

	ID  uint64 // OutSend
	Msg [llc.Size]byte
	// Long is an LLC message of version 2 that is longer than Msg, and no longer than MaxMessage (OutSend). The next one of
	// the link comes when this one has completed.
	Long []byte

	RMB    RMBID      // RMB events
	Events cdc.Events // EventConn
	Err    error      // EventSetupFailed, EventDead, EventLink
}

// EventKind is what happened.
type EventKind uint8

// Events.
const (
	// EventPointOfNoReturn: from here on a failure resets the TCP connection
	// of the first contact instead of falling back (appendix C.3).
	EventPointOfNoReturn EventKind = iota
	// EventReady: the first contact is complete, data may flow.
	EventReady
	// EventSetupFailed: the first contact failed; Err is a *SetupError.
	EventSetupFailed
	// EventRMBConfirmed and EventRMBRefused end a ConfirmRMB.
	EventRMBConfirmed
	EventRMBRefused
	// EventConn: Events happened to Conn.
	EventConn
	// EventConnDone: the peer will not write Conn's RMBE any more and nothing
	// of it is in flight. The shell gives the RMBE back with Release.
	EventConnDone
	// EventDead: the group is over; Err says why, nil after an orderly end.
	EventDead
	// EventWantLink: the group can use another queue pair, as link Link. The
	// shell answers with OfferLink, best over an RNIC that is not among
	// RNICsInUse, or with NoLink.
	EventWantLink
	// EventLink: link Link went ACTIVE, or it went down; Err says why, nil
	// after an orderly end. The first link's life is the group's.
	EventLink
)

func (k EventKind) String() string {
	names := [...]string{
		"point of no return", "ready", "set-up failed", "RMB confirmed", "RMB refused", "connection", "connection done", "dead",
		"link wanted", "link",
	}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("EventKind(%d)", uint8(k))
}

// SetupFault says at which step of the first contact the group failed.
type SetupFault uint8

// Set-up faults.
const (
	FaultConfirmLinkTimeout SetupFault = iota // no CONFIRM LINK, or no answer to it
	FaultAddLinkTimeout                       // no ADD LINK, or no answer to it
	FaultEyeCatcher                           // the peer insists on RMBE eye catchers
	FaultProtocol                             // an impossible message
	FaultLink                                 // the queue pair failed
)

func (f SetupFault) String() string {
	names := [...]string{
		"CONFIRM LINK timeout", "ADD LINK timeout", "peer insists on RMBE eye catchers", "protocol violation", "link failure",
	}
	if int(f) < len(names) {
		return names[f]
	}
	return fmt.Sprintf("SetupFault(%d)", uint8(f))
}

// SetupError tells why a first contact failed.
type SetupError struct {
	Fault SetupFault
	Err   error // nil for time-outs
}

func (e *SetupError) Error() string {
	if e.Err == nil {
		return "first contact: " + e.Fault.String()
	}
	return fmt.Sprintf("first contact: %v: %v", e.Fault, e.Err)
}

func (e *SetupError) Unwrap() error { return e.Err }

// outbox is what the shell must do, in order.
type outbox struct{ list []Output }

func (b *outbox) put(o Output) { b.list = append(b.list, o) }

// event tells the shell what happened.
func (b *outbox) event(kind EventKind, err error) {
	b.put(Output{Kind: OutEvent, Event: kind, Err: err})
}

// link tells displays and hooks that a link went ACTIVE or down.
func (b *outbox) link(l *link, err error) {
	b.put(Output{Kind: OutEvent, Event: EventLink, Link: l.index, Err: err})
}

// rmb tells what has become of a ConfirmRMB.
func (b *outbox) rmb(kind EventKind, id RMBID) {
	b.put(Output{Kind: OutEvent, Event: kind, RMB: id})
}

// moveTo appends what is there to dst, and forgets it.
func (b *outbox) moveTo(dst []Output) []Output {
	dst = append(dst, b.list...)
	clear(b.list)
	b.list = b.list[:0]
	return dst
}
