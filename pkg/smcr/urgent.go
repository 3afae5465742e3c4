// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"io"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// Urgent data is what net.Conn does not know: one byte of the stream at a time
// that the peer should look at before what precedes it (RFC 7609 §4.7.5,
// §4.7.6). These methods are Linux's TCP options and flags: WriteUrgent and
// ReadUrgent are send and recv with MSG_OOB, SetUrgentInline is SO_OOBINLINE,
// AtMark is SIOCATMARK, UrgentPending is the exception set of select, and
// UrgentNotify is SIGURG. They work on every Conn, whatever carries it.

// urgentState is where the urgent byte of either stream is.
type urgentState struct {
	// at is one past our urgent byte, until the machine knows it; 0: none.
	at atomic.Uint64
	// mark is one past the peer's last urgent byte. It is stored before
	// peerProduced passes it.
	mark   atomic.Uint64
	inline atomic.Bool // the byte is part of the stream that Read sees
	// taken is one past the urgent byte that ReadUrgent took out of the stream.
	taken atomic.Uint64

	mu     sync.Mutex // guards what is below; not held while the turn is taken
	held   byte       // the urgent byte
	fresh  bool       // ReadUrgent has not returned it
	notify chan struct{}
}

// urgentAhead stands for the position of an urgent byte that is still before
// us: what is known is that there is one.
const urgentAhead = math.MaxUint64

// handleUrgent takes what a message said about urgent data; the caller holds
// the turn.
func (c *Conn) handleUrgent(d *cdc.Conn, ev cdc.Events) {
	if d.PeerUrgentPending() {
		c.state.Or(flagPeerUrgent)
	} else {
		c.state.And(^flagPeerUrgent)
	}
	u := &c.urgent
	end := d.PeerUrgent()
	if ev&cdc.PeerUrgent == 0 && end == u.mark.Load() {
		return
	}
	u.mu.Lock()
	if end > u.mark.Load() {
		u.held, u.fresh = c.rmbe[c.ring.Offset(end-1)], true
		u.mark.Store(end)
	}
	if u.notify != nil {
		wakeUp(u.notify)
	}
	u.mu.Unlock()
	c.sink.Load().urge(len(c.rmbe))
}

// next waits for unread bytes and returns them up to where the RMBE wraps or
// the urgent byte is. That one begins what is returned if it is part of the
// stream, and is skipped otherwise.
func (c *Conn) next() ([]byte, error) {
	for {
		b, err := c.peek(true)
		pos, mark := c.consumed.Load(), c.urgent.mark.Load()
		if err != nil || mark <= pos {
			return b, err
		}
		if before := mark - 1 - pos; before > 0 {
			return b[:min(before, uint64(len(b)))], nil
		}
		if c.urgent.inline.Load() {
			return b, nil
		}
		c.consume(1)
	}
}

// WriteUrgent writes p, whose last byte is urgent. If the peer has not heard
// of an earlier urgent byte yet, that one becomes an ordinary one.
func (c *Conn) WriteUrgent(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	last := len(p) - 1
	n, err := c.Write(p[:last])
	if err != nil {
		return n, err
	}
	if c.group == nil {
		m, err := c.writeUrgentTCP(p[last:])
		return n + m, err
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if !c.hold() {
		return n, c.opError("write", net.ErrClosed)
	}
	defer c.drop()
	b, err := c.reserve(true)
	if err != nil {
		return n, c.opError("write", err)
	}
	b[0] = p[last]
	if !c.commitUrgent() {
		return n, c.opError("write", syscall.EPIPE)
	}
	return n + 1, nil
}

// commitUrgent gives one urgent byte of the send buffer to the network.
func (c *Conn) commitUrgent() bool {
	c.urgent.at.Store(c.written() + 1)
	return c.commit(1)
}

func (c *Conn) writeUrgentTCP(p []byte) (int, error) {
	s := newSocket(c.tcp)
	if s == nil {
		return 0, c.opError("write", net.ErrClosed)
	}
	return s.WriteUrgent(p)
}

// ReadUrgent returns the peer's last urgent byte, once. The error is
// syscall.EAGAIN if the peer announced it and has not written it yet, and
// syscall.EINVAL if there is none or it is in line. It does not wait, and has
// nothing to do with a Read under way. Other than TCP, it still has the byte
// when Read has gone past it, until another one comes.
func (c *Conn) ReadUrgent() (byte, error) {
	if c.group == nil {
		var b [1]byte
		err := c.controlTCP("read", func(fd int) error {
			n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_OOB|unix.MSG_DONTWAIT)
			if err == nil && n == 0 {
				err = io.EOF
			}
			return err
		})
		return b[0], err
	}
	b, mark, err := c.takeUrgent()
	if err != nil {
		return 0, c.opError("read", err)
	}
	// The peer writes nothing behind the byte until it is consumed, and the
	// program may wait for that before it reads again. Whoever has the lock
	// comes to the byte and skips it.
	if c.rmu.TryLock() {
		if c.consumed.Load() == mark-1 && c.hold() {
			c.urgent.taken.Store(mark)
			c.consume(1)
			c.drop()
		}
		c.rmu.Unlock()
	}
	return b, nil
}

