// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/peers"
	"github.com/smcr-io/kube-smcr/pkg/internal/plaintcp"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
)

// Listener listens for connections whose first bytes are an MPA Request. It has 256 places for those whose request nobody has yet, 64
// of which are for one address, or network of IPv6: what comes from there beyond them is closed.
type Listener struct {
	dev      *Device
	tcp      *net.TCPListener
	requests chan *Request
	places   chan struct{} // one taken by each connection whose request was not given away
	peers    *peers.Places // and one of the peer's
	done     <-chan struct{}
	cancel   context.CancelFunc // closes done
	once     sync.Once
	wg       sync.WaitGroup
}

// Listen listens on an address as in [net.Listen], whose host is the device's address, or
// empty.
func (d *Device) Listen(addr string) (*Listener, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w: %w", addr, rdma.ErrInvalid, err)
	}
	if host == "" {
		host = d.cfg.Addr.String()
	}
	t, err := plaintcp.Listen(context.Background(), net.JoinHostPort(host, port))
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &Listener{
		dev: d, tcp: t, requests: make(chan *Request), done: ctx.Done(), cancel: cancel,
		places: make(chan struct{}, maxListening), peers: peers.New(maxListeningPerPeer),
	}
	l.wg.Add(1) // before Close can wait
	if err := d.track(l, func() { l.loop(ctx) }); err != nil {
		l.wg.Done()
		cancel()
		_ = t.Close()
		return nil, fmt.Errorf("listen on %q: %w", addr, err)
	}
	return l, nil
}

// Addr is the address that the listener listens on.
func (l *Listener) Addr() net.Addr { return l.tcp.Addr() }

// Accept waits for the next request.
func (l *Listener) Accept(ctx context.Context) (*Request, error) {
	select {
	case r := <-l.requests:
		return r, nil
	case <-l.done:
		return nil, fmt.Errorf("accept on %v: %w", l.Addr(), net.ErrClosed)
	case <-ctx.Done():
		return nil, fmt.Errorf("accept on %v: %w", l.Addr(), context.Cause(ctx))
	}
}

// Close ends the listener. Connections whose requests nobody has are closed; requests that were
// given away stay.
func (l *Listener) Close() error {
	l.once.Do(func() {
		l.cancel()
		_ = l.tcp.Close()
		l.dev.untrack(l)
	})
	l.wg.Wait()
	return nil
}

// loop accepts connections.
func (l *Listener) loop(ctx context.Context) {
	defer l.wg.Done()
	for {
		select {
		case l.places <- struct{}{}:
		case <-l.done:
			return
		}
		c, err := l.tcp.AcceptTCP()
		if err != nil {
			<-l.places
			select {
			case <-l.done:
				return
			case <-time.After(10 * time.Millisecond): // no descriptors, perhaps
			}
			continue
		}
		peer := peers.Of(c.RemoteAddr())
		if !l.peers.Take(peer) {
			_ = c.Close()
			<-l.places
			continue
		}
		l.wg.Go(func() {
			l.serve(ctx, c)
			l.peers.GiveBack(peer)
			<-l.places
		})
	}
}

// serve waits for the request of a connection, and gives it away. A connection that begins with
// something else is closed.
func (l *Listener) serve(ctx context.Context, c *net.TCPConn) {
	s := l.dev.newPoint(nil)
	s.listener = true
	if err := s.start(nil, func() (tcpqp.Taken, error) { return tcpqp.Taken{TCPConn: c, NoDelay: true}, nil }); err != nil {
		_ = c.Close()
		return
	}
	first, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	r, err := s.Request(first)
	if err == nil {
		select {
		case l.requests <- r:
			return
		case <-ctx.Done():
		}
	}
	s.shut()
}

// past is a deadline that wakes who reads or writes.
func past() time.Time { return time.Unix(1, 0) }
