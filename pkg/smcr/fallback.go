// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// fallback is what a connection that TCP carries still has of its rendezvous: the beginning of
// the peer's stream, which was read in search of CLC messages.
//
// After our Decline the peer's own Decline may still come, before the application's bytes:
//
//	we                 peer
//	 |---- Decline ---->|  on the way at the same time
//	 |<--- Decline -----|
//	 |<--- bytes -------|
type fallback struct {
	mu       sync.Mutex // guards what is below
	early    []byte     // read from the TCP connection, and not by the application yet
	mayCross bool       // the peer's Decline may still come, after ours
}

// read gives first what was read from the TCP connection before the fallback. inline says that urgent bytes are part of the stream.
func (f *fallback) read(tcp *net.TCPConn, p []byte, inline bool) (int, error) {
	f.mu.Lock()
	if err := f.dropCrossing(waiting(tcp)); err != nil {
		f.mu.Unlock()
		return 0, err
	}
	if len(f.early) > 0 {
		defer f.mu.Unlock()
		if err := mayRead(tcp); err != nil {
			return 0, err
		}
		n := copy(p, f.early)
		f.early = f.early[n:]
		return n, nil
	}
	f.mu.Unlock()
	if inline {
		return readInline(tcp, p)
	}
	return tcp.Read(p)
}

// readInline is tcp.Read that waits for no urgent byte which is there (see socket.read).
func readInline(tcp *net.TCPConn, b []byte) (int, error) {
	s := newSocket(tcp)
	if s == nil {
		return 0, net.ErrClosed
	}
	return s.Read(b)
}

// mayRead is the error of a read that needs nothing of TCP: that of a connection that is closed, or
// whose deadline has passed.
func mayRead(tcp *net.TCPConn) error {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(uintptr) bool { return true })
}

// markReader reads from a TCP connection, but returns 0 where the next byte is an urgent one.
type markReader func(b []byte) (int, error)

// waiting is the markReader that waits as tcp.Read does.
func waiting(tcp *net.TCPConn) markReader {
	return func(b []byte) (int, error) { return readToMark(tcp, b) }
}

// readToMark is tcp.Read, but returns 0 where the next byte is an urgent one.
func readToMark(tcp *net.TCPConn, b []byte) (int, error) {
	s := newSocket(tcp)
	if s == nil {
		return 0, net.ErrClosed
	}
	at, read := false, s.readFn
	s.readFn = func(fd uintptr) bool {
		// As in pump.once: what is there now, and is not at the mark, is an ordinary byte.
		has := s.look(fd)
		if has&unix.POLLPRI != 0 {
			at, _ = atMark(int(fd)) // fails for nothing that is TCP
		}
		return at || has != 0 && read(fd)
	}
	n, err := s.Read(b)
	if at {
		return 0, nil
	}
	return n, err
}

// takeToMark is readToMark that does not wait, whatever the deadline is. EAGAIN says that there is no byte: the end of the stream, or
// an error, is a Read's to find.
func takeToMark(fd int, b []byte) (int, error) {
	// As in readToMark: a byte that is there now, and is not at the mark, is an ordinary one.
	has, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if err != nil {
		return 0, os.NewSyscallError("ioctl SIOCINQ", err)
	}
	if at, err := atMark(fd); at || err != nil {
		return 0, err
	}
	if has == 0 {
		return 0, unix.EAGAIN
	}
	n, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
	return max(n, 0), err
}

// dropCrossing removes the peer's Decline where it crossed with ours: the Decline is
// the first thing to arrive, or does not come at all. No byte of it is urgent. The caller holds mu.
func (f *fallback) dropCrossing(read markReader) error {
	for f.mayCross {
		n, undecided := clc.CrossingDecline(f.early)
		if !undecided {
			f.early = f.early[n:]
			f.mayCross = false
			return nil
		}
		var b [64]byte
		m, err := read(b[:])
		if m == 0 && err == nil {
			f.mayCross = false
			return nil
		}
		f.early = append(f.early, b[:m]...)
		if err != nil {
			f.mayCross = !errors.Is(err, io.EOF)
			if len(f.early) > 0 && !f.mayCross {
				return nil // what came is the application's
			}
			return err
		}
	}
	return nil
}

func (f *fallback) writeTo(tcp *net.TCPConn, w io.Writer) (int64, error) {
	n, err := f.writeEarly(tcp, w)
	if err != nil || n < 0 {
		return max(n, 0), err
	}
	m, err := tcp.WriteTo(w)
	return n + m, err
}

// writeEarly writes what was read before the fallback; -1 says that the stream
// ended there.
func (f *fallback) writeEarly(tcp *net.TCPConn, w io.Writer) (int64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.dropCrossing(waiting(tcp)); err != nil {
		if errors.Is(err, io.EOF) {
			return -1, nil
		}
		return 0, err
	}
	if len(f.early) == 0 {
		return 0, nil
	}
	if err := mayRead(tcp); err != nil {
		return 0, err
	}
	n, err := writeAll(w, f.early)
	f.early = f.early[n:]
	return int64(n), err
}

// atMark reports whether the next byte of the application's stream is the urgent one: not one of the peer's Decline, which it removes
// if all of it is there, nor one that was read before. While a Read looks for these there is nothing to read, or that Read gets it.
func (f *fallback) atMark(fd int) (bool, error) {
	if !f.mu.TryLock() {
		return atMark(fd)
	}
	defer f.mu.Unlock()
	err := f.dropCrossing(func(b []byte) (int, error) { return takeToMark(fd, b) })
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		return false, err
	}
	if len(f.early) > 0 {
		return false, nil
	}
	return atMark(fd)
}

// isOver reports whether all that comes is in the TCP connection. It is not while a
// Read looks for the rest, which may wait: isOver does not wait for it.
func (f *fallback) isOver() bool {
	if !f.mu.TryLock() {
		return false
	}
	defer f.mu.Unlock()
	return len(f.early) == 0 && !f.mayCross
}
