// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// Whoever is put into a link group is told its queue pair and its RMB, and is
// believed when it says that the group is gone. What a CLC message says of its sender
// proves nothing: anybody can name the GID of somebody else's RNIC, which is public.
// So a link group belongs to the two ends that made it, and a later connection joins
// it only if all of this is the same:
//
//   - the peer's address in the TCP connection, which it cannot choose freely: it has
//     to receive what is sent there;
//   - its peer ID in the Proposal or Accept;
//   - GID and, in version 1, MAC address of its RNIC;
//   - its role, and the version of SMC-R.
//
// For example, a pod behind the same source NAT as the victim has the address in
// common with it. It does not know the peer ID: our own stacks tell each peer address
// another one (see peerIDFor), and no third party any.
//
// Linux leaves the peer ID out of a Proposal of version 2 only, as between subnets, and
// otherwise it has one for all. A client without one joins only groups that were made
// without one, from its address and with a link to its RNIC, and its Confirm has to have
// the peer ID of the group. So behind the same NAT as a Linux client somebody can be
// told a queue pair, an RKey and an address of that client's group. They open nothing
// on a queue pair of his own: see memory.

// party finds the link groups with a peer.
type party struct {
	role linkgroup.Role // ours
	addr netip.Addr
	peer clc.PeerID // of a client, what its Proposal said
}

func (c *contact) party() party {
	if c.role == linkgroup.Server {
		return party{c.role, c.addr, c.key.PeerID}
	}
	return party{c.role, c.addr, c.peer}
}

// peerIDFor is our own peer ID for the peer with an address. It is another one for
// each of them, so that a server is not told under which ID we are known to others;
// and where one pod is reached under two addresses, by a Service and directly, its
// server takes us for two clients, as we take it for two servers. RFC 7609 A.2.1 wants
// an instance number and a RoCE MAC address. Many stacks share an RNIC here, so the MAC
// address is a random, locally administered one.
func (s *Stack) peerIDFor(addr netip.Addr) clc.PeerID {
	h := hmac.New(sha256.New, s.idKey[:])
	_, _ = h.Write(addr.AsSlice()) // a hash takes everything
	b := h.Sum(nil)
	mac := rdma.MAC(b[2:])
	mac[0] = mac[0]&^1 | 2
	return clc.NewPeerID(binary.BigEndian.Uint16(b), mac)
}

// serves reports whether a server's group can take further connections of a client
// that is the group's party, once it is usable.
func (g *group) serves(k clc.PeerKey) bool {
	return g.version == k.Version && g.endsAt(k) && g.isTrusted()
}

// endsAt reports whether the client's RNIC is one that a link ends at or, of a client
// that says who it is, the one that it proposed when it made the group.
func (g *group) endsAt(k clc.PeerKey) bool {
	if !k.PeerID.IsZero() && g.key.SameRNIC(k.GID, k.MAC) {
		return true
	}
	return slices.ContainsFunc(g.lg.Links(), func(l linkgroup.LinkInfo) bool { return k.SameRNIC(l.Peer.GID, l.Peer.MAC) })
}
