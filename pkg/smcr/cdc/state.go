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
