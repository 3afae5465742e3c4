// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"cmp"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/internal/deadline"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// transfer is a read or a write of the program that the machine has. The connection's turn guards it until it is over.
type transfer struct {
	id     uint64
	p      []byte  // the memory that it moves
	buf    *Buffer // where p lies; nil: p is not registered
	off    int     // of p in buf
	region rdma.MR // of buf, in the connection's domain
	sink   rdma.MR // of p, which the peer may write: RDMA READs fill it; nil: they fill region, or there was no READ
	start  uint64  // of a write: position of its first byte in our stream

	fill   bool // of a read: it is over only when p is full
	urgent bool // its last byte is out-of-band data
	last   byte // that byte, of a read that is over: p may be unmapped by then, with the stack

	n                     int // bytes moved, once the transfer is over
	eof, canceled, isOver bool
	over                  chan struct{} // has a token once the transfer is over
}

// sge is a stretch of the transfer's memory.
func (t *transfer) sge(off uint64, n uint32) rdma.SGE {
	if t.sink != nil {
		return rdma.SGE{Addr: t.sink.Addr() + off, Length: n, LKey: t.sink.LKey()}
	}
	return rdma.SGE{Addr: t.region.Addr() + uint64(t.off) + off, Length: n, LKey: t.region.LKey()}
}

// end says that a transfer is over: its memory is the program's.
func (t *transfer) end(o *socket.Output) {
	t.n, t.eof, t.urgent, t.canceled, t.isOver = int(o.Len), o.EOF, o.Urgent, o.Canceled, true
	if t.urgent && t.n > 0 {
		t.last = t.p[t.n-1]
	}
	if t.sink != nil {
		_ = t.sink.Close() // the region is there, and nothing is beneath it
	}
	if t.buf != nil {
		t.buf.giveBack()
	}
	t.over <- struct{}{}
}

// transfers are the reads, or the writes, of a connection, oldest first.
type transfers struct {
	list     []*transfer
	places   chan struct{} // a token for each transfer that is not over, or waits to begin
	urgents  chan struct{} // one more for each write with out-of-band data
	deadline deadline.Deadline
	spare    chan *transfer // to be used again
	// canceling is closed when a cancellation is over; new transfers wait for that. nil: there is no cancellation.
	canceling chan struct{}
}

func (l *transfers) init() {
	l.list, l.places = make([]*transfer, 0, maxWaiting), make(chan struct{}, maxWaiting)
	l.urgents = make(chan struct{}, socket.MaxUrgent)
	l.spare = make(chan *transfer, maxWaiting)
	l.deadline.Init()
}

// fresh returns a transfer of memory of the program.
func (l *transfers) fresh(p []byte) *transfer {
	select {
	case t := <-l.spare:
		t.p = p
		return t
	default:
		return &transfer{p: p, over: make(chan struct{}, 1)}
	}
}

// keep takes a transfer that is over, and that nobody has.
func (l *transfers) keep(t *transfer) {
	*t = transfer{over: t.over}
	select {
	case l.spare <- t:
	default:
	}
}

// find returns the transfer of a number.
func (l *transfers) find(id uint64) *transfer {
	i := slices.IndexFunc(l.list, func(t *transfer) bool { return t.id == id })
	invariant.Must(i >= 0, "sdp: the machine names a transfer that is over")
	return l.list[i]
}

// at returns the write with a position of our stream.
func (l *transfers) at(pos uint64) *transfer {
	i := slices.IndexFunc(l.list, func(t *transfer) bool { return pos >= t.start && pos < t.start+uint64(len(t.p)) })
	invariant.Must(i >= 0, "sdp: the machine names bytes that are not written")
	return l.list[i]
}

// end takes a transfer out that is over.
func (l *transfers) end(o *socket.Output) {
	t := l.find(o.ID)
	l.remove(t)
	l.release(t) // now, and not in Wait: a program may start many before it waits for the first
	t.end(o)
	if len(l.list) == 0 && l.canceling != nil {
		close(l.canceling)
		l.canceling = nil
	}
}

// place takes the places of a transfer that is to begin.
func (l *transfers) place(t *transfer) error {
	places := []chan struct{}{l.places}
	if t.urgent {
		places = append(places, l.urgents)
	}
	for i, p := range places {
		select {
		case p <- struct{}{}:
		case <-l.deadline.Wait():
			for _, p := range places[:i] {
				<-p
			}
			return errTimeout
		}
	}
	return nil
}

