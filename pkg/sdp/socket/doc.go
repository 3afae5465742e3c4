// SPDX-License-Identifier: Apache-2.0

// Package socket is the machine of one socket of the Sockets Direct Protocol for iWARP
// (draft-pinkerton-iwarp-sdp-01): set-up, both directions of data with their modes, credits, and the end.
//
// It is PURE: inputs are method calls, [Socket.Poll] says what to do, time comes in as an argument, and NextTimeout says
// when HandleTimeout is due. The same inputs give the same outputs. It moves no bytes: payload is a stretch of our
// stream on the way out, and a stretch of a receive buffer on the way in.
//
// # Words
//
// Each peer is the Data Source of its own stream and the Data Sink of the other's. Bcopy sends bytes in messages; by
// Read Zcopy the sink reads what the source offers (SrcAvail, RdmaRdCompl); by Write Zcopy the source writes into a
// buffer that the sink offers (SinkAvail, RdmaWrCompl). What is offered is an advert, and it is processed when the
// last message about it is sent. A direction is in one of three modes: Buffered has Bcopy; Combined has
// Read Zcopy too, one advert at a time; Pipelined has all, and many.
//
// # How to use it
//
// The connecting peer sends what OutHello has, raw, and the accepting peer gives that to HandleHello. From then on each
// receive completion goes to HandleRecv, each completion of the send queue to HandleSent, HandleRead or
// HandleWrite, and after every call:
//
//	for _, o := range s.Poll(outputs[:0]) {
//		// copy, post, repost or tell, in this order
//	}
//
// # Who owns what
//
// A Socket belongs to one owner and is not safe for concurrent use. Memory of a Write is the socket's until OutWritten,
// that of a Read until OutRead; the key of an advert is worthless before. [Memory] is called from within the
// methods.
//
// # What the draft leaves open
//
//   - An MSeqAck of 0 is nothing, or the first message (§6.1.6). Until another was seen it is taken for nothing, and a
//     limit that was told is not taken back.
//   - The acknowledgement of a SrcAvailCancel is held back while an RDMA READ is under way, and not until it is
//     reported (§9.5.4): a message whose acknowledgement is held back gives no credit, and two peers without
//     credit would wait for each other.
//   - SinkCancelAck waits for the end of such a hold: its receiver tells it from a late one by its MSeqAck, and takes all
//     adverts back when it comes.
//   - RdmaWrCompl is posted right behind its RDMA WRITE and not after that has completed (§9.3): the queue pair keeps
//     their order. The program's memory waits for the completion. RdmaRdCompl waits for that of the RDMA READ.
//   - RdmaWrCompl of 0 bytes gives an advert back unused, if no other one is behind it, and breaks the protocol else: the peer
//     would fill the next one first.
//   - After SendSm nothing is advertised until the bytes that it asked for have come: SinkAvail would cross them, be
//     stale, and yet make us ignore adverts that the peer thinks are alive (§11.3).
//   - A SinkAvail that arrives between ModeChange to Combined and its acknowledgement is compared with the count of
//     the time of ModeChange (§12.4).
//   - A message that only gives credit is answered late, if at all: else two starved peers would answer each other
//     for ever (§10.4).
//   - With two credits no payload may go, and the peer need not give more before there is one (§10.5): a message without
//     payload uses one up, after a while.
//   - Two ChRcvBufs cross when neither acknowledges the other; a peer that owes an answer does not ask (§10.6.1). A second
//     request waits until the receive buffers of the size before the first are gone.
//   - The answer to a request for more waits, too, for adverts of buffers that are not longer (§10.6): the draft would have
//     them, and a message of the new size would not fit into one.
//   - Behind SuspComm its sender gives no more credit, so what is kept back for messages that give some (§10.5) may be used
//     up by the answer and what must go before it; to a peer without any credit one payload-free Data goes all the same.
//     Both ends of streams are told again on the next connection. A shell that knows nothing of it (no
//     [Config.Suspends]) ends the connection at SuspComm, which the draft does not allow.
//   - When both DisConns cross, both peers end the transport connection; else the second does (§8.2.1).
//
// # Limitations
//
// An RDMA WRITE is of one Write only. The port mapper is package portmap.
package socket
