// SPDX-License-Identifier: Apache-2.0

package iwarp

import "errors"

// Errors of start-up and of the stream.
var (
	// ErrEnded says that the peer ended the stream, in OPEN between two FPDUs.
	ErrEnded = errors.New("iwarp: peer ended the stream")
	// ErrTimeout says that start-up took longer than its limit.
	ErrTimeout = errors.New("iwarp: no answer in time")
	// ErrRejected says that the peer refused the connection; its private data came.
	ErrRejected = errors.New("iwarp: peer refused the connection")
	// ErrRevision says that the peer speaks another revision of MPA: try revision 1
	// on a new TCP connection.
	ErrRevision = errors.New("iwarp: peer has another revision of MPA")
	// ErrReads says that the peer does not have the READs that were demanded.
	ErrReads = errors.New("iwarp: peer offers fewer READs than demanded")
	// ErrRTR says that both sides know no common first message.
	ErrRTR = errors.New("iwarp: no common RTR message with the peer")

	errLocalMemory = errors.New("memory of a work request is not registered, or not any more")
	errNoReads     = errors.New("RDMA READ, of which the peer serves none, or none was to be asked (ORD 0)")
)
