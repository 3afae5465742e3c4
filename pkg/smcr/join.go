// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// How a rendezvous finds or makes its link group.

// placeWait is how long a client waits for a place among the clients that owe their Confirm:
// some round trips of good clients.
const placeWait = time.Second

// joinGroup finds a group for a client, or starts one, for which it needs routes.
// One first contact per client is under way at a time; others wait for it, and have
// nothing meanwhile.
func (r *rendezvous) joinGroup(ctx context.Context, p *clc.Proposal) error {
	s := r.s
	for routed := false; ; {
		if err := r.beginHalfOpen(ctx); err != nil {
			return err
		}
		s.lock()
		if s.closed {
			s.unlock()
			return errStackClosed
		}
		g, forming := s.serverGroup(&r.with)
		if g != nil || forming == nil && routed {
			err := r.admitTo(g)
			s.unlock()
			return err
		}
		s.unlock()
		if forming == nil {
			if err := r.findRoutes(ctx, p); err != nil {
				return err
			}
			routed = true
			continue
		}
		r.endHalfOpen()
		select {
		case <-forming:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.closing:
			return errStackClosed
		}
	}
}

// beginHalfOpen takes a place for a client that will owe us its Confirm.
func (r *rendezvous) beginHalfOpen(ctx context.Context) error {
	if r.halfOpen {
		return nil
	}
	ctx, stop := context.WithTimeoutCause(ctx, placeWait, errNoPlace)
	defer stop()
	if err := r.s.halfOpen.enter(ctx, r.with.addr); err != nil {
		return err
	}
	r.halfOpen = true
	return nil
}

// endHalfOpen gives the place back.
func (r *rendezvous) endHalfOpen() {
	if r.halfOpen {
		r.halfOpen = false
		r.s.halfOpen.leave(r.with.addr)
	}
}

// admitTo puts the connection into a group, a new one if g is nil; the caller
// holds the turn.
func (r *rendezvous) admitTo(g *group) error {
	if g == nil {
		var err error
		if g, err = r.s.newGroupOf(&r.with); err != nil {
			return err
		}
		r.first = true
		r.group = g
	}
	return r.admit(g)
}

// newGroupOf is newGroup, for which idle groups give way.
func (s *Stack) newGroupOf(with *contact) (*group, error) {
	g, err := s.newGroup(with)
	for err != nil && s.giveWay(with, nil, err) {
		g, err = s.newGroup(with)
	}
	return g, err
}

// serverGroup returns a usable group with a client or, if there is none, the
// end of a first contact to wait for; the caller holds the turn.
func (s *Stack) serverGroup(with *contact) (*group, <-chan struct{}) {
	var forming <-chan struct{}
	for _, g := range s.groups.with(with.party()) {
		switch {
		case g.lg.State() == linkgroup.Forming: // where its link will end is not known yet
			if g.key == with.key {
				forming = g.formed
			}
		case g.lg.Usable() && g.serves(with.key):
			return g, nil
		}
	}
	return nil, forming
}

// clientGroup finds the group that an Accept of a subsequent contact means;
// the caller holds the turn.
//
// A device that was lost and came back may give the same numbers again, and the
// group that it had before may still be here: the youngest is meant.
func (s *Stack) clientGroup(p party, a *clc.Accept) (*group, error) {
	var found *group
	err := errOutOfSync
	if p.peer.IsZero() {
		return nil, err
	}
	for _, g := range s.groups.with(p) {
		if g.version != min(a.Version, clc.V2) {
			continue
		}
		if g.lg.MatchesPeer(a.QPN, a.GID, a.MAC) && (found == nil || g.id > found.id) {
			found = g
		}
		err = errNoLink
	}
	if found != nil {
		return found, nil
	}
	return nil, err
}

// admit makes the connection's shell in a group; the caller holds the turn.
func (r *rendezvous) admit(g *group) error {
	if r.s.closed {
		return errStackClosed
	}
	if len(r.s.conns) >= r.s.cfg.MaxConns {
		return errMaxConns
	}
	c, err := r.open(g)
	for err != nil && r.s.giveWay(&g.contact, g, err) {
		c, err = r.open(g)
	}
	if err != nil {
		return err
	}
	r.conn, r.group = c, g
	return nil
}

// open gives a connection its buffers.
func (r *rendezvous) open(g *group) (*Conn, error) {
	lc, buf, err := g.openConn()
	if err != nil {
		return nil, err
	}
	c := newSMCConn(r.s, g, lc, buf, r.tcp)
	g.noteIdle() // nobody may take the group's memory from now on
	return c, nil
}

// doubtGroup asks for the link group that we named and the peer says it does not know
// (RFC 7609 A.2.5, S bit). Its other groups with us are none the worse.
func (r *rendezvous) doubtGroup() {
	r.s.lock()
	defer r.s.unlock()
	if r.group != nil {
		r.group.doubt()
	}
}
