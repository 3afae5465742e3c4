// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"
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
}

// transfer is a call under way.
type transfer struct {
	buf   []byte
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
	s.readFn = func(fd uintptr) bool { return s.r.do(syscall.SYS_READ, fd) }
	s.writeFn = func(fd uintptr) bool { return s.w.do(syscall.SYS_WRITE, fd) }
	return s
}

// do makes one call; false means that it has to wait.
func (t *transfer) do(call, fd uintptr) bool {
	for {
		enter := syscall.RawSyscall
		if t.calls++; t.calls%quietCalls == 0 {
			enter = syscall.Syscall
		}
		n, _, errno := enter(call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(t.buf))), uintptr(len(t.buf)))
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
func (s *socket) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		s.w.buf, s.w.n, s.w.errno = p[done:], 0, 0
		err := s.raw.Write(s.writeFn)
		s.w.buf = nil
		done += s.w.n
		if err == nil && s.w.errno != 0 {
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
