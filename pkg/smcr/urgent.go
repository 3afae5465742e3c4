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
// that the peer should look at before the bytes that precede it (RFC 7609 §4.7.5,
// §4.7.6). These methods are Linux's TCP options and flags: WriteUrgent and
// ReadUrgent are send and recv with MSG_OOB, SetUrgentInline is SO_OOBINLINE,
// AtMark is SIOCATMARK, UrgentPending is the exception set of select, and
// UrgentNotify is SIGURG. The methods work on every Conn, whatever carries it.

// urgentState is where the urgent byte of either stream is.
type urgentState struct {
	// at is one past our urgent byte, until the machine knows it; 0: none. If CloseWrite was first, at
	// stays where no byte comes.
	at atomic.Uint64
	// mark is one past the peer's last urgent byte. The holder of the turn stores mark
	// before peerProduced, so that no reader goes past the byte unaware:
	//
	//	holder of the turn        reader
	//	  stores mark = 8           |
	//	  stores peerProduced = 9   |
	//	                            loads peerProduced = 9, then mark = 8: reads 7 bytes
	mark   atomic.Uint64
	inline atomic.Bool // the byte is part of the stream that Read sees
	// taken is one past the urgent byte that ReadUrgent took out of the stream.
	taken atomic.Uint64

	mu     sync.Mutex // guards what is below; not held while the turn is taken
	value  byte       // the urgent byte
	fresh  bool       // ReadUrgent has not returned value
	notify chan struct{}
}

// urgentAhead stands for the position of an urgent byte that the program's socket has not
// given yet: where the byte is in the stream is not known.
const urgentAhead = math.MaxUint64

// handleUrgent takes what a message said about urgent data; the caller holds
// the turn.
func (c *Conn) handleUrgent(d *cdc.Conn, ev cdc.Events) {
	if d.PeerUrgentPending() {
		c.streams.flags.Or(flagPeerUrgent)
	} else {
		c.streams.flags.And(^flagPeerUrgent)
	}
	u := &c.urgent
	end := d.PeerUrgent()
	if ev&cdc.PeerUrgent == 0 && end == u.mark.Load() {
		return
	}
	u.mu.Lock()
	if end > u.mark.Load() {
		u.value, u.fresh = c.recv.span(end-1, 1)[0], true
		u.mark.Store(end)
	}
	if u.notify != nil {
		wakeUp(u.notify)
	}
	u.mu.Unlock()
	c.recv.sink.Load().makeRoom(len(c.recv.rmbe))
}

// next waits for unread bytes and returns them up to where the RMBE wraps or
// the urgent byte is. An urgent byte that is part of the stream is the first of the bytes
// returned; another one is skipped.
func (c *Conn) next() ([]byte, error) {
	for {
		b, err := c.peek(true)
		pos, mark := c.streams.consumed.Load(), c.urgent.mark.Load()
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

// beforeMark returns the part of the unread bytes b, which peek gave, that is before the urgent byte.
func (c *Conn) beforeMark(b []byte) []byte {
	pos, mark := c.streams.consumed.Load(), c.urgent.mark.Load()
	if mark <= pos {
		return b
	}
	return b[:min(mark-1-pos, uint64(len(b)))]
}

// WriteUrgent writes p, whose last byte is urgent. An earlier urgent byte of which the peer has
// not heard yet becomes an ordinary one.
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
	c.send.mu.Lock()
	defer c.send.mu.Unlock()
	if !c.ref() {
		return n, c.opError("write", net.ErrClosed)
	}
	defer c.unref()
	b, err := c.reserve(1, true)
	if err != nil {
		return n, c.opError("write", err)
	}
	b[0] = p[last]
	if !c.commitUrgent() {
		return n, c.opError("write", c.whyEnded())
	}
	return n + 1, nil
}

// commitUrgent gives one urgent byte of the send buffer to the network.
func (c *Conn) commitUrgent() bool {
	c.urgent.at.Store(c.streams.written() + 1)
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
// syscall.EAGAIN if the peer announced the byte and has not written it yet, and
// syscall.EINVAL if there is no urgent byte or urgent bytes are in line. ReadUrgent does not wait, and has
// nothing to do with a Read under way. Unlike TCP, a connection on SMC-R still has the
// byte when Read has gone past its place, until another urgent byte comes.
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
	// The peer writes nothing behind the urgent byte until that is consumed, and the
	// program may wait for what comes behind before it reads again. A Read that has the
	// lock comes to the urgent byte and skips it.
	if c.recv.mu.TryLock() {
		if c.streams.consumed.Load() == mark-1 && c.ref() {
			c.urgent.taken.Store(mark)
			c.consume(1)
			c.unref()
		}
		c.recv.mu.Unlock()
	}
	return b, nil
}

// takeUrgent returns the urgent byte and the position behind it.
func (c *Conn) takeUrgent() (b byte, mark uint64, err error) {
	u := &c.urgent
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case c.life.closed.Load():
		return 0, 0, net.ErrClosed
	case u.inline.Load():
	case u.fresh:
		u.fresh = false
		return u.value, u.mark.Load(), nil
	case c.streams.has(flagPeerUrgent):
		return 0, 0, syscall.EAGAIN
	}
	return 0, 0, syscall.EINVAL
}

// SetUrgentInline says whether Read returns urgent bytes as part of the stream.
// By default Read leaves them out. Either way a Read ends before an urgent byte, so that
// AtMark can tell where the byte is.
func (c *Conn) SetUrgentInline(inline bool) error {
	c.urgent.inline.Store(inline)
	if c.group == nil {
		on := 0
		if inline {
			on = 1
		}
		return c.controlTCP("set", func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, on) })
	}
	return nil
}

// AtMark reports that the next byte of the stream is the peer's last urgent
// one.
func (c *Conn) AtMark() (bool, error) {
	if c.group != nil {
		mark, pos := c.urgent.mark.Load(), c.streams.consumed.Load()
		return mark > 0 && (pos == mark-1 || pos == mark && c.urgent.taken.Load() == mark), nil
	}
	at := false
	err := c.controlTCP("read", func(fd int) (err error) {
		at, err = c.fallback.atMark(fd)
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
	return c.streams.has(flagPeerUrgent) || u.fresh && c.streams.consumed.Load() < u.mark.Load(), nil
}

// UrgentNotify returns a channel that gets a token when the peer announces
// urgent data, even while the peer has no window to write it. The channel is nil if TCP
// carries the connection: TCP tells of urgent data by UrgentPending only.
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
