// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// mortal makes a socket reset its connection when it is closed without a word,
// which is what the kernel does for an agent that was killed. Nagle's
// algorithm is off: the application has decided what to send at once.
func mortal(c *net.TCPConn) error {
	return errors.Join(c.SetLinger(0), c.SetNoDelay(true))
}

// reset closes a connection so that its other side sees ECONNRESET. The
// connection may be broken already, so there is nothing to report.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// relay carries bytes between the application and the network until both
// directions ended, and then ends both connections in order; or until one
// breaks, and then resets both. tcp is the TCP connection below net. It owns
// all three. A direction that has ended still watches for a reset, which goes
// to the other side at once.
//
// Back-pressure needs no code: each direction reads only after it wrote.
func relay(app *net.TCPConn, net carrier, tcp *net.TCPConn) (sent, recv int64, err error) {
	var (
		once sync.Once
		wg   sync.WaitGroup
	)
	fail := func(e error) {
		once.Do(func() {
			err = e
			reset(app)
			_ = net.Abort() // the first error is the one that matters
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
	// Network to application, here: an idle connection costs one goroutine less.
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
	// Just before the orderly close take back what mortal did. A connection
	// that the other side reset meanwhile has no such choice.
	_ = app.SetLinger(-1)
	_ = tcp.SetLinger(-1)
	return sent, recv, errors.Join(app.Close(), net.Close())
}
