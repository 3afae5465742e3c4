// SPDX-License-Identifier: Apache-2.0

package clc

import "slices"

// Support is what a server can do.
type Support struct {
	V1, V2   bool
	EIDs     []EID // version 2
	Release  uint8 // highest release of version 2
	MaxConns uint8 // per link group
	MaxLinks uint8
}

// Selection is what a server and a client have in common.
type Selection struct {
	Version uint8

	// Of version 2 only.
	EID      EID
	Release  uint8
	MaxConns uint8
	MaxLinks uint8
}

// SelectVersion chooses the version for the Accept: version 2 if both sides
// can, else version 1. The error is a *[DeclineError] with the code for the
// Decline.
func SelectVersion(p Proposal, ours Support) (Selection, error) {
	v2 := p.Version >= V2 && p.V2.HasR()
	var v2Err error
	if v2 && ours.V2 {
		s, err := selectV2(p.Ext, ours)
		if err == nil {
			return s, nil
		}
		v2Err = err
	}
	v1 := p.V1.HasR() && !p.EyeCatcherD
	switch {
	case v1 && ours.V1:
		return Selection{Version: V1}, nil
	case v2Err != nil:
		return Selection{}, v2Err
	case !v1 && !v2 && (p.V1.HasD() || p.Version >= V2 && p.V2.HasD()):
		return Selection{}, declineErr(ReasonModeUnsupp, "the client offers SMC-D only")
	}
	return Selection{}, declineErr(ReasonVersMismat, "no version in common: the client offers version 1 %v, version 2 %v; ours: version 1 %v, version 2 %v",
		v1, v2, ours.V1, ours.V2)
}

func selectV2(e V2Extension, ours Support) (Selection, error) {
	if e.EIDs.Len() == 0 {
		return Selection{}, declineErr(ReasonNoUEID, "the client offers no enterprise ID")
	}
	i := slices.IndexFunc(ours.EIDs, e.EIDs.Has)
	if i < 0 {
		return Selection{}, declineErr(ReasonNoUEID, "no enterprise ID in common with the client's %v", e.EIDs)
	}
	s := Selection{Version: V2, EID: ours.EIDs[i], Release: min(e.Release, ours.Release)}
	if s.Release == 0 {
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
	return s, nil
}

// CheckAccept reports whether a client that sent p can go on with a. The error
// is a *[DeclineError].
func CheckAccept(p Proposal, a Accept) error {
	if a.Version < V2 {
		if !p.V1.HasR() {
			return declineErr(ReasonVersMismat, "the server accepts version 1, which was not offered")
		}
		return nil
	}
	if p.Version < V2 || !p.V2.HasR() {
		return declineErr(ReasonVersMismat, "the server accepts version %d, which was not offered", a.Version)
	}
	if !p.Ext.EIDs.Has(a.EID) {
		return declineErr(ReasonNoUEID, "the server chose the enterprise ID %q, which was not offered", a.EID)
	}
	if !a.FirstContact {
		return nil
	}
	x := a.Ext
	if x.Release > p.Ext.Release {
		return declineErr(ReasonReleaseErr, "the server chose release %d, we offered %d", x.Release, p.Ext.Release)
	}
	if x.Release == 0 {
		return nil
	}
	if x.MaxConns < MinMaxConns || x.MaxConns > p.Ext.MaxConns {
		return declineErr(ReasonMaxConnErr, "the server chose %d connections per link group, want %d to %d", x.MaxConns, MinMaxConns, p.Ext.MaxConns)
	}
	if x.MaxLinks < MinMaxLinks || x.MaxLinks > min(p.Ext.MaxLinks, MaxMaxLinks) {
		return declineErr(ReasonMaxLinkErr, "the server chose %d links per link group, want %d to %d", x.MaxLinks, MinMaxLinks, min(p.Ext.MaxLinks, MaxMaxLinks))
	}
	return nil
}

// CheckConfirm reports whether a server that sent a can go on with c. The
// error is a *[ParseError] or a *[DeclineError]. The first contact bit of a
// version 1 Confirm has no meaning; Linux sets it.
func CheckConfirm(a Accept, c Confirm) error {
	if (c.Version < V2) != (a.Version < V2) {
		return parseErr(7, "Confirm of version %d answers an Accept of version %d", c.Version, a.Version)
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
	if a.Ext.Release == 0 {
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
