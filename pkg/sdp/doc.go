// SPDX-License-Identifier: Apache-2.0

// Package sdp carries the two streams of a TCP connection by RDMA, with the Sockets Direct Protocol
// (draft-pinkerton-iwarp-sdp-01): a [Conn] is a net.Conn, and what a program puts into a [Buffer] goes to a Buffer of the
// peer without a copy in between.
//
//	dev, err := softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: netip.MustParseAddr("192.0.2.1")})
//	stack, err := sdp.NewStack(sdp.Config{Device: dev})
//	conn, path, err := (&sdp.Dialer{Stack: stack}).Dial(ctx, "192.0.2.2:7")
//	...
//	buf, err := stack.AllocBuffer(1 << 20)
//	n, err := conn.(*sdp.Conn).WriteBuffer(buf, 0, 1<<20)
//
// The protocol is that of [github.com/smcr-io/kube-smcr/pkg/sdp/socket]; this package is its shell: queue pairs, memory, connections of
// TCP, time.
//
// # What is copied, and when
//
//	Write          into a message, in registered memory; and out of it by the peer's Read or ReadBuffer
//	WriteBuffer    nothing, if the peer reads with ReadBuffer and both are long (Config.ZcopySize); else as Write
//	Read           out of a receive buffer
//	ReadBuffer     nothing, as WriteBuffer
//
// On a device in software an RDMA READ is a copy into the kernel and one out, as TCP has them, and one to its place: what this package
// does not copy, that device still does. Without a copy of any processor is only what an RNIC moves.
//
// # Who owns what
//
// A [Stack] owns the device's context and a protection domain for Buffers. A Conn owns a protection domain of its own, a queue pair, and the
// memory of its messages: 1.5 MiB with the defaults. After a suspension, its own ([Conn.Suspend]) or the peer's, it has another queue
// pair. The peer reaches nothing of it but by a key for exactly the bytes of one transfer, with
// one right, which is dead before the transfer is over. Whoever has the turn of a Conn drives its machine.
//
// # Over what it runs
//
// Over iWARP in software (pkg/rdma/softiwarp) as the draft has it. The connection begins as TCP; Hello is its last message, and
// HelloAck the first one of iWARP. A device with RoCE v2 carries it in a profile of ours, which nobody else speaks: both peers
// tell of their queue pairs on the connection of TCP, which then stays open and idle, and stands for the end of both streams.
//
// Over iWARP adapters that open their connections of TCP themselves (a [cm.Device], as pkg/rdma/verbs has for RNICs and Linux' siw) there
// is no streaming mode: Hello goes in the MPA Request, as InfiniBand's SDP has it in the request of its connection manager, and the connecting
// peer sends one byte before HelloAck, for it is the first who has to send. softiwarp does the same with Config.HelloInRequest, and so speaks to
// such adapters: one that makes its own connections can neither send Hello before the Request nor send the Request on a connection
// that it accepted, which the draft's set-up asks for.
//
// # Limitations
//
// SDP has one path and one queue pair per connection: with the loss of the path the connection is lost. Nothing is authenticated, and
// nothing is encrypted. A connection that is suspended goes on in the same process, on the same stack, between the same addresses, and its
// next connection of TCP belongs to the network namespace of the process. A peer that has a Buffer advertised
// decides when a transfer of it ends: behind a deadline it has 5 s, and again with each part that moves; then the connection ends. Out-of-band bytes are to be had in their order only. On
// adapters that make their own connections of TCP there are no suspension, no [Stack.Client] and no [Stack.Server], and a port mapper is
// asked by the kernel, if by anybody.
package sdp
