// SPDX-License-Identifier: Apache-2.0

// Package tcpqp runs queue pairs whose protocol is a stream on TCP connections: iWARP and
// VI/TCP. It moves bytes between sockets and registered memory, with no copy of its own,
// and knows nothing of what they mean. A provider embeds a [QP] in its type of queue pair,
// beside the protocol, a [Stream].
//
// # Who owns what
//
// A connection belongs to its queue pair from [QP.Attach] to [QP.Detach], or to the end of
// the stream. All calls of the protocol, and all bytes that come and go, are those of the
// queue pair's owner: see pkg/rdma/internal/softdev.
//
// Each connection has one goroutine that waits in the network poller. Awake it owns the queue
// pair, makes one recvmsg that does not wait, steps, and lets go. Who posts and finds the queue
// pair free transmits with one sendmsg in its own goroutine; while the socket is full, a
// second goroutine waits for room.
//
//	poster                     reader                       writer
//	Lock or ring               waits for bytes
//	PostSend, sendmsg          Lock, recvmsg, HandleRx, step
//	  full: start the writer   Unlock, again until EAGAIN   waits for room
//	                                                        Lock, step, until it is not full
//
// The goroutines are the [Host]'s, the provider's device, and not the queue pair's: a queue pair that
// is closed or reset lets its connection go at once, and has no part in its end.
//
// # How a connection ends
//
// Closing a socket that has unread bytes resets the connection, and the peer may lose what was
// sent before. So a connection that was let go lingers: our half ends, what still comes is
// dropped, and the socket is closed when the peer ends its half, too, or after a moment. Only where
// a protocol cannot end what it began to say, the connection is reset.
package tcpqp
