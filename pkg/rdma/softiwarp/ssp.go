// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// Errors of a Socket Service Point.
var (
	// ErrSocketDown says that the connection ended, or began with what is no MPA Request, before
	// there was a request: the SSP is not operational any more.
	ErrSocketDown = errors.New("softiwarp: connection of the Socket Service Point is down")
	// ErrRequestInProgress says that a part of a request was read already: the connection cannot
	// go back to the streaming mode. The request is refused, and the connection closed.
	ErrRequestInProgress = errors.New("softiwarp: a request was coming in")
)

// SSPState says whether a [SSP] waits for its request.
type SSPState uint8

// States of a Socket Service Point, as its user sees them.
const (
	Operational    SSPState = iota // it waits for the request
	NonOperational                 // it has had its request, was closed, or its connection is down
)

func (s SSPState) String() string {
	if s == Operational {
		return "OPERATIONAL"
	}
	return "NON-OPERATIONAL"
}

// SSPOptions describe a [SSP].
type SSPOptions struct {
	// QP is in INIT, with its receives posted: only the request of the SSP can be accepted
	// on it, until that is answered or the SSP is closed. nil: Accept names it.
	QP rdma.QP
	// Last is the last message of the streaming mode; it may be empty.
	Last []byte
	// Early is what was already read from the connection and belongs to the request.
	Early []byte
}

// SSP is a Socket Service Point (DAT 2.0, iWARP extensions, §3.1): a connection of TCP that
// waits for the peer's MPA Request, which is at most one.
//
//	WAITING --whole request--> ASKED     the request has the connection
//	WAITING --connection down, or no request--> DOWN     it is closed
//	WAITING --Close--> FREED     it is the caller's again; or, in the middle of a request, refused and closed
//
// Each way out of WAITING is one compare-and-swap: a Close that meets a request either comes
// first, and then nobody sees the request, or has no effect on it.
type SSP struct {
	dev   *Device
	conn  *net.TCPConn
	state atomic.Uint32
	frame frameReader
	res   atomic.Pointer[qp] // reserved
	done  chan struct{}      // closed when WAITING was left, with what follows
	req   *Request
	err   error
	back  bool          // FREED, and the connection is as it was
	ended chan struct{} // the goroutine has ended
}

const (
	sspWaiting uint32 = iota
	sspAsked
	sspDown
	sspFreed
)

// NewSSP takes c over, is ready for the peer's MPA Request, and only then sends Last: the peer may
// answer at once. c is closed, and the connection goes on without it; after an error c is as it
// was, and may be tried again. Whether the connection is still there is not looked at: if not,
// [SSP.Request] tells.
func (d *Device) NewSSP(c *net.TCPConn, o SSPOptions) (*SSP, error) {
	err := tcpqp.CheckConn(c, d.cfg.Addr)
	switch {
	case err != nil:
	case len(o.Last) > maxLast:
		err = fmt.Errorf("last message of %d bytes, want at most %d: %w", len(o.Last), maxLast, rdma.ErrInvalid)
	case len(o.Early) > headLen+iwarp.MaxPrivateData:
		err = fmt.Errorf("%d bytes read before, a request has at most %d: %w", len(o.Early), headLen+iwarp.MaxPrivateData, rdma.ErrInvalid)
	}
	if err != nil {
		return nil, fmt.Errorf("make Socket Service Point: %w", err)
	}
	s := &SSP{dev: d, done: make(chan struct{}), ended: make(chan struct{}), frame: frameReader{buf: bytes.Clone(o.Early)}}
	if err := s.reserve(o.QP); err != nil {
		return nil, fmt.Errorf("make Socket Service Point: %w", err)
	}
	if s.conn, err = tcpqp.TakeOver(c); err != nil {
		s.releaseQP()
		return nil, fmt.Errorf("make Socket Service Point: %w", err)
	}
	_ = s.conn.SetDeadline(time.Time{}) // one of the streaming mode says nothing here
	_ = s.conn.SetNoDelay(true)         // an error is that of the connection, which read tells
	if err := d.track(closerFunc{s}, s.read); err != nil {
		s.releaseQP()
		_ = s.conn.Close()
		return nil, fmt.Errorf("make Socket Service Point: %w", err)
	}
	if len(o.Last) > 0 {
		_ = s.conn.SetWriteDeadline(time.Now().Add(requestTimeout))
		if _, err := s.conn.Write(o.Last); err != nil {
			_ = s.conn.CloseRead() // the reader says that it is down
		} else {
			_ = s.conn.SetWriteDeadline(time.Time{})
		}
	}
	return s, nil
}

// closerFunc is the SSP as its device closes it.
type closerFunc struct{ s *SSP }

// Close implements [io.Closer].
func (c closerFunc) Close() error {
	_, _ = c.s.Close() // an error says that somebody else did that
	if c.s.state.Load() != sspAsked {
		_ = c.s.conn.Close()
	}
	return nil
}

