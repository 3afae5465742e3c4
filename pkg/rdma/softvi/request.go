// SPDX-License-Identifier: Apache-2.0

package softvi

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

// Request is a peer's call, which is to be accepted or rejected, once.
//
// Its goroutine reads the Connect Request, finds whom it names, and then watches the connection
// until the call is answered, the peer gives up, or the program's time is over.
type Request struct {
	dev    *Device
	conn   *net.TCPConn
	source netip.Addr    // by which it is counted
	ended  chan struct{} // closed when the goroutine has ended

	offer vitcp.CE  // constant once somebody else has the request
	taker *Listener // that it waits for, or nil

	mu    sync.Mutex // guards what follows
	m     *vitcp.Callee
	state requestState
	err   error // why it is over
}

// requestState is whose the connection of a request is.
//
//	WAITS --Accept, or a call of ours meets it--> TAKEN    a queue pair's, when the goroutine has ended
//	WAITS --Reject, or no match--> REFUSED                 the goroutine's, which closes it
//	WAITS --any end--> OVER                                likewise
type requestState uint8

const (
	requestWaits requestState = iota
	requestTaken
	requestRefused
	requestOver
)

func newRequest(d *Device, c *net.TCPConn) *Request {
	return &Request{
		dev: d, conn: c, source: sourceOf(c), ended: make(chan struct{}),
		m: vitcp.NewCallee(time.Now(), vitcp.CalleeConfig{RequestTimeout: d.cfg.RequestTimeout, AcceptTimeout: d.cfg.AcceptTimeout}),
	}
}

// remoteIP is the address of a connection's peer.
func remoteIP(c *net.TCPConn) netip.Addr {
	a, _ := c.RemoteAddr().(*net.TCPAddr)
	return a.AddrPort().Addr().Unmap().WithZone("")
}

