// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Dialer opens connections over a stack.
type Dialer struct {
	Stack *Stack
	// Dialer opens the TCP connection. Its ControlContext, or Control if that is nil, is called
	// before the option's; its KeepAlive applies to the TCP connection. Its Timeout and Deadline
	// are for both, the TCP connection and the rendezvous.
	Dialer net.Dialer
	// Require makes a connection that cannot be SMC-R fail with a
	// *FallbackError instead of being TCP.
	Require bool
}

// FallbackError means that a connection would have been TCP although SMC-R
// was required.
type FallbackError struct {
	Reason       clc.Reason
	PeerDeclined bool // the peer sent the reason
}

func (e *FallbackError) Error() string {
	who := "this side"
	if e.PeerDeclined {
		who = "the peer"
	}
	return fmt.Sprintf("smcr: SMC-R is required, %s declined it: %v: %s", who, e.Reason, e.Reason.Text())
}

// DialContext connects to address on a TCP network and runs the rendezvous.
// The connection is a *Conn.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	nd := d.Dialer
	nd.SetMultipathTCP(false)
	if opt := d.Stack.cfg.Option; opt != nil {
		nd.ControlContext = func(ctx context.Context, network, address string, c syscall.RawConn) (err error) {
			switch {
			case d.Dialer.ControlContext != nil:
				err = d.Dialer.ControlContext(ctx, network, address, c)
			case d.Dialer.Control != nil:
				err = d.Dialer.Control(network, address, c)
			}
			if err != nil {
				return err
			}
			return opt.ControlDial(network, address, c)
		}
	}
	end := nd.Deadline
	if t := time.Now().Add(nd.Timeout); nd.Timeout > 0 && (end.IsZero() || t.Before(end)) {
		end = t
	}
	if !end.IsZero() {
		limited, cancel := context.WithDeadline(ctx, end)
		defer cancel()
		ctx = limited
	}
	nc, err := nd.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("smcr: dial %s %s: not a TCP network", network, address), nc.Close())
	}
	c, err := d.Stack.Client(ctx, tcp)
	if err != nil {
		return nil, err
	}
	if d.Require && c.Mode() != ModeSMCR {
		return nil, errors.Join(&FallbackError{c.info.Reason, c.info.PeerDeclined}, c.Abort())
	}
	return c, nil
}

// Listener accepts connections over a stack. Each rendezvous runs in its own
// goroutine, and a peer may have a share of them only, so that it delays nobody.
type Listener struct {
	stack  *Stack
	tcp    *net.TCPListener
	ctx    context.Context //nolint:containedctx // it is the listener's life, ended by Close
	cancel context.CancelFunc
	ready  chan *Conn
	wg     sync.WaitGroup
	once   sync.Once
	mu     sync.Mutex // guards what is below
	err    error
	by     map[netip.Addr]int // rendezvous under way with an address
}

const (
	// maxRendezvous bounds the rendezvous of a listener and the connections that wait
	// for Accept; further ones wait in the TCP backlog.
	maxRendezvous = 4096
	// maxRendezvousWith bounds the rendezvous with one address; further connections
	// from there are reset. A client that says nothing has its place for
	// Config.MessageTimeout, and must not have all of them.
	maxRendezvousWith = maxRendezvous / 4
)

// Listen listens on a TCP network and address.
func Listen(ctx context.Context, s *Stack, network, address string) (*Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false) // MPTCP sockets do not save the SYN
	if opt := s.cfg.Option; opt != nil {
		lc.Control = opt.ControlListen
	}
	nl, err := lc.Listen(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tcp, ok := nl.(*net.TCPListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("smcr: listen %s %s: not a TCP network", network, address), nl.Close())
	}
	l := &Listener{stack: s, tcp: tcp, ready: make(chan *Conn), by: map[netip.Addr]int{}}
	l.ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
	l.wg.Go(l.run)
	return l, nil
}

// run accepts TCP connections until the listener is closed.
func (l *Listener) run() {
	slots := make(chan struct{}, maxRendezvous)
	for {
		tcp, err := l.tcp.AcceptTCP()
		if err != nil {
			if temporary(err) {
				select {
				case <-time.After(acceptPause):
					continue
				case <-l.ctx.Done():
				}
			}
			l.fail(err)
			return
		}
		select {
		case slots <- struct{}{}:
		case <-l.ctx.Done():
			_ = tcp.Close() // the listener ends
			continue
		}
		from := addrOf(tcp.RemoteAddr())
		if !l.begin(from) {
			<-slots
			_ = tcp.SetLinger(0) // Close resets; there is nothing to do about an error
			_ = tcp.Close()
			continue
		}
		l.wg.Go(func() {
			defer func() { <-slots }()
			c, err := l.stack.Server(l.ctx, tcp)
			l.end(from)
			if err != nil {
				l.stack.failed("rendezvous", err)
				return
			}
			select {
			case l.ready <- c:
			case <-l.ctx.Done():
				_ = c.Abort() // nobody will accept it
			}
		})
	}
}

// begin counts a rendezvous with an address; false if there are too many.
func (l *Listener) begin(a netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.by[a] >= maxRendezvousWith {
		return false
	}
	l.by[a]++
	return true
}

func (l *Listener) end(a netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.by[a]--; l.by[a] == 0 {
		delete(l.by, a)
	}
}

// acceptPause is the pause after a shortage of file descriptors or memory.
const acceptPause = 10 * time.Millisecond

func temporary(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM) ||
		errors.Is(err, syscall.ENOBUFS) || errors.Is(err, syscall.ECONNABORTED)
}

func (l *Listener) fail(err error) {
	l.mu.Lock()
	l.err = err
	l.mu.Unlock()
	l.cancel()
}

// Accept waits for the next connection whose rendezvous is complete; it is a
// *Conn.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.ready:
		return c, nil
	case <-l.ctx.Done():
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.err != nil {
			return nil, l.err
		}
		return nil, &net.OpError{Op: "accept", Net: l.Addr().Network(), Addr: l.Addr(), Err: net.ErrClosed}
	}
}

// Close stops listening and ends the rendezvous that are under way. Accepted
// connections live on.
func (l *Listener) Close() error {
	var err error
	l.once.Do(func() {
		err = l.tcp.Close()
		l.cancel()
		l.wg.Wait()
	})
	return err
}

// Addr returns the listener's address.
func (l *Listener) Addr() net.Addr { return l.tcp.Addr() }
