// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// frameReader reads an MPA Request and not a byte more, so that the connection can go back to
// the streaming mode.
type frameReader struct {
	buf []byte // of the frame, so far
}

// headLen is the length of a start-up frame without private data.
const headLen = 20

// read reads the rest of the Request. After an error of c it can be called again.
func (f *frameReader) read(c io.Reader) (iwarp.Frame, error) {
	if err := f.fill(c, headLen); err != nil {
		return iwarp.Frame{}, err
	}
	n, err := iwarp.FrameLen(f.buf, false)
	if err != nil {
		return iwarp.Frame{}, err
	}
	if err := f.fill(c, n); err != nil {
		return iwarp.Frame{}, err
	}
	if len(f.buf) != n {
		return iwarp.Frame{}, fmt.Errorf("%d bytes behind the Request, before it was answered: %w", len(f.buf)-n, rdma.ErrInvalid)
	}
	return iwarp.ParseFrame(f.buf)
}

// fill reads until the frame has n bytes.
func (f *frameReader) fill(c io.Reader, n int) error {
	have := len(f.buf)
	if have >= n {
		return nil
	}
	f.buf = append(f.buf, make([]byte, n-have)...)
	n, err := io.ReadFull(c, f.buf[have:])
	f.buf = f.buf[:have+n]
	return err
}

// Request is a peer's MPA Request, which is to be accepted or rejected, once.
type Request struct {
	dev   *Device
	conn  *net.TCPConn
	frame iwarp.Frame
	raw   []byte
	ssp   *SSP // that it came by, if any
	state atomic.Uint32
}

// States of a request.
//
//	PENDING --Accept--> ANSWERING --> ANSWERED      an error before anything was sent: back to PENDING
//	PENDING --Reject, or the device is closed--> ANSWERED
const (
	requestPending uint32 = iota
	requestAnswering
	requestAnswered
)

// newRequest makes the request of a frame that was read. A revision that we do not have is
// refused here, and the caller closes the connection.
func newRequest(d *Device, c *net.TCPConn, f iwarp.Frame, raw []byte, s *SSP) (*Request, error) {
	r := &Request{dev: d, conn: c, frame: f, raw: raw, ssp: s}
	if f.Rev != iwarp.Rev1 && f.Rev != iwarp.Rev2 {
		r.frame.Rev, r.frame.IsEnhanced = iwarp.Rev2, true
		_ = r.refuse(nil)
		return nil, fmt.Errorf("request of revision %d: %w", f.Rev, iwarp.ErrRevision)
	}
	return r, nil
}

// PrivateData is what the peer's program sent along: all of it, however much MPA allows.
func (r *Request) PrivateData() []byte { return r.frame.PrivateData }

// Reads returns IRD and ORD of the peer: how many READs of ours it serves at a time, and how many
// of its own it wants to have outstanding. ok is false if it did not say.
func (r *Request) Reads() (served, asked int, ok bool) {
	e := &r.frame.Enhanced
	ok = r.frame.IsEnhanced && e.IRD != iwarp.ReadsUnknown && e.ORD != iwarp.ReadsUnknown
	if !ok {
		return 0, 0, false
	}
	return int(e.IRD), int(e.ORD), true
}

// RemoteAddr and LocalAddr are those of the connection.
func (r *Request) RemoteAddr() net.Addr { return r.conn.RemoteAddr() }

// LocalAddr is the address that the peer has reached.
func (r *Request) LocalAddr() net.Addr { return r.conn.LocalAddr() }

// begin makes the request the caller's to be answered.
func (r *Request) begin(state uint32) error {
	if !r.state.CompareAndSwap(requestPending, state) {
		return fmt.Errorf("request of %v is answered: %w", r.conn.RemoteAddr(), rdma.ErrState)
	}
	return nil
}

