// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// link makes the queue pair of one connection work on a connection of TCP, and ends both. Connecting and accepting
// peers call one of connect and accept, once; after an error of these there is no connection of TCP any more.
type link interface {
	name() string
	// readHello reads what comes before the queue pair is made, and returns the Hello in it.
	readHello(ctx context.Context) ([]byte, error)
	// connect sends the Hello, and returns when the peer's first message can arrive.
	connect(ctx context.Context, e *endpoint, hello []byte) error
	// accept returns when the HelloAck can be posted.
	accept(ctx context.Context, e *endpoint) error
	// close ends the connection in order, and waits until the peer has ended it, too, or the context has. Nothing is
	// under way on it.
	close(ctx context.Context, e *endpoint)
	// reset ends the connection at once: when it returns, nothing of the peer reaches memory. There may be no
	// queue pair yet.
	reset(e *endpoint)
	// release gives back what is left, when the queue pair is closed.
	release()
}

// newLink makes the link of a connection.
func (c *Conn) newLink(tcp *net.TCPConn) link {
	cfg := &c.stack.cfg
	m := cfg.machine(c.role)
	if d, ok := cfg.Device.(*softiwarp.Device); ok {
		return &iwarpLink{dev: d, tcp: tcp, o: softiwarp.ConnectOptions{
			NoCRC: cfg.NoCRC, MaxULPDU: cfg.MaxULPDU, ReadsServed: m.IRD, ReadsAsked: m.ORD, NoPeerToPeer: true, Streamed: true,
		}, moves: c.life.established}
	}
	return &roceLink{dev: cfg.Device, ctx: c.stack.ctx, tcp: tcp, reads: m, gone: c.peerGone, over: make(chan struct{})}
}

// iwarpLink is iWARP as the draft has it (§8.1.1): Hello goes as the last bytes of the streaming mode, and HelloAck is the
// first message of iWARP. To send first is the initiator's right (RFC 5044 §7.1.2), so the accepting peer is
// the initiator of MPA:
//
//	connecting peer (MPA responder)                   accepting peer (MPA initiator)
//	NewSSP ---- Hello, 32 bytes in streaming mode ------> reads 32 bytes
//	       <--- MPA Request ----------------------------- Connect
//	Accept ---- MPA Reply ------------------------------>
//	       <--- HelloAck, the first FPDU ----------------
type iwarpLink struct {
	dev *softiwarp.Device
	tcp *net.TCPConn // the device's, once it connects
	o   softiwarp.ConnectOptions

	moves bool // the connection was established before: it is not lost for a shortage that may pass
}

// again reports whether the device is to be asked again after err, and waits a moment before. That is so for a connection that moves, if err
// tells of a shortage that may pass, and the device has done nothing to the TCP connection yet (else err is a ConnectError).
func (l *iwarpLink) again(ctx context.Context, err error) bool {
	var tried *softiwarp.ConnectError
	return l.moves && err != nil && !errors.As(err, &tried) && afterShortage(ctx, err) == nil
}

func (*iwarpLink) name() string { return "iWARP" }

func (l *iwarpLink) readHello(ctx context.Context) ([]byte, error) {
	return readExactly(ctx, l.tcp, bsdh.HelloLen)
}

func (l *iwarpLink) connect(ctx context.Context, e *endpoint, hello []byte) error {
	o := softiwarp.SSPOptions{QP: e.qp, Last: hello}
	s, err := l.dev.NewSSP(l.tcp, o)
	for l.again(ctx, err) {
		s, err = l.dev.NewSSP(l.tcp, o)
	}
	if err != nil {
		return errors.Join(err, l.tcp.Close())
	}
	r, err := s.Request(ctx)
	if err != nil {
		giveUp(ctx, s)
		return fmt.Errorf("peer does not answer Hello: %w", err)
	}
	if err = r.Accept(ctx, nil, l.o); err != nil {
		reject(r)
	}
	return err
}

// giveUp ends the connection of a peer that has not answered Hello in time.
func giveUp(ctx context.Context, s *softiwarp.SSP) {
	c, err := s.Close()
	switch {
	case c != nil:
		_ = c.Close()
	case err == nil: // the request has come meanwhile, and has the connection
		if r, err := s.Request(context.WithoutCancel(ctx)); err == nil {
			reject(r)
		}
	}
}

// reject ends the connection of a request, unless Accept has done so.
func reject(r *softiwarp.Request) {
	if c, _ := r.Reject(nil); c != nil {
		_ = c.Close()
	}
}

func (l *iwarpLink) accept(ctx context.Context, e *endpoint) error {
	_, err := l.dev.Connect(ctx, e.qp, l.tcp, l.o)
	for l.again(ctx, err) {
		_, err = l.dev.Connect(ctx, e.qp, l.tcp, l.o)
	}
	if err == nil {
		return nil
	}
	var why *softiwarp.ConnectError
	if errors.As(err, &why) && why.Socket != nil {
		_ = why.Socket.Close()
	}
	_ = l.tcp.Close() // if it was not tried
	return err
}

func (l *iwarpLink) close(ctx context.Context, e *endpoint) {
	_ = l.dev.Disconnect(e.qp) // it may have ended
	_ = l.dev.AwaitEnd(ctx, e.qp)
}

func (l *iwarpLink) reset(e *endpoint) {
	if e.qp == nil {
		_ = l.tcp.Close()
		return
	}
	_ = e.qp.Modify(rdma.QPAttr{State: rdma.QPError}) // allowed from everywhere
}

func (l *iwarpLink) release() { _ = l.tcp.Close() } // the device's, if it was taken over: then this one is closed

// readExactly reads n bytes and not one more, for as long as the context lasts.
func readExactly(ctx context.Context, tcp *net.TCPConn, n int) ([]byte, error) {
	stop := whileWaiting(ctx, tcp)
	b, err := readFull(tcp, n)
	return b, stop(err)
}

func readFull(tcp *net.TCPConn, n int) ([]byte, error) {
	b := make([]byte, n)
	_, err := io.ReadFull(tcp, b)
	return b, err
}

// whileWaiting has reads and writes of a TCP connection fail when the context ends, until the function that it returns is called. That
// function takes the error of the last of them, and returns the context's instead if that was the reason.
func whileWaiting(ctx context.Context, tcp *net.TCPConn) func(error) error {
	stop := context.AfterFunc(ctx, func() { _ = tcp.SetDeadline(time.Unix(1, 0)) })
	return func(err error) error {
		if !stop() && err != nil {
			return context.Cause(ctx)
		}
		_ = tcp.SetDeadline(time.Time{}) // an error is that of the connection
		return err
	}
}
