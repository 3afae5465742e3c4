// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// errTimeout is the error of a transfer whose deadline has passed.
var errTimeout = os.ErrDeadlineExceeded

// Conn is a connection that SDP carries. It implements net.Conn with the semantics of TCP: two streams, each of which ends on
// its own, half close, reset, deadlines. Reads and writes may run at the same time; several reads are served in their
// order, and so are several writes.
//
// A Conn owns its machine, its queue pair and the memory of its messages. Whoever has the turn (mu) drives all of them: a
// caller, the device that tells of completions, or the timer. Nobody waits for the turn in the device's
// goroutine: it leaves word with whoever has it.
//
//	Read, Write        device's goroutine        holder of the turn
//	   |  lock               | onNotify: leaves word, and takes the turn if it is free
//	   |  machine, outputs   |                         unlock: is there word? then once more
type Conn struct {
	stack  *Stack
	role   socket.Role
	local  net.Addr
	remote net.Addr
	link   link          // how the transport connects and ends the queue pair; another one after a suspension
	ready  chan struct{} // closed when established, or over

	reads, writes transfers
	urgent        urgent
	moves         moves

	word atomic.Bool // the device has told of completions, and nobody has drained them

	mu       sync.Mutex // the turn; guards what follows
	m        *socket.Socket
	ep       endpoint
	wcs      [32]rdma.WC
	outs     []socket.Output
	greeting bsdh.Message // our Hello after a suspension
	ids      uint64       // of transfers
	wrote    uint64       // bytes of our stream that were given to the machine
	kept     []byte       // what short messages had that the program has not read
	timer    *time.Timer
	next     time.Time // when the timer fires
	info     Info
	life     life
}

// life is how far a connection is.
type life struct {
	established bool
	ready       bool              // who sets it up was told so, or that it is over
	closed      bool              // by the program
	aborted     bool              // by the program
	how         socket.OutputKind // OutClose or OutReset, once the machine said so
	peerDone    bool              // the peer's stream has ended in order
	over        bool              // the machine has ended
	err         error             // why, if not in order
	torn        bool              // the device has nothing of the connection but memory
	freed       bool              // nor memory
}

// newConn makes a connection without an endpoint.
func (s *Stack) newConn(r socket.Role, tcp *net.TCPConn) (*Conn, error) {
	return s.newConnOn(r, tcp.LocalAddr(), tcp.RemoteAddr(), func(c *Conn) (link, error) { return c.newLink(tcp), c.moves.attach(tcp) })
}

// newConnOn makes a connection between two addresses.
func (s *Stack) newConnOn(r socket.Role, local, remote net.Addr, newLink func(*Conn) (link, error)) (*Conn, error) {
	c := &Conn{stack: s, role: r, local: local, remote: remote, ready: make(chan struct{})}
	c.reads.init()
	c.writes.init()
	c.urgent.init()
	m := s.cfg.machine(r)
	m.Memory = memory{c}
	m.Suspends = s.adapter == nil // the link makes a queue pair of any connection of TCP
	var err error
	if c.m, err = socket.New(time.Now(), m); err != nil {
		return nil, err
	}
	if c.link, err = newLink(c); err != nil {
		return nil, err
	}
	c.moves.ctx, c.moves.cancel = context.WithCancel(context.Background())
	c.info = Info{Role: r, Transport: c.link.name(), Layout: s.cfg.Layout}
	return c, s.add(c)
}

// lock takes the turn.
func (c *Conn) lock() { c.mu.Lock() }

// unlock gives the turn back, after the completions that came meanwhile were dealt with.
func (c *Conn) unlock() {
	for {
		c.mu.Unlock()
		if !c.word.Load() || !c.mu.TryLock() {
			return
		}
		c.drain()
		c.run()
	}
}

// onNotify is called by the device when there are completions.
func (c *Conn) onNotify() {
	c.word.Store(true)
	if c.mu.TryLock() {
		c.drain()
		c.run()
		c.unlock()
	}
}

