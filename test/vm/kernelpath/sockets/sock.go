// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// patience bounds what is waited for: a peer in a guest is slow.
	patience = time.Minute
	// pollEvery is the pause between two looks.
	pollEvery = 10 * time.Millisecond
)

// A sock is a socket, used by blocking calls as most programs do.
type sock struct {
	fd  int
	smc bool // it was made SMC
}

func (s sock) close() { _ = unix.Close(s.fd) }

// protocol is what SO_PROTOCOL tells: of a connection that fell back, TCP.
func (s sock) protocol() int {
	protocol, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil {
		return -1
	}
	return protocol
}

// connect connects, and has calls that wait too long end with EAGAIN from then on.
func (s sock) connect(to unix.Sockaddr) error {
	if err := unix.Connect(s.fd, to); err != nil {
		return err
	}
	return s.bound()
}

// bound has receiving end with EAGAIN when it takes too long.
func (s sock) bound() error {
	tv := unix.NsecToTimeval(patience.Nanoseconds())
	return unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
}

// say sends a line.
func (s sock) say(line string) error { return s.write([]byte(line + "\n")) }

func (s sock) write(b []byte) error {
	for len(b) > 0 {
		n, err := unix.SendmsgN(s.fd, b, nil, nil, unix.MSG_NOSIGNAL)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// read reads n bytes, or what there is until the end of the stream.
func (s sock) read(n int) ([]byte, error) {
	b := make([]byte, n)
	got := 0
	for got < n {
		m, err := unix.Read(s.fd, b[got:])
		if err != nil {
			return b[:got], err
		}
		if m == 0 {
			break
		}
		got += m
	}
	return b[:got], nil
}

// line reads a line, without what ends it.
func (s sock) line() (string, error) {
	var line []byte
	for {
		b, err := s.read(1)
		if err != nil || len(b) == 0 || b[0] == '\n' {
			return string(line), err
		}
		line = append(line, b[0])
	}
}

// all reads until the end of the stream.
func (s sock) all() (n int, err error) {
	b := make([]byte, 64<<10)
	for {
		m, err := unix.Read(s.fd, b)
		if err != nil || m == 0 {
			return n, err
		}
		n += m
	}
}

// poll waits for one of the events, and returns those that there are.
func (s sock) poll(events int16, limit time.Duration) (int16, error) {
	for end := time.Now().Add(limit); ; {
		fds := []unix.PollFd{{Fd: int32(s.fd), Events: events}}
		_, err := unix.Poll(fds, int(max(0, time.Until(end).Milliseconds())))
		if !errors.Is(err, unix.EINTR) {
			return fds[0].Revents, err
		}
	}
}

// queued is an answer of ioctl about the queues.
func (s sock) queued(request uint) (int, error) { return unix.IoctlGetInt(s.fd, request) }

// awaitQueued waits until ioctl gives a value, and returns the last one.
func (s sock) awaitQueued(request uint, want int) (n int, err error) {
	for end := time.Now().Add(patience); ; time.Sleep(pollEvery) {
		if n, err = s.queued(request); err != nil || n == want || time.Now().After(end) {
			return n, err
		}
	}
}

// arrived waits until that many bytes are there to be read.
func (s sock) arrived(want int) error {
	n, err := s.awaitQueued(unix.SIOCINQ, want)
	if err == nil && n != want {
		err = fmt.Errorf("%d bytes came, want %d", n, want)
	}
	return err
}

// eventNames are the names of the events of poll, in the order in which they are written.
func eventNames(events int16) string {
	var names []string
	for _, e := range []struct {
		bit  int16
		name string
	}{
		{unix.POLLIN, "IN"},
		{unix.POLLPRI, "PRI"},
		{unix.POLLOUT, "OUT"},
		{unix.POLLRDHUP, "RDHUP"},
		{unix.POLLERR, "ERR"},
		{unix.POLLHUP, "HUP"},
	} {
		if events&e.bit != 0 {
			names = append(names, e.name)
		}
	}
	if len(names) == 0 {
		return "nothing"
	}
	return strings.Join(names, " ")
}

// quoted are bytes as a reader sees them.
func quoted(parts ...[]byte) string {
	var out []string
	for _, p := range parts {
		out = append(out, fmt.Sprintf("%q", p))
	}
	return strings.Join(out, ", ")
}

// isZero tells whether nothing was written to a buffer.
func isZero(b []byte) bool { return !slices.ContainsFunc(b, func(x byte) bool { return x != 0 }) }
