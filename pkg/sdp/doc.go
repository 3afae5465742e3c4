// SPDX-License-Identifier: Apache-2.0

// Package sdp carries the two byte streams of a TCP connection by RDMA, with the Sockets Direct Protocol
// (draft-pinkerton-iwarp-sdp-01). A [Conn] is a net.Conn; besides, a program can send what it has in a [Buffer] into a
// Buffer of the peer, without a copy in between.
//
//	dev, err := softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: netip.MustParseAddr("192.0.2.1")})
//	stack, err := sdp.NewStack(sdp.Config{Device: dev})
//	conn, path, err := (&sdp.Dialer{Stack: stack}).Dial(ctx, "192.0.2.2:7")
//	...
//	buf, err := stack.AllocBuffer(1 << 20)
//	n, err := conn.(*sdp.Conn).WriteBuffer(buf, 0, 1<<20)
//
// The protocol is that of [github.com/smcr-io/kube-smcr/pkg/sdp/socket]; this package is its shell: it has the queue pairs, the
// registered memory, the TCP connections and the clock.
//
// # What is copied, and when
//
//	Write          into a message in registered memory; the peer's Read or ReadBuffer copies it out again
//	WriteBuffer    nothing, if the peer reads with ReadBuffer and both are longer than Config.ZcopySize; otherwise as Write
//	Read           out of a receive buffer
//	ReadBuffer     nothing, if the peer writes with WriteBuffer and both are longer than Config.ZcopySize; otherwise as Read
//
// These are the copies that this package makes. A device in software makes its own: it copies the bytes of an RDMA READ into
// the kernel and out of it, as TCP does, and once more to their place. Only an RNIC moves bytes without any processor copying them.
//
// # Who owns what
//
// A [Stack] owns the device's context and a protection domain for Buffers. A Conn owns a protection domain, a queue pair, and the
// memory of its messages, which is 1.5 MiB with the defaults. A suspension, its own ([Conn.Suspend]) or the peer's, gives the Conn
// another queue pair. A peer reaches memory of a program only by a key that was made for exactly the bytes of one transfer and
// grants one right; the key is dead before the transfer is over. Whoever holds the turn of a Conn drives its machine.
//
// # Over what it runs
//
// Software iWARP (pkg/rdma/softiwarp) is used as the draft has it: the connection begins as plain TCP, Hello is the last message
// of that, and HelloAck is the first message of iWARP.
//
// RoCE v2 devices carry SDP in a profile of this project, which no other implementation speaks. The peers tell each other of their
// queue pairs on the TCP connection; it then stays open and idle, and its end is the end of both streams.
//
// iWARP adapters that open their TCP connections themselves (a [cm.Device]: pkg/rdma/verbs is one for RNICs and for Linux' siw) have
// no streaming mode. There, Hello goes in the MPA Request, as InfiniBand's SDP has it in the request of its connection manager. The
// connecting peer has to send first, so it sends one byte, and HelloAck is the answer. The set-up of the draft is impossible on such
// adapters: one peer would send Hello before the MPA Request, the other the Request on a connection that it accepted. softiwarp
// can speak to them: with Config.HelloInRequest it does as they do.
//
// # Limitations
//
//   - A connection has one path and one queue pair: it does not survive the loss of its path.
//   - Nothing is authenticated, and nothing is encrypted.
//   - A suspended connection goes on in the same process, on the same stack, between the same addresses. Its next TCP connection
//     belongs to the network namespace of the process.
//   - A transfer whose Buffer is advertised to the peer ends when the peer says so, and not at the deadline. From the deadline on the peer
//     has 5 s, and again 5 s after each part that moves; then the connection ends.
//   - Out-of-band bytes can be read only when all bytes before them were read.
//   - Adapters that open their TCP connections themselves have no suspension, no [Stack.Client] and no [Stack.Server]. A port mapper is
//     asked by their kernel, if by anybody.
package sdp