// takeUrgent returns the urgent byte and the position behind it.
func (c *Conn) takeUrgent() (b byte, mark uint64, err error) {
	u := &c.urgent
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case c.closed.Load():
		return 0, 0, net.ErrClosed
	case u.inline.Load():
	case u.fresh:
		u.fresh = false
		return u.held, u.mark.Load(), nil
	case c.state.Load()&flagPeerUrgent != 0:
		return 0, 0, syscall.EAGAIN
	}
	return 0, 0, syscall.EINVAL
}

// SetUrgentInline says whether Read returns urgent bytes as part of the stream.
// By default it leaves them out. Either way a Read ends before one, so that
// AtMark can tell where it is.
func (c *Conn) SetUrgentInline(inline bool) error {
	if c.group == nil {
		on := 0
		if inline {
			on = 1
		}
		return c.controlTCP("set", func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, on) })
	}
	c.urgent.inline.Store(inline)
	return nil
}

// AtMark reports that the next byte of the stream is the peer's last urgent
// one.
func (c *Conn) AtMark() (bool, error) {
	if c.group != nil {
		mark, pos := c.urgent.mark.Load(), c.consumed.Load()
		return mark > 0 && (pos == mark-1 || pos == mark && c.urgent.taken.Load() == mark), nil
	}
	at := false
	err := c.controlTCP("read", func(fd int) (err error) {
		at, err = atMark(fd)
		return err
	})
	return at, err
}

// UrgentPending reports that the peer has announced or sent urgent data that
// was not read yet.
func (c *Conn) UrgentPending() (bool, error) {
	if c.group == nil {
		pending := false
		err := c.controlTCP("read", func(fd int) error {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}
			_, err := unix.Poll(fds, 0)
			pending = fds[0].Revents&unix.POLLPRI != 0
			return err
		})
		return pending, err
	}
	u := &c.urgent
	u.mu.Lock()
	defer u.mu.Unlock()
	return c.state.Load()&flagPeerUrgent != 0 || u.fresh && c.consumed.Load() < u.mark.Load(), nil
}

// UrgentNotify returns a channel that gets a token when the peer announces
// urgent data, even while it has no window to write it. It is nil if TCP
// carries the connection, which says it by UrgentPending only.
func (c *Conn) UrgentNotify() <-chan struct{} {
	if c.group == nil {
		return nil
	}
	u := &c.urgent
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.notify == nil {
		u.notify = make(chan struct{}, 1)
	}
	return u.notify
}

// controlTCP does something with the TCP connection's descriptor.
func (c *Conn) controlTCP(op string, f func(fd int) error) error {
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return c.opError(op, err)
	}
	cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) })
	if cerr != nil {
		return cerr
	}
	return c.opError(op, err)
}

func atMark(fd int) (bool, error) {
	at, err := unix.IoctlGetInt(fd, unix.SIOCATMARK)
	return at != 0, os.NewSyscallError("ioctl SIOCATMARK", err)
}