// drain gives completions to the machine, and asks to be told of the next one.
func (c *Conn) drain() {
	c.word.Store(false)
	for armed := false; !c.ep.dead; {
		n, err := c.ep.cq.Poll(c.wcs[:])
		if err != nil {
			c.fail(err)
			return
		}
		for i := range n {
			c.complete(&c.wcs[i])
		}
		switch {
		case n > 0:
			armed = false
		case armed:
			return
		default:
			if err := c.ep.cq.Arm(false); err != nil {
				c.fail(err)
				return
			}
			armed = true
		}
	}
}

// complete gives one completion to the machine. Flushed requests say nothing: an event says why.
func (c *Conn) complete(wc *rdma.WC) {
	now := time.Now()
	switch {
	case wc.Status == rdma.StatusFlushed:
		return
	case wc.Status != rdma.StatusSuccess:
		c.fail(fmt.Errorf("%v: %v", wc.Op, wc.Status))
		return
	}
	switch work(wc.ID & workBits) {
	case workRecv:
		i := int(uint32(wc.ID))
		var inv *rdma.RKey
		if wc.Invalidated {
			inv = &wc.InvKey
		}
		c.info.MessagesReceived++
		_ = c.m.HandleRecv(now, i, c.ep.buffer(i)[:wc.Bytes], inv) // the machine ends the connection, and says why
	case workSend:
		c.m.HandleSent(now, true)
	case workRead:
		c.m.HandleRead(now, true)
	case workWrite:
		c.m.HandleWrite(now, true)
	case workBegin:
		c.handleBegin(wc)
	}
}

// fail ends the connection for a reason of the transport; what has come before is dealt with. The machine gives Buffers back at
// once, so the queue pair must not reach them any more: that the transport failed, or a connection of TCP beside the queue
// pair ended, does not say so.
func (c *Conn) fail(err error) {
	if !c.ep.dead && c.ep.qp != nil {
		_ = c.ep.qp.Modify(rdma.QPAttr{State: rdma.QPError}) // allowed from everywhere
	}
	c.m.HandleDown(err)
}

// handleEvent takes what the device says of the queue pair.
func (c *Conn) handleEvent(ev rdma.AsyncEvent) {
	var err error
	if ev.Kind != rdma.EventDisconnected {
		if err = ev.Err; err == nil {
			err = fmt.Errorf("%v", ev.Kind)
		}
	}
	c.lock()
	defer c.unlock()
	if ev.Kind == rdma.EventDeviceFatal || c.ep.qp != nil && c.ep.qp.Num() == ev.QPN { // not of one that was left
		c.down(err)
	}
}

// peerGone says that the transport connection has ended, in order if err is nil.
func (c *Conn) peerGone(err error) {
	c.lock()
	c.down(err)
	c.unlock()
}

// down says that the transport connection has ended, in order if err is nil. The caller has the turn.
func (c *Conn) down(err error) {
	if !c.ep.dead && c.ep.cq != nil { // one that waits for Hello has no endpoint
		c.drain() // what came before counts
	}
	c.fail(err)
	c.run()
}

// run does what the machine wants; the caller has the turn.
func (c *Conn) run() {
	for {
		c.outs = c.m.Poll(c.outs[:0])
		for i := range c.outs {
			c.do(&c.outs[i])
		}
		if err := c.ep.flush(); err != nil {
			c.fail(err)
		} else if len(c.outs) == 0 {
			break
		}
	}
	c.setTimer()
}

