// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Why the program that has a socket is not found.
var (
	// ErrNoProcess means that no process of the namespace is visible here.
	ErrNoProcess = errors.New("no process of the pod is in /proc: the agent must be in the node's PID namespace (in a pod hostPID: true)")
	// ErrNoInsight means that the system does not let this process into those of the namespace.
	ErrNoInsight = errors.New("other programs' files may not be opened: the agent needs CAP_SYS_PTRACE, a seccomp profile that allows pidfd_getfd, and a sysctl kernel.yama.ptrace_scope below 3")
	// ErrNotHeld means that no process of the namespace has the socket among its files: one elsewhere has
	// it, or it is on its way to one.
	ErrNotHeld = errors.New("no process in the pod's network has the socket")
)

// A SocketFile is a file of a process that is a socket.
type SocketFile struct {
	PID, FD int
	// TID is the thread that has it where the process itself is not asked: its main thread has ended, or has
	// other files, or is in another namespace; else 0.
	TID int
}

// FindSocketFiles looks for sockets, by their inodes, among the files of the processes that are in a
// namespace. If not all are found, the error says why: [ErrNoProcess], [ErrNoInsight], [ErrNotHeld], or
// [ErrTooMuch] if that would have taken until after the given time. What was found is returned all the same.
func FindSocketFiles(ns *NetNS, inodes []uint64, until time.Time) (map[uint64]SocketFile, error) {
	s := socketSearch{proc: "/proc", wanted: make(map[string]uint64, len(inodes)), found: map[uint64]SocketFile{}, until: until}
	for _, i := range inodes {
		s.wanted[fmt.Sprintf("socket:[%d]", i)] = i
	}
	if err := s.processes(ns); err != nil {
		return s.found, fmt.Errorf("look for the programs that have %d sockets of %s: %w", len(s.wanted), ns, err)
	}
	return s.found, nil
}

// socketSearch is one search. Processes come and go meanwhile: what vanishes is no error.
type socketSearch struct {
	proc   string
	wanted map[string]uint64 // inodes that are not found yet, by what their files' links say
	found  map[uint64]SocketFile
	until  time.Time
	denied error // the first refusal of a process of the namespace
}

// searchBatch is how many names of a directory are read at once: less than 100 KiB of memory, whatever
// processes have open.
const searchBatch = 512

// processes looks through those of a namespace.
func (s *socketSearch) processes(ns *NetNS) error {
	seen := 0
	err := s.numbered(s.proc, func(pid int) error { return s.process(SocketFile{PID: pid}, pid, ns, &seen) })
	if err == nil && len(s.wanted) > 0 {
		err = s.threads(ns, &seen)
	}
	switch {
	case err != nil:
		return err
	case len(s.wanted) == 0:
		return nil
	case seen == 0:
		err = ErrNoProcess
	default:
		err = ErrNotHeld
	}
	if s.denied != nil { // it may be where we may not look
		return fmt.Errorf("%w; %w: %w", err, ErrNoInsight, s.denied)
	}
	return err
}

// process looks through the files of a process, or a thread of it, by its number, if it is in the namespace.
func (s *socketSearch) process(as SocketFile, number int, ns *NetNS, seen *int) error {
	in, err := s.isIn(number, ns)
	if err != nil {
		s.refuse(err)
		return nil
	}
	if !in {
		return nil
	}
	*seen++
	return s.files(as, number)
}

// threads looks through those of all processes that are no main threads. Most have the files of their process, and
// there are many of them: it is for those that hide what they have. Our own are in namespaces of pods at times,
// and have no files of theirs.
func (s *socketSearch) threads(ns *NetNS, seen *int) error {
	own := os.Getpid()
	return s.numbered(s.proc, func(pid int) error {
		if pid == own {
			return nil
		}
		err := s.numbered(fmt.Sprintf("%s/%d/task", s.proc, pid), func(tid int) error {
			if tid == pid {
				return nil
			}
			return s.process(SocketFile{PID: pid, TID: tid}, tid, ns, seen)
		})
		if errors.Is(err, ErrTooMuch) {
			return err
		}
		return nil // it has ended
	})
}

// isIn tells whether a process is in the namespace.
func (s *socketSearch) isIn(pid int, ns *NetNS) (bool, error) {
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(s.proc, strconv.Itoa(pid), "ns/net"), &st); err != nil {
		return false, &fs.PathError{Op: "stat", Path: fmt.Sprintf("%s/%d/ns/net", s.proc, pid), Err: err}
	}
	return st.Dev == ns.dev && st.Ino == ns.ino, nil
}

// files looks through the files of a process or thread.
func (s *socketSearch) files(as SocketFile, number int) error {
	dir := fmt.Sprintf("%s/%d/fd", s.proc, number)
	err := s.numbered(dir, func(fd int) error {
		to, err := os.Readlink(filepath.Join(dir, strconv.Itoa(fd)))
		if err != nil {
			s.refuse(err)
			return nil
		}
		if inode, ok := s.wanted[to]; ok {
			as.FD = fd
			s.found[inode] = as
			delete(s.wanted, to)
		}
		return nil
	})
	if err == nil || errors.Is(err, ErrTooMuch) {
		return err
	}
	s.refuse(err)
	return nil
}

