// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Config are the settings of a machine. Zero values mean: version 1 only, and
// the default of each timer.
type Config struct {
	PeerID   PeerID // ours
	OS       OSType // ours, in messages of version 2
	Hostname string // ours, in messages of version 2; 32 bytes at most are told

	Support

	MessageTimeout     time.Duration // for each message of the peer
	LateDeclineTimeout time.Duration // for a Decline that explains an LLC timeout
}

// Support is what one side can do and may do: what a client proposes and what
// a server chooses from.
type Support struct {
	V1, V2 bool

	// Subnets are our addresses of the TCP connection's address family, each with the
	// length of its prefix: see MatchesPrefix. Version 1 demands that the peer is in one of
	// these subnets (RFC 7609 §3.5.1.2).
	Subnets []netip.Prefix
	// AnySubnet lets a server take version 1 clients of all subnets, where
	// the fabric is known to reach them.
	AnySubnet bool

	// EIDs are our enterprise IDs, the preferred one first. Version 2 demands
	// one in common.
	EIDs []EID
	// Release is the highest release of version 2: [Release0], [Release1].
	Release uint8
	// MaxConns and MaxLinks bound a link group of version 2. Since release 1
	// the smaller number of both sides holds. 0 means the default.
	MaxConns uint8
	MaxLinks uint8
	// FeatureMask has the optional features of release 1 that we have.
	FeatureMask uint16
}

// withDefaults fills in what is not set, but for LateDeclineTimeout, whose
// default is the role's.
func (c Config) withDefaults() Config {
	if c.MessageTimeout <= 0 {
		c.MessageTimeout = DefaultMessageTimeout
	}
	c.Support = c.Support.withDefaults()
	return c
}

func (s Support) withDefaults() Support {
	if !s.V2 {
		s.V1 = true
	}
	if s.MaxConns == 0 {
		s.MaxConns = DefaultMaxConns
	}
	if s.MaxLinks == 0 {
		s.MaxLinks = DefaultMaxLinks
	}
	return s
}

// Validate reports a setting that no peer could agree to, or that does not fit
// into the messages.
func (c Config) Validate() error {
	s := c.Support.withDefaults()
	switch {
	case !s.V2:
		return nil
	case len(s.EIDs) == 0:
		return fmt.Errorf("clc: version 2 needs an enterprise ID")
	case len(s.EIDs) > MaxEIDs:
		return fmt.Errorf("clc: %d enterprise IDs, at most %d", len(s.EIDs), MaxEIDs)
	case s.Release > MaxRelease:
		return fmt.Errorf("clc: release %d, at most %d", s.Release, MaxRelease)
	case s.MaxConns < MinMaxConns:
		return fmt.Errorf("clc: %d connections per link group, at least %d", s.MaxConns, MinMaxConns)
	case s.MaxLinks > MaxMaxLinks:
		return fmt.Errorf("clc: %d links per link group, at most %d", s.MaxLinks, MaxMaxLinks)
	}
	for _, e := range s.EIDs {
		if e == (EID{}) {
			return fmt.Errorf("clc: an enterprise ID is empty")
		}
	}
	return nil
}

// Offer is what a client knows of one connection when it proposes.
type Offer struct {
	// GID and MAC are of the RNIC for version 1.
	GID rdma.GID
	MAC rdma.MAC
	// GIDv2 is the routable GID for version 2; without one, version 2 is not
	// offered.
	GIDv2 rdma.GID
}

// Proposal returns the Proposal of a client: all versions that the settings
// allow and the connection permits. The error is a *[DeclineError] if that is
// none; then the Decline is sent in place of the Proposal.
func (c Config) Proposal(o Offer) (Proposal, error) {
	c = c.withDefaults()
	v1 := c.V1 && len(c.Subnets) > 0
	v2 := c.V2 && o.GIDv2 != (rdma.GID{}) && len(c.EIDs) > 0
	// The growth area has the form that Linux always sends. A receiver skips
	// it by its offset.
	p := Proposal{Version: V1, V1: ModeR, V2: ModeNone, PeerID: c.PeerID, MAC: o.MAC, HasSMCD: true}
	switch {
	case !v1 && !v2 && c.V1 && !c.V2:
		return Proposal{}, declineErr(ReasonConfigErr, "the connection's address has no subnet, which version 1 needs")
	case !v1 && !v2:
		return Proposal{}, declineErr(ReasonNoDevR, "no RNIC with a routable GID, which version 2 needs")
	case !v1:
		p.V1 = ModeNone
	default:
		p.GID = o.GID
		p.setSubnets(c.Subnets)
	}
	if v2 {
		p.Version, p.V2 = V2, ModeR
		p.Ext = V2Extension{Release: c.Release, GID: o.GIDv2}
		for _, e := range c.EIDs {
			p.Ext.EIDs.Add(e) // Validate has counted them
		}
		if c.Release >= Release1 {
			p.Ext.MaxConns, p.Ext.MaxLinks, p.Ext.FeatureMask = c.MaxConns, c.MaxLinks, c.FeatureMask
		}
	}
	return p, nil
}

// setSubnets fills in the mask/prefix area: the first subnet of IPv4, or the
// first eight prefixes of IPv6 (RFC 7609 A.2.2).
func (p *Proposal) setSubnets(subnets []netip.Prefix) {
	if subnets[0].Addr().Is4() {
		p.IPv4 = subnets[0].Masked()
		return
	}
	for _, s := range subnets {
		p.IPv6.Add(s.Masked())
	}
}
