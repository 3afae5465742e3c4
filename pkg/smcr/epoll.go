// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// epoll waits for the sockets of many idle connections with one goroutine, for which the
// network poller waits: the poller itself has a goroutine for each socket. A socket is asked
// for one event at a time, and leaves the epoll when it is closed, without an event.
type epoll struct {
	file *os.File
	raw  syscall.RawConn
}

// newEpoll returns an epoll without sockets.
func newEpoll() (*epoll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	e := &epoll{file: os.NewFile(uintptr(fd), "epoll")}
	if e.raw, err = e.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, e.file.Close())
	}
	return e, nil
}

// close ends wait.
func (e *epoll) close() error { return e.file.Close() }

// arm asks for one of the events of a socket, or its hang-up or error. op says whether the
// socket is new to the epoll; id is what the event will tell of.
func (e *epoll) arm(conn syscall.Conn, op int, events uint32, id uint64) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	ev := unix.EpollEvent{Events: events | unix.EPOLLONESHOT, Fd: int32(id), Pad: int32(id >> 32)}
	cerr := e.raw.Control(func(epfd uintptr) {
		cerr := raw.Control(func(fd uintptr) {
			err = os.NewSyscallError("epoll_ctl", unix.EpollCtl(int(epfd), op, int(fd), &ev))
		})
		err = errors.Join(err, cerr)
	})
	return errors.Join(err, cerr)
}

// wait waits for events, of which idOf tells the socket, until the read deadline of file.
func (e *epoll) wait(events []unix.EpollEvent) (n int, err error) {
	err = e.raw.Read(func(fd uintptr) bool {
		var err error
		n, err = unix.EpollWait(int(fd), events, 0)
		return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	return max(n, 0), err
}

// idOf returns the id of the socket that an event tells of.
func idOf(ev *unix.EpollEvent) uint64 { return uint64(uint32(ev.Fd)) | uint64(uint32(ev.Pad))<<32 }