// sourceOf is the address by which connections are counted: who has one of IPv6 has all of its
// network.
func sourceOf(c *net.TCPConn) netip.Addr {
	a := remoteIP(c)
	if a.Is6() {
		if p, err := a.Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return a
}

// past is a deadline that wakes who waits for a connection.
func past() time.Time { return time.Unix(1, 0) }

// run is the goroutine.
func (r *Request) run() {
	defer close(r.ended)
	defer r.dev.release(r)
	r.receive()
	if r.match() {
		r.watch()
	}
	r.mu.Lock()
	state := r.state
	r.mu.Unlock()
	switch state {
	case requestTaken:
		return
	case requestRefused:
		_ = r.conn.CloseWrite()
		_ = r.conn.SetReadDeadline(time.Now().Add(refusalLinger))
		_, _ = io.Copy(io.Discard, io.LimitReader(r.conn, maxRefusalRead))
	case requestWaits, requestOver:
	}
	_ = r.conn.Close()
}

// receive reads the Connect Request, and not a byte more.
func (r *Request) receive() {
	at, _ := r.m.NextTimeout()
	_ = r.conn.SetReadDeadline(at)
	var buf [vitcp.MaxConnectLen]byte
	for r.m.State() == vitcp.StateIncoming {
		n, err := r.conn.Read(buf[:r.m.Want()])
		r.m.HandleData(time.Now(), buf[:n])
		if err != nil {
			r.fails(err)
		}
	}
	for _, o := range r.m.Poll(nil) {
		if o.Kind == vitcp.OutputRequest {
			r.offer = *o.Request
		}
	}
}

// fails tells the machine how a look at the connection has ended.
func (r *Request) fails(err error) {
	r.m.HandleTimeout(time.Now())
	r.m.HandleEnd(time.Now(), err) // unless it was that
}

// match finds who is called, and reports whether a listener has the request.
func (r *Request) match() bool {
	if r.m.State() != vitcp.StateMatching {
		return false
	}
	d := r.dev
	d.mu.Lock()
	p := d.peers[crossing{own: r.offer.Called, peers: r.offer.Calling, peer: remoteIP(r.conn)}]
	l := d.listeners[r.offer.Called]
	d.mu.Unlock()
	switch {
	case p != nil && r.offer.Peer:
		p.meet(r)
		return false
	case l == nil:
		r.m.NoMatch(time.Now())
		r.refused()
		return false
	}
	r.taker = l
	r.m.Match(time.Now())
	at, _ := r.m.NextTimeout()
	_ = r.conn.SetReadDeadline(at)
	return l.put(r) // else the caller may call again
}

// refused sends a refusal.
func (r *Request) refused() {
	_, _ = r.perform() // who is gone needs no refusal
	r.state = requestRefused
}

// perform does what the machine asks for, but that closing the connection is the goroutine's. It
// returns what a call that was accepted has led to, or why there is nothing.
func (r *Request) perform() (t vitcp.Terms, err error) {
	for _, o := range r.m.Poll(nil) {
		switch o.Kind {
		case vitcp.OutputSend:
			_ = r.conn.SetWriteDeadline(time.Now().Add(sendTimeout))
			if _, errSend := r.conn.Write(o.Data); errSend != nil {
				err = fmt.Errorf("%w: %w", vitcp.ErrPeerClosed, errSend)
			}
		case vitcp.OutputConnected:
			t = o.Terms
		case vitcp.OutputFailed:
			err = o.Err
		case vitcp.OutputDial, vitcp.OutputClose, vitcp.OutputRequest:
		}
	}
	return t, err
}

// watch waits until the request is answered, or over.
func (r *Request) watch() {
	err := tcpqp.AwaitInput(r.conn) // a caller that waits says nothing: what comes is the end
	r.mu.Lock()
	if r.state == requestWaits {
		r.fails(err)
		_, r.err = r.perform()
		r.state = requestOver
	}
	r.mu.Unlock()
	r.taker.drop(r)
}

// Calling and Called are the discriminators of both sides.
func (r *Request) Calling() string { return r.offer.Calling.String() }

// Called is the discriminator that the listener has.
func (r *Request) Called() string { return r.offer.Called.String() }

// Offer is what the caller offers: what it has enabled, and the most that it takes.
func (r *Request) Offer() vitcp.Attr { return r.offer.Attr }

// Security is what the caller's program sent along (§3.2, Security Information): private data,
// of at most vitcp.MaxSecurity bytes.
func (r *Request) Security() []byte { return bytes.Clone(r.offer.Security) }

// RemoteAddr and LocalAddr are those of the TCP connection.
func (r *Request) RemoteAddr() net.Addr { return r.conn.RemoteAddr() }

// LocalAddr is the address that the caller has reached.
func (r *Request) LocalAddr() net.Addr { return r.conn.LocalAddr() }

// waits refuses a request that is answered or over; mu is held.
func (r *Request) waits() error {
	switch r.state {
	case requestTaken, requestRefused:
		return fmt.Errorf("call is answered: %w", rdma.ErrState)
	case requestOver:
		return fmt.Errorf("call is over: %w", r.err)
	case requestWaits:
	}
	return nil
}

// Accept takes the call on a queue pair in INIT, which is in RTS then, and returns what both sides
// agree on. Nothing in it waits for the peer.
//
// ErrState, ErrInvalid and ErrClosed say that nothing was sent, and so do vitcp.ErrReliability,
// ErrRDMAWrite, ErrRDMARead and ErrMaxTransfer, with which the sides do not fit: the request still waits, for other
// options, or for Reject. After other errors it is over.
func (r *Request) Accept(to rdma.QP, o Options) (Terms, error) {
	q, err := r.dev.find(to)
	if err == nil {
		err = o.Validate()
	}
	var t Terms
	if err == nil {
		t, err = q.answer(r, &o)
	}
	if err != nil {
		return Terms{}, fmt.Errorf("accept call of %q at %v: %w", r.Calling(), r.conn.RemoteAddr(), err)
	}
	return t, nil
}

// answer accepts a request on the queue pair.
func (q *qp) answer(r *Request, o *Options) (Terms, error) {
	q.Lock()
	defer q.Unlock()
	if err := q.ready(); err != nil {
		return Terms{}, err
	}
	t, err := r.accept(vitcp.Answer{Attr: o.attr(), First: randomFirst(), Posted: q.m.Posted(), Security: o.Security})
	if err != nil {
		return Terms{}, err
	}
	<-r.ended
	return q.begin(r.conn, &t, o)
}

// accept sends the Connect Accept, after which the connection is the caller's when the goroutine
// has ended.
func (r *Request) accept(a vitcp.Answer) (vitcp.Terms, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.waits(); err != nil {
		return vitcp.Terms{}, err
	}
	if _, err := r.m.Accept(time.Now(), a); err != nil {
		return vitcp.Terms{}, err
	}
	t, err := r.perform()
	r.state = requestTaken
	if err != nil {
		r.state, r.err = requestOver, err
	}
	_ = r.conn.SetReadDeadline(past()) // wakes the goroutine
	return t, err
}

// Reject refuses the call. VI/TCP has no room for a reason.
func (r *Request) Reject() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.waits(); err != nil {
		return fmt.Errorf("reject call of %q at %v: %w", r.Calling(), r.conn.RemoteAddr(), err)
	}
	r.m.Reject(time.Now())
	r.refused()
	_ = r.conn.SetReadDeadline(past()) // wakes the goroutine
	return nil
}
