// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// selfNetNS is the namespace of the calling thread; /proc/self would be that
// of the main thread.
const selfNetNS = "/proc/thread-self/ns/net"

// NetNS is a handle on a network namespace. It keeps the namespace alive, and
// with it the pod's interfaces: close it once [NetNS.Gone] says so.
type NetNS struct {
	path     string // as opened; empty if the namespace has no name
	dev, ino uint64

	mu     sync.Mutex // guards what is below
	fd     int        // the namespace
	home   int        // where threads come from and go back to
	users  int        // calls of Do under way
	closed bool
}

// OpenNetNS opens the namespace at path, which is a bind mount as the
// container runtime makes it or a file in /proc. The error is [ErrGone] if it
// disappeared.
func OpenNetNS(path string) (*NetNS, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESRCH):
		return nil, fmt.Errorf("open network namespace %s: %w", path, ErrGone)
	case err != nil:
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("stat network namespace %s: %w", path, err)
	}
	if fs.Type != unix.NSFS_MAGIC {
		unix.Close(fd)
		// The mount went away and left the file that it was mounted on.
		return nil, fmt.Errorf("open network namespace %s: not a namespace (any more): %w", path, ErrGone)
	}
	if kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE); err == nil && kind != unix.CLONE_NEWNET {
		unix.Close(fd)
		return nil, fmt.Errorf("open network namespace %s: is a namespace of another kind (%#x)", path, kind)
	}
	return newNetNS(path, fd)
}

// CurrentNetNS opens the namespace of the process.
func CurrentNetNS() (*NetNS, error) {
	fd, err := openHome()
	if err != nil {
		return nil, err
	}
	return newNetNS("", fd)
}

// newNetNS takes over fd.
func newNetNS(path string, fd int) (*NetNS, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("stat network namespace %s: %w", path, err)
	}
	home, err := openHome()
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &NetNS{path: path, dev: st.Dev, ino: st.Ino, fd: fd, home: home}, nil
}

// openHome opens the namespace that unlocked threads of this process are in.
// The caller may itself run inside Do, on a thread that is elsewhere, so it
// looks from a goroutine of its own.
func openHome() (int, error) {
	type result struct {
		fd  int
		err error
	}
	c := make(chan result, 1)
	go func() {
		fd, err := unix.Open(selfNetNS, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		c <- result{fd, err}
	}()
	r := <-c
	if r.err != nil {
		return -1, fmt.Errorf("open own network namespace: %w", r.err)
	}
	return r.fd, nil
}

// ID is the inode number of the namespace: its identity while it lives.
func (n *NetNS) ID() uint64 { return n.ino }

// Path is where the namespace was opened, or "" if it has no name.
func (n *NetNS) Path() string { return n.path }

// String names the namespace for messages.
func (n *NetNS) String() string {
	if n.path == "" {
		return fmt.Sprintf("net:[%d]", n.ino)
	}
	return n.path
}

// Gone tells whether the namespace no longer stands where it was opened: the
// runtime removed it, or put another one there. A namespace without a name is
// never gone.
func (n *NetNS) Gone() bool {
	if n.path == "" {
		return false
	}
	var st unix.Stat_t
	if err := unix.Stat(n.path, &st); err != nil {
		return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOTDIR)
	}
	return st.Dev != n.dev || st.Ino != n.ino
}

// Close gives the handle back. Calls of Do under way finish undisturbed.
// Closing twice is no error.
func (n *NetNS) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	return n.releaseLocked()
}

// releaseLocked closes the descriptors once nobody uses them: a descriptor
// number that was closed too early may already name something else.
func (n *NetNS) releaseLocked() error {
	if !n.closed || n.users > 0 {
		return nil
	}
	return errors.Join(unix.Close(n.fd), unix.Close(n.home))
}

func (n *NetNS) acquire() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return ErrClosed
	}
	n.users++
	return nil
}

func (n *NetNS) release() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.users--
	return n.releaseLocked()
}

// errGoexit is what Do returns when f ended its goroutine.
var errGoexit = errors.New("function ended its goroutine")

// Do runs f on a thread that is in the namespace, and waits for it. f runs in
// a goroutine of its own, locked to that thread; goroutines that f starts are
// not in the namespace. A socket that f makes stays in the namespace for good,
// so f should make it and leave the waiting to others. If the thread cannot go
// back it is discarded.
func (n *NetNS) Do(f func() error) error {
	if err := n.acquire(); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", n, err)
	}
	done := make(chan error, 1)
	go func() {
		err := errGoexit
		defer func() {
			if rerr := n.release(); rerr != nil && err == nil {
				err = fmt.Errorf("close network namespace %s: %w", n, rerr)
			}
			done <- err
		}()
		runtime.LockOSThread()
		if serr := unix.Setns(n.fd, unix.CLONE_NEWNET); serr != nil {
			runtime.UnlockOSThread()
			err = fmt.Errorf("enter network namespace %s: %w", n, serr)
			return
		}
		defer func() {
			// Still locked when the goroutine ends, the thread dies with it.
			if unix.Setns(n.home, unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
		}()
		err = f()
	}()
	return <-done
}

// newScratchNetNS makes a nameless namespace that lives as long as the handle.
func newScratchNetNS() (*NetNS, error) {
	type result struct {
		fd  int
		err error
	}
	c := make(chan result, 1)
	onDisposableThread(func() {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			c <- result{-1, fmt.Errorf("make network namespace: %w", err)}
			return
		}
		fd, err := unix.Open(selfNetNS, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		c <- result{fd, err}
	})
	r := <-c
	if r.err != nil {
		return nil, r.err
	}
	return newNetNS("", r.fd)
}

// onDisposableThread runs f on a thread that ends with it. The main thread
// cannot end, and /proc shows its namespace as that of the process; so when
// the scheduler hands out that one, it is held while another one is taken.
func onDisposableThread(f func()) {
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			onDisposableThread(f)
			runtime.UnlockOSThread()
			close(done)
			return
		}
		defer close(done)
		f()
	}()
	<-done
}

// WithFD calls f with a descriptor of the namespace, for kernel calls that take
// one. It is valid until f returns.
func (n *NetNS) WithFD(f func(fd int) error) error {
	if err := n.acquire(); err != nil {
		return fmt.Errorf("use network namespace %s: %w", n, err)
	}
	return errors.Join(f(n.fd), n.release())
}

// ScratchNetNS makes a nameless namespace for a probe; it ends when the handle is
// closed.
func ScratchNetNS() (*NetNS, error) { return newScratchNetNS() }
