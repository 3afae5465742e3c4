// SPDX-License-Identifier: Apache-2.0

// Package clc has the Connection Layer Control messages of SMC-R and the two
// machines of the rendezvous: how a client and a server whose SYN and SYN-ACK
// carried the SMC-R option agree, over the new TCP connection, on the link and
// the RMB elements that will carry its data (RFC 7609 §3.2, §3.5.1, §3.5.2,
// A.2, C.1 to C.6). Version 2 messages have the layout of Linux 6.12.
//
// It is PURE: no sockets, no clock. The shell reads and writes TCP, the LLC and
// link group packages do the RDMA part in between.
//
// # Messages
//
// [Proposal], [Accept], [Confirm] and [Decline] are plain values with a ParseX
// function and an Append method. Captured messages of Linux come out of Append
// byte for byte. Reserved bytes are written as zero and not looked at.
//
// Errors keep two cases apart (RFC 7609 C.6). A [*ParseError] means that this
// is not the CLC message that was due: the TCP connection must be reset. An
// error that matches [ErrDecline], a [*DeclineError], means that the peer asks
// for something we do not have: decline with its code and use TCP.
//
// # Machines
//
// A [Client] or [Server] belongs to one goroutine. Its methods never block:
//
//	for !m.State().Done() {
//		for _, o := range m.Poll(nil) { ... }       // in order
//		read m.Want() bytes and call m.HandleData   // or m.HandleEOF
//		at m.NextTimeout call m.HandleTimeout
//	}
//
// Want is what keeps CLC messages and the application's data apart: the shell
// never reads more than it says, so that after [OutputDeclined] the next byte of
// the TCP connection belongs to the application. The one exception is marked by
// [Declined].MayCross, see [CrossingDecline].
//
// While the LLC messages of a first contact are exchanged, Want is not 0,
// because the peer may still decline; the shell reads and drives LLC at the same
// time, and stops reading when Want becomes 0. Bytes it had read by then, and bytes
// that come after the point of no return, go to HandleData nevertheless: the peer
// has declined too late, and the connection is reset. In the states
// [StateDeciding], [StateLinkSetup] and [StateCommitted] no timer of this
// package runs: the peer's next move is awaited elsewhere, and the shell or the
// LLC timers call Decline.
//
// # Versions
//
// [Config] says which versions are allowed and what we have of each; zero means
// version 1. A client proposes what [Config.Proposal] makes of it. A server
// chooses version 2 if there is an enterprise ID in common, else version 1 if it
// is offered and the IP subnets fit, else it declines ([SelectVersion]). What was
// agreed is in [Output].Selected, and the machines write it into Accept and
// Confirm: the shell fills in the link, the RMB element and, in version 2,
// whether the peer is reached without a router ([FirstContactExtension].Direct,
// [Accept.NextHop], [Confirm.NextHop]). A link group belongs to one version.
//
// # Who decides what
//
// The machine decides on the version and whether a Decline is still allowed. The
// shell decides whether to accept (its devices, routes and budgets), and tells
// the machine when LLC has passed the point of no return.
// Receive buffers must be posted, and the RMB element must be ready for RDMA
// writes, before Accept or Confirm is called: data may come before the TCP
// segment with the next CLC message does (RFC 7609 §3.5.2.4).
//
// # Limitations
//
// SMC-D is recognized and declined.
package clc
