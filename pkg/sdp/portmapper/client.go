// SPDX-License-Identifier: Apache-2.0

package portmapper

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/portmap"
)

// Port is the UDP port of port mappers.
const Port = portmap.Port

// Reason says why a service has no SDP address for a client, which then connects to the
// conventional one.
type Reason uint8

// Reasons.
const (
	Denied      Reason = iota + 1 // the port mapper says that there is none
	NoAnswer                      // to none of the questions
	Silent                        // the port mapper was asked a moment ago, and said nothing
	Unreachable                   // the host says that it has no port mapper, or the network that it has no such host
	Busy                          // too many questions of the client wait for an answer
	GivenUp                       // the context ended first
	Refused                       // only from Dial: nobody listens at the SDP address
)

func (r Reason) String() string {
	names := [...]string{
		Denied: "denied", NoAnswer: "no answer", Silent: "silent", Unreachable: "unreachable", Busy: "busy", GivenUp: "given up", Refused: "refused",
	}
	if r > 0 && int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("Reason(%d)", uint8(r))
}

// LookupError says that there is no SDP address of a service.
type LookupError struct {
	Service netip.AddrPort
	Reason  Reason
	Err     error // of the socket or the context, if it was that
}

func (e *LookupError) Error() string {
	s := fmt.Sprintf("look up the SDP address of %v: %v", e.Service, e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

func (e *LookupError) Unwrap() error { return e.Err }

// Timeout reports whether nobody answered in time, as in [net.Error].
func (e *LookupError) Timeout() bool {
	return e.Reason == NoAnswer || e.Reason == GivenUp && errors.Is(e.Err, context.DeadlineExceeded)
}

// ErrAddress says that a service or a connecting peer has no usable address.
var ErrAddress = errors.New("portmapper: want two addresses of one family, with ports")

// ClientConfig says how a client asks. The zero value asks each service's own host.
type ClientConfig struct {
	// Mapper is the host that is asked; zero: the one of the service. MapperPort is its port; 0: [Port].
	Mapper     netip.Addr
	MapperPort uint16
	// Tries is how often a question is sent; Timeout is how long the first answer may take, doubled
	// for each of the next ones. 0: portmap.DefaultTries and portmap.DefaultTimeout.
	Tries   int
	Timeout time.Duration
	// SilentFor is how long a port mapper that did not answer is not asked again, and how long [Client.Dial] does not try an SDP address at
	// which nobody answered. An answer to somebody else meanwhile ends that. 0: [DefaultSilentFor]; negative: they are always asked.
	SilentFor time.Duration
	// MaxLookups bounds the questions that wait; 0: [DefaultMaxLookups].
	MaxLookups int
	// Control is called for each socket that asks, as in [net.Dialer].
	Control func(network, address string, c syscall.RawConn) error
}

// Validate returns an error if a value is out of range.
func (c *ClientConfig) Validate() error {
	switch {
	case c.Tries < 0 || c.Tries > portmap.MaxTries:
		return fmt.Errorf("portmapper: Tries is %d: want 0 to %d", c.Tries, portmap.MaxTries)
	case c.Timeout < 0 || c.Timeout > portmap.MaxTimeout:
		return fmt.Errorf("portmapper: Timeout is %v: want 0 to %v", c.Timeout, portmap.MaxTimeout)
	case c.MaxLookups < 0:
		return fmt.Errorf("portmapper: MaxLookups is %d: want 0 or more", c.MaxLookups)
	}
	return nil
}

// question is what an answer is kept for: a server may answer each connecting peer otherwise.
type question struct {
	service netip.AddrPort
	cp      netip.Addr
}

// Client asks port mappers. It is safe for concurrent use, has no goroutine, and needs no Close.
type Client struct {
	cfg ClientConfig

	mu      sync.Mutex
	kept    *portmap.Expiring[question, netip.AddrPort]
	asked   *outcomes           // of port mappers
	tried   *outcomes           // of SDP addresses
	handles map[uint64]struct{} // of the questions that wait
	stats   ClientStats
}

// outcome is what came of the last question to a port mapper, or of the last connection to an SDP address.
type outcome struct {
	silent bool // nobody answered
	at     time.Time
}

type outcomes = portmap.Expiring[netip.AddrPort, outcome]

// ClientStats count what a client has asked and heard.
type ClientStats struct {
	Lookups   uint64 // calls of Lookup, and of these:
	Mapped    uint64 // there was an SDP address
	FromCache uint64 // and it was known
	NotMapped map[Reason]uint64

	Discarded map[portmap.Verdict]uint64 // datagrams, by reason
}

// NewClient makes a client.
func NewClient(c ClientConfig) (*Client, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if c.MapperPort == 0 {
		c.MapperPort = Port
	}
	if c.MaxLookups == 0 {
		c.MaxLookups = DefaultMaxLookups
	}
	if c.SilentFor == 0 {
		c.SilentFor = DefaultSilentFor
	}
	return &Client{
		cfg: c, kept: portmap.NewExpiring[question, netip.AddrPort](maxKept), asked: portmap.NewExpiring[netip.AddrPort, outcome](maxOutcomes),
		tried: portmap.NewExpiring[netip.AddrPort, outcome](maxOutcomes), handles: make(map[uint64]struct{}),
		stats: ClientStats{NotMapped: make(map[Reason]uint64), Discarded: make(map[portmap.Verdict]uint64)},
	}, nil
}

// Stats returns the counts.
func (c *Client) Stats() ClientStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.NotMapped, s.Discarded = make(map[Reason]uint64), make(map[portmap.Verdict]uint64)
	for r, n := range c.stats.NotMapped {
		s.NotMapped[r] = n
	}
	for v, n := range c.stats.Discarded {
		s.Discarded[v] = n
	}
	return s
}

// Lookup returns the SDP address of a service, for a connection that the caller will soon open from cp, an address and a port that it has
// taken for this. The question is sent from the address of cp, unless that is not one of this host. If there is no SDP address, the error
// is a [*LookupError], and the caller connects to the service itself, without SDP. Addresses that cannot be are [ErrAddress].
func (c *Client) Lookup(ctx context.Context, service, cp netip.AddrPort) (netip.AddrPort, error) {
	return c.lookup(ctx, service, cp, false)
}

// lookup is Lookup for a ctx that may end before the caller's, with the cause errShare: then the reason is NoAnswer. enough says whether the
// port mapper had long enough to answer, so that it is remembered as silent then.
func (c *Client) lookup(ctx context.Context, service, cp netip.AddrPort, enough bool) (netip.AddrPort, error) {
	service, cp = unmap(service), unmap(cp)
	if !isHost(service) || !isHost(cp) || service.Addr().Is4() != cp.Addr().Is4() {
		return netip.AddrPort{}, fmt.Errorf("look up the SDP address of %v for %v: %w", service, cp, ErrAddress)
	}
	q := question{service, cp.Addr()}
	to := c.mapper(service)
	sdp, known, reason := c.recall(q, to)
	if known {
		return sdp, nil
	}
	var err error
	began := time.Now()
	if reason == 0 {
		sdp, reason, err = c.ask(ctx, q, cp, to)
	}
	silent := reason == NoAnswer
	if reason == GivenUp && errors.Is(err, errShare) {
		reason, silent = NoAnswer, enough
	}
	if silent || reason == 0 || reason == Denied {
		c.note(c.asked, to, began, silent)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if reason == 0 {
		c.stats.Mapped++
		return sdp, nil
	}
	c.stats.NotMapped[reason]++
	return netip.AddrPort{}, &LookupError{Service: service, Reason: reason, Err: err}
}

// mapper is who is asked for a service.
func (c *Client) mapper(service netip.AddrPort) netip.AddrPort {
	host := c.cfg.Mapper
	if !host.IsValid() {
		host = service.Addr()
	}
	return netip.AddrPortFrom(host, c.cfg.MapperPort)
}

// recall returns the answer to a question that is still remembered. If there is none, reason says why the port mapper is not to be asked;
// 0: it is.
func (c *Client) recall(q question, to netip.AddrPort) (sdp netip.AddrPort, known bool, reason Reason) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.stats.Lookups++
	if sdp, known = c.kept.Get(now, q); known {
		c.stats.Mapped++
		c.stats.FromCache++
		return sdp, true, 0
	}
	if o, _ := c.asked.Get(now, to); o.silent {
		return sdp, false, Silent
	}
	return sdp, false, 0
}

// firstTimeout is how long the first answer may take.
func (c *Client) firstTimeout() time.Duration { return cmp.Or(c.cfg.Timeout, portmap.DefaultTimeout) }

// isMute reports whether an SDP address is to be left alone.
func (c *Client) isMute(sdp netip.AddrPort) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	o, _ := c.tried.Get(time.Now(), sdp)
	return o.silent
}

