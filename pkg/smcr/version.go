// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"net"
	"net/netip"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

func defaultEID() clc.EID {
	e, err := clc.ParseUEID(DefaultEID)
	invariant.Must(err == nil, "smcr: the default enterprise ID is none")
	return e
}

// clcConfig is what a stack can do and may do on a connection.
func (s *Stack) clcConfig(tcp *net.TCPConn) clc.Config {
	return clc.Config{
		PeerID: s.peerIDFor(addrOf(tcp.RemoteAddr())), OS: clc.OSLinux, Hostname: s.cfg.Hostname, MessageTimeout: s.cfg.MessageTimeout,
		Support: clc.Support{
			V1: s.cfg.Versions != VersionsV2, V2: s.cfg.Versions != VersionsV1,
			Subnets: s.prefixes(addrOf(tcp.LocalAddr())), AnySubnet: s.cfg.AnyPrefix,
			EIDs: s.cfg.EIDs, Release: clc.MaxRelease,
			MaxConns: uint8(s.cfg.ConnsPerGroup), MaxLinks: uint8(s.cfg.LinksPerGroup),
		},
	}
}

// offer is the RNIC that a client proposes to a peer. It is always the same one while that works:
// Linux looks for a link group that has a link to it, and makes the first link of a new group to it,
// whatever the Confirm says.
func (s *Stack) offer(peer netip.Addr) (offered uint8, o clc.Offer) {
	s.lock()
	defer s.unlock()
	r := s.devices.offered(s.preferred[peer])
	return r.index, clc.Offer{GID: r.gids.v1.GID, MAC: r.gids.v1.MAC, GIDv2: r.gids.v2.GID}
}

// prefixes returns our addresses in subnets that contain an address, with the length of their prefix: of IPv6 a peer looks for
// an address of ours in its own subnet, which may be a part of ours.
func (s *Stack) prefixes(a netip.Addr) []netip.Prefix {
	var ps []netip.Prefix
	for _, p := range s.cfg.Prefixes {
		if p.Contains(a) {
			ps = append(ps, p)
		}
	}
	if len(ps) > 0 {
		return ps
	}
	bits := 64
	if a.Is4() {
		bits = 24
	}
	if !a.IsValid() {
		return nil
	}
	return []netip.Prefix{netip.PrefixFrom(a, bits)}
}

func addrOf(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

// gids are the addresses of the RNICs where links may end, that of l first.
// The caller holds the turn.
func (s *Stack) gids(l rdma.GID) (list clc.List[rdma.GID]) {
	list.Add(l)
	for _, r := range s.devices.list {
		if r.active() && !list.Has(r.gids.v2.GID) {
			list.Add(r.gids.v2.GID) // there are no more devices than it has room for
		}
	}
	return list
}

// contact is what a first contact knows of the peer when it makes a group.
type contact struct {
	role linkgroup.Role
	addr netip.Addr  // of the peer, in the TCP connection
	key  clc.PeerKey // of a client, at its server
	peer clc.PeerID  // zero if the peer has not told it yet
	// gid is of the peer's RNIC where the first link will end, at a server the
	// one that the client thinks of.
	gid     rdma.GID
	routes  routes // to it
	offered uint8  // the device that a client proposed
	agreed  clc.Selection
	host    string // the peer's name
}

// client is the peer's address where the peer is the client: no client gets all of what is meant for several.
func (c *contact) client() netip.Addr {
	if c.role == linkgroup.Server {
		return c.addr
	}
	return netip.Addr{}
}
