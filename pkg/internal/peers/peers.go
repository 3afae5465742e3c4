// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"net"
	"net/netip"
	"sync"
)

// Of is by what the places of a peer are counted. Who has one address of IPv6 has the network of it, and is one peer by all of them.
func Of(remote net.Addr) netip.Addr {
	at, _ := netip.ParseAddrPort(remote.String()) // it is one
	a := at.Addr().Unmap().WithZone("")
	if a.Is6() {
		const network = 64
		a = netip.PrefixFrom(a, network).Masked().Addr()
	}
	return a
}

// Places are those that peers have.
type Places struct {
	most int // of one

	mu    sync.Mutex // guards what follows
	taken map[netip.Addr]int
}

// New makes places of which a peer may have so many.
func New(most int) *Places { return &Places{most: most, taken: make(map[netip.Addr]int)} }

// Take takes a place for a peer. It reports false if the peer has all that one may have.
func (p *Places) Take(peer netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken[peer] >= p.most {
		return false
	}
	p.taken[peer]++
	return true
}

// GiveBack ends Take.
func (p *Places) GiveBack(peer netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken[peer]--; p.taken[peer] == 0 {
		delete(p.taken, peer)
	}
}
