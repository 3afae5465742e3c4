// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// ErrProtocol says that the peer does not keep to the protocol. The connection cannot go on.
var ErrProtocol = errors.New("vitcp: peer broke the protocol")

// Why a connection is not established.
var (
	ErrTimeout     = errors.New("vitcp: not connected in time")
	ErrUnreachable = errors.New("vitcp: no TCP connection to the peer")
	ErrRejected    = errors.New("vitcp: the called program rejected the connection")
	ErrNoMatch     = errors.New("vitcp: no program at the peer waits for this discriminator")
	ErrCanceled    = errors.New("vitcp: given up")
	ErrPeerClosed  = errors.New("vitcp: peer closed the TCP connection")
	ErrRival       = errors.New("vitcp: conceded to the peer's own call")

	// The sides do not fit together.

	ErrReliability = errors.New("vitcp: levels of reliability differ")
	ErrRDMAWrite   = errors.New("vitcp: enabled on one side only: RDMA WRITE")
	ErrRDMARead    = errors.New("vitcp: enabled on one side only: RDMA READ")
	ErrMaxTransfer = errors.New("vitcp: transfer size is not acceptable")
)

// RemoteError is the peer's report that it could not take a message: the reason of an
// EventQPFatal.
type RemoteError struct {
	Message uint32 // number of the message
	Type    ErrorType
	Cause   Cause
}

func (e *RemoteError) Error() string {
	return fmt.Sprintf("peer refused message %d: %v, %v", e.Message, e.Type, e.Cause)
}

// status returns how the request fails that sent the message.
func (e *RemoteError) status() rdma.Status {
	switch {
	case e.Type == ErrorMemory:
		return rdma.StatusRemoteAccess
	case e.Cause == CauseNoReceive:
		return rdma.StatusRNRRetryExceeded
	case e.Cause == CauseTooSmall, e.Cause == CauseReadWindow, e.Cause == CauseTooLong:
		return rdma.StatusRemoteInvalid
	}
	return rdma.StatusRemoteOp
}

// What ended a queue pair, in asynchronous events.
var (
	errMemory    = errors.New("memory of a work request is not registered for it")
	errCut       = errors.New("memory of a segment that was half sent is not registered any more")
	errTransmit  = errors.New("peer could not read its memory any more")
	errTCP       = errors.New("TCP connection is lost")
	errGone      = errors.New("memory that the peer was using is not registered any more")
	errLastWords = errors.New("peer did not take its leave")
)
