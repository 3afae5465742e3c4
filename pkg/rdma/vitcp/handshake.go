// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// State is where a [Caller] or a [Callee] stands (§4.2, §4.3).
type State uint8

// States. The diagrams are at [Caller] and [Callee].
const (
	StateDisconnected  State = iota // not begun, or over
	StateConnecting                 // caller: TCP is being set up, or will be after a pause
	StateIncoming                   // callee: TCP is there, the request is not
	StateMatching                   // callee: the shell looks for the discriminator
	StatePendingAccept              // the called program decides
	StateConnected
	numStates
)

func (s State) String() string {
	names := [numStates]string{"Disconnected", "Connecting", "Incoming", "Matching", "Pending Accept", "Connected"}
	if s < numStates {
		return names[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// OutputKind says what the shell must do.
type OutputKind uint8

// Kinds of output.
const (
	OutputDial      OutputKind = iota + 1 // set a TCP connection up: HandleDialed or HandleDialFailed follows
	OutputSend                            // write Data to the TCP connection
	OutputClose                           // close the TCP connection, or give its set-up up; say nothing more of it
	OutputRequest                         // look for Request.Called: Match or NoMatch follows
	OutputConnected                       // the queue pair takes the TCP connection over with Terms
	OutputFailed                          // over, because of Err
)

func (k OutputKind) String() string {
	names := [...]string{"", "Dial", "Send", "Close", "Request", "Connected", "Failed"}
	if k > 0 && int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("OutputKind(%d)", uint8(k))
}

// Output is one thing for the shell to do. The field that Kind names is set.
type Output struct {
	Kind    OutputKind
	Data    []byte
	Request *CE
	Terms   Terms
	Err     error
}

// Terms are what connection establishment leaves to the queue pair.
type Terms struct {
	Attr
	First, PeerFirst uint32 // each side's number before that of its first message
	Posted           uint16 // our receives that the peer was told of
	PeerPosted       uint16 // the peer's that we were told of
	Security         []byte // the peer's

	// MaxSegment is the longest segment to be sent, in bytes: the shell's choice, which the
	// peer does not hear of; 0: [MaxSegment].
	MaxSegment int
}

// handshake is what both machines share: a TCP connection's messages, outputs, and a timer.
type handshake struct {
	state    State
	out      []Output
	deadline time.Time
	buf      [MaxConnectLen]byte // the message that is being read
	have     int
}

// State returns where the machine stands.
func (h *handshake) State() State { return h.state }

// Poll appends what the shell must do, in this order, and forgets it.
func (h *handshake) Poll(dst []Output) []Output {
	dst = append(dst, h.out...)
	clear(h.out)
	h.out = h.out[:0]
	return dst
}

// Want returns how many bytes at most the shell may read from the TCP connection and give to
// HandleData: never one that follows the message. It is 0 when the shell must not read.
func (h *handshake) Want() int {
	switch {
	case h.state != StateIncoming && h.state != StatePendingAccept:
		return 0
	case h.have < HeaderLen:
		return HeaderLen - h.have
	}
	hdr, err := ParseHeader(h.buf[:HeaderLen])
	invariant.Must(err == nil, "vitcp: unchecked header in the buffer")
	return int(hdr.Length) - h.have
}

// receive collects a message and returns it when it is complete.
func (h *handshake) receive(b []byte) (m connectMessage, whole bool, err error) {
	for len(b) > 0 {
		n := min(len(b), h.Want())
		if n == 0 {
			return m, false, fmt.Errorf("%w: %d bytes behind a message in %v", ErrProtocol, len(b), h.state)
		}
		copy(h.buf[h.have:], b[:n])
		h.have += n
		b = b[n:]
		if h.have < HeaderLen {
			continue
		}
		hdr, err := ParseHeader(h.buf[:HeaderLen])
		if err == nil && !hdr.Type.isConnect() {
			err = fmt.Errorf("%w: %v in %v", ErrProtocol, hdr.Type, h.state)
		}
		if err != nil {
			return m, false, err
		}
		if h.have < int(hdr.Length) {
			continue
		}
		if len(b) > 0 {
			return m, false, fmt.Errorf("%w: %d bytes behind %v", ErrProtocol, len(b), hdr.Type)
		}
		m, err = parseConnect(h.buf[:h.have])
		h.have = 0
		return m, err == nil, err
	}
	return m, false, nil
}

func (h *handshake) put(o Output) { h.out = append(h.out, o) }

func (h *handshake) send(m connectMessage) { h.put(Output{Kind: OutputSend, Data: m.bytes()}) }

// becomeDisconnected ends a machine that has a TCP connection.
func (h *handshake) becomeDisconnected(err error) {
	h.state, h.deadline, h.have = StateDisconnected, time.Time{}, 0
	h.put(Output{Kind: OutputClose})
	h.put(Output{Kind: OutputFailed, Err: err})
}

func (h *handshake) becomeConnected(t Terms) {
	h.state, h.deadline, h.have = StateConnected, time.Time{}, 0
	h.put(Output{Kind: OutputConnected, Terms: t})
}
