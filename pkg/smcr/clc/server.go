// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"errors"
	"time"
)

// Server is the accepting side of the rendezvous (RFC 7609 §3.5.1, §3.5.2).
//
//	WaitProposal --Proposal--> Deciding --Accept--> WaitConfirm
//	                                                    |
//	                      +--- Confirm received --------+--- Confirm received ---+
//	                      | (first contact)               (subsequent contact)   |
//	                      v                                                      v
//	                 LinkSetup ------------- PassPointOfNoReturn ----------> Committed
//	                      |  \                                                   |
//	                      |   +------ Complete ------+                           | Complete
//	  Decline for an LLC  |                          v                           v
//	  timeout             v                          Established <---------------+
//	                 LateDecline
//
//	Declined: the peer's Decline in WaitProposal, WaitConfirm, LinkSetup,
//	LateDecline; our Decline in Deciding, LinkSetup; in WaitProposal, and in
//	WaitConfirm of a first contact, it waits for the peer's message, in
//	LateDecline for the timer.
//	Aborted: timeouts, parse errors, the end of the TCP connection; our
//	Decline in WaitConfirm of a subsequent contact, Committed, Established;
//	commands in the wrong state.
//
// A Server is owned by one goroutine, the one that reads the TCP connection.
type Server struct {
	machine
	proposal Proposal
	accept   Accept
}

// NewServer returns a machine that waits for a Proposal from now on.
func NewServer(now time.Time, cfg Config) *Server {
	if cfg.LateDeclineTimeout <= 0 {
		cfg.LateDeclineTimeout = DefaultLateDeclineServer
	}
	s := &Server{machine: machine{cfg: cfg.withDefaults(), version: V1}}
	s.becomeWaiting(now, StateWaitProposal)
	return s
}

// WithoutV2 takes version 2 back for reason r, for example because no RNIC
// reaches the client's GID. If version 1 can do it becomes the selection;
// otherwise r is declined, and ok is false.
func (s *Server) WithoutV2(_ time.Time, r Reason) (_ Selection, ok bool) {
	if s.state != StateDeciding {
		s.misuse("WithoutV2")
		return Selection{}, false
	}
	if s.selected.Version < V2 {
		return s.selected, true
	}
	ours := s.cfg.Support
	ours.V2 = false
	sel, err := SelectVersion(s.proposal, ours)
	if err != nil {
		s.sendDecline(r, false, false)
		return Selection{}, false
	}
	sel.NoV2 = r
	s.selected = sel
	return sel, true
}

// Accept answers the Proposal and waits for the Confirm. The machine fills in
// what was negotiated: the version and, in version 2, EID and first contact
// extension but Direct.
func (s *Server) Accept(now time.Time, a Accept) {
	if s.state != StateDeciding {
		s.misuse("Accept")
		return
	}
	s.selected.put(&a.Endpoint, s.cfg)
	s.accept, s.first = a, a.FirstContact
	s.send(a.Append(nil))
	s.becomeWaiting(now, StateWaitConfirm)
}

// HandleData takes the bytes that Want asked for. An error says why the
// negotiation ended; what to do about it is in the outputs.
func (s *Server) HandleData(_ time.Time, b []byte) error {
	state := s.state
	msg, err := s.receive(b)
	if msg == nil {
		return err
	}
	if state == StateWaitProposal {
		return s.handleProposal(msg)
	}
	return s.handleConfirm(msg)
}

func (s *Server) handleProposal(msg []byte) error {
	p, err := ParseProposal(msg)
	if err != nil {
		return s.abort(err)
	}
	// Linux answers in the version of the Proposal's header.
	s.version = min(p.Version, V2)
	if d := s.pending; d != nil {
		s.sendDecline(d.reason, d.outOfSync, false)
		return nil
	}
	if s.selected, err = SelectVersion(p, s.cfg.Support); err != nil {
		return s.refuse(err)
	}
	s.proposal = p
	s.becomeDeciding()
	s.out = append(s.out, Output{Kind: OutputProposed, Proposal: &p, Selected: s.selected})
	return nil
}

func (s *Server) handleConfirm(msg []byte) error {
	c, err := ParseConfirm(msg)
	if err == nil {
		err = CheckConfirm(s.accept, c)
	}
	if err != nil && (!errors.Is(err, ErrDecline) || !s.first) {
		// RFC 7609 C.1: on subsequent contact the Accept was our last word,
		// also where the message could be declined.
		return s.abort(err)
	}
	if d := s.pending; d != nil {
		s.sendDecline(d.reason, d.outOfSync, true)
		return nil
	}
	if err != nil {
		return s.refuse(err)
	}
	if s.first {
		s.becomeLinkSetup()
	} else {
		s.becomeCommitted()
	}
	s.out = append(s.out, Output{Kind: OutputConfirmed, Confirm: &c, Selected: s.selected})
	return nil
}
