// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"errors"
	"fmt"
)

// ErrDecline is what errors that allow the fallback to TCP match with
// [errors.Is]. All other errors of this package end the TCP connection.
var ErrDecline = errors.New("clc: declined")

// ParseError is a message that is not a CLC message of the kind that was
// expected. RFC 7609 C.6: the two sides are out of step, so the TCP connection
// must be reset; falling back could hand CLC bytes to the application.
type ParseError struct {
	Offset int // of the offending byte in the message
	What   string
}

func (e *ParseError) Error() string {
	return fmt.Sprintf("clc: byte %d: %s", e.Offset, e.What)
}

func parseErr(offset int, format string, args ...any) *ParseError {
	return &ParseError{Offset: offset, What: fmt.Sprintf(format, args...)}
}

// DeclineError is a well-formed message that asks for something we cannot do.
// RFC 7609 C.6: answer with a Decline and use TCP. It matches [ErrDecline].
type DeclineError struct {
	Reason Reason // the code for our Decline
	What   string
}

func (e *DeclineError) Error() string {
	return fmt.Sprintf("clc: decline (%v): %s", e.Reason, e.What)
}

// Is makes a DeclineError match [ErrDecline].
func (e *DeclineError) Is(target error) bool { return target == ErrDecline }

func declineErr(r Reason, format string, args ...any) *DeclineError {
	return &DeclineError{Reason: r, What: fmt.Sprintf(format, args...)}
}
