// SPDX-License-Identifier: Apache-2.0

package socket

import "errors"

// ErrProtocol says that the peer does not keep to the protocol. The connection ends. It is always in a [ViolationError], which says
// in what way.
var ErrProtocol = errors.New("sdp: peer broke the protocol")

// Why a connection is not established, or ended.
var (
	ErrSetupTimeout = errors.New("sdp: not established in time")
	ErrReset        = errors.New("sdp: connection reset by peer")
	ErrAborted      = errors.New("sdp: connection aborted")
	ErrLost         = errors.New("sdp: connection lost")
	ErrTransfer     = errors.New("sdp: transfer failed")
	ErrSuspend      = errors.New("sdp: not suspended in time")
	ErrStalled      = errors.New("sdp: peer keeps a buffer that was canceled")
	ErrLinger       = errors.New("sdp: peer did not end the connection")
)

// What a program may not ask for.
var (
	ErrState   = errors.New("sdp: not in this state")
	ErrFull    = errors.New("sdp: too much is posted")
	ErrInvalid = errors.New("sdp: invalid request")
)
