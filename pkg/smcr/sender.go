// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"io"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/deadline"
)

// sender is the sending side of a connection over SMC-R. A sender owns the send buffer, from
// which the device reads, and knows who waits for room there and which bytes wait for more.
type sender struct {
	mu       sync.Mutex             // held by whoever writes: one at a time
	buf      *sendBuffer            // a ring, of the link group's memory
	settled  uint64                 // up to where nothing is in buf: its pages were given back; 0: from the start on
	intake   atomic.Pointer[intake] // of the RelayFrom under way
	writable chan struct{}          // has a token when there may be room
	deadline deadline.Deadline
	coalesce coalescer
}

func (s *sender) init(buf *sendBuffer) {
	s.buf, s.writable = buf, make(chan struct{}, 1)
	s.deadline.Init()
}

// size is the size of the send buffer, a power of two.
func (s *sender) size() uint64 { return uint64(len(s.buf.mem)) }

// span returns n bytes of the send buffer from a position of the stream on, fewer where the
// buffer wraps before.
func (s *sender) span(pos, n uint64) []byte {
	off := pos & (s.size() - 1)
	return s.buf.mem[off:min(off+n, s.size())]
}

// wake leaves a token for the writer.
func (s *sender) wake() { wakeUp(s.writable) }

// await waits for a token or the deadline.
func (s *sender) await() {
	select {
	case <-s.writable:
	case <-s.deadline.Wait():
	}
}

// wipe clears what was written up to a position of the stream: the buffer's next user must
// not see the bytes.
func (s *sender) wipe(end uint64) {
	for pos := max(s.settled, end-min(end, s.size())); pos < end; {
		b := s.span(pos, end-pos)
		clear(b)
		pos += uint64(len(b))
	}
}

// Write sends p, and returns when all of p is in the send buffer.
func (c *Conn) Write(p []byte) (int, error) {
	if c.group == nil {
		return c.tcp.Write(p)
	}
	c.send.mu.Lock()
	defer c.send.mu.Unlock()
	if !c.ref() {
		return 0, c.opError("write", net.ErrClosed)
	}
	defer c.unref()
	done := 0
	for {
		b, err := c.reserve(len(p)-done, done < len(p))
		if err != nil {
			return done, c.opError("write", err)
		}
		n := copy(b, p[done:])
		if !c.commit(n) {
			return done, c.opError("write", c.whyEnded())
		}
		if done += n; done == len(p) {
			return done, nil
		}
	}
}

// anyLength is for a writer that does not know how much it has.
const anyLength = math.MaxInt

// reserve returns free space of the send buffer, up to where the buffer wraps, for a writer of n
// bytes. There is room for n bytes, or in a quarter of the buffer: a writer that took each byte
// as it becomes free would send small pieces for ever once it has sent one. While there
// is less reserve waits, or returns nothing.
func (c *Conn) reserve(n int, wait bool) ([]byte, error) {
	enough := min(uint64(max(n, 1)), c.send.size()/4)
	for {
		pos := c.streams.produced.Load()
		free := c.send.size() - (pos - c.streams.completed.Load())
		switch {
		case c.life.closed.Load():
			return nil, net.ErrClosed
		case pos&endOfStream != 0:
			return nil, syscall.EPIPE
		case c.send.deadline.Past():
			return nil, os.ErrDeadlineExceeded
		case c.streams.has(flagAborted):
			if c.streams.has(flagPeerDone) {
				return nil, syscall.EPIPE // nobody is there to take bytes, as with TCP in CLOSE-WAIT
			}
			return nil, c.whyReset()
		case free >= enough:
			return c.send.span(pos, free), nil
		case !wait:
			return nil, nil
		}
		c.send.await()
	}
}

// whyEnded is why nothing more can be written after the end of our stream.
func (c *Conn) whyEnded() error {
	if c.life.closed.Load() {
		return net.ErrClosed
	}
	return syscall.EPIPE
}

// commit gives n bytes of the send buffer to the network; false if CloseWrite
// or Close came first.
func (c *Conn) commit(n int) bool {
	if n <= 0 {
		return true
	}
	if !c.streams.produce(n) {
		return false
	}
	c.stack.marks.moved(c)
	c.stack.kick()
	return true
}

// ReadFrom implements io.ReaderFrom: r reads straight into registered memory.
// ReadFrom returns when r ends, without closing the connection.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	if c.group == nil {
		return c.tcp.ReadFrom(r)
	}
	c.send.mu.Lock()
	defer c.send.mu.Unlock()
	if !c.ref() {
		return 0, c.opError("write", net.ErrClosed)
	}
	defer c.unref()
	if t, ok := r.(*net.TCPConn); ok {
		if s := newSocket(t); s != nil {
			r = s
		}
	}
	var total int64
	for {
		b, err := c.reserve(anyLength, true)
		if err != nil {
			return total, c.opError("write", err)
		}
		n, err := r.Read(b)
		if !c.commit(n) {
			return total, c.opError("write", c.whyEnded())
		}
		total += int64(n)
		if errors.Is(err, io.EOF) {
			return total, nil
		}
		if err != nil {
			return total, err
		}
	}
}

// CloseWrite ends our stream: the peer reads io.EOF after what was written. A
// Write that waits for room ends with syscall.EPIPE.
func (c *Conn) CloseWrite() error {
	if c.group == nil {
		return c.tcp.CloseWrite()
	}
	if c.life.closed.Load() || !c.ref() {
		return c.opError("close", net.ErrClosed)
	}
	defer c.unref()
	c.streams.end()
	c.send.wake() // a Write that waits
	c.recv.wake() // or AwaitEnd
	s := c.stack
	s.lock()
	defer s.unlock()
	c.sync()
	c.lc.Shutdown()
	c.group.flush(time.Now())
	return nil
}
