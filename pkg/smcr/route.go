// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// routes tell how our devices reach one RNIC of the peer, by number of the
// device.
type routes [linkgroup.MaxRNICs]clc.Route

// route tells how a device reaches a peer's RNIC. The caller may hold the turn or
// not.
func (s *Stack) route(r *rnic, own rdma.GIDEntry, peer rdma.GID) clc.Route {
	src, dst := own.GID.Addr(), peer.Addr()
	switch {
	case own.OnLink(peer):
		return clc.Route{Found: true}
	case src.Is4() != dst.Is4(), dst.IsUnspecified(), dst.IsMulticast(), dst.IsLoopback() && !src.IsLoopback():
		return clc.Route{} // no RNIC of a peer has such an address
	case s.cfg.Route == nil:
		return clc.Route{Found: true}
	}
	to, err := s.cfg.Route(src, dst)
	if err != nil {
		s.failed("route", fmt.Errorf("device %s: %w", r.dev.Name(), err))
		return clc.Route{}
	}
	to.Elsewhere = to.Elsewhere && !r.dev.Attr().HostRouted
	return to
}

// isDirect is what a server of version 2 says of the way from an RNIC of its own: it needs no
// router, and is the RNIC's own way.
func isDirect(to clc.Route) bool { return to.Found && !to.Gateway && !to.Elsewhere }

// Gateways that did not speak lately are asked for their MAC address first,
// which takes a round trip.
const (
	gatewayWait = 100 * time.Millisecond
	gatewayPoll = 2 * time.Millisecond
)

// routesTo tells how each device reaches a peer's RNIC. The caller does not
// hold the turn. A gateway that does not answer keeps no MAC address; devices
// that do without one work nevertheless.
func (s *Stack) routesTo(ctx context.Context, peer rdma.GID) routes {
	var to routes
	rnics, own := s.ownGIDs()
	var poll <-chan time.Time
	for deadline := time.Now().Add(gatewayWait); ; {
		missing := false
		for _, r := range rnics {
			if t := &to[r.index]; !t.Found || t.Gateway && t.MAC == (rdma.MAC{}) {
				*t = s.route(r, own[r.index], peer)
				missing = missing || t.Gateway && t.MAC == (rdma.MAC{})
			}
		}
		if !missing || time.Now().After(deadline) {
			return to
		}
		if poll == nil {
			tick := time.NewTicker(gatewayPoll)
			defer tick.Stop()
			poll = tick.C
		}
		select {
		case <-poll:
		case <-ctx.Done():
			return to
		case <-s.closing:
			return to
		}
	}
}

// ownGIDs returns the devices and the GID of version 2 that each has now. The caller does not hold
// the turn.
func (s *Stack) ownGIDs() (rnics []*rnic, own [linkgroup.MaxRNICs]rdma.GIDEntry) {
	s.lock()
	defer s.unlock()
	for _, r := range s.devices.list {
		own[r.index] = r.gids.v2
	}
	return s.devices.list, own
}

// maxPreferred bounds the peers of which it is remembered what to propose to them.
const maxPreferred = 1024

// preferred are the devices that are proposed to peers, by their address, since what was proposed
// before does not reach them. It is guarded by the stack's turn.
type preferred map[netip.Addr]uint8

// set remembers what to propose to a peer, and forgets some other peer if there are too many.
func (p preferred) set(peer netip.Addr, device uint8) {
	if _, known := p[peer]; !known && len(p) >= maxPreferred {
		for other := range p {
			delete(p, other)
			break
		}
	}
	p[peer] = device
}

// forget forgets a device whose number another one has now: it may be in another subnet.
func (p preferred) forget(device uint8) {
	maps.DeleteFunc(p, func(_ netip.Addr, d uint8) bool { return d == device })
}

// any reports whether a device has a route.
func (t *routes) any() bool {
	for i := range t {
		if t[i].Found {
			return true
		}
	}
	return false
}
