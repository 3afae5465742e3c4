// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// The client's half of a rendezvous: it proposes, takes the Accept, and confirms.

// Client runs the rendezvous on a connection that was dialed with the
// option's ControlDial. It owns tcp. An error means that the connection was
// broken; every other failure gives a connection in ModeTCP.
func (s *Stack) Client(ctx context.Context, tcp *net.TCPConn) (*Conn, error) {
	r := &rendezvous{s: s, tcp: tcp, started: time.Now(), reads: make(chan readResult, 1)}
	if s.cfg.Option == nil {
		return r.plain(clc.ReasonPeerNoSMC), nil
	}
	switch offered, err := s.cfg.Option.PeerOffered(tcp); {
	case err != nil: // it says nothing about the peer
		s.failed("TCP option", err)
		return r.plain(clc.ReasonInternal), nil
	case !offered:
		return r.plain(clc.ReasonPeerNoSMC), nil
	}
	cfg := s.clcConfig(tcp)
	r.client = clc.NewClient(cfg)
	r.m = r.client
	r.with.role, r.with.addr = linkgroup.Client, addrOf(tcp.RemoteAddr())
	var offer clc.Offer
	r.with.offered, offer = s.offer(r.with.addr)
	if p, err := cfg.Proposal(offer); err == nil {
		r.client.Propose(r.started, p)
	} else {
		r.decline(err)
	}
	return r.run(ctx)
}

// accept answers an Accept, at the client.
func (r *rendezvous) accept(ctx context.Context, a *clc.Accept) {
	if err := r.prepareConfirm(ctx, a); err != nil {
		r.declineUnless(ctx, err)
		return
	}
	r.s.lock()
	c := clc.Confirm{Endpoint: r.endpoint()}
	c.MTU = min(c.MTU, a.MTU)
	c.GIDs = r.s.gids(c.GID)
	r.s.unlock()
	r.named = true
	r.client.Confirm(time.Now(), c, r.first)
	if !r.first {
		r.client.Complete(time.Now())
	}
}

func (r *rendezvous) prepareConfirm(ctx context.Context, a *clc.Accept) error {
	s := r.s
	r.with.peer, r.with.gid, r.with.host = a.PeerID, a.GID, a.Ext.Host()
	if a.FirstContact {
		r.with.routes = s.routesTo(ctx, a.GID)
		if err := r.checkRoutes(a); err != nil {
			return err
		}
		s.lock()
		defer s.unlock()
		if s.closed {
			return errStackClosed
		}
		if err := r.admitTo(nil); err != nil {
			return err
		}
		return r.connect(&a.Endpoint)
	}
	s.lock()
	if s.closed {
		s.unlock()
		return errStackClosed
	}
	g, err := s.clientGroup(r.with.party(), a)
	if err == nil {
		err = r.admit(g)
	}
	s.unlock()
	if err == nil {
		err = r.confirmRMB(ctx)
	}
	if err != nil {
		return err
	}
	s.lock()
	defer s.unlock()
	return r.activate(&a.Endpoint)
}

// checkRoutes takes away the routes that do not agree with what a server of version 2 says about
// them: it says so of the way to the RNIC that was proposed. Another one of ours that is in the subnet of the
// server's needs no such word. One must be left.
//
//	we propose 10.0.1.1     the server's RNIC 10.0.2.5 reaches that through a router
//	10.0.1.1 to 10.0.2.5    no router here: taken away
//	10.0.2.1 to 10.0.2.5    one subnet: left, and proposed to this peer from now on
func (r *rendezvous) checkRoutes(a *clc.Accept) error {
	if a.Version < clc.V2 {
		return nil
	}
	var refused error
	to := &r.with.routes
	_, own := r.s.ownGIDs()
	for i := range to {
		if !to[i].Found {
			continue
		}
		if _, err := a.NextHop(to[i]); err != nil && (i == int(r.with.offered) || !own[i].OnLink(a.GID)) {
			to[i], refused = clc.Route{}, err
		}
	}
	if to.any() {
		return nil
	}
	if refused == nil {
		return &clc.DeclineError{Reason: clc.ReasonNoRoute, What: fmt.Sprintf("no device has a route to the server's RNIC %v", a.GID)}
	}
	return refused
}