// release gives the places of a transfer back.
func (l *transfers) release(t *transfer) {
	<-l.places
	if t.urgent {
		<-l.urgents
	}
}

func (l *transfers) remove(t *transfer) {
	l.list = slices.DeleteFunc(l.list, func(x *transfer) bool { return x == t })
}

// copyStream copies n bytes of our stream from pos on behind b.
func (l *transfers) copyStream(b []byte, pos uint64, n uint32) []byte {
	for n > 0 {
		t := l.at(pos)
		k := min(uint64(n), t.start+uint64(len(t.p))-pos)
		b = append(b, t.p[pos-t.start:][:k]...)
		pos, n = pos+k, n-uint32(k)
	}
	return b
}

// direction is reading or writing.
type direction bool

const (
	reading direction = false
	writing direction = true
)

// of returns the transfers of a direction.
func (c *Conn) of(d direction) *transfers {
	if d == writing {
		return &c.writes
	}
	return &c.reads
}

// start gives a transfer to the machine. It waits for a place, and for the end of a cancellation.
func (c *Conn) start(d direction, t *transfer) error {
	l := c.of(d)
	if err := l.place(t); err != nil {
		c.lock()
		defer c.unlock()
		return cmp.Or(c.mayStart(l), err) // a closed connection is closed, whatever its deadline was
	}
	for {
		c.lock()
		canceling := l.canceling
		err := c.mayStart(l)
		if err == nil && canceling == nil {
			if err = c.begin(d, t); err == nil {
				c.run()
			}
		}
		c.unlock()
		if err != nil {
			l.release(t)
			return err
		}
		if canceling == nil {
			return nil
		}
		<-canceling
	}
}

// begin gives a transfer to the machine; the caller has the turn.
func (c *Conn) begin(d direction, t *transfer) (err error) {
	l := c.of(d)
	if t.buf != nil {
		c.ep.forgetClosed()
		if t.region, err = t.buf.take(c, t.off, len(t.p), d == reading && c.ep.opensSinks); err != nil {
			return err
		}
	}
	c.ids++
	t.id = c.ids
	l.list = append(l.list, t)
	now, n, direct := time.Now(), uint32(len(t.p)), t.buf != nil
	switch {
	case d == reading:
		err = c.m.Read(now, socket.Read{ID: t.id, Len: n, Direct: direct, Fill: t.fill})
	case t.urgent:
		t.start = c.wrote
		err = c.m.WriteUrgent(now, socket.Write{ID: t.id, Len: n, Direct: direct})
	default:
		t.start = c.wrote
		err = c.m.Write(now, socket.Write{ID: t.id, Len: n, Direct: direct})
	}
	if err == nil {
		if d == writing {
			c.wrote += uint64(n)
		}
		return nil
	}
	l.remove(t)
	if t.buf != nil {
		t.buf.giveBack()
	}
	return c.ended(d)
}

// wait waits until a transfer is over; the deadline cancels it, with all others of its direction.
func (c *Conn) wait(d direction, t *transfer) {
	l := c.of(d)
	select {
	case <-t.over:
	case <-l.deadline.Wait():
		c.lock()
		if !t.isOver {
			c.cancel(d)
			c.run()
		}
		c.unlock()
		<-t.over
	}
}

// cancel ends all transfers of a direction; the caller has the turn. New transfers wait until that is done, but not if the machine has
// nothing to cancel: then the transfers end with the connection.
func (c *Conn) cancel(d direction) {
	l := c.of(d)
	cancel := c.m.CancelReads
	if d == writing {
		cancel = c.m.CancelWrites
	}
	if cancel(time.Now()) && l.canceling == nil {
		l.canceling = make(chan struct{})
	}
}

// stopped says why a transfer was canceled. nil: another transfer of its direction had to end, and this one may be tried again.
func (c *Conn) stopped(d direction) error {
	c.lock()
	defer c.unlock()
	switch {
	case c.life.closed || c.life.over:
		return c.ended(d)
	case c.of(d).deadline.Past():
		return errTimeout
	}
	return nil
}