// refuse notes that the system did not let us see something.
func (s *socketSearch) refuse(err error) {
	if s.denied == nil && errors.Is(err, fs.ErrPermission) {
		s.denied = err
	}
}

// numbered calls f with the entries of a directory of /proc that are numbers, until nothing is wanted
// any more or the time is over.
func (s *socketSearch) numbered(dir string, f func(n int) error) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	for {
		names, err := d.Readdirnames(searchBatch)
		for _, name := range names {
			n, nerr := strconv.Atoi(name)
			if nerr != nil {
				continue
			}
			if len(s.wanted) == 0 {
				return nil
			}
			if time.Now().After(s.until) {
				return fmt.Errorf("the processes of the node, and the files of those of the pod: %w in this time", ErrTooMuch)
			}
			if err := f(n); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
	}
}

// Open opens the socket of the file, if that is still the one with this inode; the error is
// [ErrNotHeld] if not. The descriptor is the caller's.
func (f SocketFile) Open(inode uint64) (fd int, err error) {
	const pidfdThread = unix.O_EXCL // PIDFD_THREAD, since Linux 6.9
	number, flags := f.PID, 0
	if f.TID != 0 {
		number, flags = f.TID, pidfdThread
	}
	pidfd, err := unix.PidfdOpen(number, flags)
	if err != nil {
		return -1, f.openError("pidfd_open", err)
	}
	defer unix.Close(pidfd)
	if fd, err = unix.PidfdGetfd(pidfd, f.FD, 0); err != nil {
		return -1, f.openError("pidfd_getfd", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Ino != inode || st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		unix.Close(fd)
		return -1, f.openError("fstat", errors.Join(err, ErrNotHeld))
	}
	return fd, nil
}

// openError says what a refusal means.
func (f SocketFile) openError(call string, err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES), errors.Is(err, unix.ENOSYS):
		err = fmt.Errorf("%w: %w", ErrNoInsight, os.NewSyscallError(call, err))
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.EBADF): // the process ended, or closed it
		err = fmt.Errorf("%w: %w", ErrNotHeld, os.NewSyscallError(call, err))
	default:
		err = os.NewSyscallError(call, err)
	}
	return fmt.Errorf("open file %d of process %d: %w", f.FD, f.PID, err)
}

// nudgeEvery is the pause between two interruptions of a system call: one that comes before the call
// began is lost.
const nudgeEvery = 10 * time.Millisecond

// ShutDown ends both directions of a socket that somebody else may have, too. A socket of SMC waits
// meanwhile for room at its peer, for as long as that somebody set by SO_LINGER; at the given time the wait is
// ended, and what was to be sent is lost. The error is ENOTCONN if the connection has ended already.
func ShutDown(fd int, until time.Time) error {
	return nudged(until, func() error { return os.NewSyscallError("shutdown", shutDown(fd)) })
}

// CloseSocket closes a copy of a socket's descriptor. If the others' were closed meanwhile, that is the end of the
// socket, and may wait as ShutDown does.
func CloseSocket(fd int, until time.Time) error {
	return nudged(until, func() error { return os.NewSyscallError("close", unix.Close(fd)) })
}

// nudged calls f, which makes a system call, and interrupts that from the given time on.
func nudged(until time.Time, f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, tid := os.Getpid(), unix.Gettid()
	over, stopped := make(chan struct{}), make(chan struct{})
	go func() { // until over is closed
		defer close(stopped)
		for pause := max(time.Until(until), nudgeEvery); ; pause = nudgeEvery {
			select {
			case <-over:
				return
			case <-time.After(pause):
				// The signal by which Go's runtime interrupts its threads, at any time.
				_ = unix.Tgkill(pid, tid, unix.SIGURG)
			}
		}
	}()
	err := f()
	close(over)
	<-stopped
	return err
}

// shutDown makes sure that programs which wait for the socket learn of it, whether a kernel wakes them before or
// after it notes that the directions have ended: of SMC's sockets nothing else may ever wake them, if the peer is
// silent. So whoever waits for data finds that direction at its end already when it is woken, and whoever waits for
// room is woken once more, as by a buffer that grew.
func shutDown(fd int) error {
	if err := unix.Shutdown(fd, unix.SHUT_RD); err != nil {
		return err
	}
	if err := unix.Shutdown(fd, unix.SHUT_RDWR); err != nil {
		return err
	}
	size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return err
	}
	const shown = 2 // the kernel shows twice what it was told
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size/shown)
}

// EndsOf are the addresses of a socket's connection.
func EndsOf(fd int) (c TCPConn, err error) {
	local, err := unix.Getsockname(fd)
	if err != nil {
		return c, os.NewSyscallError("getsockname", err)
	}
	peer, err := unix.Getpeername(fd)
	if err != nil {
		return c, os.NewSyscallError("getpeername", err)
	}
	if c.Local, err = addrPort(local); err != nil {
		return c, err
	}
	c.Peer, err = addrPort(peer)
	return c, err
}