// reserve keeps a queue pair for the request.
func (s *SSP) reserve(r rdma.QP) error {
	if r == nil {
		return nil
	}
	q, err := s.dev.find(r)
	if err != nil {
		return err
	}
	q.Lock()
	defer q.Unlock()
	if err := q.ready(nil); err != nil {
		return err
	}
	q.reserved = s
	s.res.Store(q)
	return nil
}

// release ends the reservation of a queue pair. The caller owns it.
func (q *qp) release() {
	if s := q.reserved; s != nil {
		q.reserved = nil
		s.res.Store(nil)
	}
}

// releaseQP does that for who does not own it.
func (s *SSP) releaseQP() {
	if q := s.res.Load(); q != nil {
		q.Lock()
		q.release()
		q.Unlock()
	}
}

// qp returns the reserved queue pair.
func (s *SSP) qp() rdma.QP {
	if q := s.res.Load(); q != nil {
		return q
	}
	return nil
}

// State returns the state.
func (s *SSP) State() SSPState {
	if s.state.Load() == sspWaiting {
		return Operational
	}
	return NonOperational
}

// LocalAddr is the address of our end of the connection; RemoteAddr that of the peer's.
func (s *SSP) LocalAddr() net.Addr { return s.conn.LocalAddr() }

// RemoteAddr is the address of the peer.
func (s *SSP) RemoteAddr() net.Addr { return s.conn.RemoteAddr() }

// QP returns the queue pair that waits for the request, nil if there is none, or not any more.
func (s *SSP) QP() rdma.QP { return s.qp() }

// Request waits for the one request that there can be, and returns it however often it is
// called. The error is [ErrSocketDown], [rdma.ErrClosed] after Close, or that of the context, which
// leaves the SSP as it is.
func (s *SSP) Request(ctx context.Context) (*Request, error) {
	select {
	case <-s.done:
	default:
		select {
		case <-s.done:
		case <-ctx.Done():
			return nil, fmt.Errorf("await request of %v: %w", s.RemoteAddr(), context.Cause(ctx))
		}
	}
	if s.err != nil {
		return nil, fmt.Errorf("await request of %v: %w", s.RemoteAddr(), s.err)
	}
	return s.req, nil
}

// Close ends the SSP and frees its queue pair. While it was operational it returns the
// connection, as it was; [ErrRequestInProgress] if a part of a request was read already. After
// that it has no connection, and returns none: a request that there was goes on.
func (s *SSP) Close() (*net.TCPConn, error) {
	if !s.state.CompareAndSwap(sspWaiting, sspFreed) {
		<-s.done
		if errors.Is(s.err, rdma.ErrClosed) {
			return nil, fmt.Errorf("close Socket Service Point: %w", rdma.ErrClosed)
		}
		return nil, nil //nolint:nilnil // documented: there is none, and nothing is wrong
	}
	s.releaseQP()
	_ = s.conn.SetReadDeadline(past())
	<-s.done
	if !s.back {
		return nil, fmt.Errorf("close Socket Service Point: %w", ErrRequestInProgress)
	}
	<-s.ended
	_ = s.conn.SetDeadline(time.Time{})
	return s.conn, nil
}

// read waits for the request.
func (s *SSP) read() {
	defer close(s.ended)
	f, err := s.frame.read(s.conn)
	if err == nil {
		err = s.asked(f)
	}
	switch {
	case err == nil:
		return
	case s.state.CompareAndSwap(sspWaiting, sspDown):
		s.releaseQP()
		s.dev.untrack(closerFunc{s})
		s.err = fmt.Errorf("%w: %w", ErrSocketDown, err)
		_ = s.conn.Close()
		close(s.done)
	default:
		s.freed(err)
	}
}

// asked makes the request of its frame.
func (s *SSP) asked(f iwarp.Frame) error {
	r, err := newRequest(s.dev, s.conn, f, s.frame.buf, s)
	if err != nil {
		return err
	}
	if err := s.dev.track(s.conn, nil); err != nil {
		return err
	}
	if !s.state.CompareAndSwap(sspWaiting, sspAsked) {
		s.dev.untrack(s.conn)
		return errFreed
	}
	s.dev.untrack(closerFunc{s})
	s.req = r
	close(s.done)
	return nil
}

// errFreed says that Close came before a request that was read.
var errFreed = errors.New("closed")

// freed ends the SSP after Close: the connection is the caller's, or a request that is coming
// in is refused.
func (s *SSP) freed(err error) {
	s.err = rdma.ErrClosed
	s.back = len(s.frame.buf) == 0
	if s.back {
		s.dev.untrack(closerFunc{s})
		close(s.done)
		return
	}
	close(s.done)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		_ = s.conn.SetReadDeadline(time.Now().Add(requestTimeout))
		var f iwarp.Frame
		if f, err = s.frame.read(s.conn); err == nil {
			_, err = newRequest(s.dev, s.conn, f, nil, nil)
		}
		if err == nil {
			err = errFreed
		}
	}
	if errors.Is(err, errFreed) {
		if f, err := iwarp.ParseFrame(s.frame.buf); err == nil {
			_ = (&Request{dev: s.dev, conn: s.conn, frame: f}).refuse(nil)
		}
	}
	s.dev.untrack(closerFunc{s})
	_ = s.conn.Close()
}
