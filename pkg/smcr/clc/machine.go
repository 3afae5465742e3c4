// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"errors"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// Reasons for which a machine gives up the TCP connection, besides
// [*ParseError]: what [OutputAbort] carries matches one of them.
var (
	// ErrTimeout: the peer's message did not come in time (RFC 7609 C.5).
	ErrTimeout = errors.New("clc: no answer in time")
	// ErrPeerClosed: the TCP connection ended during the negotiation.
	ErrPeerClosed = errors.New("clc: peer closed the connection")
	// ErrTooLate: SMC-R failed when there was no way back to TCP
	// (RFC 7609 C.1, C.3).
	ErrTooLate = errors.New("clc: too late to fall back to TCP")
	// ErrUnexpectedData: bytes came where RFC 7609 allows none.
	ErrUnexpectedData = errors.New("clc: unexpected data")
	// ErrState: the shell asked for what the state does not allow.
	ErrState = errors.New("clc: command not allowed in this state")
)

// State is where a machine stands. Both sides have the same states; only the
// first ones differ.
type State uint8

// States; the diagrams are at [Client] and [Server].
const (
	StateIdle         State = iota // client: nothing sent
	StateWaitProposal              // server: nothing received
	StateWaitAccept                // client: Proposal sent
	StateDeciding                  // the peer's message is with the shell
	StateWaitConfirm               // server: Accept sent
	StateLinkSetup                 // first contact: LLC is at work, fallback is possible
	StateLateDecline               // first contact: LLC timed out, the peer may tell why
	StateCommitted                 // past the point of no return
	StateEstablished               // end: SMC-R
	StateDeclined                  // end: TCP
	StateAborted                   // end: reset
	numStates
)

