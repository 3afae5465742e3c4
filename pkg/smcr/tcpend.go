// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// AwaitTCPEnd is [Conn.AwaitEnd] for a TCP connection: AwaitTCPEnd waits until both
// streams have ended or the connection was reset.
func AwaitTCPEnd(t *net.TCPConn) error {
	_, err := do(&tcpEnd{conn: t})
	return err
}

// StartAwaitTCPEnd is AwaitTCPEnd as a call of d, which gives the result to then. Nobody may set
// deadlines meanwhile; who closes t calls d.Wake.
func StartAwaitTCPEnd(d *Direction, t *net.TCPConn, then func(error)) {
	d.start(&tcpEnd{conn: t}, func(_ int64, err error) { then(err) })
}

// tcpEnd is an AwaitTCPEnd under way.
type tcpEnd struct {
	conn *net.TCPConn
	s    *socket
	d    *Direction
}

func (e *tcpEnd) begin(d *Direction) error {
	e.s, e.d = newSocket(e.conn), d
	if e.s == nil {
		return net.ErrClosed
	}
	return nil
}

func (e *tcpEnd) end(err error) (int64, error) {
	if e.d != nil {
		_ = e.conn.SetReadDeadline(time.Time{}) // prod may have set one; fails if closed: nobody waits
	}
	return 0, err
}

func (e *tcpEnd) run() error {
	s := e.s
	for {
		var err error
		werr := s.raw.Read(func(fd uintptr) bool {
			has := s.look(fd)
			if has&unix.POLLERR != 0 {
				err = s.pendingError(int(fd))
			}
			return has&(unix.POLLERR|unix.POLLHUP) != 0
		})
		switch {
		case !e.d.prodded(e.conn, &werr):
			return errors.Join(err, werr)
		case e.park():
			return errParked
		}
	}
}

// park has the call wait without a goroutine. False: something came, or it cannot.
func (e *tcpEnd) park() bool {
	if !e.d.becomeParking() {
		return false
	}
	// No event but the hang-up and the error, of which the kernel always tells.
	if err := e.d.arm(e.conn, 0); err == nil && e.d.becomeParked() {
		return true
	}
	e.d.stay()
	return false
}

func (e *tcpEnd) prod() { _ = e.conn.SetReadDeadline(time.Unix(1, 0)) } // closed: the wait has ended
