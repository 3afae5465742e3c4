// SPDX-License-Identifier: Apache-2.0

package vitcp

import "time"

const (
	// Version is the version of every segment.
	Version = 1

	// Lengths of the headers, in bytes (§3.1, §3.2, §3.2.1).
	HeaderLen = 24
	RDMALen   = 16
	CELen     = 44

	// MaxSegment is the longest segment: its length has 16 bits and counts the headers.
	MaxSegment = 1<<16 - 1

	// MinSegment bounds what a shell may shorten segments to: shorter ones are mostly header.
	MinSegment = 128

	// MaxDiscriminator is the room for a discriminator in a CE header.
	MaxDiscriminator = 16

	// MaxSecurity bounds the security information, for which the draft has no length: room
	// for two keys and a certificate's hash, and little for a stranger to fill.
	MaxSecurity = 256

	// MaxConnectLen is the longest message of connection establishment.
	MaxConnectLen = HeaderLen + CELen + MaxSecurity

	// MaxSGE is the largest number of pieces that one send gathers.
	MaxSGE = 4

	// MaxRecvWR bounds the receive queue: the count of posted receives has 16 bits, and old and
	// new are told apart by half of them (§3.1, Rx Descriptors Posted).
	MaxRecvWR = 1<<15 - 1

	// MaxInlineLimit bounds MaxInline: each slot of the send queue owns that
	// many bytes.
	MaxInlineLimit = 4096

	// MaxReadWindow bounds the READ window: the responder keeps that many requests of a peer.
	MaxReadWindow = 256

	// DefaultReadWindow is what common RNICs offer.
	DefaultReadWindow = 16

	// DefaultMaxTransfer is the longest message that is offered, in bytes, and the longest that
	// IBTA allows, too.
	DefaultMaxTransfer = 1 << 31

	// DefaultACKDelay is how long an acknowledgement may wait for a segment to travel with, or
	// for a second message.
	DefaultACKDelay = time.Millisecond

	// ackAfter is the number of messages after which an acknowledgement waits no longer.
	ackAfter = 2

	// creditFraction is the part of the receive queue below which a peer's unused credits make
	// us tell of new ones at once (§3.1, Notes on NOP).
	creditFraction = 4

	// stageBytes is the room for what is copied to be sent: several short segments
	// leave in one write. The bytes of a segment longer than shortBytes stay where they are.
	stageBytes = 4096
	shortBytes = 512

	// rxBytes is the room for what is read ahead of its header. What is longer goes
	// straight to its memory, but for its first bytes.
	rxBytes = 4096

	// MaxTxBuffers and MaxRxBuffers are the slices of TxBuffers and RxBuffers at most.
	MaxTxBuffers = 1 + MaxSGE
	MaxRxBuffers = 3 // receive buffer, its spill, read-ahead

	// lastWords bounds how long the report of the peer's error may take to leave, and the peer's
	// FIN to follow ours: a peer that reads nothing must not keep a connection.
	lastWords = 5 * time.Second

	// DefaultRequestTimeout is how long a new TCP connection may go without a Connect Request.
	DefaultRequestTimeout = 5 * time.Second

	// DefaultAcceptTimeout is how long a matched Connect Request may wait for the program.
	DefaultAcceptTimeout = 30 * time.Second

	// DefaultConnectTimeout is the caller's patience if the program has none of its own.
	DefaultConnectTimeout = 30 * time.Second

	// minBackoff and maxBackoff bound the pause before another call.
	minBackoff = 50 * time.Millisecond
	maxBackoff = time.Second
)
