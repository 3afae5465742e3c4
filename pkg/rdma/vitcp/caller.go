// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// CallConfig describes a call.
type CallConfig struct {
	Calling, Called Discriminator
	Attr            Attr   // what is offered
	First           uint32 // number before that of the first message; random is good
	Security        []byte // security information, at most [MaxSecurity] bytes
	// Timeout is the program's patience, for all attempts together; 0:
	// [DefaultConnectTimeout].
	Timeout time.Duration
}

// Validate reports what is wrong with the configuration.
func (c *CallConfig) Validate() error {
	if c.Timeout < 0 {
		return fmt.Errorf("connect timeout %v: %w", c.Timeout, rdma.ErrInvalid)
	}
	return validateOffer(c.Attr, c.Security)
}

func validateOffer(a Attr, security []byte) error {
	switch {
	case a.MaxTransfer == 0:
		return fmt.Errorf("offer transfers of 0 bytes: %w", rdma.ErrInvalid)
	case a.ReadWindow > MaxReadWindow:
		return fmt.Errorf("offer a window of %d READs, want at most %d: %w", a.ReadWindow, MaxReadWindow, rdma.ErrInvalid)
	case len(security) > MaxSecurity:
		return fmt.Errorf("%d bytes of security information, want at most %d: %w", len(security), MaxSecurity, rdma.ErrInvalid)
	}
	return nil
}

// Caller is the active side of connection establishment (§4.2):
//
//	Disconnected --Start: dial--> Connecting --TCP fails--> Disconnected
//	Connecting --TCP established: Connect Request--> Pending Accept
//	Pending Accept --Connect Accept--> Connected
//	Pending Accept --TCP closes: pause, dial--> Connecting
//	Pending Accept --Connect No Match, peer-to-peer: close TCP, pause, dial--> Connecting
//	Pending Accept --Connect Reject, No Match, any error: close TCP--> Disconnected
//	any --timeout: close TCP--> Disconnected
type Caller struct {
	handshake
	cfg     CallConfig
	posted  uint16 // receives that the request told of
	retryAt time.Time
	backoff time.Duration
}

// NewCaller makes a machine for one call.
func NewCaller(c CallConfig) (*Caller, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("call %q: %w", c.Called, err)
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultConnectTimeout
	}
	return &Caller{cfg: c, backoff: minBackoff}, nil
}

// Start begins the call: VipConnectRequest.
func (c *Caller) Start(now time.Time) {
	if c.state == StateDisconnected && c.deadline.IsZero() {
		c.deadline = now.Add(c.cfg.Timeout)
		c.becomeConnecting()
	}
}

// NextTimeout returns when HandleTimeout wants to be called.
func (c *Caller) NextTimeout() (time.Time, bool) {
	if !c.retryAt.IsZero() && c.retryAt.Before(c.deadline) {
		return c.retryAt, true
	}
	return c.deadline, c.state == StateConnecting || c.state == StatePendingAccept
}

// HandleTimeout does what is due at now.
func (c *Caller) HandleTimeout(now time.Time) {
	switch at, ok := c.NextTimeout(); {
	case !ok || now.Before(at):
	case now.Before(c.deadline):
		c.becomeConnecting()
	default:
		c.fail(fmt.Errorf("%w: in %v for %v", ErrTimeout, c.state, c.cfg.Timeout))
	}
}

// HandleDialed says that the TCP connection is established, and how many receives are posted.
func (c *Caller) HandleDialed(_ time.Time, posted uint16) {
	if !c.dialing() {
		return
	}
	c.posted = posted
	c.state, c.have = StatePendingAccept, 0
	c.send(connectMessage{
		typ: TypeConnectRequest, first: c.cfg.First, posted: posted,
		ce: CE{Attr: c.cfg.Attr, Calling: c.cfg.Calling, Called: c.cfg.Called, Security: c.cfg.Security},
	})
}

// HandleDialFailed says that there is no TCP connection: so there is no VI connection either
// (§2.2.2.2.2).
func (c *Caller) HandleDialFailed(_ time.Time, err error) {
	if c.dialing() {
		c.fail(fmt.Errorf("%w: %w", ErrUnreachable, err))
	}
}

// HandleEnd says that the TCP connection is closed, or broken.
func (c *Caller) HandleEnd(now time.Time, _ error) {
	if c.state == StatePendingAccept {
		c.becomePausing(now)
	}
}

