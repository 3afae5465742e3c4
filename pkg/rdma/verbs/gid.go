// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// ErrNoGID means that a port has no GID that can be used.
var ErrNoGID = errors.New("no usable GID")

// GIDWish is what is asked of a GID; the zero value asks for the best one with
// RoCE v2.
type GIDWish struct {
	Addr netip.Addr   // zero: any
	Type rdma.GIDType // GIDTypeUnknown: RoCE v2
	// NetDev is the network interface of the GID; "": any.
	NetDev string
}

// ChooseGID picks the GID that a port's queue pairs and its users' peers see,
// and says why: the one of the address that is asked for; else that of an IPv4
// address, then of a global, a unique local and last of a link-local IPv6
// address, and of several the one in the lowest row. Packets of a RoCE v2 GID
// are routed by its address, so a link-local GID reaches the own segment only.
//
// A row without a network interface is chosen only if no other can be: its interface
// is in another network namespace, as that of a macvlan or ipvlan child in a pod, and
// with the child its address goes away.
func ChooseGID(table []rdma.GIDEntry, want GIDWish) (e rdma.GIDEntry, why string, err error) {
	var here []rdma.GIDEntry
	for _, g := range table {
		if g.NetDev != "" {
			here = append(here, g)
		}
	}
	if e, why, err = chooseGID(here, want); err == nil {
		return e, why, nil
	}
	return chooseGID(table, want)
}

// chooseGID is ChooseGID where it does not matter whose a row is.
func chooseGID(table []rdma.GIDEntry, want GIDWish) (e rdma.GIDEntry, why string, err error) {
	if want.Type == rdma.GIDTypeUnknown {
		want.Type = rdma.GIDTypeRoCEv2
	}
	addr := want.Addr.WithZone("").Unmap()
	best := gidUnusable
	var others []string
	for _, g := range table {
		r := rankGID(g, want.Type)
		if addr.IsValid() && g.GID.Addr() != addr || want.NetDev != "" && g.NetDev != want.NetDev {
			r = gidUnusable
		}
		if r < best {
			best, e = r, g
		}
		others = append(others, fmt.Sprintf("%d: %v (%v)", g.Index, g.GID.Addr(), g.Type))
	}
	if best == gidUnusable {
		what := fmt.Sprintf("%v GID", want.Type)
		if addr.IsValid() {
			what += fmt.Sprintf(" of address %v", addr)
		}
		if want.NetDev != "" {
			what += " of interface " + want.NetDev
		}
		have := "the port has none at all: give its network interface an IP address"
		if len(others) > 0 {
			have = "the port has " + strings.Join(others, ", ")
		}
		return rdma.GIDEntry{}, "", fmt.Errorf("%w: no %s: %s", ErrNoGID, what, have)
	}
	reason := best.String()
	if addr.IsValid() {
		reason = "the address that is configured"
	}
	return e, fmt.Sprintf("GID %d, %v, %v of %s: %s", e.Index, e.Type, e.GID.Addr(), e.NetDev, reason), nil
}

// gidRank orders GIDs, the best first.
type gidRank uint8

const (
	gidIPv4 gidRank = iota
	gidGlobal
	gidPrivate
	gidLinkLocal
	gidUnusable
)

func (r gidRank) String() string {
	switch r {
	case gidIPv4:
		return "the first IPv4 address"
	case gidGlobal:
		return "the first global IPv6 address, there is no IPv4 address"
	case gidPrivate:
		return "the first unique local IPv6 address, there is no IPv4 address"
	case gidLinkLocal:
		return "only a link-local address is there, which does not reach beyond the segment"
	case gidUnusable:
	}
	return "not usable"
}

func rankGID(g rdma.GIDEntry, want rdma.GIDType) gidRank {
	a := g.GID.Addr()
	switch {
	case g.Type != want || g.GID.IsZero() || g.Index > maxGIDIndex:
		return gidUnusable
	case a.Is4():
		return gidIPv4
	case a.IsLinkLocalUnicast():
		return gidLinkLocal
	case a.IsPrivate():
		return gidPrivate
	}
	return gidGlobal
}