// note remembers the outcome of a question to, or a connection to, an address. It began at a time; an answer since then to somebody
// else counts more than that this one had none.
func (c *Client) note(in *outcomes, of netip.AddrPort, began time.Time, silent bool) {
	if c.cfg.SilentFor <= 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if last, ok := in.Get(now, of); silent && ok && !last.silent && !last.at.Before(began) {
		return
	}
	in.Put(of, outcome{silent, now}, now.Add(c.cfg.SilentFor))
}

// forget drops an answer that is remembered, since nobody listens at the address that it names.
func (c *Client) forget(q question) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kept.Drop(q)
}

// begin takes a place for a question, and a handle that no other one has.
func (c *Client) begin() (handle uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.handles) >= c.cfg.MaxLookups {
		return 0, false
	}
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // it does not fail
		handle = binary.BigEndian.Uint64(b[:])
		if _, taken := c.handles[handle]; !taken {
			c.handles[handle] = struct{}{}
			return handle, true
		}
	}
}

func (c *Client) end(handle uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.handles, handle)
}

// ask asks the port mapper.
func (c *Client) ask(ctx context.Context, q question, cp, to netip.AddrPort) (netip.AddrPort, Reason, error) {
	handle, ok := c.begin()
	if !ok {
		return netip.AddrPort{}, Busy, nil
	}
	defer c.end(handle)
	n, err := c.dialUDP(ctx, cp.Addr(), to)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return netip.AddrPort{}, GivenUp, context.Cause(ctx)
	default:
		return netip.AddrPort{}, Unreachable, err
	}
	defer func() { _ = n.Close() }()
	defer context.AfterFunc(ctx, func() { _ = n.SetDeadline(past()) })()

	l := portmap.NewLookup(time.Now(), portmap.LookupConfig{Service: q.service, CP: cp, Handle: handle, Tries: c.cfg.Tries, Timeout: c.cfg.Timeout})
	err = c.talk(ctx, n, l)
	switch l.State() {
	case portmap.Accepted:
	case portmap.Denied:
		return netip.AddrPort{}, Denied, nil
	case portmap.Unreachable:
		return netip.AddrPort{}, Unreachable, err
	case portmap.NoAnswer:
		return netip.AddrPort{}, NoAnswer, nil
	case portmap.Waiting:
		return netip.AddrPort{}, GivenUp, err
	}
	sdp, cacheTime := l.Answer()
	if a := sdp.Addr(); a.IsLinkLocalUnicast() {
		sdp = netip.AddrPortFrom(a.WithZone(q.service.Addr().Zone()), sdp.Port())
	}
	if d := cacheTime.Duration(); d > 0 {
		c.mu.Lock()
		c.kept.Put(q, sdp, time.Now().Add(d))
		c.mu.Unlock()
	}
	return sdp, 0, nil
}

