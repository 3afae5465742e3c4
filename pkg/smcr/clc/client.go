// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"errors"
	"time"
)

// Client is the connecting side of the rendezvous (RFC 7609 §3.5.1, §3.5.2).
//
//	Idle --Propose--> WaitAccept --Accept--> Deciding
//	                                            |
//	                      +--- Confirm ---------+--- Confirm ---+
//	                      | (first contact)    (subsequent)     |
//	                      v                                     v
//	                 LinkSetup ---- PassPointOfNoReturn ---> Committed
//	                      |  \                                  |
//	                      |   +------ Complete ------+          | Complete
//	  Decline for an LLC  |                          v          v
//	  timeout             v                          Established
//	                 LateDecline
//
//	Declined: the peer's Decline in WaitAccept, LinkSetup, LateDecline; our
//	Decline in Idle, Deciding, LinkSetup; in WaitAccept it waits for the
//	Accept, in LateDecline for the timer.
//	Aborted: timeouts, parse errors, the end of the TCP connection; our
//	Decline in Committed and Established; commands in the wrong state.
//
// A Client is owned by one goroutine, the one that reads the TCP connection.
type Client struct {
	machine
	proposal Proposal
}

// NewClient returns a machine in [StateIdle].
func NewClient(cfg Config) *Client {
	if cfg.LateDeclineTimeout <= 0 {
		cfg.LateDeclineTimeout = DefaultLateDeclineClient
	}
	return &Client{machine: machine{cfg: cfg.withDefaults(), state: StateIdle, version: V1}}
}

// Propose sends the Proposal, as [Config.Proposal] makes it, and waits for the
// Accept.
func (c *Client) Propose(now time.Time, p Proposal) {
	if c.state != StateIdle {
		c.misuse("Propose")
		return
	}
	c.proposal = p
	c.send(p.Append(nil))
	c.becomeWaiting(now, StateWaitAccept)
}

// Confirm answers the Accept. On first contact the LLC set-up follows; on
// subsequent contact there is no way back from here (RFC 7609 C.1).
//
// The machine fills in what was negotiated: the version and, in version 2, EID
// and first contact extension but Direct. On first contact of version 2, GIDs
// are the RNICs where more links may end; it has at least the link's own.
func (c *Client) Confirm(_ time.Time, m Confirm, firstContact bool) {
	if c.state != StateDeciding {
		c.misuse("Confirm")
		return
	}
	c.first = firstContact
	c.selected.put(&m.Endpoint, c.cfg)
	if m.Version >= V2 {
		m.FirstContact = firstContact
		if m.GIDs.Len() == 0 {
			m.GIDs.Add(m.GID)
		}
	}
	c.send(m.Append(nil))
	if firstContact {
		c.becomeLinkSetup()
	} else {
		c.becomeCommitted()
	}
}

// HandleData takes the bytes that Want asked for. An error says why the
// negotiation ended; what to do about it is in the outputs.
func (c *Client) HandleData(_ time.Time, b []byte) error {
	msg, err := c.receive(b)
	if msg == nil {
		return err
	}
	a, err := ParseAccept(msg)
	if err != nil && !errors.Is(err, ErrDecline) {
		return c.abort(err)
	}
	c.version = min(a.Version, V2)
	if p := c.pending; p != nil {
		// RFC 7609 C.1: now the Decline answers a message and chases none.
		c.sendDecline(p.reason, p.outOfSync, false)
		return nil
	}
	if err == nil {
		c.selected, err = accepted(c.proposal, a)
	}
	if err != nil {
		return c.refuse(err)
	}
	c.first = a.FirstContact
	c.becomeDeciding()
	c.out = append(c.out, Output{Kind: OutputAccepted, Accept: &a, Selected: c.selected})
	return nil
}
