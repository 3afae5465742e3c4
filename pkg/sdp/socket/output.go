// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// OutputKind says what to do.
type OutputKind uint8

// Kinds of outputs. What the shell does of one must be done, or posted, before it looks at the next.
const (
	// OutHello: send Message as bytes of the TCP stream, and be ready for iWARP at once (§8.1.1).
	OutHello OutputKind = iota
	// OutEstablished: data may flow. Message is the peer's Hello or HelloAck; IRD and ORD are ours now.
	OutEstablished
	// OutSend: post a Send of Message, with Len bytes of our stream from position Pos behind its headers,
	// which are copied: they are the program's again. With Invalidate it makes Key of the peer worthless.
	OutSend
	// OutRDMAWrite: write Len bytes of our stream from Pos to Addr with Key. The message that tells the peer follows, so the send
	// queue must keep the order of both.
	OutRDMAWrite
	// OutRDMARead: read Len bytes at Addr with Key into the buffer of Read ID, from Offset. Several may be under way, no more
	// than the ORD of OutEstablished.
	OutRDMARead
	// OutCopy: copy Len bytes, at From in receive buffer Buffer, into the buffer of Read ID, from Offset. If Buffer is [Kept]
	// they are the oldest ones of OutKeep.
	OutCopy
	// OutRecycle: post receive buffer Buffer again.
	OutRecycle
	// OutRead: Read ID is over, with Len bytes. EOF: there will be no more. Urgent: its last byte is
	// out-of-band data. Canceled: CancelReads, or the end of the connection.
	OutRead
	// OutWritten: the next Write, ID, is over, with Len bytes; less than it had: CancelWrites, or the end.
	OutWritten
	// OutUrgent: the peer says that out-of-band data will come.
	OutUrgent
	// OutPeerDone: the peer will send no more data. What arrived is still there to be read.
	OutPeerDone
	// OutClose: end the transport connection in order. Nothing is under way on it.
	OutClose
	// OutReset: end the transport connection at once; with TCP, by a reset. No operation may be under way
	// when this returns.
	OutReset
	// OutEnded: the connection is over; Err is nil if both streams ended in order. What arrived before may still be
	// read: OutCopy, OutRecycle and OutRead may come behind, so receive buffers stay where they are, and none is posted.
	OutEnded
	// OutPost: post [Config.RecvBuffers] new receive buffers of Len bytes, with the numbers from Buffer on. The
	// connection begins with those from 0 on; there are two such sets at most.
	OutPost
	// OutDrop: receive buffer Buffer has served. It is not posted again.
	OutDrop
	// OutKeep: copy Len bytes, at From in receive buffer Buffer, behind those in private memory. An OutCopy whose Buffer is
	// [Kept] takes the oldest of them out. Both are there until they were read, also behind OutEnded.
	OutKeep
	// OutSuspended: the transport connection is to be replaced. No operation may be under way on the old one when this
	// returns, nor is one reported later. If Message is SuspComm, close the old one, connect to its Port at the
	// same address, from the same port if that can be, and call Resume; if it is SuspCommAck, the peer
	// connects to Port: look at where it comes from, and give its Hello to HandleHello. The receive buffers are
	// other ones then: RecvBuffers, of the size that the Hello or HelloAck tells, with the numbers from 0 on.
	// OutEstablished comes again. A shell whose queue pairs cannot change their connection takes another one.
	OutSuspended
)

func (k OutputKind) String() string {
	names := [...]string{
		"hello", "established", "send", "RDMA write", "RDMA read", "copy", "recycle", "read", "written", "urgent", "peer done",
		"close", "reset", "ended", "post", "drop", "keep", "suspended",
	}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("OutputKind(%d)", uint8(k))
}

// Output is what the shell must do, or know.
type Output struct {
	Kind    OutputKind
	Message bsdh.Message

	Pos        uint64 // of our stream
	Len        uint32
	Key        rdma.RKey
	Addr       uint64
	Invalidate bool

	ID, Offset uint64
	Buffer     int
	From       int

	EOF, Urgent, Canceled bool

	IRD, ORD int
	Err      error
}

// outbox is what the shell must do, in order.
type outbox struct{ list []Output }

func (b *outbox) put(o Output) { b.list = append(b.list, o) }

// moveTo appends what is there to dst, and forgets it.
func (b *outbox) moveTo(dst []Output) []Output {
	dst = append(dst, b.list...)
	clear(b.list)
	b.list = b.list[:0]
	return dst
}
