// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"cmp"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// CalleeConfig has the patience of the passive side; 0: [DefaultRequestTimeout] and
// [DefaultAcceptTimeout].
type CalleeConfig struct {
	RequestTimeout time.Duration // for the Connect Request, from the TCP connection on
	AcceptTimeout  time.Duration // for the program's answer
}

// Answer is how a program accepts a request.
type Answer struct {
	Attr     Attr
	First    uint32 // number before that of the first message; random is good
	Posted   uint16 // receives of the queue pair until now
	Security []byte // security information, at most [MaxSecurity] bytes
}

// Callee is the passive side of connection establishment (§4.3), from the TCP connection on that
// was accepted:
//
//	Incoming --Connect Request--> Matching --match--> Pending Accept --Accept: Connect Accept--> Connected
//	Matching --NoMatch: Connect No Match, close TCP--> Disconnected
//	Pending Accept --Reject: Connect Reject, close TCP--> Disconnected
//	any --timeout, TCP closes, any error: close TCP--> Disconnected
type Callee struct {
	handshake
	cfg     CalleeConfig
	request CE
	first   uint32
	posted  uint16
}

// NewCallee makes a machine for a TCP connection that was accepted at now.
func NewCallee(now time.Time, c CalleeConfig) *Callee {
	c.RequestTimeout = cmp.Or(c.RequestTimeout, DefaultRequestTimeout)
	c.AcceptTimeout = cmp.Or(c.AcceptTimeout, DefaultAcceptTimeout)
	return &Callee{
		handshake: handshake{state: StateIncoming, deadline: now.Add(c.RequestTimeout)},
		cfg:       c,
	}
}

// Want returns how many bytes at most the shell may read from the TCP connection and give to
// HandleData: 0 once the request is there.
func (c *Callee) Want() int {
	if c.state != StateIncoming {
		return 0
	}
	return c.handshake.Want()
}

// NextTimeout returns when HandleTimeout wants to be called.
func (c *Callee) NextTimeout() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

// HandleTimeout does what is due at now.
func (c *Callee) HandleTimeout(now time.Time) {
	if at, ok := c.NextTimeout(); ok && !now.Before(at) {
		c.becomeDisconnected(fmt.Errorf("%w: in %v", ErrTimeout, c.state))
	}
}

// HandleEnd says that the TCP connection is closed, or broken.
func (c *Callee) HandleEnd(time.Time, error) {
	if c.state != StateDisconnected && c.state != StateConnected {
		c.becomeDisconnected(fmt.Errorf("%w in %v", ErrPeerClosed, c.state))
	}
}

// HandleData takes bytes of the TCP connection, no more than Want.
func (c *Callee) HandleData(now time.Time, b []byte) {
	if c.state != StateIncoming {
		return
	}
	m, whole, err := c.receive(b)
	if err == nil && whole && m.typ != TypeConnectRequest {
		err = fmt.Errorf("%w: %v as a request", ErrProtocol, m.typ)
	}
	switch {
	case err != nil:
		c.becomeDisconnected(err)
	case whole:
		c.request, c.first, c.posted = m.ce, m.first, m.posted
		c.state, c.deadline = StateMatching, now.Add(c.cfg.AcceptTimeout)
		c.put(Output{Kind: OutputRequest, Request: &c.request})
	}
}

// Match says that a program waits for the discriminator.
func (c *Callee) Match(time.Time) {
	if c.state == StateMatching {
		c.state = StatePendingAccept
	}
}

// NoMatch says that none does.
func (c *Callee) NoMatch(time.Time) {
	if c.state == StateMatching {
		c.refuse(TypeConnectNoMatch, ErrNoMatch)
	}
}

// Accept establishes the connection, VipConnectAccept, and returns what was agreed on. With
// attributes that do not fit it changes nothing: the program may offer others, or reject.
func (c *Callee) Accept(_ time.Time, a Answer) (Attr, error) {
	if c.state != StatePendingAccept {
		return Attr{}, fmt.Errorf("accept the call of %q in %v: %w", c.request.Calling, c.state, rdma.ErrState)
	}
	err := validateOffer(a.Attr, a.Security)
	var agreed Attr
	if err == nil {
		agreed, err = agree(c.request.Attr, a.Attr)
	}
	if err != nil {
		return Attr{}, fmt.Errorf("accept the call of %q: %w", c.request.Calling, err)
	}
	ce := c.request
	ce.Attr, ce.Security = agreed, a.Security
	c.send(connectMessage{typ: TypeConnectAccept, first: a.First, posted: a.Posted, ce: ce})
	c.becomeConnected(Terms{
		Attr: agreed, First: a.First, PeerFirst: c.first,
		Posted: a.Posted, PeerPosted: c.posted, Security: c.request.Security,
	})
	return agreed, nil
}

// Reject refuses the connection: VipConnectReject.
func (c *Callee) Reject(time.Time) {
	if c.state == StatePendingAccept {
		c.refuse(TypeConnectReject, ErrRejected)
	}
}

// refuse answers with what was asked, but for what is nobody's business then.
func (c *Callee) refuse(t Type, err error) {
	ce := c.request
	ce.Security, ce.ReadWindow = nil, 0
	c.send(connectMessage{typ: t, ce: ce})
	c.becomeDisconnected(err)
}