// Accept takes the request on a queue pair in INIT, and returns when the connection is
// established: the queue pair is in RTS. If the request names a peer-to-peer connection that is
// when the initiator's first message came, else when the Reply is sent; what is posted before
// the initiator's first message waits for that (RFC 5044 §7.1.2). A queue pair of the [SSP]
// that the request came by may be left out.
//
// ErrState, ErrInvalid and ErrClosed say that nothing was sent: the request still waits. After
// other errors it is refused, and the connection closed.
func (r *Request) Accept(ctx context.Context, to rdma.QP, o ConnectOptions) error {
	if to == nil && r.ssp != nil {
		to = r.ssp.qp()
	}
	q, err := r.dev.find(to)
	if err == nil && r.ssp != nil && r.ssp.qp() != nil && r.ssp.qp() != to {
		err = fmt.Errorf("queue pair %v is not that of the Socket Service Point: %w", q.Num(), rdma.ErrInvalid)
	}
	if err == nil {
		err = r.begin(requestAnswering)
	}
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	done, err := q.reply(r, &o)
	if err != nil {
		return fmt.Errorf("accept %v: %w", r.conn.RemoteAddr(), err)
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
	if err := q.established(ctx); err != nil {
		return fmt.Errorf("accept %v: %w", r.conn.RemoteAddr(), err)
	}
	return nil
}

// reply begins start-up as the responder, and sends the Reply.
func (q *qp) reply(r *Request, o *ConnectOptions) (<-chan struct{}, error) {
	q.Lock()
	defer q.Unlock()
	now := time.Now()
	s := o.startup(iwarp.Responder, r.conn)
	s.Early = r.raw
	err := q.ready(r.ssp)
	if f := (iwarp.Frame{IsEnhanced: r.frame.IsEnhanced, PrivateData: o.PrivateData}); err == nil && f.Len()-headLen > iwarp.MaxPrivateData {
		err = fmt.Errorf("%d bytes of private data: %w", len(o.PrivateData), rdma.ErrInvalid)
	}
	if err == nil {
		err = q.m.Start(now, s)
	}
	if err != nil {
		r.state.Store(requestPending)
		return nil, err
	}
	q.release()
	r.state.Store(requestAnswered)
	err = q.m.HandleRx(now, 0) // the Request
	if err == nil {
		err = q.m.Reply(now, iwarp.Reply{PrivateData: o.PrivateData})
	}
	if err != nil && q.m.Phase() == iwarp.PhaseAsked {
		_ = q.m.Reply(now, iwarp.Reply{Reject: true}) // allowed there
	}
	if !r.dev.untrack(r.conn) {
		err = fmt.Errorf("device %q: %w", r.dev.cfg.Name, rdma.ErrClosed)
	} else if attach := q.Attach(r.conn); attach != nil {
		err = attach
	}
	if !q.Attached() {
		_ = r.conn.Close()
		q.m.HandleEnd(now, err)
		return nil, err
	}
	q.HoldEnd(now.Add(settleTime))
	if err != nil {
		q.Step(now) // which says why
		q.QP.Drop()
		return nil, err
	}
	before := q.m.Stats().RxFPDUs
	gated := r.frame.IsEnhanced && r.frame.Enhanced.PeerToPeer
	done := q.await(func() bool {
		return q.m.Phase() != iwarp.PhaseOpen || !gated || q.m.Stats().RxFPDUs > before
	})
	q.Step(now)
	return done, nil
}

// established returns whether the responder's connection is, and ends one that is not.
func (q *qp) established(ctx context.Context) error {
	q.Lock()
	defer q.Unlock()
	waits := q.wait != nil
	q.wait, q.decided = nil, nil
	switch {
	case q.Dead():
		return fmt.Errorf("queue pair %v: %w", q.Num(), rdma.ErrClosed)
	case waits:
		_ = q.m.Modify(time.Now(), rdma.QPAttr{State: rdma.QPError}) // allowed from there
		q.Step(time.Now())
		return fmt.Errorf("queue pair %v: initiator's first message: %w", q.Num(), context.Cause(ctx))
	case q.m.State() != rdma.QPRTS && q.m.Stats().RxFPDUs == 0:
		if err := q.m.Err(); err != nil {
			return err
		}
		return fmt.Errorf("queue pair %v is in %v: %w", q.Num(), q.m.State(), rdma.ErrState)
	}
	return nil
}

// Reject refuses the request, with private data for the peer's program, and returns the
// connection: it is in the streaming mode again, unless the peer closes it, as Linux's siw does. A
// queue pair of the [SSP] is free again, in INIT.
func (r *Request) Reject(pd []byte) (*net.TCPConn, error) {
	f := iwarp.Frame{IsEnhanced: r.frame.IsEnhanced, PrivateData: pd}
	if f.Len()-headLen > iwarp.MaxPrivateData {
		return nil, fmt.Errorf("reject %v with %d bytes of private data: %w", r.conn.RemoteAddr(), len(pd), rdma.ErrInvalid)
	}
	if err := r.begin(requestAnswered); err != nil {
		return nil, fmt.Errorf("reject: %w", err)
	}
	if r.ssp != nil {
		r.ssp.releaseQP()
	}
	open := r.dev.untrack(r.conn)
	err := r.refuse(pd)
	if !open {
		err = fmt.Errorf("device %q: %w", r.dev.cfg.Name, rdma.ErrClosed)
	}
	if err != nil {
		_ = r.conn.Close()
		return nil, fmt.Errorf("reject %v: %w", r.conn.RemoteAddr(), err)
	}
	return r.conn, nil
}

// refuse sends the Reply of a refusal.
func (r *Request) refuse(pd []byte) error {
	f := iwarp.Frame{Reply: true, Reject: true, CRC: r.frame.CRC, Rev: r.frame.Rev, IsEnhanced: r.frame.IsEnhanced, PrivateData: pd}
	err := r.conn.SetDeadline(time.Now().Add(requestTimeout))
	if err == nil {
		_, err = r.conn.Write(f.Append(nil))
	}
	return errors.Join(err, r.conn.SetDeadline(time.Time{}))
}
