// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"net"
	"net/netip"
	"sync"
)

// Of returns the address under which the places of a peer are counted: that of IPv4, or the /64 network of that of IPv6. Whoever has one
// address of IPv6 usually has its whole network, and shall not be as many peers as the network has addresses.
func Of(remote net.Addr) netip.Addr {
	at, _ := netip.ParseAddrPort(remote.String()) // it is one
	a := at.Addr().Unmap().WithZone("")
	if a.Is6() {
		const network = 64
		a = netip.PrefixFrom(a, network).Masked().Addr()
	}
	return a
}

// Places are the places of one listener that its peers have taken.
type Places struct {
	most int // of one

	mu    sync.Mutex // guards what follows
	taken map[netip.Addr]int
}

// New makes Places of which one peer may have so many at a time.
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

// GiveBack gives back a place that Take took for the peer.
func (p *Places) GiveBack(peer netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken[peer]--; p.taken[peer] == 0 {
		delete(p.taken, peer)
	}
}
