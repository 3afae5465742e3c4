// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"fmt"
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
	return to
}

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
	s.lock()
	rnics := s.devices.list
	var own [linkgroup.MaxRNICs]rdma.GIDEntry
	for _, r := range rnics {
		own[r.index] = r.gids.v2
	}
	s.unlock()
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

// any reports whether a device has a route.
func (t *routes) any() bool {
	for i := range t {
		if t[i].Found {
			return true
		}
	}
	return false
}
