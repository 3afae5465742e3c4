// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"container/list"
	"net/netip"
	"time"
)

// peer is what a server knows of an address that has sent to it.
type peer struct {
	key     netip.Addr
	busy    time.Time // each datagram moves it peers.each into the future; more than peers.burst ahead is too many
	pending int       // transactions
	at      *list.Element
}

// idle reports whether the peer can be forgotten without effect.
func (p *peer) idle(now time.Time) bool { return p.pending == 0 && !now.Before(p.busy) }

// peers are the peers that have sent lately.
type peers struct {
	limit  int
	each   time.Duration // time between datagrams at the allowed rate
	burst  time.Duration // the same for as many as may come at once
	known  map[netip.Addr]*peer
	order  list.List // of *peer, by when they last sent
	others peer      // all for whom there is no room, as one
}

func newPeers(limit, rate, burst int) peers {
	each := time.Second / time.Duration(rate)
	return peers{limit: limit, each: each, burst: each * time.Duration(burst), known: make(map[netip.Addr]*peer)}
}

func (s *peers) len() int { return len(s.known) }

// find returns the peer of an address. Who has one address of IPv6 has the network of it, and is
// one peer by all of them.
func (s *peers) find(now time.Time, a netip.Addr) *peer {
	if a.Is6() {
		const network = 64
		a = netip.PrefixFrom(a, network).Masked().Addr()
	}
	if p := s.known[a]; p != nil {
		s.order.MoveToBack(p.at)
		return p
	}
	if len(s.known) >= s.limit {
		oldest := s.order.Front().Value.(*peer)
		if !oldest.idle(now) {
			return &s.others
		}
		s.order.Remove(oldest.at)
		delete(s.known, oldest.key)
	}
	p := &peer{key: a}
	p.at = s.order.PushBack(p)
	s.known[a] = p
	return p
}

// take takes one datagram from what a peer may send, and reports whether it was still in it.
func (s *peers) take(now time.Time, p *peer) bool {
	if p.busy.Before(now) {
		p.busy = now
	}
	next := p.busy.Add(s.each)
	if next.Sub(now) > s.burst {
		return false
	}
	p.busy = next
	return true
}
