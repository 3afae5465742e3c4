// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"math"
	"math/bits"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// A network between two nodes may carry only smaller packets than the interfaces at both ends do: through a tunnel, or a switch
// that was forgotten when the MTU was raised. The path MTU that the two sides agree on (RFC 7609 A.2.3) is that of their ports. So
// messages pass, which are small, and a large WRITE never does: its queue pair runs out of retries, and the link ends. RoCE packets
// are not fragmented, and nobody is told of the loss. Without a memory the next link group would be made with the same path MTU, and
// end likewise.
//
// What follows a lost packet on a queue pair is not acknowledged either, so that nothing shows that smaller packets go on
// passing. But the link has a history. Its path MTU is taken to be too large if
//
//   - it ended because its queue pair ran out of retries;
//   - the peer had acknowledged all messages before that WRITE, and there were some;
//   - and never a WRITE with a packet of this size or larger.
//
//	the path is lost under bulk data           large packets were acknowledged before     the path MTU stays
//	the path is lost, and nothing is sent      TEST LINK is lost first, a small message   the path MTU stays
//	large packets do not pass                  the first large one is lost                it becomes smaller
//	the path, or the peer, is lost just        the first large one is lost                it becomes smaller,
//	before the first large packet is sent                                                 without need
//
// The last case looks like the one before: TEST LINK leaves it linkgroup.TestLinkInterval, and it happens to links that are
// new. A smaller path MTU for some minutes does little harm there. So the memory lapses by itself, it is of one peer only, whose
// packets nobody else's depend on, and a loss takes the path MTU down by one step: further only down to plainMTU.
//
// Where a group has two links, the first that stalls is given up before its queue pair has used up the retries, and the last one
// tells. So what is found out holds for all paths to the peer. Both ends send with the smaller path MTU of what they
// offer: it does not matter which of them has found out.

const (
	// pathMTUTime is how long a peer is offered a smaller path MTU. When it is over and large packets still do not pass, some
	// connections are reset anew: the operator has to end that, and is told.
	pathMTUTime = 10 * time.Minute
	// maxPathMTUs bounds the peers of which a path MTU is remembered.
	maxPathMTUs = 1024
	// plainMTU is the largest path MTU whose packets fit into frames of Ethernet that are no jumbo frames, also in a tunnel. Where
	// packets of this size, or smaller ones, are lost while the path MTU is larger, that is for another reason.
	plainMTU = rdma.MTU1024
)

// errPathMTU: the network has not even carried packets of the smallest path MTU.
var errPathMTU = errors.New("smcr: RDMA packets of 256 bytes do not reach the peer; no link with it for some minutes")

// PathMTU tells that the network between two RNICs seems to carry only smaller packets than their ports do.
type PathMTU struct {
	Peer    netip.Addr // in the TCP connection
	PeerGID rdma.GID   // the peer's RNIC
	Device  string
	Lost    rdma.MTU // packets were lost that fit into this path MTU, and into no smaller one
	Next    rdma.MTU // links with the peer have no larger path MTU for some minutes; 0: there are no links, but plain TCP
}

// pathPeer is whom a path leads to: the peer of a [party], in either role.
type pathPeer struct {
	addr netip.Addr
	id   clc.PeerID
}

func (g *group) pathPeer() pathPeer {
	p := g.party()
	return pathPeer{p.addr, p.peer}
}

// pathMTUs are the largest path MTUs that peers are offered, where it is not that of the port. It is guarded by the stack's turn.
type pathMTUs map[pathPeer]pathMTU

type pathMTU struct {
	most  rdma.MTU // 0: none
	until time.Time
}

// most is the largest path MTU with a peer, as far as it is known; 0: none is small enough.
func (m pathMTUs) most(now time.Time, p pathPeer) rdma.MTU {
	if e, ok := m[p]; ok && now.Before(e.until) {
		return e.most
	}
	return rdma.MTU4096
}

// lower remembers that a path MTU is the largest one with a peer, unless that is a smaller one already.
func (m pathMTUs) lower(now time.Time, p pathPeer, mtu rdma.MTU) {
	mtu = min(mtu, m.most(now, p))
	if _, known := m[p]; !known && len(m) >= maxPathMTUs {
		m.makeRoom(now)
	}
	m[p] = pathMTU{mtu, now.Add(pathMTUTime)}
}

// makeRoom forgets all whose time is over or, if there is none, the one whose time is over first.
func (m pathMTUs) makeRoom(now time.Time) {
	var first pathPeer
	for p, e := range m {
		if !now.Before(e.until) {
			delete(m, p)
		} else if f, ok := m[first]; !ok || e.until.Before(f.until) {
			first = p
		}
	}
	if len(m) >= maxPathMTUs {
		delete(m, first)
	}
}

// packetSizes tell of each path MTU which message of a link follows the first WRITE whose largest packet is so large that it needs
// this path MTU; 0: there was no such WRITE.
type packetSizes [rdma.MTU4096 + 1]uint64

// note is called for each WRITE, of n bytes and before the message msg.
func (s *packetSizes) note(n uint32, mtu rdma.MTU, msg uint64) {
	if need := min(mtuOf(n), mtu); s[need] == 0 {
		s[need] = msg
	}
}

// mtuOf is the smallest path MTU with which n bytes are one packet, and has values beyond the largest one. Of 128 bytes
// and less it is 0: they are no larger than messages are.
func mtuOf(n uint32) rdma.MTU { return rdma.MTU(bits.Len32((max(n, 1) - 1) >> 7)) }

// lost is the path MTU of the packets that the path seems not to carry, of a link that has so many messages acknowledged and has run
// out of retries; 0: nothing says so.
func (s *packetSizes) lost(acknowledged uint64, mtu rdma.MTU) rdma.MTU {
	if acknowledged == 0 {
		return 0 // the path carries nothing
	}
	for m := mtu; m > 0; m-- {
		switch at := s[m]; {
		case at == 0: // there was none; or, at > acknowledged+1, there are some behind what was lost
		case at <= acknowledged:
			return 0 // it carries such packets, or did
		case at == acknowledged+1 && (m == mtu || m > plainMTU):
			return m
		}
	}
	return 0
}

// writeID is the ID of all RDMA WRITEs. The operation of a completion with an error is not known of all devices.
const writeID = math.MaxUint64

// outOfRetries is told that the link's queue pair got no acknowledgement for its oldest request, a WRITE. Messages that are acknowledged were
// counted before: their completions come before that of the failure.
func (l *link) outOfRetries(now time.Time) {
	lost := l.sizes.lost(l.complete, l.peer.MTU)
	if lost == 0 {
		return
	}
	g := l.g
	p := g.pathPeer()
	g.s.pathMTUs.lower(now, p, lost-1)
	if h := g.s.cfg.Hooks.PathMTU; h != nil {
		h(PathMTU{Peer: g.addr, PeerGID: l.peer.GID, Device: l.rnic.dev.Name(), Lost: lost, Next: g.s.pathMTUs.most(now, p)})
	}
}

// offeredMTU is the path MTU that the peer of a new link on a device is offered.
func (g *group) offeredMTU(now time.Time, r *rnic) (rdma.MTU, error) {
	most := g.s.pathMTUs.most(now, g.pathPeer())
	if most == 0 {
		return 0, errPathMTU
	}
	return min(r.dev.Port().ActiveMTU, most), nil
}
