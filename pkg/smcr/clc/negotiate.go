// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Selection is what a server and a client agreed on.
type Selection struct {
	Version uint8

	// NoV2 is why version 1 was chosen though both sides know version 2.
	NoV2 Reason

	// Of version 2 only. The numbers hold for a new link group; on subsequent
	// contact the client learns the first two fields only, the others are
	// those of the group.
	EID         EID
	Release     uint8
	MaxConns    uint8
	MaxLinks    uint8
	FeatureMask uint16
}

// SelectVersion chooses the version for the Accept: version 2 if both sides
// can, else version 1. The error is a *[DeclineError] with the code for the
// Decline.
func SelectVersion(p Proposal, ours Support) (Selection, error) {
	v2 := p.Version >= V2 && p.V2.HasR()
	var v2Err *DeclineError
	if v2 && ours.V2 {
		s, err := selectV2(p.Ext, ours)
		if err == nil {
			return s, nil
		}
		v2Err = err
	}
	v1 := p.V1.HasR() && !p.EyeCatcherD
	subnet := ours.AnySubnet || p.inSubnets(ours.Subnets)
	switch {
	case v1 && ours.V1 && subnet:
		s := Selection{Version: V1}
		if v2Err != nil {
			s.NoV2 = v2Err.Reason
		}
		return s, nil
	case v2Err != nil:
		// Version 2 is for peers in any subnet, so what it lacks is what there
		// is to repair.
		return Selection{}, v2Err
	case v1 && ours.V1:
		return Selection{}, declineErr(ReasonDiffPrefix, "the client's subnet %v %v is none of ours, %v", p.IPv4, p.IPv6, ours.Subnets)
	case !v1 && !v2 && (p.V1.HasD() || p.Version >= V2 && p.V2.HasD()):
		return Selection{}, declineErr(ReasonModeUnsupp, "the client offers SMC-D only")
	}
	return Selection{}, declineErr(ReasonVersMismat, "no version in common: the client offers version 1 %v, version 2 %v; ours: version 1 %v, version 2 %v",
		v1, v2, ours.V1, ours.V2)
}

func selectV2(e V2Extension, ours Support) (Selection, *DeclineError) {
	if e.EIDs.Len() == 0 {
		return Selection{}, declineErr(ReasonNoUEID, "the client offers no enterprise ID")
	}
	i := slices.IndexFunc(ours.EIDs, e.EIDs.Has)
	if i < 0 {
		return Selection{}, declineErr(ReasonNoUEID, "none of the client's enterprise IDs %v is ours", e.EIDs)
	}
	s := Selection{Version: V2, EID: ours.EIDs[i], Release: min(e.Release, ours.Release)}
	if s.Release == Release0 {
		// Release 0 announces no limits; ours hold alone.
		s.MaxConns, s.MaxLinks = ours.MaxConns, ours.MaxLinks
		return s, nil
	}
	if e.MaxConns < MinMaxConns {
		return Selection{}, declineErr(ReasonMaxConnErr, "the client allows %d connections per link group, at least %d are needed", e.MaxConns, MinMaxConns)
	}
	if e.MaxLinks < MinMaxLinks {
		return Selection{}, declineErr(ReasonMaxLinkErr, "the client allows %d links per link group", e.MaxLinks)
	}
	s.MaxConns = min(e.MaxConns, ours.MaxConns)
	s.MaxLinks = min(e.MaxLinks, ours.MaxLinks)
	s.FeatureMask = e.FeatureMask & ours.FeatureMask
	return s, nil
}

// accepted is what a client that sent p and got a goes on with. The error is a
// *[DeclineError]: the client cannot go on.
func accepted(p Proposal, a Accept) (Selection, error) {
	if a.Version < V2 {
		if !p.V1.HasR() {
			return Selection{}, declineErr(ReasonModeUnsupp, "the server accepts version 1, which was not offered")
		}
		return Selection{Version: V1}, nil
	}
	if p.Version < V2 || !p.V2.HasR() {
		return Selection{}, declineErr(ReasonModeUnsupp, "the server accepts version %d, which was not offered", a.Version)
	}
	if !p.Ext.EIDs.Has(a.EID) {
		return Selection{}, declineErr(ReasonNoUEID, "the server chose the enterprise ID %q, which was not offered", a.EID)
	}
	s := Selection{Version: V2, EID: a.EID}
	if !a.FirstContact {
		return s, nil
	}
	x := a.Ext
	if x.Release > p.Ext.Release {
		return Selection{}, declineErr(ReasonReleaseErr, "the server chose release %d, we offered %d", x.Release, p.Ext.Release)
	}
	s.Release = x.Release
	if x.Release == Release0 {
		return s, nil
	}
	if x.MaxConns < MinMaxConns || x.MaxConns > p.Ext.MaxConns {
		return Selection{}, declineErr(ReasonMaxConnErr, "the server chose %d connections per link group, want %d to %d", x.MaxConns, MinMaxConns, p.Ext.MaxConns)
	}
	if x.MaxLinks < MinMaxLinks || x.MaxLinks > p.Ext.MaxLinks {
		return Selection{}, declineErr(ReasonMaxLinkErr, "the server chose %d links per link group, want %d to %d", x.MaxLinks, MinMaxLinks, p.Ext.MaxLinks)
	}
	s.MaxConns, s.MaxLinks, s.FeatureMask = x.MaxConns, x.MaxLinks, x.FeatureMask&p.Ext.FeatureMask
	return s, nil
}