// do does one thing.
func (c *Conn) do(o *socket.Output) {
	switch o.Kind {
	case socket.OutHello: // the first one is Client's matter
		c.greeting = o.Message
	case socket.OutEstablished:
		c.establish(o)
	case socket.OutSend:
		if c.ep.dead { // perhaps without memory for messages: there was too little to make the endpoint
			break
		}
		b := o.Message.AppendHeaders(c.ep.slot(), c.stack.cfg.Layout, int(o.Len))
		b = c.writes.copyStream(b, o.Pos, o.Len)
		c.info.MessagesSent++
		c.info.BytesCopied += uint64(o.Len)
		c.ep.send(len(b), o)
	case socket.OutRDMAWrite:
		t := c.writes.at(o.Pos)
		c.info.BytesWritten += uint64(o.Len)
		c.ep.post(rdma.SendWR{ID: uint64(workWrite), Op: rdma.OpWrite, Flags: rdma.SendSignaled, RemoteAddr: o.Addr, RKey: o.Key},
			t.sge(o.Pos-t.start, o.Len))
	case socket.OutRDMARead:
		t := c.reads.find(o.ID)
		c.info.BytesRead += uint64(o.Len)
		c.ep.post(rdma.SendWR{ID: uint64(workRead), Op: rdma.OpRead, Flags: rdma.SendSignaled, RemoteAddr: o.Addr, RKey: o.Key},
			t.sge(o.Offset, o.Len))
	case socket.OutCopy:
		c.info.BytesCopied += uint64(o.Len)
		to := c.reads.find(o.ID).p[o.Offset:][:o.Len]
		if o.Buffer == socket.Kept {
			c.kept = c.kept[copy(to, c.kept):]
		} else {
			copy(to, c.ep.buffer(o.Buffer)[o.From:])
		}
	case socket.OutKeep:
		c.info.BytesCopied += uint64(o.Len)
		c.kept = append(c.kept, c.ep.buffer(o.Buffer)[o.From:][:o.Len]...)
	case socket.OutRecycle:
		c.ep.recycle(o.Buffer)
	case socket.OutRead:
		c.info.BytesReceived += uint64(o.Len)
		c.reads.end(o)
	case socket.OutWritten:
		c.info.BytesSent += uint64(o.Len)
		if o.Canceled { // the stream goes on behind what was sent
			c.wrote = min(c.wrote, c.writes.find(o.ID).start+uint64(o.Len))
		}
		c.writes.end(o)
	case socket.OutUrgent:
		c.urgent.announce()
	case socket.OutSuspended:
		c.leave(o.Message)
	case socket.OutPeerDone:
		c.life.peerDone = true
	case socket.OutClose:
		c.life.how = o.Kind
	case socket.OutReset:
		c.life.how = o.Kind
		c.ep.dead = true
		c.link.reset(&c.ep)
	case socket.OutEnded:
		c.end(o.Err)
	case socket.OutPost:
		if err := c.ep.postSet(o.Buffer, int(o.Len)); err != nil {
			c.fail(err)
		}
	case socket.OutDrop:
		if err := c.ep.drop(o.Buffer); err != nil {
			c.fail(err)
		}
	}
}

// establish says that data may flow, for the first time or after a suspension. A connection that was given up while it was set up
// is nobody's.
func (c *Conn) establish(o *socket.Output) {
	c.info.established(o)
	if c.life.established {
		c.arrived()
		return
	}
	c.life.established = !c.life.closed
	if c.stands() {
		c.tellReady()
	}
}

// end begins the end of what the connection has of the device.
func (c *Conn) end(err error) {
	c.life.over, c.life.err = true, err
	c.ep.dead = true
	c.tellReady()
	c.moves.cancel()
	if p := c.moves.own; p != nil {
		c.moves.own = nil
		p.end(c.ended(writing))
	}
	go c.tearDown() // free, which this waits for, ends the stack's wait
}

// tellReady wakes who sets the connection up.
func (c *Conn) tellReady() {
	if !c.life.ready {
		c.life.ready = true
		close(c.ready)
	}
}

// tearDown ends the queue pair. The device may be in the middle of telling of completions, so this has a goroutine of its own.
func (c *Conn) tearDown() {
	c.moves.wg.Wait() // what moved it had word of its end
	if c.ep.qp != nil {
		if c.life.how == socket.OutClose { // set before over, which began this
			ctx, cancel := context.WithTimeout(context.Background(), finWait)
			c.link.close(ctx, &c.ep)
			cancel()
		}
		c.stack.unnamed(c.ep.qp.Num())
	}
	err := c.ep.closeQP()
	c.link.release()
	c.lock()
	c.life.torn = true
	if c.life.err == nil {
		c.life.err = err
	}
	c.free()
	tell := c.stands() && c.stack.cfg.Hooks.Ended != nil
	why := c.life.err
	c.unlock()
	if tell {
		c.stack.cfg.Hooks.Ended(c, why)
	}
}

// free gives the memory back when neither the device nor the program needs it. The caller has the turn.
func (c *Conn) free() {
	if !c.life.torn || !c.life.closed || c.life.freed {
		return
	}
	c.life.freed = true
	if err := c.ep.closeMemory(c); c.life.err == nil {
		c.life.err = err
	}
	c.reads.deadline.Stop()
	c.writes.deadline.Stop()
	c.stack.remove(c)
}

