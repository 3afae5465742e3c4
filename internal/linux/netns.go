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
	home   int        // the namespace that threads are in outside of Do
	users  int        // calls of Do under way
	closed bool

	stock stock // for dials
}

// OpenNetNS opens the namespace at path, which is a bind mount that a container runtime
// made, or a file in /proc. The error is [ErrGone] if there is no namespace at path any
// more. What is at path is looked at before it is opened: the open of a pipe waits for a
// writer, and that of a device does something.
func OpenNetNS(path string) (*NetNS, error) {
	place, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESRCH):
		return nil, fmt.Errorf("open network namespace %s: %w", path, ErrGone)
	case err != nil:
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	defer unix.Close(place)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(place, &fs); err != nil {
		return nil, fmt.Errorf("stat network namespace %s: %w", path, err)
	}
	if fs.Type != unix.NSFS_MAGIC {
		// The runtime unmounted the namespace, and the file below the mount is left.
		return nil, fmt.Errorf("open network namespace %s: not a namespace (any more): %w", path, ErrGone)
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/thread-self/fd/%d", place), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
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

// openHome opens the namespace that the threads of this process are in outside of Do. The
// caller may run inside Do, on a thread in another namespace, so openHome looks from a new
// goroutine.
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

// ID is the inode number of the namespace, which identifies it while it exists.
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

// Gone tells whether the path at which the namespace was opened no longer leads to it:
// the runtime removed it, or put another one there. A namespace without a path is never
// gone.
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

// Close closes the handle. Calls of Do under way finish undisturbed. Closing twice is no
// error.
func (n *NetNS) Close() error {
	defer n.stock.close() // a dial that is under way has the stock, and waits for mu
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	return n.releaseLocked()
}

// releaseLocked closes the descriptors once no call of Do uses them: the number of a
// descriptor that is closed too early may already be that of another file.
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

// Do runs f on a thread that is in the namespace, and waits for f. f runs in a goroutine
// of its own, locked to that thread; goroutines that f starts are not in the namespace. A
// socket that f makes stays in the namespace for good, so f should only make the socket,
// and the caller use it after Do. If the thread cannot go back to its namespace, it ends.
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
			// A thread that is still locked when its goroutine ends, ends too.
			if unix.Setns(n.home, unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
		}()
		err = f()
	}()
	return <-done
}

// ScratchNetNS makes a namespace without a name, for example for a probe. It exists as
// long as the handle.
func ScratchNetNS() (*NetNS, error) {
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

// onDisposableThread runs f on a thread that ends after f. That must not be the main
// thread, which cannot end, and whose namespace /proc shows as that of the process. If the
// goroutine is on the main thread, it stays locked to it while a second goroutine, which
// must be on another thread then, runs f.
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

// Cookie is the number by which the kernel tells the namespace from all that there are and
// were since it started. eBPF programs know it. The error is ENOPROTOOPT before Linux 5.14.
func (n *NetNS) Cookie() (cookie uint64, err error) {
	err = n.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("ask for the cookie of network namespace %s: %w", n, err)
	}
	return cookie, nil
}
