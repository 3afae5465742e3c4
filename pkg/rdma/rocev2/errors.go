// SPDX-License-Identifier: Apache-2.0

package rocev2

import "errors"

// Errors of ParsePacket.
var (
	ErrShort  = errors.New("rocev2: packet is shorter than its headers")
	ErrLong   = errors.New("rocev2: packet is longer than the largest path MTU")
	ErrOpCode = errors.New("rocev2: not an operation of the reliable connected service")
	ErrTVer   = errors.New("rocev2: unknown transport header version")
	ErrLength = errors.New("rocev2: packet length is wrong for its operation")
	ErrMisfit = errors.New("rocev2: packet is not a multiple of four bytes")
)

// What ended a queue pair, in asynchronous events.
var (
	errTimeout   = errors.New("no answer to any retransmission; check the path and the peer")
	errRNR       = errors.New("peer posted no receive buffer after all retries")
	errNAK       = errors.New("peer refused a request")
	errMemory    = errors.New("memory of a work request is not registered for it")
	errRequest   = errors.New("peer sent an invalid request")
	errGone      = errors.New("memory that the peer was using is not registered any more")
	errTooLong   = errors.New("peer sent a message longer than the receive buffer")
	errRecvSpace = errors.New("memory of a receive buffer is not registered for it")
)
