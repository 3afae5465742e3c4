// SPDX-License-Identifier: Apache-2.0

// Package vitcp is VI/TCP, the Virtual Interface Architecture on a TCP connection
// (draft-dicecco-vitcp-00): the three headers, the machines that connect, and the
// machine of a connected queue pair.
//
// It is PURE: bytes come in and go out as slices, time comes in as an argument, and
// NextTimeout says when HandleTimeout is due. The same inputs give the same outputs.
//
// # Words
//
// What the Virtual Interface Architecture calls a VI is a queue pair here, a descriptor
// a work request, a memory handle the LKey and RKey of a region, a protection tag a
// protection domain. A message is what one work request sends. Messages are cut into
// segments, which are all that travels. An address has a part that no socket knows,
// the discriminator: it names a program behind the one TCP port of a host.
//
// # How to use it
//
// Two programs connect as client ([Caller]) and server ([Callee]), or as peers, where
// both call and [Peer] decides which call stands. That ends with [Terms], which a
// queue pair takes over together with the TCP connection:
//
//	q.Start(now, terms)
//	for {
//		n := read(q.RxBuffers(bufs[:0])) // straight into registered memory where possible
//		err := q.HandleRx(now, n)
//		q.PollWC(wcs)                    // first: an acknowledgement waits for it
//		n = write(q.TxBuffers(now, bufs[:0]))
//		q.HandleTx(now, n)
//		switch q.End() { ... }           // FIN, or close
//	}
//
// # Who owns what
//
// A [QP] belongs to whoever holds the device's queue pair and is not safe for concurrent
// use. The slices of RxBuffers and TxBuffers are valid until the next call of any
// other method of it. Nothing is allocated after [NewQP] while there are no errors.
//
// # Code points
//
// The draft names its types, flags and errors and gives no numbers to most of them. There is no
// other implementation to learn them from. These are ours, all of them:
//
//	Version            1
//	Type (bits 7..3)   1 Send, 2 RDMA Read Request, 3 RDMA Read Response, 4 RDMA Write,
//	                   5 NOP, 6 Connect Request, 7 Connect Accept, 8 Connect Reject,
//	                   9 Connect No Match
//	Flags (bits 2..0)  1 Immediate Data Valid, 2 End of Message, 4 Transmit Error
//	Remote Error Code  the VI error type in the first byte, the IS code in the second
//	VI error type      0 no error, 1 RDMA memory protection, 2 VI descriptor
//	IS error code      0 none, 1 no receive posted, 2 receive too small, 3 unknown
//	                   handle, 4 out of bounds, 5 no right, 6 READ window exceeded,
//	                   7 memory of the receive is gone, 8 transfer too long, 9 transmit error
//	Attributes         0x0001 Reliable, 0x0002 RDMA Write, 0x0004 RDMA Read,
//	                   0x0008 Descriptor Flow Control, 0x0010 Peer-to-peer
//	RDMA Length        with Transmit Error: still that of the whole message
//	TCP port           none; the configuration names it, the same one on all hosts
//
// # What the draft leaves open
//
// Every segment of an RDMA message has the RDMA header, with the same content. Send, Write
// and Read Request share one sequence of message numbers; a Connect Request or
// Accept has the number before the first one. Reliable means reliable reception: a
// work request completes when the peer says that its message was delivered. The READ
// window is the lesser of both and holds in both directions. After an error is
// reported, the connection ends. A connection ends in order by FIN, between messages.
//
// # Limitations
//
// Nothing protects the bytes but TCP's checksum, and nobody proves who they are: the
// security information travels, and its meaning is the program's. Segments are not
// fitted to TCP's, whose bounds a socket does not show; a shell may make them shorter.
package vitcp
