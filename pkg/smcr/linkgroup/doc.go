// SPDX-License-Identifier: Apache-2.0

// Package linkgroup is the SMC-R link group (RFC 7609 §2.2, §3.5, §4): its
// links, its RMBs and their RKeys, and the connections that share them. It
// composes packages llc and cdc into one machine.
//
// It is PURE: no sockets, clock, goroutines or locks. The shell (package smcr)
// owns a [Group] and drives it with four kinds of methods:
//
//	A  getters         State, Links, Conn, Info …
//	B  input           HandleRecv, HandleSent, HandleLinkFailure, HandleTimeout
//	C  commands        AddFirstLink, ConnectPeer, OpenConn, Conn.Produce …
//	D  output          Poll, NextTimeout
//
// After any number of B and C calls the shell takes the outputs with Poll and
// carries them out in order; what belongs to one link must be posted to that
// link's queue pair in that order, since a CDC message must not overtake the
// RDMA writes it announces (§4.7). The same inputs, times and random seed give
// the same outputs.
//
// # Ownership
//
// A Group and its Conns belong to whoever drives the group, one goroutine at a
// time. The bytes of RMBs and send buffers are not seen here; positions in
// them are.
//
// # Limitations
//
// A group has one link. The server offers a second one at once, as Linux and
// §3.5.1.6 demand, and the client declines it; a peer's second link is given
// back with DELETE LINK. The structures hold up to [MaxLinks] links.
package linkgroup
