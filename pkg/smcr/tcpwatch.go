// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// tcpWatch looks at the idle TCP connections under a stack's SMC-R connections.
// A reset resets the connection above; the orderly end is left to SMC-R for a
// while, since the peer may close TCP right after its last CDC message. One
// goroutine looks at all of them: a goroutine for each would take more memory than
// the connection.
//
//	idle --anything to read--> asked once --reset, data--> connection reset
//	                                |
//	                                +--end--> tcpEndGrace --silence--> connection reset
//	                                           ^      |
//	                                           +------+ the peer speaks
//
// The fields behind epoll are guarded by the stack's turn.
type tcpWatch struct {
	s     *Stack
	epoll *epoll

	last  uint64 // number of a connection
	conns map[uint64]*Conn
}

// tcpEvents is how many connections are looked at in one turn.
const tcpEvents = 64

func newTCPWatch(s *Stack) (*tcpWatch, error) {
	e, err := newEpoll()
	if err != nil {
		return nil, err
	}
	return &tcpWatch{s: s, epoll: e, conns: map[uint64]*Conn{}}, nil
}

// close ends run.
func (w *tcpWatch) close() error { return w.epoll.close() }

// add begins to look at a connection. The caller holds the turn.
func (w *tcpWatch) add(c *Conn) error {
	w.last++
	c.watched.id = w.last
	w.conns[w.last] = c
	if err := w.arm(c, unix.EPOLL_CTL_ADD); err != nil {
		return fmt.Errorf("watch the TCP connection to %v: %w", c.tcp.RemoteAddr(), err)
	}
	return nil
}

// remove looks at a connection no longer; closing the TCP connection does the rest. The
// caller holds the turn.
func (w *tcpWatch) remove(c *Conn) {
	delete(w.conns, c.watched.id)
	if c.watched.stop() {
		w.s.wg.Done()
	}
}

// arm asks for one event.
func (w *tcpWatch) arm(c *Conn, op int) error {
	return w.epoll.arm(c.tcp, op, unix.EPOLLIN|unix.EPOLLRDHUP, c.watched.id)
}

// run is the goroutine.
func (w *tcpWatch) run() {
	var events [tcpEvents]unix.EpollEvent
	for {
		n, err := w.epoll.wait(events[:])
		if err != nil {
			return // closed
		}
		w.s.lock()
		for i := range events[:n] {
			if c := w.conns[idOf(&events[i])]; c != nil {
				w.look(c)
			}
		}
		w.s.unlock()
	}
}

// look finds out what happened. The caller holds the turn.
func (w *tcpWatch) look(c *Conn) {
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return
	}
	n := 0
	cerr := raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err = unix.Recvfrom(int(fd), b[:], unix.MSG_DONTWAIT)
	})
	switch {
	case cerr != nil: // we have closed it
	case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
		if err := w.arm(c, unix.EPOLL_CTL_MOD); err != nil {
			w.s.failed("TCP connection", err)
		}
	case err == nil && n == 0:
		if !c.watched.inGrace() {
			w.s.wg.Add(1)
			c.watched.begin(time.Now(), c.tcpEnded)
		}
	default: // reset, or data, which only SMC-R may carry now
		c.abortLocked()
	}
}

// abortLocked resets the connection; the caller holds the turn.
func (c *Conn) abortLocked() {
	if !c.life.isOver() {
		now := time.Now()
		c.lc.Abort(now)
		c.group.flush(now)
	}
}
