// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/plaintcp"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// ConnectOptions say how a connection is to be. The zero value asks for revision 2 of MPA,
// CRCs, and a first message of the initiator, so that both sides may send at once.
type ConnectOptions struct {
	// PrivateData goes to the peer's program with the Request or Reply. Every peer takes
	// [iwarp.PortablePrivateData] bytes. A Request may have twice as many, but Linux's siw resets the
	// connection then. A Reply may not, unless [Config.LongReplies] says so.
	PrivateData []byte
	// NoPeerToPeer has an initiator send no message by itself after start-up (RFC 6581 §9). The responder
	// may then not send before the initiator's program does.
	NoPeerToPeer bool
	// NoCRC leaves out the CRCs if the peer wants to, too. What arrives is then checked only
	// by TCP.
	NoCRC bool
	// ReadsServed and ReadsAsked are IRD and ORD: how many RDMA READs of the peer are served at
	// a time, and how many of ours may wait for the peer. Start-up fits them to the peer's; with Exact it
	// fails if they do not fit. If both are 0 without Exact they are the default. If none of ours may wait, a READ
	// fails with [rdma.StatusLocalQP].
	ReadsServed, ReadsAsked int
	Exact                   bool
	// Rev is the revision of MPA that an initiator asks for; 0: the second. [Device.Dial]
	// tries the first by itself if the peer has only that.
	Rev uint8
	// MaxULPDU is the length of the longest ULPDU to be sent, in bytes; 0: what fits a segment of TCP. Peers in
	// software are faster with longer ones.
	MaxULPDU int
	// Streamed says that the peer has spoken another protocol on the connection before, so that it cannot be
	// Linux's siw. This device then leaves out what it does for siw's sake: an initiator waits for 2 ms with its first
	// message and sends empty ones behind it, and a connection lasts at least 50 ms.
	Streamed bool
}

// startup translates the options for a connection.
func (o *ConnectOptions) startup(role iwarp.Role, c *net.TCPConn) iwarp.Startup {
	s := iwarp.Startup{
		Role: role, Rev: o.Rev, NoCRC: o.NoCRC, IRD: o.ReadsServed, ORD: o.ReadsAsked, Exact: o.Exact, MaxULPDU: o.MaxULPDU,
	}
	if role == iwarp.Initiator {
		s.PrivateData = o.PrivateData
		s.PeerToPeer = !o.NoPeerToPeer && o.Rev != iwarp.Rev1
	} else {
		s.Rev = iwarp.Rev2 // whatever the Request has
	}
	if s.MaxULPDU == 0 {
		s.MaxULPDU = maxULPDU(c)
	}
	return s
}

// ConnectReason says why there is no connection.
type ConnectReason uint8

// Reasons.
const (
	Rejected    ConnectReason = iota + 1 // the peer refused: its program, or its provider; MPA does not tell which
	Refused                              // the peer closed the connection, or does not speak MPA as we do
	Unreachable                          // TCP does not reach the peer
	TimedOut                             // the context ended before the peer answered
)

func (r ConnectReason) String() string {
	names := [...]string{Rejected: "rejected", Refused: "refused", Unreachable: "unreachable", TimedOut: "timed out"}
	if r > 0 && int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("ConnectReason(%d)", uint8(r))
}

// ConnectError says why there is no connection.
type ConnectError struct {
	Reason      ConnectReason
	PrivateData []byte       // of a peer that rejected
	Socket      *net.TCPConn // the caller's again; nil if [Device.Dial] has closed it
	// Tainted says that Socket can only be closed: the peer's answer may still arrive on it, or one of
	// both has sent something that is not MPA.
	Tainted bool
	Err     error

	rev uint8 // of the peer's Reply
}

func (e *ConnectError) Error() string { return fmt.Sprintf("connect: %v: %v", e.Reason, e.Err) }

func (e *ConnectError) Unwrap() error { return e.Err }

// Timeout reports whether the context ended first, as in [net.Error].
func (e *ConnectError) Timeout() bool { return e.Reason == TimedOut }

// Connect makes an RDMA connection of a connection of TCP: it sends the MPA Request, waits for
// the Reply and returns the peer's private data. The queue pair is in INIT, and then in RTS.
//
// A [*ConnectError] says that Connect has tried in vain: the queue pair is still in INIT, c is closed, and
// the error has the socket in its place. Any other error says that Connect has not tried: c and
// the queue pair are as before. The exception is a queue pair that was closed or modified
// meanwhile: the connection is gone with it.
//
// With a context without deadline Connect may wait for ever.
func (d *Device) Connect(ctx context.Context, r rdma.QP, c *net.TCPConn, o ConnectOptions) ([]byte, error) {
	q, err := d.find(r)
	if err == nil {
		err = tcpqp.CheckConn(c, d.cfg.Addr)
	}
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if ctx.Err() != nil { // a peer could not answer in no time
		return nil, fmt.Errorf("connect: %w", context.Cause(ctx))
	}
	done, err := q.ask(c, &o)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
	return q.answered(ctx)
}

