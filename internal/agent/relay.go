// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net"
	"sync"

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
// both. tcp is the TCP connection below net. relay owns all three. A direction that has ended still
// watches for a reset, which relay passes on at once.
//
// Back-pressure needs no code: each direction reads only after it wrote.
func relay(app *net.TCPConn, net peerConn, tcp *net.TCPConn) (sent, recv int64, err error) {
	var (
		once sync.Once
		wg   sync.WaitGroup
	)
	fail := func(e error) {
		once.Do(func() {
			err = e
			reset(app)
			_ = net.Abort() // err is the first error, which matters
		})
	}
	wg.Go(func() { // application to network
		n, e := net.RelayFrom(app)
		if sent = n; e == nil {
			e = net.CloseWrite()
		}
		if e == nil {
			e = smcr.AwaitTCPEnd(app)
		}
		if e != nil {
			fail(e)
		}
	})
	// From network to application, in this goroutine: a goroutine less for each idle session.
	n, e := net.RelayTo(app)
	if recv = n; e == nil {
		e = app.CloseWrite()
	}
	if e == nil {
		e = net.AwaitEnd()
	}
	if e != nil {
		fail(e)
	}
	wg.Wait()
	if err != nil {
		return sent, recv, err
	}
	// Undo resetOnClose just before the orderly close. A connection that its other side reset
	// meanwhile has no such option, so errors do not matter.
	_ = app.SetLinger(-1)
	_ = tcp.SetLinger(-1)
	return sent, recv, errors.Join(app.Close(), net.Close())
}
