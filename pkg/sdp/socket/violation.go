// SPDX-License-Identifier: Apache-2.0

package socket

import "fmt"

// Violation says in what way a peer broke the protocol, for programs and metrics that tell one from another.
type Violation uint8

// Violations. What the draft wants accepted is none: bits and fields without a meaning, another minor version, a late
// SinkCancelAck, a cancel that finds nothing.
const (
	BadMessage        Violation = iota // cannot be parsed, or is not of the form of its kind (§6)
	BadSetup                           // a Hello or HelloAck of which no connection can be made (§8.1.1)
	BadNumber                          // MSeq is not the next one (§10.1)
	BadAck                             // MSeqAck is of a message that was not sent, or goes back (§6.1.6)
	NoCredit                           // a message without credit (§10.5)
	UnexpectedMessage                  // an answer without a question, or what may not come now
	BehindEnd                          // data behind DisConn, or DisConn before all was sent that was offered (§8.2.1)
	PayloadInTurn                      // payload that an advert stands before (§11)
	WrongMode                          // an advert that the mode does not allow, or a change of mode that there is not (§11, §12)
	TooManyAdverts                     // more than MaxAdverts (§6.2.1.3)
	NoAdvert                           // RdmaRdCompl, RdmaWrCompl or SendSm without an advert of ours (§9)
	BeyondAdvert                       // more bytes than were advertised (§9)
	WrongKey                           // a message makes a key of ours worthless that it has nothing to do with (§9.2, §9.3)
	BadSize                            // ChRcvBufAck of a size that nobody asked for (§10.6)
)

func (v Violation) String() string {
	names := [...]string{
		"bad message", "bad set-up", "bad number", "bad acknowledgement", "no credit", "unexpected message", "behind the end",
		"payload before its turn", "wrong mode", "too many adverts", "no advert", "beyond advert", "wrong key", "bad size",
	}
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("Violation(%d)", uint8(v))
}

// ViolationError is why a connection ends whose peer broke the protocol. It is an [ErrProtocol].
type ViolationError struct {
	Violation Violation
	what      error // and what it was exactly
}

// violation returns the error for a violation.
func violation(v Violation, format string, args ...any) error {
	return &ViolationError{v, fmt.Errorf(format, args...)}
}

func (e *ViolationError) Error() string { return fmt.Sprintf("%v: %v", ErrProtocol, e.what) }

// Unwrap returns ErrProtocol, and what a message could not be parsed for.
func (e *ViolationError) Unwrap() []error { return []error{ErrProtocol, e.what} }