// HandleData takes bytes of the TCP connection, no more than Want.
func (c *Caller) HandleData(now time.Time, b []byte) {
	if c.state != StatePendingAccept {
		return
	}
	m, whole, err := c.receive(b)
	switch {
	case err != nil:
		c.fail(err)
	case whole:
		c.answered(now, &m)
	}
}

// Cancel gives the call up.
func (c *Caller) Cancel(time.Time) {
	if c.state == StateConnecting || c.state == StatePendingAccept {
		c.fail(ErrCanceled)
	}
}

func (c *Caller) answered(now time.Time, m *connectMessage) {
	switch m.typ {
	case TypeConnectAccept:
		if err := m.ce.accepted(c.cfg.Attr); err != nil {
			c.fail(err)
			return
		}
		c.becomeConnected(Terms{
			Attr: m.ce.Attr, First: c.cfg.First, PeerFirst: m.first,
			Posted: c.posted, PeerPosted: m.posted, Security: m.ce.Security,
		})
	case TypeConnectReject:
		c.fail(ErrRejected)
	case TypeConnectNoMatch:
		if c.cfg.Attr.Peer {
			// §4: the peer's program may call a little later.
			c.put(Output{Kind: OutputClose})
			c.becomePausing(now)
			return
		}
		c.fail(ErrNoMatch)
	default:
		c.fail(fmt.Errorf("%w: %v as an answer", ErrProtocol, m.typ))
	}
}

// dialing reports whether the TCP connection is being set up.
func (c *Caller) dialing() bool { return c.state == StateConnecting && c.retryAt.IsZero() }

func (c *Caller) becomeConnecting() {
	c.state, c.retryAt, c.have = StateConnecting, time.Time{}, 0
	c.put(Output{Kind: OutputDial})
}

// becomePausing is Connecting without a TCP connection yet.
func (c *Caller) becomePausing(now time.Time) {
	c.state, c.have = StateConnecting, 0
	c.retryAt = now.Add(c.backoff)
	c.backoff = min(2*c.backoff, maxBackoff)
}

// fail ends the call, and the TCP connection if there is one.
func (c *Caller) fail(err error) {
	if c.retryAt.IsZero() {
		c.becomeDisconnected(err)
		return
	}
	c.state, c.retryAt = StateDisconnected, time.Time{}
	c.put(Output{Kind: OutputFailed, Err: err})
}

// Peer is a call in peer-to-peer mode (§4): the peer calls, too. Where the calls meet,
// that of the higher address stands. The other one is conceded, and its caller
// becomes the passive side.
type Peer struct {
	Caller
	concedes bool
}

// NewPeer makes a machine for a call from the address local to the address remote. Of two
// programs at one address the discriminators decide.
func NewPeer(c CallConfig, local, remote netip.Addr) (*Peer, error) {
	c.Attr.Peer = true
	caller, err := NewCaller(c)
	if err != nil {
		return nil, err
	}
	order := local.Unmap().WithZone("").Compare(remote.Unmap().WithZone(""))
	if order == 0 {
		order = compareDiscriminators(c.Calling, c.Called)
	}
	if order == 0 {
		return nil, fmt.Errorf("call %q at %v from the same: %w", c.Called, remote, rdma.ErrInvalid)
	}
	return &Peer{Caller: *caller, concedes: order < 0}, nil
}

func compareDiscriminators(a, b Discriminator) int {
	switch x, y := a.String(), b.String(); {
	case x < y:
		return -1
	case x > y:
		return 1
	}
	return 0
}

// HandleRequest takes a call of the peer, in Matching, that has our discriminators the other way
// round and comes from the peer's address. It answers that call and reports whether the call stands:
// then our own is over, and in has the connection. Posted is the number of receives now.
func (p *Peer) HandleRequest(now time.Time, in *Callee, posted uint16) bool {
	pausing := p.state == StateConnecting && !p.dialing()
	calling := p.dialing() || p.state == StatePendingAccept
	if !in.request.Peer || !pausing && (!calling || !p.concedes) {
		// Over, or ours stands: a caller that concedes learns of ours by our request.
		in.NoMatch(now)
		return false
	}
	in.Match(now)
	if _, err := in.Accept(now, Answer{Attr: p.cfg.Attr, First: p.cfg.First, Posted: posted, Security: p.cfg.Security}); err != nil {
		in.Reject(now)
		p.fail(err)
		return false
	}
	p.fail(ErrRival)
	return true
}
