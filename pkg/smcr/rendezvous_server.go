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

// The server's half of a rendezvous: it takes the Proposal, accepts, and takes the Confirm.

// Server runs the rendezvous on a connection that was accepted from a
// listener made with the option's ControlListen. It owns tcp, as Client does.
func (s *Stack) Server(ctx context.Context, tcp *net.TCPConn) (*Conn, error) {
	return s.ServerDecline(ctx, tcp, 0)
}

// ServerDecline is Server, but declines the proposal with reason unless it
// is 0.
func (s *Stack) ServerDecline(ctx context.Context, tcp *net.TCPConn, reason clc.Reason) (*Conn, error) {
	r := &rendezvous{s: s, tcp: tcp, started: time.Now(), reads: make(chan readResult, 1)}
	if s.cfg.Option == nil {
		return r.plain(clc.ReasonPeerNoSMC), nil
	}
	switch offered, err := s.cfg.Option.SYNOffered(tcp); {
	case err != nil: // it says nothing about the peer
		s.failed("TCP option", err)
		return r.plain(clc.ReasonInternal), nil
	case !offered:
		return r.plain(clc.ReasonPeerNoSMC), nil
	}
	r.server = clc.NewServer(r.started, s.clcConfig(tcp))
	r.m = r.server
	r.with.role, r.with.addr = linkgroup.Server, addrOf(tcp.RemoteAddr())
	if reason != 0 {
		r.m.Decline(r.started, reason, false)
	}
	return r.run(ctx)
}

// propose answers a Proposal, at the server.
func (r *rendezvous) propose(ctx context.Context, p *clc.Proposal) {
	// The client waits as long as we would, and resets its connection then: so it has
	// to have an answer before.
	soon, stop := context.WithTimeoutCause(ctx, min(r.s.cfg.MessageTimeout, clc.DefaultMessageTimeout)*2/3, errSlow)
	defer stop()
	a, err := r.prepareAccept(soon, p)
	if err != nil {
		r.declineUnless(ctx, err)
		return
	}
	r.named = true
	r.server.Accept(time.Now(), a)
}

func (r *rendezvous) prepareAccept(ctx context.Context, p *clc.Proposal) (clc.Accept, error) {
	s := r.s
	r.with.key, r.with.peer = p.Key(r.with.agreed.Version), p.PeerID
	if err := r.joinGroup(ctx, p); err != nil {
		return clc.Accept{}, err
	}
	if !r.first {
		if err := r.confirmRMB(ctx); err != nil {
			return clc.Accept{}, err
		}
	}
	s.lock()
	defer s.unlock()
	return clc.Accept{Endpoint: r.endpoint()}, nil
}

// findRoutes asks how the client's RNIC is reached, at a server. Version 2 needs a
// route; without one version 1 is left.
func (r *rendezvous) findRoutes(ctx context.Context, p *clc.Proposal) error {
	v2 := r.with.agreed.Version >= clc.V2
	r.with.gid = p.GID
	if v2 {
		r.with.gid = p.Ext.GID
	}
	r.with.routes = r.s.routesTo(ctx, r.with.gid)
	if !v2 || r.with.routes.any() {
		return nil
	}
	v1, ok := r.server.WithoutV2(time.Now(), clc.ReasonNoRoute)
	if !ok {
		return &clc.DeclineError{Reason: clc.ReasonNoRoute, What: fmt.Sprintf("no device has a route to the client's RNIC %v", p.Ext.GID)}
	}
	r.with.agreed, r.with.key = v1, p.Key(v1.Version)
	return r.findRoutes(ctx, p)
}

// confirm takes the client's Confirm, at the server.
func (r *rendezvous) confirm(ctx context.Context, c *clc.Confirm) {
	if !r.first {
		r.endHalfOpen() // at first contact only the link proves that there is a client
	}
	if !r.with.key.Matches(*c) || !r.first && c.PeerID != r.group.peer {
		r.decline(fmt.Errorf("%w: %v, and before %v", errPeerID, c.PeerID, r.with.peer))
		return
	}
	if r.first && c.Version >= clc.V2 && c.GID != r.with.gid { // not the RNIC that the Proposal was about
		r.with.gid, r.with.routes = c.GID, r.s.routesTo(ctx, c.GID)
		if !r.route().Found {
			r.decline(&clc.DeclineError{Reason: clc.ReasonNoRoute, What: fmt.Sprintf("no route to the client's RNIC %v", c.GID)})
			return
		}
	}
	r.s.lock()
	var err error
	if r.first {
		r.group.takeConfirm(c)
		err = r.connect(&c.Endpoint)
	} else {
		err = r.activate(&c.Endpoint)
	}
	r.s.unlock()
	switch {
	case err != nil:
		r.decline(err)
	case !r.first:
		r.server.Complete(time.Now())
	}
}
