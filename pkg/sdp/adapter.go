// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/plaintcp"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// adapterLink is iWARP on an adapter that opens the connection of TCP itself: there is no streaming mode in which a Hello could go
// (§8.1.1), so it is the private data of the MPA Request, as InfiniBand's SDP has it in the request of its connection manager. HelloAck
// is the accepting peer's first message of iWARP, as the draft has it.
//
// Whoever sends the MPA Request has to send the first FPDU, too (RFC 5044 §7.1.2), and not every adapter does so by itself
// (RFC 6581 §9; Linux' siw does not). So that is a message of ours, which the accepting peer has a receive buffer for beside
// those of SDP:
//
//	connecting peer (MPA initiator)                   accepting peer (MPA responder)
//	Dial   ---- MPA Request with Hello ------------------> Request
//	       <--- MPA Reply -------------------------------- Accept
//	       ---- one byte, 0 ----------------------------->
//	       <--- HelloAck, the first SEND -----------------
type adapterLink struct {
	c     *Conn
	dev   cm.Device
	o     cm.Options
	to    netip.AddrPort // of a connecting peer
	asked []byte         // private data of the request, on an accepting peer

	// req is the request that an accepting peer has to answer; nil once somebody does. The connection's turn guards it: who sets the
	// connection up accepts the request, unless somebody else has ended the connection, and rejected it.
	req cm.Request
}

// beginning says what a connection of an adapter does before its first message of SDP.
type beginning uint8

const (
	beginsWithout beginning = iota // nothing, or it was done
	beginsSending                  // sends the byte
	beginsWaiting                  // sends nothing until the byte has come
)

// adapterOf returns the device as one that connects its queue pairs itself, nil if the stack does that.
func adapterOf(cfg *Config) cm.Device {
	switch d := cfg.Device.(type) {
	case cm.Device:
		return d
	case *softiwarp.Device:
		if cfg.HelloInRequest {
			return &softAdapter{d, cfg.NoCRC, cfg.MaxULPDU}
		}
	}
	return nil
}

// dialAdapter connects to a listener of an adapter.
func (s *Stack) dialAdapter(ctx context.Context, to netip.AddrPort) (*Conn, error) {
	local := net.TCPAddrFromAddrPort(netip.AddrPortFrom(s.deviceAddr(), 0))
	c, err := s.newConnOn(socket.Connecting, local, net.TCPAddrFromAddrPort(to), func(c *Conn) (link, error) {
		c.ep.begins = beginsSending // before others can have the connection
		return &adapterLink{c: c, dev: s.adapter, o: s.reads(), to: to}, nil
	})
	if err != nil {
		return nil, fmt.Errorf("set up SDP with %v: %w", to, err)
	}
	return s.establish(ctx, c)
}

