// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// link is one queue pair between the two peers.
type link struct {
	index       LinkIndex
	id          llc.LinkID
	local, peer Endpoint
	peerUserID  uint32
	state       linkState
	born        uint64    // order in which links became ACTIVE
	asymmetric  bool      // shares an RNIC of one side with another link; see classify
	queue       []message // LLC messages that wait for room, see maySend
	ready       connQueue // connections that write over this link and have something to send
	conns       int       // connections that write over this link, or are about to
	inflight    int       // SENDs that have not completed
	untilLong   int       // how many of these end with the long LLC message among them; 0: none is long
	awaiting    int       // connections that depend on hearing of that at once
	health
	drainBy    time.Time      // DRAINING: when connections that still use it fail over
	deletion   llc.DeleteLink // DRAINING: what the peer is told once no connection uses it
	sent, recv uint64         // stream bytes
}

// place names a link's place in its group, or none.
type place uint8

// noPlace is none; the others are one more than the LinkIndex.
const noPlace place = 0

// linkState is the life of a link.
//
//	DOWN --> WANTED --> FORMING --> ACTIVE --> DRAINING --> DOWN
//	           |           |          |                      ^
//	           +-----------+----------+----------------------+
type linkState uint8

const (
	linkDown     linkState = iota // no such link
	linkWanted                    // the shell was asked for a queue pair
	linkForming                   // the queue pair exists, its path is not proven
	linkActive                    // carries connections
	linkDraining                  // connections leave it, then the peer is told
)

func (s linkState) String() string {
	switch s {
	case linkWanted, linkForming:
		return "FORMING"
	case linkActive:
		return "ACTIVE"
	case linkDraining:
		return "DRAINING"
	case linkDown:
	}
	return "DOWN"
}

func (l *link) place() place {
	if l == nil {
		return noPlace
	}
	return place(l.index) + 1
}

// isUp reports whether messages can be sent over the link in an established
// group.
func (l *link) isUp() bool { return l.state == linkActive || l.state == linkDraining }

// crosses reports whether a link is known to join two subnets.
func (l *link) crosses() bool { return l.local.crosses(l.peer) }

// sharesRNIC reports whether two links share an RNIC of either side.
func (l *link) sharesRNIC(o *link) bool { return l.local.RNIC == o.local.RNIC || l.samePeer(o.peer) }

// samePeer reports whether two links end at the same RNIC of the peer.
func (l *link) samePeer(e Endpoint) bool { return l.peer.GID == e.GID && l.peer.MAC == e.MAC }

// peerHalf is the peer's half of the link, for the shell.
func (l *link) peerHalf() *Endpoint {
	e := l.peer
	if e.Router == (rdma.MAC{}) {
		e.Router = l.local.Router
	}
	return &e
}

// message is an LLC message as Output has it: one that does not fit into short
// is in long.
type message struct {
	short [llc.Size]byte
	long  []byte
}

// send queues an LLC message on the link.
func (l *link) send(m llc.Message) {
	invariant.Must(l.state > linkWanted, "LLC message for a link without a queue pair")
	var q message
	if b := m.Append(q.short[:0]); len(b) > llc.Size {
		q.long = b
	}
	l.queue = append(l.queue, q)
}

// maySend reports whether there is room for the next LLC message: in the send budget and, for a long one, in
// the one place that the shell has for it.
func (l *link) maySend() bool {
	return l.inflight < SendBudget && (l.untilLong == 0 || l.queue[0].long == nil)
}

// pump turns waiting LLC messages into SENDs as far as there is room, and counts them.
func (l *link) pump(out *outbox) (sent uint64) {
	for len(l.queue) > 0 && l.maySend() {
		l.inflight++
		if l.queue[0].long != nil {
			l.untilLong = l.inflight
		}
		out.put(Output{Kind: OutSend, Link: l.index, Msg: l.queue[0].short, Long: l.queue[0].long})
		l.queue[0] = message{}
		l.queue = l.queue[1:]
		sent++
	}
	return sent
}

// isIdle reports whether the link has nothing that can go out now.
func (l *link) isIdle(carriesData bool) bool {
	return (len(l.queue) == 0 || !l.maySend()) &&
		(l.ready.empty() || !carriesData || l.inflight >= SendBudget-llcReserve)
}

// completed counts a SEND that has completed: they do in their order.
func (l *link) completed() {
	l.inflight--
	l.untilLong = max(l.untilLong-1, 0)
}

// isSending reports whether messages are under way, or wait.
func (l *link) isSending() bool { return l.inflight > 0 || len(l.queue) > 0 }
