// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// checkConn refuses a connection that is not one of the device's address: what is not routed
// by the device cannot be its. Whether there is a peer still is not looked at.
func (d *Device) checkConn(c *net.TCPConn) error {
	if c == nil {
		return fmt.Errorf("no connection: %w", rdma.ErrInvalid)
	}
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(uintptr) {})
	}
	if err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrInvalid, err)
	}
	local, ok := c.LocalAddr().(*net.TCPAddr)
	if !ok {
		return fmt.Errorf("connection is not of TCP: %w", rdma.ErrInvalid)
	}
	a := local.AddrPort().Addr().Unmap()
	if a.WithZone("") != d.cfg.Addr.WithZone("") {
		return fmt.Errorf("connection of %v, the device has %v: %w", a, d.cfg.Addr, rdma.ErrState)
	}
	return nil
}

// takenOver is a connection that was taken over from whoever had it, with what has to be put
// back if it returns.
type takenOver struct {
	*net.TCPConn
	noDelay int
}

// takeOver makes a connection unusable for whoever has it, who could do nothing to it but
// harm, and returns it under another descriptor, with the options of TCP as they were.
func takeOver(c *net.TCPConn) (takenOver, error) {
	kept, err := keptOptions(c)
	if err != nil {
		return takenOver{}, fmt.Errorf("take over connection: %w: %w", rdma.ErrInvalid, err)
	}
	f, err := c.File()
	if err != nil {
		return takenOver{}, fmt.Errorf("take over connection: %w: %w", rdma.ErrNoResources, err)
	}
	defer func() { _ = f.Close() }()
	n, err := net.FileConn(f)
	if err != nil {
		return takenOver{}, fmt.Errorf("take over connection: %w: %w", rdma.ErrNoResources, err)
	}
	t, ok := n.(*net.TCPConn)
	if ok {
		err = kept.restore(t)
	} else {
		err = fmt.Errorf("it is %T: %w", n, rdma.ErrInvalid)
	}
	if err != nil {
		_ = n.Close()
		return takenOver{}, fmt.Errorf("take over connection: %w", err)
	}
	_ = c.Close() // t is the same connection
	return takenOver{t, kept[0]}, nil
}

// giveBack readies the connection for whom it was taken over from.
func (t takenOver) giveBack() *net.TCPConn {
	_ = t.SetDeadline(time.Time{})
	_ = t.SetNoDelay(t.noDelay != 0) // errors are those of the connection, which who has it will see
	return t.TCPConn
}

// options are those that package net sets anew on a connection that it makes of a descriptor.
// The first one is what RDMA has to have its own way.
var options = [...]struct{ level, name int }{
	{unix.IPPROTO_TCP, unix.TCP_NODELAY},
	{unix.SOL_SOCKET, unix.SO_KEEPALIVE},
	{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE},
	{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL},
	{unix.IPPROTO_TCP, unix.TCP_KEEPCNT},
}

type optionValues [len(options)]int

func keptOptions(c syscall.Conn) (v optionValues, err error) {
	err = onDescriptor(c, func(fd int) error {
		for i, o := range options {
			if v[i], err = unix.GetsockoptInt(fd, o.level, o.name); err != nil {
				return err
			}
		}
		return nil
	})
	return v, err
}

func (v *optionValues) restore(c syscall.Conn) error {
	return onDescriptor(c, func(fd int) error {
		for i, o := range options {
			if err := unix.SetsockoptInt(fd, o.level, o.name, v[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

// onDescriptor calls f with the descriptor of a connection.
func onDescriptor(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = f(int(fd)) })
	return errors.Join(err, inner)
}

// maxULPDU is the longest ULPDU that fits one of TCP's segments (RFC 5044 §4.5).
func maxULPDU(c *net.TCPConn) int {
	mss := 0
	err := onDescriptor(c, func(fd int) (err error) {
		mss, err = unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
		return err
	})
	if err != nil {
		return iwarp.DefaultULPDU
	}
	return iwarp.MULPDU(mss, false)
}

// peek shows what the stream begins with, and leaves it there. end says that nothing comes
// behind that, and why.
func peek(fd int, b []byte) (n int, end error) {
	over := hungUp(fd) // before the bytes, so that they are the last ones
	err := ignoringEINTR(func() (err error) {
		n, _, err = unix.Recvfrom(fd, b, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return err
	})
	switch {
	case errors.Is(err, unix.EAGAIN):
		return 0, nil
	case err != nil:
		return 0, err
	case over || n == 0:
		return n, iwarp.ErrEnded
	}
	return n, nil
}

// hungUp reports whether the peer's half of a connection has ended.
func hungUp(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	err := ignoringEINTR(func() error {
		_, err := unix.Poll(p, 0)
		return err
	})
	return err == nil && p[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
}

// take takes b out of the stream, which begins with it.
func take(fd int, b []byte) error {
	n := 0
	err := ignoringEINTR(func() (err error) {
		n, _, err = unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
		return err
	})
	if err == nil && n < len(b) {
		err = fmt.Errorf("%d of %d bytes: somebody else reads from the connection", n, len(b))
	}
	return err
}

func ignoringEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
