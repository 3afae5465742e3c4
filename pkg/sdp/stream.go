// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Read reads what has arrived, at least one byte, and copies it out of receive buffers. What the peer offers to be read by RDMA
// Read refuses, so that the peer sends it in messages; [Conn.ReadBuffer] takes it. At the end of the peer's stream Read returns [io.EOF].
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err := c.read(p[:min(len(p), maxTransfer)], nil, 0, false)
	return n, c.opError("read", err)
}

// read reads into p. If buf is not nil, p lies in it, at off.
func (c *Conn) read(p []byte, buf *Buffer, off int, fill bool) (int, error) {
	for {
		t := c.reads.fresh(p)
		t.buf, t.off, t.fill = buf, off, fill
		if err := c.start(reading, t); err != nil {
			c.reads.keep(t)
			return 0, err
		}
		n, over, err := c.finishRead(t)
		if over {
			return n, err
		}
	}
}

// finishRead waits for a read that was started. If over is false, the read has got nothing for its program, and is to be tried again.
func (c *Conn) finishRead(t *transfer) (n int, over bool, err error) {
	c.wait(reading, t)
	n = t.n
	if n > 0 && t.urgent && c.urgent.take(t.last) {
		n--
	}
	eof, canceled, moved := t.eof, t.canceled, t.n
	c.reads.keep(t)
	switch {
	case n > 0:
		return n, true, nil
	case eof:
		return 0, true, io.EOF
	case canceled && moved == 0:
		err = c.stopped(reading)
		return 0, err != nil, err
	}
	return 0, false, nil // the out-of-band byte was all
}

// Write copies p into messages, and returns when all of them are posted: the peer has them, or they are on their way. It waits while
// Config.SendSlots messages are under way, or the peer has no receive buffer left. [Conn.WriteBuffer] need not copy.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.write(p, false)
	return n, c.opError("write", err)
}

func (c *Conn) write(p []byte, urgent bool) (done int, err error) {
	for {
		part := p[done:min(len(p), done+maxTransfer)]
		if len(part) == 0 {
			return done, nil
		}
		t := c.writes.fresh(part)
		t.urgent = urgent && done+len(part) == len(p)
		if err := c.start(writing, t); err != nil {
			c.writes.keep(t)
			return done, err
		}
		n, err := c.finishWrite(t)
		done += n
		if err != nil {
			return done, err
		}
	}
}

// finishWrite waits for a write that was started.
func (c *Conn) finishWrite(t *transfer) (int, error) {
	c.wait(writing, t)
	n, short := t.n, t.canceled && t.n < len(t.p)
	c.writes.keep(t)
	if !short {
		return n, nil
	}
	return n, c.stopped(writing)
}

// WriteBuffer sends the n bytes of b from off on, and returns how many of them were sent: fewer than n only with an error. When it returns,
// the program may change them. More than Config.ZcopySize bytes go without a copy, if the peer's program waits with a long Buffer:
// the peer's device fetches them, or this one writes them there. Others are copied, as by Write. A stretch that is not in b, is
// empty, or is longer than 1 GiB is [rdma.ErrInvalid].
func (c *Conn) WriteBuffer(b *Buffer, off, n int) (int, error) {
	t, err := c.StartWrite(b, off, n)
	if err != nil {
		return 0, err
	}
	return t.Wait()
}

// ReadBuffer reads into the n bytes of b from off on, and returns how many have arrived: when there is at least one, or, with fill, when
// there are n. What the peer offers to be read by RDMA this device fetches into b. A stretch that is not in b, is empty, or is longer than
// 1 GiB is [rdma.ErrInvalid].
func (c *Conn) ReadBuffer(b *Buffer, off, n int, fill bool) (int, error) {
	t, err := c.StartRead(b, off, n, fill)
	if err != nil {
		return 0, err
	}
	return t.Wait()
}

// Transfer is a read or a write of a Buffer that was started. Wait must be called, once.
type Transfer struct {
	c *Conn
	d direction
	t *transfer
}

// StartWrite is [Conn.WriteBuffer] without waiting for the end, so that the next one can be prepared meanwhile. Several are sent in the
// order in which they were started.
func (c *Conn) StartWrite(b *Buffer, off, n int) (*Transfer, error) {
	return c.startBuffer(writing, b, off, n, false)
}