// answerAdapter accepts a request.
func (s *Stack) answerAdapter(ctx context.Context, r cm.Request) (*Conn, error) {
	c, err := s.newConnOn(socket.Accepting, r.LocalAddr(), r.RemoteAddr(), func(c *Conn) (link, error) {
		c.ep.begins = beginsWaiting // before others can have the connection
		return &adapterLink{c: c, dev: s.adapter, o: s.reads(), asked: r.PrivateData(), req: r}, nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set up SDP with %v: %w", r.RemoteAddr(), err), r.Reject(nil))
	}
	return s.establish(ctx, c)
}

// deviceAddr is where connections of the device begin.
func (s *Stack) deviceAddr() netip.Addr { return s.cfg.Device.GIDs()[0].GID.Addr() }

// reads returns the IRD and ORD of a connection: those that Hello names.
func (s *Stack) reads() cm.Options {
	m := s.cfg.machine(socket.Connecting)
	return cm.Options{ReadsServed: m.IRD, ReadsAsked: m.ORD}
}

func (*adapterLink) name() string { return "iWARP" }

func (l *adapterLink) readHello(context.Context) ([]byte, error) {
	b := l.asked
	if len(b) < bsdh.HelloLen { // behind it may be what some adapters fill private data up with
		return nil, fmt.Errorf("request with %d bytes of private data, want %d: %w", len(b), bsdh.HelloLen, socket.ErrProtocol)
	}
	return b[:bsdh.HelloLen], nil
}

func (l *adapterLink) connect(ctx context.Context, e *endpoint, hello []byte) error {
	o := l.o
	o.PrivateData = hello
	conn, err := l.dev.Dial(ctx, e.qp, l.to, o)
	if err != nil {
		return err
	}
	l.c.local = net.TCPAddrFromAddrPort(conn.Local) // nobody has the connection yet
	l.c.lock()
	defer l.c.unlock()
	if l.c.life.over { // by Stack.Close, and the memory is gone
		return net.ErrClosed
	}
	return e.sendBegin()
}

func (l *adapterLink) accept(ctx context.Context, e *endpoint) error {
	l.c.lock()
	r := l.take()
	l.c.unlock()
	if r == nil {
		return net.ErrClosed
	}
	return r.Accept(ctx, e.qp, l.o)
}

// take returns the request to who answers it, nil if somebody has. The caller has the turn.
func (l *adapterLink) take() cm.Request {
	r := l.req
	l.req = nil
	return r
}

func (l *adapterLink) close(ctx context.Context, e *endpoint) {
	_ = l.dev.Disconnect(e.qp) // it may have ended
	_ = l.dev.AwaitEnd(ctx, e.qp)
}

func (l *adapterLink) reset(e *endpoint) {
	if r := l.take(); r != nil {
		_ = r.Reject(nil) // the peer may be gone
	}
	if e.qp != nil {
		_ = e.qp.Modify(rdma.QPAttr{State: rdma.QPError}) // allowed from everywhere
	}
}

func (*adapterLink) release() {} // the queue pair had everything

// beginBytes is the size of the place behind the slots where the byte lies, in bytes.
const beginBytes = 64

// beginSGE is where the byte lies.
func (e *endpoint) beginSGE() rdma.SGE { return sge(e.slots, e.slotCount*e.slotBytes, 1) }

// recvBegin posts the receive buffer for the byte, before those of SDP.
func (e *endpoint) recvBegin() {
	e.recvs = append(e.recvs, rdma.RecvWR{ID: uint64(workBegin), SGE: e.beginSGE()})
}

// sendBegin posts the byte.
func (e *endpoint) sendBegin() error {
	e.post(rdma.SendWR{ID: uint64(workBegin), Op: rdma.OpSend, Flags: rdma.SendSignaled}, e.beginSGE())
	return e.flush()
}

// handleBegin takes the completion of what begins a connection. The caller has the turn.
func (c *Conn) handleBegin(wc *rdma.WC) {
	if c.ep.begins != beginsWaiting {
		return // of what we sent
	}
	if wc.Bytes != 1 {
		c.fail(fmt.Errorf("%w: connection begins with %d bytes", socket.ErrProtocol, wc.Bytes))
		return
	}
	c.ep.begins = beginsWithout
	if c.life.established {
		c.tellReady()
	}
}

// waitReady waits until the connection is established, or over. Meanwhile it nudges the peer: Linux' siw, as the responder, may
// overlook the byte that comes right behind its Reply until something else arrives. A nudge is a WRITE of no bytes, which takes no
// receive buffer, and whose key nobody looks at. (A READ of no bytes will not do: siw answers it with bytes at times, R5040.5.2.1-1.)
func (c *Conn) waitReady(ctx context.Context) error {
	pause := nudgePause
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for range maxNudges {
		select {
		case <-c.ready:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		}
		if !c.nudge() {
			break
		}
		pause *= 2
		timer.Reset(pause)
	}
	select {
	case <-c.ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// nudge sends a WRITE of no bytes, and reports whether the connection still waits for a peer that this may wake.
func (c *Conn) nudge() bool {
	c.lock()
	defer c.unlock()
	if c.ep.begins != beginsSending || c.ep.dead || c.life.established {
		return false
	}
	c.ep.wrs = append(c.ep.wrs, rdma.SendWR{ID: uint64(workBegin), Op: rdma.OpWrite, Flags: rdma.SendSignaled})
	c.run()
	return true
}

// softAdapter makes a softiwarp device one that connects its queue pairs itself, so that it can talk to peers on real adapters.
type softAdapter struct {
	*softiwarp.Device
	noCRC    bool
	maxULPDU int
}

var _ cm.Device = (*softAdapter)(nil)

func (a *softAdapter) options(o *cm.Options) softiwarp.ConnectOptions {
	return softiwarp.ConnectOptions{
		PrivateData: o.PrivateData, NoCRC: a.noCRC, MaxULPDU: a.maxULPDU, ReadsServed: o.ReadsServed, ReadsAsked: o.ReadsAsked,
	}
}

// Dial implements [cm.Device].
func (a *softAdapter) Dial(ctx context.Context, qp rdma.QP, to netip.AddrPort, o cm.Options) (cm.Conn, error) {
	own := a.GIDs()[0].GID.Addr()
	tcp, err := plaintcp.Dial(ctx, net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(own, 0))}, to.String())
	if err != nil {
		return cm.Conn{}, err
	}
	local, _ := netip.ParseAddrPort(tcp.LocalAddr().String()) // it is one
	data, err := a.Connect(ctx, qp, tcp, a.options(&o))
	if err != nil {
		var why *softiwarp.ConnectError
		if errors.As(err, &why) && why.Socket != nil {
			_ = why.Socket.Close()
		}
		_ = tcp.Close() // if it was not tried
		if why != nil && why.Reason == softiwarp.Rejected {
			err = &cm.RejectError{PrivateData: why.PrivateData, Err: err}
		}
		return cm.Conn{}, err
	}
	return cm.Conn{PrivateData: data, Local: local, Remote: to}, nil
}

// Listen implements [cm.Device].
func (a *softAdapter) Listen(at netip.AddrPort) (cm.Listener, error) {
	l, err := a.Device.Listen(at.String())
	if err != nil {
		return nil, err
	}
	return softListener{l, a}, nil
}

type softListener struct {
	*softiwarp.Listener
	a *softAdapter
}

// Accept implements [cm.Listener].
func (l softListener) Accept(ctx context.Context) (cm.Request, error) {
	r, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return softRequest{r, l.a}, nil
}

type softRequest struct {
	*softiwarp.Request
	a *softAdapter
}

// Accept implements [cm.Request].
func (r softRequest) Accept(ctx context.Context, qp rdma.QP, o cm.Options) error {
	err := r.Request.Accept(ctx, qp, r.a.options(&o))
	if err != nil {
		_ = r.Reject(nil) // if nothing was sent
	}
	return err
}

// Reject implements [cm.Request].
func (r softRequest) Reject(privateData []byte) error {
	tcp, err := r.Request.Reject(privateData)
	if err == nil {
		err = tcp.Close()
	}
	return err
}
