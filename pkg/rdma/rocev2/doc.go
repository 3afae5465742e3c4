// SPDX-License-Identifier: Apache-2.0

// Package rocev2 is the wire and the queue pairs of RoCEv2: the packets of
// InfiniBand's reliable connected (RC) service in UDP port 4791, their
// invariant CRC, and the requester and responder of one queue pair.
//
// It is PURE: packets come in by [QP.HandlePacket] and go out by [QP.PollTx],
// time comes in as an argument, and [QP.NextTimeout] says when
// [QP.HandleTimeout] is due. The same inputs give the same outputs.
// The shell that gives it sockets, memory and a clock is
// [github.com/smcr-io/kube-smcr/pkg/rdma/soft].
//
// # Who owns what
//
// A [QP] belongs to whoever holds the device's queue pair and is not safe for
// concurrent use. It never copies what it sends: a [TxPacket] refers to
// registered memory. It copies what it receives, once, into registered
// memory. Nothing is allocated after [NewQP].
//
// # How to use it
//
//	q.PostSend(now, wrs)
//	n := q.PollTx(now, pkts)      // send them: header, payload, pad, ICRC
//	...
//	if icrc.Check(b, 0) && pkt.Parse(b) == nil {
//		q.HandlePacket(now, &pkt)
//	}
//	n = q.PollTx(now, pkts)       // acknowledgements and what they let go
//	n = q.PollWC(wcs)
//	t, ok := q.NextTimeout()
//
// # Limitations
//
// No atomics, no SEND with invalidate, no memory windows, no path migration:
// a peer that asks for them gets NAK "invalid request". No congestion control
// beyond the window. Acknowledgements carry no credits.
package rocev2