// StartRead is [Conn.ReadBuffer] without waiting for the end. Several get what arrives in the order in which they were started. A read
// without fill may be advertised to the peer, whose device then writes into b.
func (c *Conn) StartRead(b *Buffer, off, n int, fill bool) (*Transfer, error) {
	return c.startBuffer(reading, b, off, n, fill)
}

func (c *Conn) startBuffer(d direction, b *Buffer, off, n int, fill bool) (*Transfer, error) {
	op := "read"
	if d == writing {
		op = "write"
	}
	all := b.Bytes()
	if n <= 0 || n > maxTransfer || off < 0 || off > len(all)-n {
		return nil, c.opError(op, fmt.Errorf("%d bytes at %d of a buffer of %d: %w", n, off, len(all), rdma.ErrInvalid))
	}
	t := c.of(d).fresh(all[off : off+n])
	t.buf, t.off, t.fill = b, off, fill
	if err := c.start(d, t); err != nil {
		c.of(d).keep(t)
		return nil, c.opError(op, err)
	}
	return &Transfer{c, d, t}, nil
}

// Wait waits until the transfer is over, and returns how many bytes it moved.
func (x *Transfer) Wait() (int, error) {
	c, t := x.c, x.t
	x.t = nil
	buf, off, p, fill := t.buf, t.off, t.p, t.fill
	if x.d == writing {
		n, err := c.finishWrite(t)
		if err == nil && n < len(p) { // canceled for the sake of others
			return n, c.opError("write", errTimeout)
		}
		return n, c.opError("write", err)
	}
	n, over, err := c.finishRead(t)
	if !over {
		n, err = c.read(p, buf, off, fill)
	}
	return n, c.opError("read", err)
}

// ReadFrom implements [io.ReaderFrom]: it sends what r has until its end, by two Buffers of 1 MiB in turn, so that a long stream is not
// copied.
func (c *Conn) ReadFrom(r io.Reader) (sent int64, err error) {
	if !c.stack.beginCopy() {
		return 0, c.opError("write", net.ErrClosed)
	}
	defer c.stack.endCopy()
	var bufs [2]*Buffer
	var under [2]*Transfer
	wait := func(i int) {
		if under[i] == nil {
			return
		}
		n, werr := under[i].Wait()
		under[i], sent = nil, sent+int64(n)
		err = cmp.Or(err, werr) // one error, as it is: callers look for a net.Error, or their own
	}
	defer func() {
		for i, b := range bufs {
			wait(i)
			if b != nil {
				_ = b.Close() // nobody has it
			}
		}
	}()
	for i := 0; err == nil; i = 1 - i {
		if bufs[i] == nil {
			if bufs[i], err = c.stack.AllocBuffer(copyBytes); err != nil {
				return sent, c.opError("write", err)
			}
		}
		if wait(i); err != nil {
			break
		}
		n, rerr := r.Read(bufs[i].Bytes())
		if n > 0 {
			under[i], err = c.StartWrite(bufs[i], 0, n)
		}
		if errors.Is(rerr, io.EOF) {
			break
		}
		err = cmp.Or(err, rerr)
	}
	wait(0) // both are in their order, whichever was the last: their sums are what counts
	wait(1)
	return sent, err
}

// WriteTo implements [io.WriterTo]: it gives w what arrives until the end of the stream, by two Buffers of 1 MiB in turn, so that a long
// stream is not copied, and one is filled while w has the other. After an error of w, what the other one has got is lost.
func (c *Conn) WriteTo(w io.Writer) (got int64, err error) {
	if !c.stack.beginCopy() {
		return 0, c.opError("read", net.ErrClosed)
	}
	defer c.stack.endCopy()
	var bufs [2]*Buffer
	var under [2]*transfer
	defer func() {
		for i, b := range bufs {
			c.dropRead(under[i])
			if b != nil {
				_ = b.Close() // nobody has it
			}
		}
	}()
	for i := range bufs {
		if bufs[i], err = c.stack.AllocBuffer(copyBytes); err != nil {
			return 0, c.opError("read", err)
		}
	}
	for i := 0; ; i = 1 - i {
		if under[i] != nil {
			n, _, err := c.finishRead(under[i]) // a read that has got nothing begins anew, behind the other one
			under[i] = nil
			switch {
			case n > 0: // then there is no error
				k, err := writeAll(w, bufs[i].Bytes()[:n])
				if got += int64(k); err != nil {
					return got, err
				}
			case errors.Is(err, io.EOF):
				return got, nil
			case err != nil:
				return got, c.opError("read", err)
			}
		}
		t := c.reads.fresh(bufs[i].Bytes())
		t.buf = bufs[i]
		err := c.start(reading, t)
		if err == nil {
			under[i] = t
			continue
		}
		c.reads.keep(t)
		switch {
		case under[1-i] != nil: // what that has comes first
		case errors.Is(err, io.EOF):
			return got, nil
		default:
			return got, c.opError("read", err)
		}
	}
}

