// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socket reads and writes a TCP connection, mostly by system calls that the Go
// scheduler does not see. They never wait, since the descriptor is
// non-blocking. An ordinary call would wake the scheduler's monitor thread
// each time the process was idle before, which a relay of small messages is
// before every message: two context switches that do nothing. A process that
// goes on working needs the monitor at times, so some calls are ordinary.
//
// Waiting is left to the network poller, and deadlines and Close of the
// connection work as ever. Reads and writes may run at the same time.
type socket struct {
	conn *net.TCPConn
	raw  syscall.RawConn
	r, w transfer
	// Allocated once, not for every call.
	readFn, writeFn func(fd uintptr) bool
	// stalled: a write waits for room, or is about to.
	stalled atomic.Bool
	// stall, if set, is asked before a write waits. It may make room; if it
	// returns false the write ends with errStalled.
	stall func(fd int) bool
	ask   pollRequest
	// reopen belongs to whoever reads.
	reopen reopener
}

// errStalled ends a write that would have to wait.
var errStalled = errors.New("smcr: the socket takes no more")

// transfer is a call under way.
type transfer struct {
	buf   []byte
	flags uintptr // of a send
	n     int
	errno syscall.Errno
	calls uint
}

// quietCalls: of so many calls one is ordinary.
const quietCalls = 1024

// newSocket returns nil if c is closed.
func newSocket(c *net.TCPConn) *socket {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil
	}
	s := &socket{conn: c, raw: raw}
	s.readFn = s.read
	s.writeFn = s.write
	return s
}

// do makes one call; false means that it has to wait.
func (t *transfer) do(call, fd uintptr) bool {
	for {
		enter := syscall.RawSyscall
		if t.calls++; t.calls%quietCalls == 0 {
			enter = syscall.Syscall
		}
		var n uintptr
		var errno syscall.Errno
		if t.flags == 0 {
			n, _, errno = enter(call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(t.buf))), uintptr(len(t.buf)))
		} else {
			n, _, errno = syscall.RawSyscall6(syscall.SYS_SENDTO, fd,
				uintptr(unsafe.Pointer(unsafe.SliceData(t.buf))), uintptr(len(t.buf)), t.flags, 0, 0)
		}
		switch errno {
		case 0:
			t.n, t.errno = int(n), 0
			return true
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		default:
			t.n, t.errno = 0, errno
			return true
		}
	}
}

// read makes one call that finds something, or there is nothing to read. At an urgent byte Linux refuses a thread that has a
// signal to handle as if there were nothing, and the poller, which has told of the byte, does not tell again:
//
//	kernel                        reader
//	  urgent byte: tells poller     |
//	  signal of Go's scheduler      | is woken
//	    |                           read: EAGAIN, and the byte is there
func (s *socket) read(fd uintptr) bool {
	for !s.r.do(syscall.SYS_READ, fd) {
		if s.look(fd)&unix.POLLIN == 0 {
			return false
		}
	}
	return true
}

// write makes one call, and asks stall when it would have to wait.
func (s *socket) write(fd uintptr) bool {
	if s.w.do(syscall.SYS_WRITE, fd) {
		return true
	}
	if s.stall == nil {
		return false
	}
	// Whoever makes the stall's answer another one looks at stalled
	// afterwards, so one of the two sees the other.
	s.stalled.Store(true)
	goOn := s.stall(int(fd))
	if s.w.do(syscall.SYS_WRITE, fd) {
		return true
	}
	if !goOn {
		s.w.errno = errnoStalled
		return true
	}
	return false
}

// errnoStalled stands for errStalled; the kernel has no such number.
const errnoStalled = syscall.Errno(1 << 20)

// Read implements io.Reader.
func (s *socket) Read(p []byte) (int, error) {
	s.r.buf = p
	err := s.raw.Read(s.readFn)
	s.r.buf = nil
	switch {
	case err != nil:
		return 0, err
	case s.r.errno != 0:
		return 0, s.opError("read", s.r.errno)
	case s.r.n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return s.r.n, nil
}

// Write implements io.Writer.
func (s *socket) Write(p []byte) (int, error) { return s.send(p, 0) }

// WriteUrgent sends one byte as urgent. Not more: of a longer piece the kernel
// may take a part, and the mark would stand behind that.
func (s *socket) WriteUrgent(p []byte) (int, error) { return s.send(p[:1], unix.MSG_OOB) }

func (s *socket) send(p []byte, flags uintptr) (int, error) {
	done := 0
	for done < len(p) {
		s.w.buf, s.w.flags, s.w.n, s.w.errno = p[done:], flags, 0, 0
		err := s.raw.Write(s.writeFn)
		s.w.buf, s.w.flags = nil, 0
		if s.stalled.Load() {
			s.stalled.Store(false)
		}
		done += s.w.n
		switch {
		case err != nil:
		case s.w.errno == errnoStalled:
			err = errStalled
		case s.w.errno != 0:
			err = s.opError("write", s.w.errno)
		}
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

func (s *socket) opError(op string, errno syscall.Errno) error {
	return &net.OpError{
		Op: op, Net: s.conn.LocalAddr().Network(), Source: s.conn.LocalAddr(), Addr: s.conn.RemoteAddr(),
		Err: os.NewSyscallError(op, errno),
	}
}

// pollRequest is a call of ppoll that does not wait.
type pollRequest struct {
	fd   unix.PollFd
	wait unix.Timespec
}

// look asks what the socket has, which is at least a hang-up or an error.
func (s *socket) look(fd uintptr) int16 {
	s.ask.fd = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN | unix.POLLPRI | unix.POLLRDHUP}
	for {
		n, _, errno := syscall.RawSyscall6(unix.SYS_PPOLL,
			uintptr(unsafe.Pointer(&s.ask.fd)), 1, uintptr(unsafe.Pointer(&s.ask.wait)), 0, 0, 0)
		switch {
		case errno == syscall.EINTR:
		case errno != 0: // never for one descriptor that is open
			return unix.POLLIN
		case n == 0:
			return 0
		default:
			return s.ask.fd.Revents
		}
	}
}