// ask begins start-up as the initiator.
func (q *qp) ask(c *net.TCPConn, o *ConnectOptions) (<-chan struct{}, error) {
	q.Lock()
	defer q.Unlock()
	if err := q.ready(nil); err != nil {
		return nil, err
	}
	now := time.Now()
	if err := q.m.Start(now, o.startup(iwarp.Initiator, c)); err != nil {
		return nil, err
	}
	own, err := tcpqp.TakeOver(c)
	if err != nil {
		q.m.HandleEnd(now, err) // nobody heard of it
		return nil, err
	}
	if err := q.Attach(own.TCPConn); err != nil {
		q.m.HandleEnd(now, err)
		return nil, &ConnectError{Reason: Refused, Socket: own.GiveBack(), Err: err}
	}
	q.asking, q.streamed, q.taken = true, o.Streamed, own
	done := q.await(func() bool { return q.m.Phase() != iwarp.PhaseWaitReply })
	q.Step(now)
	return done, nil
}

// answered returns how start-up ended, and ends one that did not.
func (q *qp) answered(ctx context.Context) ([]byte, error) {
	q.Lock()
	if q.Dead() {
		q.Unlock()
		return nil, fmt.Errorf("connect queue pair %v: %w", q.Num(), rdma.ErrClosed)
	}
	phase, err := q.m.Phase(), q.m.Err()
	timedOut := phase == iwarp.PhaseWaitReply
	if timedOut {
		err = context.Cause(ctx)
		q.m.HandleEnd(time.Now(), err)
	}
	taken := q.taken
	q.taken, q.asking, q.wait, q.decided = tcpqp.Taken{}, false, nil, nil
	peer, has := q.m.Request()
	data := bytes.Clone(peer.PrivateData)
	switch {
	case timedOut || phase == iwarp.PhaseFailed:
	case has: // it may have ended since
		q.Unlock()
		return data, nil
	default:
		state := q.m.State()
		q.Unlock()
		return nil, fmt.Errorf("connect queue pair %v, which was moved to %v: %w", q.Num(), state, rdma.ErrState)
	}
	e := &ConnectError{Reason: reasonOf(err, timedOut), PrivateData: data, Err: err}
	if has {
		e.rev = peer.Rev
	}
	e.Tainted = e.Reason != Rejected
	_, wait := q.Detach() // of taken, which is still there: no queue pair in INIT lets it go
	q.tell()
	q.Unlock()
	wait()
	e.Socket = taken.GiveBack()
	return nil, e
}

func reasonOf(err error, timedOut bool) ConnectReason {
	switch {
	case timedOut:
		return TimedOut
	case errors.Is(err, iwarp.ErrRejected):
		return Rejected
	case errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return Unreachable
	}
	return Refused
}

// Dial opens a TCP connection to an address, as in [net.Dial], and makes an RDMA connection of it as
// [Device.Connect] does. A [*ConnectError] has no socket. If the peer has only the first revision of
// MPA, and Rev is 0, Dial dials a second time.
func (d *Device) Dial(ctx context.Context, r rdma.QP, addr string, o ConnectOptions) ([]byte, error) {
	data, err := d.dial(ctx, r, addr, o)
	var e *ConnectError
	if o.Rev == 0 && errors.As(err, &e) && e.rev == iwarp.Rev1 {
		o.Rev = iwarp.Rev1
		data, err = d.dial(ctx, r, addr, o)
	}
	return data, err
}

func (d *Device) dial(ctx context.Context, r rdma.QP, addr string, o ConnectOptions) ([]byte, error) {
	c, err := plaintcp.Dial(ctx, net.Dialer{LocalAddr: &net.TCPAddr{IP: d.cfg.Addr.AsSlice(), Zone: d.cfg.Addr.Zone()}}, addr)
	if err != nil {
		e := &ConnectError{Reason: Unreachable, Err: err}
		if ctx.Err() != nil {
			e.Reason = TimedOut
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			e.Reason = Refused
		}
		return nil, e
	}
	data, err := d.Connect(ctx, r, c, o)
	if err == nil {
		return data, nil
	}
	_ = c.Close() // if it was not tried
	var e *ConnectError
	if errors.As(err, &e) && e.Socket != nil {
		_ = e.Socket.Close()
		e.Socket, e.Tainted = nil, false
	}
	return nil, err
}
