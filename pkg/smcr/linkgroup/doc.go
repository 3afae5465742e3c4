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
// again later.
//
// # Parts
//
// A Group takes input and gives it to its parts. Each of them is a type with its states.
// Links are named by their place. What points from one part into another are a Conn, to
// its group and to the RMBs of both sides, a link's queue of connections, and peerKeys, to
// the RMB that a CONFIRM RKEY goes on about.
//
// The parts get at one another in two ways. Those that know a table or a clock (terms,
// linkTable, health, keyTable's lists, connTable, lastWords, outbox) get what they need as
// arguments. Those that carry an exchange on (setup, adding, side, growth, requests,
// announcement, peerKeys, a Conn) get the Group for the time of a call, since most of
// what a message means concerns several parts: they read the state of the others, and call
// methods to change it. Three things are simpler than that: a side writes the fields of
// adding, the other half of the same exchange; who handles a message writes the link that
// the message is about; and a Conn writes what its links, its RMB and connTable count of it.
//
//	terms         what both sides have agreed on             terms.go
//	linkTable     places, numbers, redundancy                links.go, link.go
//	health        silence of a link, and whose fault it is   silence.go
//	requests      our LLC exchanges, one at a time           requests.go
//	setup         first contact                              setup.go
//	adding        the exchange that adds a link              adding.go
//	growth        whether and when another link is tried     growth.go
//	side          what server and client do differently      side.go, adding_*.go, deleting_*.go
//	keyTable      our RMBs and the peer's RTokens            keys.go, rmbe.go
//	announcement  RKeys of ours                              ourkeys.go
//	peerKeys      RKeys of the peer                          peerkeys.go
//	connTable     connections by token                       conn.go
//	lastWords     what a group says after its end            lastwords.go
//	outbox        what the shell must do                     output.go
//
// What must hold between any two steps is in check.go; what is kept although it follows from
// the rest, as these counts, in derived.go.
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
//     has one under way at a time. Each link waits for its completion before the next,
//     so room for one of MaxMessage bytes is enough.
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
// not know we took. So those that are free go to nobody for RMBEHold from when
// the peer can have heard of the loss, and are to be zeroed once more
// (Conn.Stale). One whose last word does not come keeps its RMB from new
// connections, until DELETE RKEY can take it back. File: rmbe.go.
//
// # Snapshots
//
// [Group.Snapshot] says all that a group and its connections know, in any state and in the
// middle of any exchange, as a plain value that another process can read. [Restore] makes
// the same group of it: the same inputs, times and random numbers give the same outputs.
// Times in it are relative, so the two clocks may differ. No part of this is on the data
// path, and the shell does not use it yet.
//
// What the shell does around it:
//
//   - It stops all input, and takes the outputs with Poll until Idle says that there are
//     none. It carries them out: outputs are no part of a snapshot, which panics if there
//     are any. What Poll keeps back for want of send budget is in it.
//   - It drives the old group no further. Two groups of one snapshot are two senders with
//     the same sequence numbers.
//   - It moves what a group only counts: the bytes of RMBs and send buffers, the queue
//     pairs with what is under way on them, and the completions that were not handed in.
//     Work request IDs mean the same to the restored group.
//   - It finds its connections with [Group.ConnAt] by Conn.Slot, and asks NextTimeout anew.
//   - It gives Restore the timers and a random generator. What was negotiated is in the
//     snapshot. RNICs keep their numbers.
//
// Restore refuses what no group can have given, by the name of a field, and never panics.
// It does not prove that a snapshot is true: who can change one can write the peer's
// memory, as whoever drives a group can. Files: snapshot.go, snapshot_take.go, restore.go.
//
// # Limitations
//
// Of an error that ended a group a snapshot keeps the text and which errors of this package
// it is, not what else is wrapped in it. Only snapshots of this version are read.
//
// A peer may notice the loss of a link before we do, and then write into an
// RMBE that has another connection by now; of the free RMBEs the one that has
// been free for the longest time is given, so that this is unlikely.
//
// Which link a peer's connection has left is known from the message before. Of two links
// that it leaves one after the other, with no message over the second one, that one
// stands until the peer's DELETE LINK; and of a peer of our own kind with three links or
// more, which may move a connection in order and say nothing, the wrong one may be
// closed. A write that is held up may come over the one that stands.
//
// A group of version 2 takes messages of version 1 as well, as Linux does, but for
// those that offer a link; one of version 1 takes none of version 2. The target GID
// of ADD LINK is not looked at. An established group takes the link of a wrong
// message down, not the connections on it (C.7.1). A CONFIRM LINK that meets a
// CONFIRM RKEY of ours is answered at once, not queued (§3.5.5.3.3): the server has
// answered, or will, in the negative. A link is not deleted because nothing uses it
// (§3.5.5.1.3); the group is.
package linkgroup
