// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"os"
	"syscall"
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
// The fields behind file are guarded by the stack's turn.
type tcpWatch struct {
	s    *Stack
	raw  syscall.RawConn
	file *os.File // epoll, for which the network poller waits

	last  uint64 // number of a connection
	conns map[uint64]*Conn
}

// tcpEvents is how many connections are looked at in one turn.
const tcpEvents = 64

func newTCPWatch(s *Stack) (*tcpWatch, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	w := &tcpWatch{s: s, file: os.NewFile(uintptr(fd), "epoll"), conns: map[uint64]*Conn{}}
	if w.raw, err = w.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, w.file.Close())
	}
	return w, nil
}

// close ends run.
func (w *tcpWatch) close() error { return w.file.Close() }

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
	id := c.watched.id
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: int32(id), Pad: int32(id >> 32)}
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return err
	}
	cerr := w.raw.Control(func(epfd uintptr) {
		cerr := raw.Control(func(fd uintptr) {
			err = os.NewSyscallError("epoll_ctl", unix.EpollCtl(int(epfd), op, int(fd), &ev))
		})
		err = errors.Join(err, cerr)
	})
	return errors.Join(err, cerr)
}

// run is the goroutine.
func (w *tcpWatch) run() {
	var events [tcpEvents]unix.EpollEvent
	for {
		n := 0
		err := w.raw.Read(func(fd uintptr) bool {
			var err error
			n, err = unix.EpollWait(int(fd), events[:], 0)
			return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
		})
		if err != nil {
			return // closed
		}
		w.s.lock()
		for i := range events[:max(n, 0)] {
			id := uint64(uint32(events[i].Fd)) | uint64(uint32(events[i].Pad))<<32
			if c := w.conns[id]; c != nil {
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