// writeAll is w.Write, but never without an error for less than p.
func writeAll(w io.Writer, p []byte) (int, error) {
	n, err := w.Write(p)
	if err == nil && n < len(p) {
		err = io.ErrShortWrite
	}
	return n, err
}

// dropRead ends a read that was started, if there is one, and forgets what it got.
func (c *Conn) dropRead(t *transfer) {
	if t == nil {
		return
	}
	c.lock()
	if !t.isOver {
		c.cancel(reading)
		c.run()
	}
	c.unlock()
	_, _, _ = c.finishRead(t)
}

// ResizePeer asks the peer for receive buffers of n bytes. Our messages become longer with them, up to our own Config.RecvBufferSize. The
// peer may decline: [Conn.Info] says the size that it has.
func (c *Conn) ResizePeer(n int) error {
	c.lock()
	defer c.unlock()
	if c.life.closed {
		return c.opError("resize", net.ErrClosed)
	}
	if err := c.m.ResizePeer(time.Now(), uint32(min(n, math.MaxUint32))); err != nil {
		return c.opError("resize", err)
	}
	c.run()
	return nil
}

// Close closes the connection as TCP does. What was written is still sent, for up to 10 seconds, and then the peer sees the end of
// our stream. But if something was not read, or arrives later, the connection is reset. Close does not wait for any of this. Reads and
// writes that wait end with [net.ErrClosed].
func (c *Conn) Close() error { return c.close(false) }

// Abort resets the connection, also one that was closed and still sends what was written. Once more it is net.ErrClosed, as after the
// end, although the last word to the peer may still be under way.
func (c *Conn) Abort() error { return c.close(true) }

func (c *Conn) close(abort bool) error {
	c.lock()
	defer c.unlock()
	if c.life.closed && (!abort || c.life.aborted || c.life.over) {
		return c.opError("close", net.ErrClosed)
	}
	now := time.Now()
	c.life.closed, c.life.aborted = true, abort
	if !c.life.over {
		c.cancel(reading)
		c.cancel(writing)
		if abort {
			c.m.Abort(now)
		} else {
			c.m.Close(now)
		}
	}
	c.run()
	c.free()
	return nil
}

// abortUnlessClosed is Abort for a connection whose program has not closed it: what was written before Close goes.
func (c *Conn) abortUnlessClosed() {
	c.lock()
	closed := c.life.closed
	c.unlock()
	if !closed {
		_ = c.Abort() // its program may be quicker, and close it
	}
}

// CloseWrite ends our stream behind all that was written. The peer's stream goes on.
func (c *Conn) CloseWrite() error {
	c.lock()
	defer c.unlock()
	switch {
	case c.life.closed:
		return c.opError("close", net.ErrClosed)
	case c.life.over && c.life.err != nil:
		return c.opError("close", c.ended(writing))
	}
	c.m.Shutdown(time.Now())
	c.run()
	return nil
}

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	return cmp.Or(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline bounds reads; the zero time removes the bound. A read whose Buffer is advertised to the peer ends later, when the peer
// has said what it wrote there; see the package's Limitations.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadline(reading, t) }

// SetWriteDeadline bounds writes, as SetReadDeadline does reads.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(writing, t) }

func (c *Conn) setDeadline(d direction, t time.Time) error {
	c.lock()
	closed := c.life.closed
	c.unlock()
	if closed {
		return c.opError("set", net.ErrClosed)
	}
	c.of(d).deadline.Set(t)
	return nil
}
