// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// maxULPDU is the longest ULPDU that fits one of TCP's segments (RFC 5044 §4.5).
func maxULPDU(c *net.TCPConn) int {
	mss := 0
	err := tcpqp.OnDescriptor(c, func(fd int) (err error) {
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
