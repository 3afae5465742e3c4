// SPDX-License-Identifier: Apache-2.0

package cdc

import "fmt"

// State is where a connection stands between its rendezvous and the reuse of
// its RMBE (RFC 7609 §4.8, figures 22 and 23).
//
//	                   +--------+
//	+----------------->| Closed |<------------------+
//	|                  +--------+                   |
//	|                       | Activate              |
//	|                  +--------+                   |
//	|       +----------| Active |---------+         |
//	|       | we send D or C    | peer sends D or C |
//	|       v                             v         |
//	| PeerCloseWait1                AppCloseWait1   |
//	|       | peer sends D                | we send D
//	|       v                             v         |
//	| PeerCloseWait2                AppCloseWait2   |
//	|       | peer sends C                | we send C
//	|       v                             v         |
//	+- AppFinCloseWait              PeerFinCloseWait+
//	   (we have not closed yet)     (the peer has not closed yet)
//
// Each of the wait states goes straight to Closed when both sides' C has been
// exchanged. From every state: our A leads to PeerAbortWait until the peer
// answers; the peer's A leads to ProcessAbort until we answer.
type State uint8

// Connection states.
const (
	Closed State = iota
	Active
	PeerCloseWait1
	PeerCloseWait2
	AppCloseWait1
	AppCloseWait2
	AppFinCloseWait
	PeerFinCloseWait
	PeerAbortWait
	ProcessAbort
)

func (s State) String() string {
	switch s {
	case Closed:
		return "CLOSED"
	case Active:
		return "ACTIVE"
	case PeerCloseWait1:
		return "PEERCLW1"
	case PeerCloseWait2:
		return "PEERCLW2"
	case AppCloseWait1:
		return "APPLCLW1"
	case AppCloseWait2:
		return "APPLCLW2"
	case AppFinCloseWait:
		return "APPLFINCLW"
	case PeerFinCloseWait:
		return "PEERFINCLW"
	case PeerAbortWait:
		return "PEERABORTW"
	case ProcessAbort:
		return "PROCESSABORT"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// sentDone is the transition after our D went out (4.8.1, 3A and 4B).
func (c *Conn) sentDone() {
	switch c.state {
	case Active:
		c.state = PeerCloseWait1
	case AppCloseWait1:
		c.state = AppCloseWait2
	case Closed, PeerCloseWait1, PeerCloseWait2, AppCloseWait2, AppFinCloseWait, PeerFinCloseWait, PeerAbortWait, ProcessAbort:
	}
}

// sentClosed is the transition after our C went out (4.8.1, 3A, 3D and 4C).
func (c *Conn) sentClosed() {
	switch c.state {
	case Active:
		c.state = PeerCloseWait1
	case AppCloseWait1, AppCloseWait2:
		if c.peerFlags.Closed() {
			c.state = Closed
		} else {
			c.state = PeerFinCloseWait
		}
	case AppFinCloseWait:
		c.state = Closed
	case Closed, PeerCloseWait1, PeerCloseWait2, PeerFinCloseWait, PeerAbortWait, ProcessAbort:
	}
}

// peerDone is the transition when the peer's D arrived (4.8.1, 3B and 4A).
func (c *Conn) peerDone() {
	switch c.state {
	case Active:
		c.state = AppCloseWait1
	case PeerCloseWait1:
		c.state = PeerCloseWait2
	case Closed, PeerCloseWait2, AppCloseWait1, AppCloseWait2, AppFinCloseWait, PeerFinCloseWait, PeerAbortWait, ProcessAbort:
	}
}

// peerClosed is the transition when the peer's C arrived (4.8.1, 3C, 3D, 4A
// and 4D).
func (c *Conn) peerClosed() {
	switch c.state {
	case Active:
		c.state = AppCloseWait1
	case PeerCloseWait1, PeerCloseWait2:
		if c.sentFlags.Closed() {
			c.state = Closed
		} else {
			c.state = AppFinCloseWait
		}
	case PeerFinCloseWait:
		c.state = Closed
	case PeerAbortWait:
		if c.HasSentClose() { // else our A must still go out
			c.state = Closed
		}
	case Closed, AppCloseWait1, AppCloseWait2, AppFinCloseWait, ProcessAbort:
	}
}