// CheckConfirm reports whether a server that sent a can go on with c. The
// error is a *[ParseError] or a *[DeclineError]. The first contact bit of a
// version 1 Confirm has no meaning; Linux sets it.
func CheckConfirm(a Accept, c Confirm) error {
	if (c.Version < V2) != (a.Version < V2) {
		return parseErr(7, "Confirm of version %d answers an Accept of version %d", c.Version, a.Version)
	}
	if err := c.checkMTU(TypeConfirm, a.FirstContact); err != nil {
		return err
	}
	if a.Version < V2 || !a.FirstContact {
		return nil
	}
	if !c.FirstContact {
		return declineErr(ReasonReleaseErr, "first contact, but the Confirm has no first contact extension")
	}
	if c.Ext.Release != a.Ext.Release {
		return declineErr(ReasonReleaseErr, "the client confirms release %d, the Accept had %d", c.Ext.Release, a.Ext.Release)
	}
	if a.Ext.Release == Release0 {
		return nil
	}
	if c.Ext.MaxConns != a.Ext.MaxConns {
		return declineErr(ReasonMaxConnErr, "the client confirms %d connections per link group, the Accept had %d", c.Ext.MaxConns, a.Ext.MaxConns)
	}
	if c.Ext.MaxLinks != a.Ext.MaxLinks {
		return declineErr(ReasonMaxLinkErr, "the client confirms %d links per link group, the Accept had %d", c.Ext.MaxLinks, a.Ext.MaxLinks)
	}
	return nil
}

// put writes what was negotiated into our Accept or Confirm: version, EID and,
// at first contact, the extension. Whether we are reached directly is for the
// caller to say.
func (s Selection) put(e *Endpoint, c Config) {
	e.Version = s.Version
	if s.Version < V2 {
		return
	}
	e.EID = s.EID
	x := FirstContactExtension{Direct: e.Ext.Direct, OS: c.OS, Release: s.Release, Vendor: e.Ext.Vendor}
	x.SetHost(c.Hostname)
	if s.Release >= Release1 {
		x.MaxConns, x.MaxLinks, x.FeatureMask = s.MaxConns, s.MaxLinks, s.FeatureMask
	}
	e.Ext = x
}

// Route is how the IP routing table reaches the peer's GID of version 2.
type Route struct {
	Found   bool
	Gateway bool     // the GID is behind a router
	MAC     rdma.MAC // of the router
	// Elsewhere: the packets leave by another interface than that of the RNIC whose
	// way it is, which itself may reach nobody there.
	Elsewhere bool
}

// NextHop returns the destination MAC address for a client's link to the
// server. In version 2 the server says whether it is reached directly. If not,
// the address is the router's, and a client without one declines: the error is
// a *[DeclineError].
func (a Accept) NextHop(r Route) (rdma.MAC, error) {
	switch {
	case a.Version < V2 || a.Ext.Direct:
		return a.MAC, nil
	case !r.Found:
		return rdma.MAC{}, declineErr(ReasonNoRoute, "no route to the server's GID %v", a.GID)
	case !r.Gateway:
		return rdma.MAC{}, declineErr(ReasonNoIndirect, "the server sees a router between us, the route to its GID %v has none", a.GID)
	}
	return r.MAC, nil
}

// NextHop returns the destination MAC address for a server's link to the
// client. The route is the one by which the server set [FirstContactExtension].Direct
// in its Accept.
func (c Confirm) NextHop(r Route) rdma.MAC {
	if c.Version >= V2 && r.Gateway {
		return r.MAC
	}
	return c.MAC
}

// PeerKey is who a client says it is, at a server. To use a link group that exists
// it has to say the same.
type PeerKey struct {
	Version uint8
	PeerID  PeerID   // zero: it does not say
	GID     rdma.GID // of the RNIC that it proposes from, in this version
	MAC     rdma.MAC // version 1
}

// Key returns the client's key in the version that was chosen. Linux leaves the
// peer ID out of a Proposal of version 2 only; its RNIC's GID stands for it.
func (p Proposal) Key(version uint8) PeerKey {
	if version >= V2 {
		return PeerKey{Version: version, PeerID: p.PeerID, GID: p.Ext.GID}
	}
	return PeerKey{Version: version, PeerID: p.PeerID, GID: p.GID, MAC: p.MAC}
}

// SameRNIC reports whether an RNIC may be the one that the client proposes from. A
// Proposal of version 2 has no MAC address.
func (k PeerKey) SameRNIC(gid rdma.GID, mac rdma.MAC) bool {
	return k.GID == gid && (k.Version >= V2 || k.MAC == mac)
}

// Matches reports whether a Confirm comes from the client with this key.
func (k PeerKey) Matches(c Confirm) bool { return k.PeerID.IsZero() || k.PeerID == c.PeerID }
