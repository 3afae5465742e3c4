// SPDX-License-Identifier: Apache-2.0

// Package linkgroup is the SMC-R link group (RFC 7609 §2.2, §3.5, §4): its
// links, its RMBs and their RKeys, and the connections that share them. It
// composes packages llc and cdc into one machine.
//
// It is PURE: no sockets, clock, goroutines or locks. The shell (package smcr)
// owns a [Group] and drives it with four kinds of methods:
//
//	A  getters         State, Links, Conn, Info …
//	B  input           HandleRecv, HandleSent, HandleLinkFailure, HandlePort, HandleTimeout
//	C  commands        AddFirstLink, ConnectPeer, OfferLink, OpenConn, Conn.Produce …
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
// # Links
//
// A link is a place in the group (LinkIndex), which is known before the peer
// has agreed, and has a number on the wire (llc.LinkID), which the server
// gives. When a group can use another link it says EventWantLink; the shell
// answers with a queue pair over an RNIC of its choice (OfferLink) or NoLink.
// After OutCloseLink nothing of the link completes any more; its place is used
// again later. Files: links.go (states, redundancy), setup.go (first contact),
// addlink.go, dellink.go, failover.go, rkeys.go, version.go (what version 2 does
// otherwise), and flow.go, which lets one exchange of ours run at a time.
//
// A group that has ended (DEAD) has closed its links, but the shell should let the queue
// pairs that are sound linger for a moment, and go on with HandleRecv, HandleSent,
// HandleTimeout and Poll for them: the peer may have questions, or may have to be told
// of the end again, until PeerKnows says that it has heard. OutSend is all that
// comes then; what has no link any more is dropped. File: lastwords.go.
//
// An operator takes a link out of service with DeleteLink; no other one takes its
// place before AllowLinks, or before a port comes up.
//
// # Versions
//
// A group speaks the version of the protocol that CLC settled (Config.Version)
// for its whole life. In version 2 the shell does four things more:
//
//   - It takes LLC messages of up to llc.MaxSizeV2 bytes: OutSend has the bytes in
//     Output.Long when they are more than Output.Msg has room for, and HandleRecv
//     gets exactly what the completion's byte count says. CDC messages and most
//     LLC messages have 44 bytes in either version; of the longer ones each side
//     has one under way at a time.
//   - It sends to Endpoint.NextHop of the peer's half that OutReceive has. Where a
//     router is between the two sides, the shell sets Endpoint.Router in the half
//     given to ConnectPeer, and in our own half with OfferLink; ADD LINK
//     tells the peer. Zero means that both are on one subnet.
//   - It gives New the release and the limits that CLC negotiated.
//   - It answers a client's EventWantLink as in version 1: the queue pair's GID
//     goes into REQUEST ADD LINK. At the server, EventWantLink has the GID that the
//     client asked for in Output.Peer.
//
// # Connections
//
// Each side writes over a link of its choice. A connection moves in order, once
// nothing of it is under way, when links are balanced or deleted in order; off
// a lost link it fails over: validation, then everything again that may not
// have arrived (§4.6).
//
// # RMBEs
//
// An RMBE is given back when the peer has said its last word on the connection
// and nothing of ours is under way (Conn.Release). After the loss of a link it
// may still be written, by a peer that repeats over another link what it does
// not know we took; so for RMBEHold those that are free go to nobody, and are to
// be zeroed once more (Conn.Stale). One whose last word does not come keeps its
// RMB from new connections, until DELETE RKEY can take it back. File: rmbe.go.
//
// # Limitations
//
// A peer may notice the loss of a link before we do, and then write into an
// RMBE that has another connection by now; of the free RMBEs the one that has
// been free for the longest time is given, so that this is unlikely.
//
// A group of version 2 takes messages of version 1 as well, as Linux does, but for
// those that offer a link; one of version 1 takes none of version 2. The target GID
// of ADD LINK is not looked at. An established group takes the link of a wrong
// message down, not the connections on it (C.7.1). A CONFIRM LINK that meets a
// CONFIRM RKEY of ours is answered at once, not queued (§3.5.5.3.3): the server has
// answered, or will, in the negative. A link is not deleted because nothing uses it
// (§3.5.5.1.3); the group is.
package linkgroup
