// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"cmp"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"

	"github.com/smcr-io/kube-smcr/pkg/internal/deadline"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// receiver is the receiving side of a connection over SMC-R. A receiver owns the element of an
// RMB into which the peer writes, and knows who waits for what the peer has not written yet.
type receiver struct {
	mu       sync.Mutex                // held by whoever reads: one at a time
	rmbe     []byte                    // the RMBE's memory
	ring     cdc.Ring                  // where in the RMBE a position of the stream is
	region   *region                   // the RMB
	element  int                       // of the RMB
	before   uint64                    // what was written into the element by then
	settled  uint64                    // up to where nothing is in the RMBE: its pages were given back; 0: from the start on
	sink     atomic.Pointer[sink]      // of the RelayTo under way
	readable chan struct{}             // has a token when there may be something to read
	waiter   atomic.Pointer[Direction] // of the RelayTo or AwaitEnd under way; nil: it is no direction's
	deadline deadline.Deadline
}

func (r *receiver) init(rmb *region, element int, rmbe []byte, ring cdc.Ring) {
	r.rmbe, r.ring, r.readable = rmbe, ring, make(chan struct{}, 1)
	r.region, r.element = rmb, element
	r.before, _ = rmb.written(element)
	r.deadline.Init()
}

// negotiated fixes the ring that the first contact negotiated; no data has moved yet.
func (r *receiver) negotiated(ring cdc.Ring) {
	r.ring = ring
	if ring.Origin > 0 {
		copy(r.rmbe, cdc.EyeCatcher)
	}
}

// span returns n bytes of the stream from a position on, fewer where the RMBE wraps before.
func (r *receiver) span(pos, n uint64) []byte {
	off := uint64(r.ring.Offset(pos))
	return r.rmbe[off:min(off+n, uint64(r.ring.Size))]
}

// wake leaves a token for the reader, and wakes one that is parked.
func (r *receiver) wake() {
	wakeUp(r.readable)
	r.waiter.Load().Wake()
}

// await waits for a token or the deadline. Meanwhile the holder of the turn may write what
// arrives to the socket of a RelayTo.
func (r *receiver) await() {
	k := r.sink.Load()
	k.park()
	select {
	case <-r.readable:
	case <-r.deadline.Wait():
	}
	k.unpark()
}

// wipe clears what the peer wrote up to a position of its stream: the RMBE's next user must
// not see the bytes.
func (r *receiver) wipe(end uint64) {
	clear(r.rmbe[:r.ring.Origin])
	if end-r.settled > uint64(r.ring.Capacity()) {
		r.wipeAll()
		return
	}
	for pos := r.settled; pos < end; {
		b := r.span(pos, end-pos)
		clear(b)
		pos += uint64(len(b))
	}
}

// wipeAll clears all of the RMBE.
func (r *receiver) wipeAll() { clear(r.rmbe) }

// Read reads into p. At the end of the peer's stream it returns io.EOF, after
// a reset an error that is syscall.ECONNRESET.
func (c *Conn) Read(p []byte) (int, error) {
	if c.group == nil {
		return c.fallback.read(c.tcp, p, c.urgent.inline.Load())
	}
	c.recv.mu.Lock()
	defer c.recv.mu.Unlock()
	if !c.ref() {
		return 0, c.opError("read", net.ErrClosed)
	}
	defer c.unref()
	if len(p) == 0 {
		return 0, nil // as package net: not even the end of the stream
	}
	b, err := c.next()
	if err != nil {
		return 0, c.opError("read", err)
	}
	n := copy(p, b)
	c.consume(n)
	if n < len(p) && n > 0 {
		if b, err = c.peek(false); err == nil { // the part that wrapped
			m := copy(p[n:], c.beforeMark(b))
			c.consume(m)
			n += m
		}
	}
	return n, nil
}

// peek returns the unread bytes up to where the RMBE wraps; with wait, peek
// waits for at least one byte.
func (c *Conn) peek(wait bool) ([]byte, error) {
	for {
		flags := c.streams.flags.Load()
		pos, avail := c.streams.unread()
		switch {
		case c.life.closed.Load():
			return nil, net.ErrClosed
		case c.recv.deadline.Past():
			return nil, os.ErrDeadlineExceeded
		case avail > 0: // also after a reset, as with TCP: the bytes were acknowledged
			return c.recv.span(pos, avail), nil
		case flags&flagPeerDone != 0: // also if we have reset the connection since
			return nil, io.EOF
		case flags&flagAborted != 0:
			return nil, c.whyReset()
		case !wait:
			return nil, nil
		}
		c.recv.await()
	}
}

// consume gives n bytes of the RMBE back to the peer, and tells the machine
// when the peer should know (RFC 7609 §4.5.1).
func (c *Conn) consume(n int) {
	if n == 0 {
		return
	}
	pos := c.streams.consumed.Add(uint64(n))
	known := c.streams.announced.Load()
	if c.streams.has(flagPeerBlocked) || c.recv.ring.UpdateDue(pos, known, c.streams.peerProduced.Load()) {
		c.stack.marks.moved(c)
		c.stack.kick()
	}
}

// WriteTo implements io.WriterTo: w is written straight from the RMBE. WriteTo
// returns nil at the end of the peer's stream.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	if c.group == nil {
		return c.fallback.writeTo(c.tcp, w)
	}
	return c.writeTo(w)
}

func (c *Conn) writeTo(w io.Writer) (int64, error) {
	c.recv.mu.Lock()
	defer c.recv.mu.Unlock()
	if !c.ref() {
		return 0, c.opError("read", net.ErrClosed)
	}
	defer c.unref()
	var total int64
	for {
		b, err := c.next()
		if errors.Is(err, io.EOF) {
			return total, nil
		}
		if err != nil {
			return total, c.opError("read", err)
		}
		n, err := writeAll(w, b)
		c.consume(n)
		total += int64(n)
		if err != nil {
			return total, err
		}
	}
}

// errInvalidWrite means that a writer took fewer bytes than none, or more than it was given.
var errInvalidWrite = errors.New("smcr: invalid result of a write")

// writeAll writes b to w and returns how much of it w took. It is an error to take less than all, as for
// [io.Copy].
func writeAll(w io.Writer, b []byte) (int, error) {
	n, err := w.Write(b)
	switch {
	case n < 0 || n > len(b):
		return 0, cmp.Or(err, errInvalidWrite)
	case n < len(b) && err == nil:
		err = io.ErrShortWrite
	}
	return n, err
}