// dialUDP makes the socket of a question about a connection from an address. The socket has that address, too: a server denies questions
// that come from another one (§15.1), which the kernel might choose if the host has several. If the address is another host's, the kernel
// chooses. The socket is connected, so that only answers of the port mapper reach it, and the kernel says if nobody is there.
func (c *Client) dialUDP(ctx context.Context, from netip.Addr, to netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{Control: c.cfg.Control}
	if to.Addr().Is4() == from.Is4() {
		d.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	n, err := d.DialContext(ctx, "udp", to.String())
	if errors.Is(err, syscall.EADDRNOTAVAIL) {
		d.LocalAddr = nil
		return d.DialContext(ctx, "udp", to.String())
	}
	return n, err
}

// talk carries a lookup to its end, or to that of the context. The error is the context's, or says why
// nobody can answer.
func (c *Client) talk(ctx context.Context, n net.Conn, l *portmap.Lookup) error {
	var in, out [readBytes]byte
	for {
		if b, ok := l.Poll(out[:0]); ok {
			_, err := n.Write(b)
			if err == nil || l.State() != portmap.Waiting { // a PMAck may be lost
				continue
			}
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				l.HandleUnreachable()
				return err
			}
		}
		at, waiting := l.NextTimeout()
		if !waiting {
			return nil
		}
		_ = n.SetReadDeadline(at)
		if ctx.Err() != nil { // the deadline that said so may be gone
			return context.Cause(ctx)
		}
		got, err := n.Read(in[:])
		switch {
		case err == nil:
			c.count(l.HandleDatagram(in[:got]))
		case errors.Is(err, os.ErrDeadlineExceeded):
			l.HandleTimeout(time.Now())
		default: // the host, or a router, has said so
			l.HandleUnreachable()
			return err
		}
	}
}

func (c *Client) count(v portmap.Verdict) {
	if v == portmap.Taken {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Discarded[v]++
}

// past is a deadline that wakes who reads or writes.
func past() time.Time { return time.Unix(1, 0) }

// unmap makes an address of IPv4 in the form of IPv6 one of IPv4.
func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

func isHost(a netip.AddrPort) bool {
	return a.Addr().IsValid() && !a.Addr().IsUnspecified() && a.Port() != 0
}
