// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// resetOnClose makes the kernel reset a connection when its socket is closed, also if the agent is
// killed. It also turns off Nagle's algorithm: the application has already decided what to send at
// once.
func resetOnClose(c *net.TCPConn) error {
	return errors.Join(c.SetLinger(0), c.SetNoDelay(true))
}

// reset closes a connection so that its other side sees ECONNRESET. An error says no more than that
// the connection is broken already.
func reset(c *net.TCPConn) {
	if c == nil {
		return // a held SYN has no connection yet
	}
	_ = c.SetLinger(0)
	_ = c.Close()
}

// relay copies bytes between the application's connection and the network's until both directions
// have ended, and then closes both connections in order. If one connection breaks, relay resets
// both, after what had arrived on the broken one. A direction that has ended still watches for a reset,
// which relay passes on at once. While nothing moves a direction is parked, and has no goroutine: see
// [smcr.Direction].
//
// Back-pressure needs no code: each direction reads only after it wrote.
type relay struct {
	app *net.TCPConn
	net peerConn
	tcp *net.TCPConn // below net
	// over is called when the relay has ended, and has closed the three.
	over func(sent, recv int64, err error)

	out, in    *smcr.Direction // from the application to the network, and back
	sent, recv int64           // each of its direction until that has ended

	mu       sync.Mutex  // guards what is below
	left     int         // directions that have not ended
	err      error       // the first one, which matters
	patience *time.Timer // ends the last direction; nil: that needs none
	appEnded bool        // we have ended our stream to the application, or are about to
	netEnded bool        // and that to the network
}

// newRelay returns a relay that has not begun. It owns the three connections from start on.
func newRelay(p *smcr.Parker, app *net.TCPConn, net peerConn, tcp *net.TCPConn, over func(sent, recv int64, err error)) *relay {
	return &relay{app: app, net: net, tcp: tcp, over: over, out: p.NewDirection(), in: p.NewDirection(), left: 2}
}

// start begins both directions.
func (r *relay) start() {
	r.net.StartRelayFrom(r.out, r.app, func(n int64, err error) {
		if r.sent = n; err == nil {
			err = r.checkEnd(r.app, &r.appEnded)
		}
		if err == nil {
			err = r.endStream(&r.netEnded, r.net.CloseWrite)
		}
		if err != nil {
			r.end(err)
			return
		}
		smcr.StartAwaitTCPEnd(r.out, r.app, r.end)
	})
	r.net.StartRelayTo(r.in, r.app, func(n int64, err error) {
		if r.recv = n; err == nil && r.net.Info().Mode == smcr.ModeTCP {
			err = r.checkEnd(r.tcp, &r.netEnded)
		}
		if err == nil {
			err = r.endStream(&r.appEnded, r.app.CloseWrite)
		}
		if err != nil {
			r.end(err)
			return
		}
		r.net.StartAwaitEnd(r.in, r.end)
	})
}

// endStream ends our stream to one of the connections.
func (r *relay) endStream(ended *bool, closeWrite func() error) error {
	r.mu.Lock()
	*ended = true
	r.mu.Unlock()
	return closeWrite()
}

// checkEnd returns an error if the end of the stream from a connection is none, but a reset of which
// somebody else was told: the kernel tells of a reset once, and reads are at the end from then on. So
// when the other direction writes at that moment, this one would pass on the end of a stream that
// was cut.
//
//	RelayTo                     the socket           RelayFrom
//	                            is reset
//	write: connection reset
//	                                                 read: 0 bytes, as after the end
//	                                                 ends its stream to the peer
//	resets the session: late
//
// A stream that has ended and was reset then still has the error. ended is whether we have ended our
// own stream there, and so whether both may have ended in order.
func (r *relay) checkEnd(c *net.TCPConn, ended *bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if *ended {
		return nil
	}
	over, err := linux.HungUp(c)
	if err == nil && over {
		err = os.NewSyscallError("read", syscall.ECONNRESET)
	}
	return err
}

// wake has the directions see that their connections were closed. r may be nil: the relay has not
// begun, and will see that.
func (r *relay) wake() {
	if r != nil {
		r.out.Wake()
		r.in.Wake()
	}
}

// end ends a direction. If the connection to which the direction writes is broken, the other one passes on
// what had arrived there before the reset, as TCP gives a program what is in its receive queue, and then
// finds the reset, too:
//
//	client           agent                        server
//	upload --------> RelayTo
//	                 RelayTo -------------------> is busy
//	                          <------ response,   rejects the rest
//	                          <----- and a reset
//	                 RelayTo: connection reset
//	     <---------- RelayFrom: the response
//	     <---------- RelayFrom: connection reset
func (r *relay) end(err error) {
	r.mu.Lock()
	r.left--
	last := r.left == 0
	if r.err == nil {
		r.err = err
	}
	wait := !last && brokeWriting(err)
	if wait {
		r.patience = time.AfterFunc(lastPatience, r.fail)
	}
	patience := r.patience
	failed := r.err
	r.mu.Unlock()
	if failed != nil && !wait {
		r.fail()
	}
	if !last {
		return
	}
	if patience != nil {
		patience.Stop()
	}
	if failed == nil {
		// Undo resetOnClose just before the orderly close. A connection that its other side reset
		// meanwhile has no such option, so errors do not matter.
		_ = r.app.SetLinger(-1)
		_ = r.tcp.SetLinger(-1)
		failed = errors.Join(r.app.Close(), r.net.Close())
	}
	r.over(r.sent, r.recv, failed)
}

// brokeWriting reports whether a direction ended because of the connection to which it writes, other than that
// we have closed it.
func brokeWriting(err error) bool {
	op := (*net.OpError)(nil)
	return errors.As(err, &op) && (op.Op == "write" || op.Op == "close") && !errors.Is(err, net.ErrClosed)
}

// fail resets both connections, and may be called again.
func (r *relay) fail() {
	reset(r.app)
	_ = r.net.Abort() // r.err is the first error, which matters
	r.wake()
}
