// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/ssp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
)

// ErrSocketDown says that the connection ended, or began with what is no MPA Request, before
// there was a request: the SSP is not operational any more (§3.1.1).
var ErrSocketDown = ssp.ErrDown

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
	// QP is a queue pair in INIT, with its receives posted, for the request. It is reserved: no other request can be accepted
	// on it until this one is answered or the SSP is closed. nil: Accept names the queue pair.
	QP rdma.QP
	// Last is the last message of the streaming mode, of up to 64 KiB; it may be empty.
	Last []byte
	// Early are bytes of the request that were read from the connection already.
	Early []byte
}

// SSP is a Socket Service Point (§3.1): a TCP connection that waits for the peer's MPA Request. There is
// at most one Request. Which comes first, the Request, the connection's end or [SSP.Close], is
// decided once, under one lock; pkg/rdma/internal/ssp has the states.
//
// Nothing is taken out of the stream but a whole request. So Close gives the connection back as it
// was, with all bytes that the peer has sent, also those of a part of a request.
type SSP struct {
	dev           *Device
	listener      bool // a [Listener] made it
	local, remote net.Addr
	res           atomic.Pointer[qp] // reserved
	greeted       chan struct{}      // closed when the last message is sent
	done          chan struct{}      // closed when there is a request, or will be none
	req           *Request           // before done is closed; nil: none
	ended         chan struct{}      // closed when the goroutine has ended

	mu    sync.Mutex  // guards what follows
	conn  tcpqp.Taken // since start, for good
	point ssp.Point
	head  []byte // room to look at the stream
}

// NewSSP takes the connection over from c, and sends Last; from then on the SSP waits for the peer's MPA Request,
// which may come at once. NewSSP closes c, and the connection goes on under another descriptor. After an error c is as it
// was, and may be tried again. NewSSP does not find out whether the connection has ended; [SSP.Request] tells.
//
// NewSSP returns when TCP has taken Last. If TCP has not within 5 seconds, the SSP is down.
func (d *Device) NewSSP(c *net.TCPConn, o SSPOptions) (*SSP, error) {
	err := tcpqp.CheckConn(c, d.cfg.Addr)
	switch {
	case err != nil:
	case len(o.Last) > maxLast:
		err = fmt.Errorf("last message of %d bytes, want at most %d: %w", len(o.Last), maxLast, rdma.ErrInvalid)
	case len(o.Early) > ssp.MaxRequest:
		err = fmt.Errorf("%d bytes read before, a request has at most %d: %w", len(o.Early), ssp.MaxRequest, rdma.ErrInvalid)
	}
	if err != nil {
		return nil, fmt.Errorf("make Socket Service Point: %w", err)
	}
	s := d.newPoint(o.Early)
	s.local, s.remote = c.LocalAddr(), c.RemoteAddr()
	if err := s.reserve(o.QP); err != nil {
		return nil, fmt.Errorf("make Socket Service Point: %w", err)
	}
	if err := s.start(o.Last, func() (tcpqp.Taken, error) { return tcpqp.TakeOver(c) }); err != nil {
		s.releaseQP()
		return nil, fmt.Errorf("make Socket Service Point: %w", err)
	}
	return s, nil
}

// newPoint makes a SSP without a connection.
func (d *Device) newPoint(early []byte) *SSP {
	return &SSP{
		dev: d, greeted: make(chan struct{}), done: make(chan struct{}), ended: make(chan struct{}),
		point: ssp.New(early), head: make([]byte, ssp.MaxRequest),
	}
}

// start gets the connection, sends the last message, and begins to wait.
func (s *SSP) start(last []byte, get func() (tcpqp.Taken, error)) error {
	s.mu.Lock() // the goroutine, and the end of the device, wait for the connection
	err := s.dev.track(shutter{s}, func() { s.run(last) })
	if err == nil {
		if s.conn, err = get(); err != nil {
			s.dev.untrack(shutter{s})
		}
	}
	s.mu.Unlock()
	if err == nil {
		<-s.greeted
	}
	return err
}

// shutter is the SSP as its device closes it.
type shutter struct{ s *SSP }

// Close implements [io.Closer].
func (c shutter) Close() error {
	c.s.shut()
	return nil
}

