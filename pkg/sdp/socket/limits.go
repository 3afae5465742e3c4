// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"math"
	"time"
)

const (
	// DefaultRecvBuffers and DefaultRecvBytes are the receive buffers of a connection: 1 MiB.
	DefaultRecvBuffers = 64
	DefaultRecvBytes   = 16 << 10

	// MinRecvBuffers is what a connection begins with at least: of the three that §10 asks for, the
	// HelloAck takes one of the connecting peer's.
	MinRecvBuffers = 4

	// MaxRecvBuffers bounds them: a message can tell of 65,535, and while buffers are resized there are
	// twice as many.
	MaxRecvBuffers = 1<<15 - 1

	// DefaultSendDepth is how many messages may be under way in the send queue.
	DefaultSendDepth = 64

	// DefaultMaxAdverts is how many adverts either side may have outstanding.
	DefaultMaxAdverts = 16

	// MaxMaxAdverts bounds them, and with them what a peer makes us remember.
	MaxMaxAdverts = 1024

	// DefaultReads is how many RDMA READs may be under way, served and asked for (IRD, ORD).
	DefaultReads = 16

	// MaxRDMAWrites is how many RDMA WRITEs may be under way. Each has a message behind it in the send queue, and a buffer
	// of the peer, of which there are not many.
	MaxRDMAWrites = 16

	// DefaultZcopyBytes is the size above which RDMA moves bytes. Below it the messages that an advert
	// takes cost more than a copy.
	DefaultZcopyBytes = 64 << 10

	// NoZcopy as [Config.ZcopyBytes] makes everything go by Bcopy.
	NoZcopy = math.MaxUint32

	// MaxWrites and MaxReads bound what a program may have posted.
	MaxWrites = 256
	MaxReads  = 256

	// MaxUrgent bounds the out-of-band bytes that were written and not sent.
	MaxUrgent = 16

	// urgentDistance is how many bytes may go between the announcement of an out-of-band byte and the
	// byte, both included (§9.5.3).
	urgentDistance = 65535

	// srcInline is how many bytes of an advertised buffer the SrcAvail of Combined mode repeats. One is
	// the least (§11.2); a few more fill what a Send costs anyhow.
	srcInline = 64

	// readsToPipeline is how many adverts in a row the peer must have read before we change to Pipelined
	// mode unasked; refusalsToBuffer how many it must have refused before we advertise no more.
	readsToPipeline  = 2
	refusalsToBuffer = 2

	// DefaultSetupTimeout bounds the wait for Hello, and for HelloAck.
	DefaultSetupTimeout = 5 * time.Second

	// deadlockDelay is how long an advert of the peer waits for a program that reads nothing while an
	// advert of ours waits for the peer: each side may be waiting for the other (§9.2).
	deadlockDelay = 50 * time.Millisecond

	// sinkDelay is how long we wait for the next buffer of a peer that has advertised some before, until we offer it our bytes to be
	// read (§11.3). Its program needs a moment to take the buffer that we have filled and to post another one. If our SrcAvail were
	// there before its SinkAvail, the peer would read these bytes, and all behind them, and an RDMA READ takes one message more
	// than an RDMA WRITE.
	sinkDelay = time.Millisecond

	// updateDelay and maxUpdateDelay bound how long the answer waits to a message that did nothing but
	// give credit: without a wait two starved peers would answer each other for ever.
	updateDelay    = 10 * time.Millisecond
	maxUpdateDelay = 200 * time.Millisecond

	// lingerTimeout bounds how long the peer that closed first waits for the end of the connection, and how long a socket lives whose
	// program has closed it, also if it is moved to other connections meanwhile. Only AbortConn may be sent after that.
	lingerTimeout = 10 * time.Second

	// DefaultSuspendTimeout bounds the way from SuspComm to the Hello on the next connection.
	DefaultSuspendTimeout = 10 * time.Second

	// cancelTimeout bounds how long a peer may keep a buffer that is canceled while nothing moves. It is a compromise: the peer's
	// program may take a while to read what is offered, and our program waits for its buffer.
	cancelTimeout = 5 * time.Second

	// abortTimeout bounds the wait of AbortConn for credit, and for its completion.
	abortTimeout = time.Second
)
