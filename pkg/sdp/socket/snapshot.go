// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// Snapshot is what a socket is at a moment, for checkers and for people.
type Snapshot struct {
	State State
	Err   error

	// Our stream.
	SendMode             bsdh.Mode
	Produced, Sent       uint64 // bytes written by the program; with the peer, or on their way in a message
	SrcAdverts           []rdma.RKey
	Forced               uint64 // bytes that must go by Bcopy
	PeerSinks            []rdma.RKey
	Writing              int    // RDMA WRITEs under way
	WindowOpen           bool   // ModeChange to Combined is not acknowledged
	PotentialNonDiscards uint32 // PotentialNonDiscards
	CancelSrcPending     bool
	Writes               int
	FinSent, SendsIdle   bool

	// The peer's stream.
	RecvMode          bsdh.Mode
	SinkAdverts       []rdma.RKey
	PeerSrcs          []rdma.RKey
	Held              uint32 // bytes in receive buffers
	Owed              uint32 // bytes that the peer must send by Bcopy
	Reading           int    // RDMA READs under way
	NonDiscards       uint32
	CancelSinkPending bool
	Reads             int
	PeerDone          bool

	CreditSnapshot
}

// CreditSnapshot is the part of a [Snapshot] about receive buffers, which both directions share.
type CreditSnapshot struct {
	Available int // messages that we may send
	PeerHas   int // messages that the peer may send, as far as we told it
	Posted    int // receive buffers
	AckHeld   bool
	SentSeq   uint32

	RecvBytes, PeerRecvBytes uint32 // size of each, in bytes
	Resizing                 bool   // one of both peers waits for an answer
}

// Snapshot returns a copy of what is worth seeing.
func (s *Socket) Snapshot() Snapshot {
	o, k, c := &s.src, &s.snk, &s.credits
	v := Snapshot{
		State: s.state, Err: s.err,
		SendMode: o.mode, Produced: o.produced, Sent: o.next, Forced: max(o.forced, o.next) - o.next, Writing: o.flight.n,
		WindowOpen: o.window.open, PotentialNonDiscards: o.potential, CancelSrcPending: o.cancel.sent, Writes: o.writes.n,
		FinSent: s.end.finSent, SendsIdle: s.sends.posted == s.sends.done,
		RecvMode: k.mode, Owed: k.owed, Reading: k.flight.n, NonDiscards: k.nonDiscards, CancelSinkPending: k.cancel.sent,
		Reads: k.reads.n, PeerDone: k.done,
		CreditSnapshot: CreditSnapshot{
			Available: c.available(), PeerHas: c.peerHas(), Posted: c.posted, AckHeld: c.holds, SentSeq: c.sent,
			RecvBytes: s.size.recvBytes, PeerRecvBytes: s.peer.recvBytes, Resizing: s.size.isBusy() || s.size.asked > 0,
		},
	}
	for i := range o.srcs.n {
		v.SrcAdverts = append(v.SrcAdverts, o.srcs.at(i).key)
	}
	for i := range o.sinks.n {
		v.PeerSinks = append(v.PeerSinks, o.sinks.at(i).key)
	}
	for i := range k.adv {
		v.SinkAdverts = append(v.SinkAdverts, k.reads.at(i).key)
	}
	for i := range k.srcs.n {
		v.PeerSrcs = append(v.PeerSrcs, k.srcs.at(i).key)
	}
	v.Held = uint32(k.count.bytes + k.count.kept)
	return v
}

func (v Snapshot) String() string {
	return fmt.Sprintf("%v: out %v, %d of %d bytes sent, %d offered, %d of the peer's buffers; in %v, %d bytes held, %d owed, "+
		"%d offered by the peer, %d buffers advertised of %d; may send %d messages, peer %d",
		v.State, v.SendMode, v.Sent, v.Produced, len(v.SrcAdverts), len(v.PeerSinks), v.RecvMode, v.Held, v.Owed,
		len(v.PeerSrcs), len(v.SinkAdverts), v.Reads, v.Available, v.PeerHas)
}