// shut ends the SSP, and closes a connection that nobody else has.
func (s *SSP) shut() {
	s.mu.Lock()
	mine := s.conn.TCPConn != nil && s.point.Shut()
	s.mu.Unlock()
	if mine {
		s.dev.untrack(shutter{s})
		_ = s.conn.Close()
	}
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

// State returns the state.
func (s *SSP) State() SSPState {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.point.State() == ssp.Waiting {
		return Operational
	}
	return NonOperational
}

// LocalAddr is the address of our end of the connection.
func (s *SSP) LocalAddr() net.Addr { return s.local }

// RemoteAddr is the address of the peer; nil if there was none any more when c was made of a
// descriptor.
func (s *SSP) RemoteAddr() net.Addr { return s.remote }

// Device returns the device whose SSP it is.
func (s *SSP) Device() *Device { return s.dev }

// QP returns the queue pair that waits for the request, nil if there is none, or not any more.
func (s *SSP) QP() rdma.QP {
	if q := s.res.Load(); q != nil {
		return q
	}
	return nil
}

// Request waits for the one request that there can be, and returns it however often it is
// called. The error is an [ErrSocketDown], [rdma.ErrClosed] after Close, or that of the context,
// which leaves the SSP as it is.
func (s *SSP) Request(ctx context.Context) (*Request, error) {
	select {
	case <-s.done:
	default:
		select {
		case <-s.done:
		case <-ctx.Done():
			return nil, fmt.Errorf("await request of %v: %w", s.remote, context.Cause(ctx))
		}
	}
	s.mu.Lock()
	err := s.point.Err()
	s.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("await request of %v: %w", s.remote, err)
	}
	return s.req, nil
}

// Close ends the SSP, frees its queue pair, and returns the connection as it was (§3.1.2): what came
// since, and was no whole request, is there to be read. If there was a request, that has the
// connection and the queue pair, and goes on; then Close returns nil. A second Close is an
// error, [rdma.ErrClosed].
//
// A SSP that is down still has the connection, which may be of use: the peer may have said
// something else than expected. But who began with a part of a request and went on with something
// else is to be disconnected (RFC 5044 §7.1.1).
func (s *SSP) Close() (*net.TCPConn, error) {
	s.mu.Lock()
	back, err := s.point.Free()
	s.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("close Socket Service Point: %w", err)
	}
	if !back {
		return nil, nil //nolint:nilnil // documented: there is none, and nothing is wrong
	}
	_ = s.conn.SetReadDeadline(past())
	<-s.ended
	s.dev.untrack(shutter{s})
	return s.conn.GiveBack(), nil
}

// run waits for the request.
func (s *SSP) run(last []byte) {
	defer close(s.ended)
	s.mu.Lock()
	c := s.conn
	s.mu.Unlock()
	if c.TCPConn == nil {
		return // there was no connection to be had
	}
	err := s.greet(last)
	close(s.greeted)
	var raw syscall.RawConn
	if err == nil {
		raw, err = c.SyscallConn()
	}
	var answer []byte
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			var over bool
			answer, over = s.look(int(fd))
			return over
		})
	}
	s.mu.Lock()
	if err != nil {
		s.point.HandleHead(nil, err) // it was closed, if that is news
	}
	s.head = nil
	if s.point.State() == ssp.Asked {
		s.req = &Request{s: s, frame: *s.point.Frame()}
	}
	s.mu.Unlock()
	if s.req == nil {
		s.releaseQP()
	}
	if answer != nil {
		_ = send(c.TCPConn, answer) // the peer may be gone
	}
	close(s.done)
}

// greet sends the last message of the streaming mode.
func (s *SSP) greet(last []byte) error {
	_ = s.conn.SetDeadline(time.Time{}) // one of the streaming mode says nothing here
	_ = s.conn.SetNoDelay(true)         // an error is that of the connection, which look tells
	if len(last) == 0 {
		return nil
	}
	if err := send(s.conn.TCPConn, last); err != nil {
		return fmt.Errorf("send the last message: %w", err)
	}
	return nil
}

// send writes a few bytes, for a bounded time.
func send(t *net.TCPConn, b []byte) error {
	if err := t.SetWriteDeadline(time.Now().Add(requestTimeout)); err != nil {
		return err
	}
	_, err := t.Write(b)
	return errors.Join(err, t.SetWriteDeadline(time.Time{}))
}

// look looks at the stream, and reports whether there will be nothing more to look for.
func (s *SSP) look(fd int) (answer []byte, over bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.point.State() != ssp.Waiting {
		return nil, true
	}
	n, end := peek(fd, s.head)
	length, answer := s.point.HandleHead(s.head[:n], end)
	if length > 0 {
		_ = take(fd, s.head[:length]) // they are there
	}
	return answer, s.point.State() != ssp.Waiting
}
