// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// Request is a peer's MPA Request, which is to be accepted or rejected, once.
type Request struct {
	s     *SSP // that it came by, which has the connection
	frame iwarp.Frame
}

// SSP returns the Socket Service Point that the request came by, nil for that of a [Listener].
func (r *Request) SSP() *SSP {
	if r.s.listener {
		return nil
	}
	return r.s
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

// RemoteAddr is the address of the peer: the connection's, so its port is the initiator's.
func (r *Request) RemoteAddr() net.Addr { return r.s.conn.RemoteAddr() }

// LocalAddr is the address that the peer has reached.
func (r *Request) LocalAddr() net.Addr { return r.s.conn.LocalAddr() }

// Accept takes the request on a queue pair in INIT, and returns when the connection is
// established: the queue pair is in RTS. If the request names a peer-to-peer connection that is
// when the initiator's first message came, else when the Reply is sent; what is posted before
// the initiator's first message waits for that (RFC 5044 §7.1.2). A queue pair of the [SSP]
// that the request came by may be left out.
//
// The private data is at most [iwarp.PortablePrivateData] bytes, unless [Config.LongReplies] allows more.
//
// ErrState, ErrInvalid and ErrClosed say that nothing was sent, and so does the error of a context
// that had ended before: the request still waits. After other errors it is refused, and the
// connection closed.
func (r *Request) Accept(ctx context.Context, to rdma.QP, o ConnectOptions) error {
	own := r.s.QP()
	if to == nil {
		to = own
	}
	q, err := r.s.dev.find(to)
	switch {
	case err != nil:
	case own != nil && own != to:
		err = fmt.Errorf("queue pair %v is not that of the Socket Service Point: %w", q.Num(), rdma.ErrInvalid)
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	done, err := q.reply(r, &o)
	if err != nil {
		return fmt.Errorf("accept %v: %w", r.RemoteAddr(), err)
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
	if err := q.established(ctx); err != nil {
		return fmt.Errorf("accept %v: %w", r.RemoteAddr(), err)
	}
	return nil
}

// take begins start-up as the responder: the queue pair has the request's connection then, and
// has read the request.
func (q *qp) take(now time.Time, r *Request, o *ConnectOptions) error {
	if err := q.ready(r.s); err != nil {
		return err
	}
	if err := r.checkLength(o.PrivateData); err != nil {
		return err
	}
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if err := r.s.point.CheckReply(o.PrivateData); err != nil {
		return err
	}
	raw, err := r.s.point.Accept()
	if err != nil {
		return err
	}
	s := o.startup(iwarp.Responder, r.s.conn.TCPConn)
	s.Early = raw
	if err := q.m.Start(now, s); err != nil {
		r.s.point.TakeBack()
		return err
	}
	q.release()
	return nil
}

// reply sends the Reply.
func (q *qp) reply(r *Request, o *ConnectOptions) (<-chan struct{}, error) {
	q.Lock()
	defer q.Unlock()
	now := time.Now()
	if err := q.take(now, r, o); err != nil {
		return nil, err
	}
	err := q.m.HandleRx(now, 0) // the Request
	if err == nil {
		err = q.m.Reply(now, iwarp.Reply{PrivateData: o.PrivateData})
	}
	if err != nil && q.m.Phase() == iwarp.PhaseAsked {
		_ = q.m.Reply(now, iwarp.Reply{Reject: true}) // allowed there
	}
	<-r.s.ended // so that nobody else reads
	if !r.s.dev.untrack(shutter{r.s}) {
		err = fmt.Errorf("device %q: %w", r.s.dev.cfg.Name, rdma.ErrClosed)
	} else if attach := q.Attach(r.s.conn.TCPConn); attach != nil {
		err = attach
	}
	if !q.Attached() {
		_ = r.s.conn.Close()
		q.m.HandleEnd(now, err)
		return nil, err
	}
	if !o.Streamed {
		q.DelayEnd(now.Add(minStay))
	}
	if err != nil {
		q.Step(now) // which says why
		q.QP.Drop()
		return nil, err
	}
	q.before = q.m.Stats().RxFPDUs
	gated := r.frame.IsEnhanced && r.frame.Enhanced.PeerToPeer
	done := q.await(func() bool {
		return q.m.Phase() != iwarp.PhaseOpen || !gated || q.m.Stats().RxFPDUs > q.before
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
	case q.m.State() == rdma.QPRTS || q.began():
		return nil
	case q.m.Err() != nil:
		return q.m.Err()
	}
	return fmt.Errorf("queue pair %v is in %v: %w", q.Num(), q.m.State(), rdma.ErrState)
}

// began reports whether a connection that has ended was established before: an initiator that
// does not like the Reply says so by a Terminate, which is no first message.
func (q *qp) began() bool {
	n := q.m.Stats().RxFPDUs - q.before
	var t *iwarp.TerminateError
	return n > 1 || n == 1 && (!errors.As(q.m.Err(), &t) || t.Sent)
}

// checkLength refuses private data of a Reply that a peer may not survive. Nothing in a Request tells
// that it is siw's.
func (r *Request) checkLength(pd []byte) error {
	if len(pd) > iwarp.PortablePrivateData && !r.s.dev.cfg.LongReplies {
		return fmt.Errorf("%d bytes of private data in a Reply, want at most %d: more would stop the kernel of a peer with Linux's siw, unless Config.LongReplies says that there is none: %w",
			len(pd), iwarp.PortablePrivateData, rdma.ErrInvalid)
	}
	return nil
}

// Reject refuses the request, with private data for the peer's program as in [Request.Accept], and
// returns the connection: it is in the streaming mode again, unless the peer closes it, as Linux's siw does. A
// queue pair of the [SSP] is free again, in INIT.
//
// ErrState, ErrInvalid and ErrClosed say that nothing was sent; after other errors the connection
// is closed.
func (r *Request) Reject(pd []byte) (*net.TCPConn, error) {
	if err := r.checkLength(pd); err != nil {
		return nil, fmt.Errorf("reject: %w", err)
	}
	r.s.mu.Lock()
	answer, err := r.s.point.Reject(pd)
	r.s.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("reject: %w", err)
	}
	<-r.s.ended // so that nobody else reads
	r.s.releaseQP()
	open := r.s.dev.untrack(shutter{r.s})
	err = send(r.s.conn.TCPConn, answer)
	if !open {
		err = fmt.Errorf("device %q: %w", r.s.dev.cfg.Name, rdma.ErrClosed)
	}
	if err != nil {
		_ = r.s.conn.Close()
		return nil, fmt.Errorf("reject %v: %w", r.RemoteAddr(), err)
	}
	return r.s.conn.GiveBack(), nil
}