// setTimer has the timer fire when the machine wants to.
func (c *Conn) setTimer() {
	at, ok := c.m.NextTimeout()
	if c.life.over {
		at, ok = time.Time{}, false
	}
	switch {
	case !ok:
		if c.timer != nil && !c.next.IsZero() {
			c.timer.Stop()
		}
		c.next = time.Time{}
	case at.Equal(c.next):
	default:
		c.next = at
		wait := max(time.Until(at), minTimer)
		if c.timer == nil {
			c.timer = time.AfterFunc(wait, c.handleTimer)
		} else {
			c.timer.Reset(wait)
		}
	}
}

func (c *Conn) handleTimer() {
	c.lock()
	c.next = time.Time{}
	c.m.HandleTimeout(time.Now())
	c.run()
	c.unlock()
}

// mayStart reports why no transfer can begin; the caller has the turn.
func (c *Conn) mayStart(l *transfers) error {
	switch {
	case c.life.closed:
		return net.ErrClosed
	case l.deadline.Past():
		return errTimeout
	}
	return nil
}

// ended is why there will be no more of a direction; the caller has the turn. As with TCP, the end of the peer's stream is
// told before a reset that came behind, and who has seen it is told EPIPE when it writes.
func (c *Conn) ended(d direction) error {
	err := c.m.Err()
	switch {
	case c.life.closed:
		return net.ErrClosed
	case d == reading && (c.life.peerDone || c.life.over && err == nil):
		return io.EOF
	case d == writing && (c.life.peerDone || err == nil):
		return syscall.EPIPE
	case err == nil:
		err = socket.ErrState
	}
	return fmt.Errorf("%w: %w", syscall.ECONNRESET, err)
}

// opError wraps an error as package net does, except nil and io.EOF.
func (c *Conn) opError(op string, err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	return &net.OpError{Op: op, Net: c.local.Network(), Source: c.local, Addr: c.remote, Err: err}
}

// LocalAddr returns the address of our end of the first TCP connection: a suspension does not change it.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr returns the address of the peer's end of the first TCP connection.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// Info describes the connection as it is now.
func (c *Conn) Info() Info {
	c.lock()
	defer c.unlock()
	i := c.info
	i.read(c.m)
	i.Err = c.life.err
	return i
}

// memory opens Buffers to the peer for the machine, which calls it with the turn.
type memory struct{ c *Conn }

var _ socket.Memory = memory{}

// AdvertiseStream implements [socket.Memory].
func (m memory) AdvertiseStream(pos uint64, n uint32) (rdma.RKey, uint64, error) {
	t := m.c.writes.at(pos)
	return m.advertise(t, t.off+int(pos-t.start), int(n), rdma.RemoteRead|rdma.StableRead)
}

// AdvertiseRead implements [socket.Memory].
func (m memory) AdvertiseRead(id uint64, n uint32) (rdma.RKey, uint64, error) {
	t := m.c.reads.find(id)
	return m.advertise(t, t.off, int(n), rdma.LocalWrite|rdma.RemoteWrite)
}

func (m memory) advertise(t *transfer, off, n int, a rdma.Access) (rdma.RKey, uint64, error) {
	mr, err := t.buf.open(m.c, off, n, a)
	if err != nil {
		return 0, 0, err
	}
	m.c.ep.keys[mr.RKey()] = mr
	m.c.info.Adverts++
	return mr.RKey(), mr.Addr(), nil
}

// OpenSink implements [socket.Memory]. Where the peer learns the key it is one for this transfer's bytes.
func (m memory) OpenSink(id uint64) error {
	if !m.c.ep.opensSinks {
		return nil
	}
	t := m.c.reads.find(id)
	if t.sink != nil {
		return nil
	}
	mr, err := t.buf.open(m.c, t.off, len(t.p), rdma.LocalWrite|rdma.RemoteWrite)
	if err != nil {
		return err
	}
	t.sink = mr
	return nil
}

// Revoke implements [socket.Memory].
func (m memory) Revoke(key rdma.RKey) {
	mr := m.c.ep.keys[key]
	delete(m.c.ep.keys, key)
	_ = mr.Close() // the region is there, and nothing is beneath it
}
