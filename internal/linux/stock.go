// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// stockBatch is how many sockets are made at once.
	stockBatch = 4
	// stockFor is how long a stock is kept without a dial, and how old what it knows of the namespace
	// can be.
	stockFor = time.Second
)

// stock is what dials in a namespace need, and what only a thread in that namespace can make: to bring one
// there takes longer than the rest of a dial on the same machine. A socket stays in the namespace in which it
// was made, so dials that follow each other share one visit.
//
//	dial      dial  dial  dial      dial      a second without one
//	  | visit: 4 sockets              | visit       | the rest is closed
type stock struct {
	mu    sync.Mutex    // guards what is below
	fds   map[int][]int // sockets of a family that nobody has used
	timer *time.Timer   // closes what is left; nil: there is nothing
	used  time.Time     // by the last dial
	ports portRange
	at    time.Time // when ports were read
	diag  int       // a socket of NETLINK_SOCK_DIAG; -1: the kernel has none, 0: there is none yet
}

// socket returns a new TCP socket of the namespace, for an address of the family of a.
func (n *NetNS) socket(a netip.Addr) (*rawSocket, error) {
	fam := unix.AF_INET6
	if a.Is4() {
		fam = unix.AF_INET
	}
	k := &n.stock
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.fds[fam]) == 0 {
		if err := n.Do(func() error { return k.makeSockets(fam) }); err != nil {
			return nil, err
		}
	}
	last := len(k.fds[fam]) - 1
	fd := k.fds[fam][last]
	k.fds[fam] = k.fds[fam][:last]
	k.keep()
	return rawSocketOf(fd)
}

// makeSockets is called on a thread in the namespace.
func (k *stock) makeSockets(fam int) error {
	if k.fds == nil {
		k.fds = map[int][]int{}
	}
	for range stockBatch {
		fd, err := unix.Socket(fam, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		if err != nil && len(k.fds[fam]) > 0 {
			break // one is enough
		}
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		k.fds[fam] = append(k.fds[fam], fd)
	}
	return nil
}

// portRange returns the namespace's range, as it was stockFor ago at most.
func (n *NetNS) portRange() (portRange, error) {
	k := &n.stock
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.at.IsZero() && time.Since(k.at) < stockFor {
		return k.ports, nil
	}
	err := n.Do(func() (err error) {
		k.ports, err = readPortRange()
		return err
	})
	if err == nil {
		k.at = time.Now()
	}
	return k.ports, err
}

// tupleFree tells whether the namespace has no connection with these two ends, not even one in
// TIME_WAIT. On a kernel without socket diagnosis every pair of ends counts as free.
func (n *NetNS) tupleFree(local, remote netip.AddrPort) (bool, error) {
	state, err := n.tupleState(local, remote, 0)
	return err == nil && state == 0, err
}

// tupleState is the state of the connection with these two ends among those that get what comes by an interface, see askDiag; 0:
// there is none.
func (n *NetNS) tupleState(local, remote netip.AddrPort, iface int) (state byte, err error) {
	k := &n.stock
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.diag == 0 {
		err := n.Do(func() error {
			fd, err := openDiag()
			if err == nil { // else the next question tries again
				k.diag = fd
			}
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	if k.diag < 0 {
		return 0, nil
	}
	k.keep()
	state, err = askDiag(k.diag, local, remote, uint32(iface))
	if err != nil { // the next answer might be that of this question
		unix.Close(k.diag)
		k.diag = 0
	}
	return state, err
}

// keep has the stock closed when no dial has used it for stockFor. The caller holds mu.
func (k *stock) keep() {
	k.used = time.Now()
	if k.timer == nil {
		k.timer = time.AfterFunc(stockFor, k.expire)
	}
}

// expire closes the stock, if it was not used meanwhile.
func (k *stock) expire() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.timer == nil {
		return
	}
	if rest := stockFor - time.Since(k.used); rest > 0 {
		k.timer.Reset(rest)
		return
	}
	k.closeLocked()
}

// close closes what is left.
func (k *stock) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closeLocked()
}

func (k *stock) closeLocked() {
	if k.timer != nil {
		k.timer.Stop()
		k.timer = nil
	}
	for _, fds := range k.fds {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
	k.fds = nil
	if k.diag > 0 {
		unix.Close(k.diag)
		k.diag = 0
	}
}

// openDiag opens a socket of the thread's namespace for socket diagnosis; -1: the kernel has none.
func openDiag() (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_INET_DIAG)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return -1, nil
	}
	return fd, os.NewSyscallError("socket NETLINK_SOCK_DIAG", err)
}
