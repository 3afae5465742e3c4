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
// goroutine does it for all of them: one for each would take more memory than
// the connection.
//
//	idle --anything to read--> asked once --reset, data--> connection reset
//	                                |
//	                                +--end--> tcpEndGrace --silence--> connection reset
//	                                           ^      |
//	                                           +------+ the peer speaks
//
// What follows file is guarded by the stack's turn.
type tcpWatch struct {
	s    *Stack
	raw  syscall.RawConn
	file *os.File // epoll; the network poller waits for it

	last  uint64 // number of a connection
	conns map[uint64]*Conn
}

// tcpEndGrace is how long a peer may say nothing in the link group after the end of
// the TCP connection: then nobody is left who could end SMC-R in order. One that
// ends hundreds of connections at once, or is short of processors, has more to say
// first; it has CloseTimeout.
const tcpEndGrace = 2 * time.Second

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
	c.watchID = w.last
	w.conns[c.watchID] = c
	if err := w.arm(c, unix.EPOLL_CTL_ADD); err != nil {
		return fmt.Errorf("watch the TCP connection to %v: %w", c.tcp.RemoteAddr(), err)
	}
	return nil
}

// remove ends it; closing the TCP connection does the rest. The caller holds
// the turn.
func (w *tcpWatch) remove(c *Conn) {
	delete(w.conns, c.watchID)
	if c.tcpGrace != nil && c.tcpGrace.Stop() {
		w.s.wg.Done()
	}
}

// arm asks for one event.
func (w *tcpWatch) arm(c *Conn, op int) error {
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: int32(c.watchID), Pad: int32(c.watchID >> 32)}
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
			w.s.malformed("TCP connection", err)
		}
	case err == nil && n == 0:
		if c.tcpGrace == nil {
			w.s.wg.Add(1)
			c.tcpEnd = time.Now()
			c.tcpLook = c.tcpEnd
			c.tcpGrace = time.AfterFunc(tcpEndGrace, c.tcpEnded)
		}
	default: // reset, or data, which only SMC-R may carry now
		c.abortLocked()
	}
}

// tcpEnded is called when the grace is over.
func (c *Conn) tcpEnded() {
	s := c.stack
	defer s.wg.Done()
	s.lock()
	defer s.unlock()
	now := time.Now()
	s.drainOthers(now, nil) // this process may be what was slow
	s.flushTouched(now)
	switch {
	case c.state.Load()&flagPeerDone != 0 || c.users.Load() == 0:
		return // the peer closed in order; its close timer does the rest
	case !s.closed && c.lc.Heard().After(c.tcpLook) && now.Sub(c.tcpEnd) < s.cfg.CloseTimeout:
		c.tcpLook = now
		s.wg.Add(1)
		c.tcpGrace.Reset(tcpEndGrace)
	default:
		c.abortLocked()
	}
}

// abortLocked resets the connection; the caller holds the turn.
func (c *Conn) abortLocked() {
	if c.users.Load() > 0 {
		now := time.Now()
		c.lc.Abort(now)
		c.group.flush(now)
	}
}