func (s State) String() string {
	switch s {
	case StateIdle:
		return "Idle"
	case StateWaitProposal:
		return "WaitProposal"
	case StateWaitAccept:
		return "WaitAccept"
	case StateDeciding:
		return "Deciding"
	case StateWaitConfirm:
		return "WaitConfirm"
	case StateLinkSetup:
		return "LinkSetup"
	case StateLateDecline:
		return "LateDecline"
	case StateCommitted:
		return "Committed"
	case StateEstablished:
		return "Established"
	case StateDeclined:
		return "Declined"
	case StateAborted:
		return "Aborted"
	case numStates:
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Done reports whether the state is final.
func (s State) Done() bool { return s >= StateEstablished }

// OutputKind says what the shell must do.
type OutputKind uint8

// Kinds of output.
const (
	OutputSend        OutputKind = iota + 1 // write Data to the TCP connection
	OutputProposed                          // server: answer Proposal with Accept or Decline
	OutputAccepted                          // client: answer Accept with Confirm or Decline
	OutputConfirmed                         // server: set the link up, or Complete
	OutputDeclined                          // carry the application's data over TCP; see Declined
	OutputAbort                             // reset the TCP connection because of Err
	OutputEstablished                       // carry the application's data over SMC-R
)

func (k OutputKind) String() string {
	switch k {
	case OutputSend:
		return "Send"
	case OutputProposed:
		return "Proposed"
	case OutputAccepted:
		return "Accepted"
	case OutputConfirmed:
		return "Confirmed"
	case OutputDeclined:
		return "Declined"
	case OutputAbort:
		return "Abort"
	case OutputEstablished:
		return "Established"
	}
	return fmt.Sprintf("OutputKind(%d)", uint8(k))
}

// Output is one thing for the shell to do. The field that Kind names is set.
type Output struct {
	Kind     OutputKind
	Data     []byte
	Proposal *Proposal
	Accept   *Accept
	Confirm  *Confirm
	Selected Selection // with Proposal, Accept and Confirm: what was agreed on
	Declined Declined
	Err      error
}

// Declined says why SMC-R is not used.
type Declined struct {
	Reason   Reason
	FromPeer bool
	// OutOfSync is the S bit, sent or received: the link group with the peer
	// must be cleaned up.
	OutOfSync bool
	// PeerID is the peer's, if it is FromPeer.
	PeerID PeerID
	// MayCross says that the peer may have sent its own Decline while ours was
	// on its way, which can happen during LLC set-up only. The bytes that come
	// next must be shown to [CrossingDecline] before the application gets them.
	MayCross bool
}

// pendingDecline waits until a Decline is allowed.
type pendingDecline struct {
	reason    Reason
	outOfSync bool
}

// machine is what [Client] and [Server] share: reading messages, declining,
// and everything after the last CLC message.
type machine struct {
	cfg      Config
	state    State
	out      []Output
	buf      []byte // the message that is being read
	deadline time.Time
	version  uint8 // of our Decline
	selected Selection
	first    bool // first contact
	pending  *pendingDecline
}

// State returns where the machine stands.
func (m *machine) State() State { return m.state }

// Poll appends what the shell must do, in this order, and forgets it.
func (m *machine) Poll(dst []Output) []Output {
	dst = append(dst, m.out...)
	clear(m.out)
	m.out = m.out[:0]
	return dst
}

// NextTimeout returns when HandleTimeout wants to be called.
func (m *machine) NextTimeout() (time.Time, bool) { return m.deadline, !m.deadline.IsZero() }

// Want returns how many bytes the shell must read from the TCP connection and
// give to HandleData: first a header, then the rest of that message, never a
// byte of what follows it. It is 0 when the shell must not read.
func (m *machine) Want() int {
	switch m.state {
	case StateWaitProposal, StateWaitAccept, StateWaitConfirm, StateLinkSetup, StateLateDecline:
	case StateIdle, StateDeciding, StateCommitted, StateEstablished, StateDeclined, StateAborted, numStates:
		return 0
	}
	if len(m.buf) < HeaderLen {
		return HeaderLen
	}
	h, err := ParseHeader([HeaderLen]byte(m.buf))
	invariant.Must(err == nil, "clc: unchecked header in the buffer")
	return h.Length - HeaderLen
}

// Partial reports whether the shell has read the header of a message and not the rest of it.
func (m *machine) Partial() bool { return len(m.buf) > 0 && m.Want() > 0 }

// expected returns the message that the state waits for; a Decline may come
// instead of it. During LLC set-up nothing but a Decline may come.
func (m *machine) expected() Type {
	switch m.state {
	case StateWaitProposal:
		return TypeProposal
	case StateWaitAccept:
		return TypeAccept
	case StateWaitConfirm:
		return TypeConfirm
	case StateLinkSetup, StateLateDecline, StateIdle, StateDeciding, StateCommitted,
		StateEstablished, StateDeclined, StateAborted, numStates:
	}
	return TypeDecline
}

// receive collects one message. It returns it when it is complete and is not a
// Decline; with errors the machine has already given up.
func (m *machine) receive(b []byte) (msg []byte, err error) {
	want := m.Want()
	if m.state == StateDeclined || m.state == StateAborted {
		return nil, fmt.Errorf("%w: %d bytes in state %v", ErrState, len(b), m.state)
	}
	if want == 0 {
		// RFC 7609 C.6: also a Decline that comes when there is no way back.
		return nil, m.abort(fmt.Errorf("%w: %d bytes in state %v", ErrUnexpectedData, len(b), m.state))
	}
	if len(b) != want {
		return nil, m.abort(fmt.Errorf("%w: got %d bytes to read, want %d", ErrState, len(b), want))
	}
	m.buf = append(m.buf, b...)
	if len(m.buf) == HeaderLen {
		h, err := ParseHeader([HeaderLen]byte(m.buf))
		if err != nil {
			return nil, m.abort(err)
		}
		if e := m.expected(); h.Type != e && h.Type != TypeDecline {
			return nil, m.abort(parseErr(4, "%v in state %v, want %v or Decline", h.Type, m.state, e))
		}
		return nil, nil
	}
	msg, m.buf = m.buf, nil
	if Type(msg[4]) != TypeDecline {
		return msg, nil
	}
	d, err := ParseDecline(msg)
	if err != nil {
		return nil, m.abort(err)
	}
	m.becomeDeclined(Declined{Reason: d.Reason, FromPeer: true, OutOfSync: d.OutOfSync, PeerID: d.PeerID})
	return nil, nil
}

// HandleEOF says that the peer will send nothing more over TCP. Once SMC-R
// carries the connection this has no meaning.
func (m *machine) HandleEOF(time.Time) {
	if !m.state.Done() {
		_ = m.abort(fmt.Errorf("%w in state %v", ErrPeerClosed, m.state))
	}
}

// HandleTimeout does what is due at now.
func (m *machine) HandleTimeout(now time.Time) {
	if m.deadline.IsZero() || now.Before(m.deadline) {
		return
	}
	m.deadline = time.Time{}
	if m.state == StateLateDecline && len(m.buf) == 0 {
		m.sendDecline(m.pending.reason, m.pending.outOfSync, true)
		return
	}
	// RFC 7609 C.5: a TCP connection that does not carry CLC messages in time
	// would not carry the application's data either.
	_ = m.abort(fmt.Errorf("%w: state %v", ErrTimeout, m.state))
}

// Decline gives up SMC-R. Where RFC 7609 allows it, a Decline is sent and
// [OutputDeclined] follows: at once, or after the message that the peer still
// owes, since a Decline must not chase another CLC message (C.1). Where it is
// too late (C.3), [OutputAbort] follows. outOfSync sets the S bit (C.4).
func (m *machine) Decline(now time.Time, r Reason, outOfSync bool) {
	switch m.state {
	case StateIdle, StateDeciding:
		m.sendDecline(r, outOfSync, false)
	case StateWaitProposal, StateWaitAccept:
		m.keepPending(r, outOfSync)
	case StateWaitConfirm:
		if !m.first {
			m.tooLate(r)
			return
		}
		m.keepPending(r, outOfSync)
	case StateLinkSetup:
		if len(m.buf) > 0 {
			// The peer's Decline is coming in. Ours would reach the peer's
			// application as data.
			m.becomeLateDecline(now)
			return
		}
		if (r == ReasonTimeoutCL || r == ReasonTimeoutAL) && !outOfSync {
			// The peer may have seen the failure first; its Decline may be on
			// the way. RFC 7609 C.7 would have the connection reset; Linux
			// waits and then declines, which C.2 allows and which saves the
			// connection.
			m.keepPending(r, outOfSync)
			m.becomeLateDecline(now)
			return
		}
		m.sendDecline(r, outOfSync, true)
	case StateCommitted, StateEstablished:
		m.tooLate(r)
	case StateLateDecline, StateDeclined, StateAborted, numStates:
	}
}

// keepPending stores a Decline for later. The first reason stays.
func (m *machine) keepPending(r Reason, outOfSync bool) {
	if m.pending == nil {
		m.pending = &pendingDecline{reason: r, outOfSync: outOfSync}
	}
}

func (m *machine) tooLate(r Reason) {
	_ = m.abort(fmt.Errorf("%w: state %v, %v: %s", ErrTooLate, m.state, r, r.Text()))
}

// PassPointOfNoReturn says that a first contact can no longer fall back to
// TCP (RFC 7609 C.3). For a server: ADD LINK was sent (write completion), or
// its answer was received. For a client: the answer to ADD LINK was sent, or
// CONFIRM LINK of the second link was received.
func (m *machine) PassPointOfNoReturn(time.Time) {
	switch {
	case m.state == StateLinkSetup && len(m.buf) > 0:
		// The header of a Decline is here already.
		_ = m.abort(fmt.Errorf("%w: the peer declines past the point of no return", ErrTooLate))
	case m.state == StateLinkSetup:
		m.becomeCommitted()
	case m.state != StateCommitted:
		m.misuse("PassPointOfNoReturn")
	}
}

// Complete says that the link is set up: on first contact after the LLC
// messages, on subsequent contact after the last CLC message.
func (m *machine) Complete(now time.Time) {
	m.PassPointOfNoReturn(now)
	if m.state == StateCommitted {
		m.becomeEstablished()
	}
}

// misuse ends the connection after a command that makes no sense in this state:
// our own mistake, but one that costs no more than this connection. When the
// negotiation is over, the command has only crossed with what ended it.
func (m *machine) misuse(command string) {
	if m.state.Done() {
		return
	}
	_ = m.abort(fmt.Errorf("%w: %s in state %v", ErrState, command, m.state))
}

// sendDecline sends our Decline and falls back.
func (m *machine) sendDecline(r Reason, outOfSync, mayCross bool) {
	d := Decline{Version: m.version, OutOfSync: outOfSync, PeerID: m.cfg.PeerID, Reason: r}
	if d.Version >= V2 {
		d.OS = m.cfg.OS
	}
	m.send(d.Append(nil))
	m.becomeDeclined(Declined{Reason: r, OutOfSync: outOfSync, MayCross: mayCross})
}

// refuse answers a message that is well formed but not acceptable with a
// Decline, and returns err, a *[DeclineError].
func (m *machine) refuse(err error) error {
	var d *DeclineError
	invariant.Must(errors.As(err, &d), "clc: refuse without a reason")
	m.sendDecline(d.Reason, false, m.state == StateWaitConfirm)
	return err
}

func (m *machine) send(b []byte) { m.out = append(m.out, Output{Kind: OutputSend, Data: b}) }

// Transitions. Each leaves no timer but its own.

func (m *machine) becomeWaiting(now time.Time, s State) {
	m.state, m.deadline = s, now.Add(m.cfg.MessageTimeout)
}

func (m *machine) becomeDeciding() { m.state, m.deadline = StateDeciding, time.Time{} }

func (m *machine) becomeLinkSetup() { m.state, m.deadline = StateLinkSetup, time.Time{} }

func (m *machine) becomeLateDecline(now time.Time) {
	m.state, m.deadline = StateLateDecline, now.Add(m.cfg.LateDeclineTimeout)
}

func (m *machine) becomeCommitted() { m.state, m.deadline = StateCommitted, time.Time{} }

func (m *machine) becomeEstablished() {
	m.state, m.deadline = StateEstablished, time.Time{}
	m.out = append(m.out, Output{Kind: OutputEstablished})
}

func (m *machine) becomeDeclined(d Declined) {
	m.state, m.deadline, m.buf = StateDeclined, time.Time{}, nil
	m.out = append(m.out, Output{Kind: OutputDeclined, Declined: d})
}

// abort gives the TCP connection up and returns err.
func (m *machine) abort(err error) error {
	m.state, m.deadline, m.buf = StateAborted, time.Time{}, nil
	m.out = append(m.out, Output{Kind: OutputAbort, Err: err})
	return err
}

// CrossingDecline tells whether the first bytes after our own Decline are the
// peer's Decline, sent at the same moment (see [Declined].MayCross): drop that
// many. While undecided is true b could still become one; more bytes are
// needed, and the application can have none yet.
func CrossingDecline(b []byte) (drop int, undecided bool) {
	if len(b) < HeaderLen {
		eye := Header{Type: TypeDecline}.append(nil)[:5]
		n := min(len(b), len(eye))
		return 0, string(b[:n]) == string(eye[:n])
	}
	h, err := ParseHeader([HeaderLen]byte(b))
	if err != nil || h.Type != TypeDecline {
		return 0, false
	}
	if len(b) < h.Length {
		return 0, true
	}
	if _, err := ParseDecline(b[:h.Length]); err != nil {
		return 0, false
	}
	return h.Length, false
}
