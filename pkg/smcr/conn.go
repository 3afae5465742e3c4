// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// Conn is a TCP connection, carried by SMC-R or by TCP itself; Info tells
// which. It implements net.Conn. Reads and writes may run at the same time;
// two reads, or two writes, take turns.
type Conn struct {
	tcp   *net.TCPConn
	stack *Stack
	info  Info   // what is fixed at the rendezvous
	early []byte // read before the fallback; guarded by rmu, like mayCross
	// opened: the rendezvous has handed the connection over. Guarded by the
	// turn.
	opened bool
	// mayCross: the peer's Decline may still come, after ours.
	mayCross bool
	keepTCP  bool // the TCP connection outlives this one: fallback
	closed   atomic.Bool

	// With SMC-R only.
	group *group
	lc    *linkgroup.Conn // guarded by the stack's turn
	// halfOpen is the address whose place a connection has that was given up before its
	// Confirm; not valid: none.
	halfOpen netip.Addr
	buf      *sendBuffer
	rmbe     []byte
	ring     cdc.Ring
	// users counts who may touch the connection's memory: the application
	// until Close, the group until it is done, and each call under way. At
	// zero the memory goes to the next connection.
	users atomic.Int32

	// Stream positions, as in package cdc. The writer stores produced, the
	// reader consumed, the holder of the turn the others.
	_            [64]byte
	produced     atomic.Uint64 // with endOfStream
	consumed     atomic.Uint64
	_            [64]byte
	completed    atomic.Uint64
	peerProduced atomic.Uint64
	announced    atomic.Uint64
	state        atomic.Uint32 // connFlags
	_            [64]byte

	sink      atomic.Pointer[sink]   // of the RelayTo under way
	intake    atomic.Pointer[intake] // of the RelayFrom under way
	dirty     atomic.Bool
	nextDirty *Conn // owned by the dirty queue

	rmu, wmu           sync.Mutex // one reader and one writer at a time
	readable, writable chan struct{}
	rdeadline          deadline
	wdeadline          deadline
	// Guarded by the turn, like tcpWatch.
	watchID  uint64
	tcpGrace *time.Timer // once the TCP connection has ended
	tcpEnd   time.Time   // when it did
	tcpLook  time.Time   // since when the peer must have spoken

	urgent urgentState
	held   holding
}

// endOfStream, in produced, says that nothing may follow: CloseWrite ends a
// Write under way, as with TCP, and does not wait for it.
const endOfStream = 1 << 63

// written is the stream position up to which the application wrote.
func (c *Conn) written() uint64 { return c.produced.Load() &^ endOfStream }

// What the holder of the turn tells reader and writer.
const (
	flagPeerDone    uint32 = 1 << iota // no more data will come
	flagAborted                        // the connection was reset
	flagPeerBlocked                    // the peer waits for window
	flagReset                          // it did not end in order
	flagPeerUrgent                     // the peer has urgent data that it could not write yet
)

// newTCPConn wraps a connection that stays TCP.
func newTCPConn(s *Stack, tcp *net.TCPConn, info Info, early []byte) *Conn {
	return &Conn{tcp: tcp, stack: s, info: info, early: early}
}

// newSMCConn makes the shell of a connection; the caller holds the turn.
func newSMCConn(s *Stack, g *group, lc *linkgroup.Conn, tcp *net.TCPConn) (*Conn, error) {
	buf, err := g.mem.takeSend()
	if err != nil {
		return nil, err
	}
	c := &Conn{
		tcp: tcp, stack: s, group: g, lc: lc, buf: buf, rmbe: g.rmbe(lc.Local()), ring: lc.Ring(),
		readable: make(chan struct{}, 1), writable: make(chan struct{}, 1),
	}
	if lc.Stale() {
		clear(c.rmbe)
	}
	c.rdeadline.init()
	c.wdeadline.init()
	c.users.Store(2)
	lc.User = c
	s.conns[c] = struct{}{}
	return c, nil
}

// settle fixes what the first contact negotiated; the caller holds the turn
// and no data has moved yet.
func (c *Conn) settle() {
	c.ring = c.lc.Ring()
	c.startCoalescing()
	if c.ring.Origin > 0 {
		copy(c.rmbe, rmbeEyeCatcher)
	}
}

// rmbeEyeCatcher is "RMBE" in EBCDIC: the first bytes of an RMBE in the RFC's
// dialect (RFC 7609 4.3).
const rmbeEyeCatcher = "\xd9\xd4\xc2\xc5"

// hold keeps the connection's memory from being reused; false when it already
// may be.
func (c *Conn) hold() bool {
	for {
		n := c.users.Load()
		if n == 0 {
			return false
		}
		if c.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// drop ends a hold; the last one gives the memory back.
func (c *Conn) drop() {
	if c.users.Add(-1) != 0 {
		return
	}
	// The next user must not see this one's bytes. After a reset there may be
	// some that were written and never announced.
	used := min(c.peerProduced.Load()+uint64(c.ring.Origin), uint64(len(c.rmbe)))
	if c.state.Load()&flagReset != 0 {
		used = uint64(len(c.rmbe))
	}
	clear(c.rmbe[:used])
	clear(c.buf.mem[:min(c.written(), uint64(len(c.buf.mem)))])
	s := c.stack
	s.lock()
	defer s.unlock()
	c.release()
}

// release gives the memory back; the caller holds the turn.
func (c *Conn) release() {
	s := c.stack
	if _, ok := s.conns[c]; !ok {
		return
	}
	delete(s.conns, c)
	if c.halfOpen.IsValid() {
		s.halfOpen.leave(c.halfOpen)
	}
	s.tcpWatch.remove(c)
	if s.answering == c {
		s.answering = nil
	}
	s.poured.CompareAndSwap(c, nil)
	defer s.checkEmpty()
	s.stats.BytesSentSMCR += c.written()
	s.stats.BytesRecvSMCR += c.consumed.Load()
	info := c.infoLocked()
	_ = c.group.mem.giveSend(c.buf) // the region is unmapped either way
	c.rdeadline.stop()
	c.wdeadline.stop()
	c.held.stop()
	c.lc.Release(time.Now())
	c.group.flush(time.Now())
	c.group.freeIfUnused()
	if !c.keepTCP {
		_ = c.tcp.Close() // SMC-R has ended in order; TCP ends last
	}
	if h := s.cfg.Hooks.ConnClosed; h != nil && c.opened {
		h(info)
	}
}

// groupDone is told by the machine: the peer will not write the RMBE again.
// The caller holds the turn, which the last drop takes, so another goroutine
// drops.
func (c *Conn) groupDone() {
	c.raise(flagAborted)
	c.stack.wg.Go(c.drop)
}

// handle takes the machine's events; the caller holds the turn.
func (c *Conn) handle(ev cdc.Events) {
	d := c.lc.Data()
	// The mark before the data, also if its own event is only the next one.
	if ev&cdc.PeerUrgent != 0 || d.PeerUrgent() != c.urgent.mark.Load() || c.state.Load()&flagPeerUrgent != 0 {
		c.handleUrgent(d, ev)
	}
	c.peerProduced.Store(d.PeerProduced())
	c.completed.Store(d.Completed())
	var f uint32
	if ev&cdc.PeerDone != 0 {
		f |= flagPeerDone
	}
	if ev&cdc.Aborted != 0 {
		f |= flagAborted | flagReset
	}
	if d.PeerBlocked() != (c.state.Load()&flagPeerBlocked != 0) {
		if d.PeerBlocked() {
			f |= flagPeerBlocked
		} else {
			c.state.And(^flagPeerBlocked)
		}
	}
	if f != 0 {
		c.state.Or(f)
	}
	// The reader may have gone on since it last told us, without a reason to
	// tell; now there may be one.
	if ev&cdc.Readable != 0 {
		poured := f == 0 && c.pour()
		c.lc.Consume(c.consumed.Load())
		if !poured {
			wakeUp(c.readable)
		}
	}
	if ev&cdc.Writable != 0 {
		wakeUp(c.writable)
	}
	if c.held.on {
		c.holdOn() // what was left of more, or what waited for window
	}
	if f&(flagAborted|flagPeerDone) != 0 {
		wakeUp(c.readable)
		wakeUp(c.writable)
	}
	if f&flagReset != 0 {
		c.sink.Load().giveUp()
	}
}

func (c *Conn) raise(f uint32) {
	c.state.Or(f)
	wakeUp(c.readable)
	wakeUp(c.writable)
}

// sync tells the machine how far the application has come; the caller holds
// the turn.
func (c *Conn) sync() {
	if c.users.Load() == 0 {
		return
	}
	produced := c.written()
	// The writer stores the urgent position before produced.
	if u := c.urgent.at.Load(); u != 0 {
		c.urgent.at.CompareAndSwap(u, 0)
		c.lc.Urgent(u)
	}
	c.lc.Consume(c.consumed.Load())
	c.lc.Produce(produced)
	if c.held.on {
		c.holdOn()
	}
	c.stack.touch(c.group)
}

// wakeUp leaves a token for a waiter.
func wakeUp(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// opError wraps an error as package net does.
func (c *Conn) opError(op string, err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	return &net.OpError{Op: op, Net: c.tcp.LocalAddr().Network(), Source: c.tcp.LocalAddr(), Addr: c.tcp.RemoteAddr(), Err: err}
}

// Read reads into p. At the end of the peer's stream it returns io.EOF, after
// a reset an error that is syscall.ECONNRESET.
func (c *Conn) Read(p []byte) (int, error) {
	if c.group == nil {
		return c.readTCP(p)
	}
	c.rmu.Lock()
	defer c.rmu.Unlock()
	if !c.hold() {
		return 0, c.opError("read", net.ErrClosed)
	}
	defer c.drop()
	if len(p) == 0 {
		return 0, nil // as package net: not even the end of the stream
	}
	b, err := c.next()
	if err != nil {
		return 0, c.opError("read", err)
	}
	n := copy(p, b)
	c.consume(n)
	if n < len(p) && n > 0 && c.urgent.mark.Load() <= c.consumed.Load() {
		if b, err = c.peek(false); err == nil && len(b) > 0 { // the part that wrapped
			m := copy(p[n:], b)
			c.consume(m)
			n += m
		}
	}
	return n, nil
}

// readTCP gives first what was read from the TCP connection before the
// fallback.
func (c *Conn) readTCP(p []byte) (int, error) {
	c.rmu.Lock()
	if err := c.dropCrossing(); err != nil {
		c.rmu.Unlock()
		return 0, err
	}
	if len(c.early) > 0 {
		n := copy(p, c.early)
		c.early = c.early[n:]
		c.rmu.Unlock()
		return n, nil
	}
	c.rmu.Unlock()
	return c.tcp.Read(p)
}

// dropCrossing removes the peer's Decline where it crossed with ours: it is
// the first thing to arrive, or it does not come at all. The caller holds rmu.
func (c *Conn) dropCrossing() error {
	for c.mayCross {
		n, undecided := clc.CrossingDecline(c.early)
		if !undecided {
			c.early = c.early[n:]
			c.mayCross = false
			return nil
		}
		var b [64]byte
		m, err := c.tcp.Read(b[:])
		c.early = append(c.early, b[:m]...)
		if err != nil {
			c.mayCross = !errors.Is(err, io.EOF)
			if len(c.early) > 0 && !c.mayCross {
				return nil // what came is the application's
			}
			return err
		}
	}
	return nil
}

// peek returns the unread bytes up to where the RMBE wraps; with wait it
// waits for at least one.
func (c *Conn) peek(wait bool) ([]byte, error) {
	for {
		flags := c.state.Load()
		pos := c.consumed.Load()
		avail := c.peerProduced.Load() - pos
		switch {
		case c.closed.Load():
			return nil, net.ErrClosed
		case c.rdeadline.past.Load():
			return nil, os.ErrDeadlineExceeded
		case avail > 0: // also after a reset, as with TCP: it was acknowledged
			off := c.ring.Offset(pos)
			return c.rmbe[off:min(uint64(off)+avail, uint64(c.ring.Size))], nil
		case flags&flagPeerDone != 0: // also if we reset it since
			return nil, io.EOF
		case flags&flagAborted != 0:
			return nil, syscall.ECONNRESET
		case !wait:
			return nil, nil
		}
		k := c.sink.Load()
		k.park()
		select {
		case <-c.readable:
		case <-c.rdeadline.wait():
		}
		k.unpark()
	}
}

// consume gives n bytes of the RMBE back to the peer, and tells the machine
// when the peer should know (RFC 7609 4.5.1).
func (c *Conn) consume(n int) {
	if n == 0 {
		return
	}
	pos := c.consumed.Add(uint64(n))
	size := uint64(c.ring.Capacity())
	known := c.announced.Load()
	if c.state.Load()&flagPeerBlocked != 0 || (pos-known >= size/10 && c.peerProduced.Load()-known > size/2) {
		c.stack.markDirty(c)
		c.stack.kick()
	}
}

// Write sends p. It returns when all of p is in the send buffer.
func (c *Conn) Write(p []byte) (int, error) {
	if c.group == nil {
		return c.tcp.Write(p)
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if !c.hold() {
		return 0, c.opError("write", net.ErrClosed)
	}
	defer c.drop()
	done := 0
	for {
		b, err := c.reserve(done < len(p))
		if err != nil {
			return done, c.opError("write", err)
		}
		n := copy(b, p[done:])
		if !c.commit(n) {
			return done, c.opError("write", syscall.EPIPE)
		}
		if done += n; done == len(p) {
			return done, nil
		}
	}
}

// reserve returns free space of the send buffer up to where it wraps; with
// wait it waits for at least one byte.
func (c *Conn) reserve(wait bool) ([]byte, error) {
	size := uint64(len(c.buf.mem))
	for {
		pos := c.produced.Load()
		free := size - (pos - c.completed.Load())
		switch {
		case c.closed.Load():
			return nil, net.ErrClosed
		case pos&endOfStream != 0:
			return nil, syscall.EPIPE
		case c.wdeadline.past.Load():
			return nil, os.ErrDeadlineExceeded
		case c.state.Load()&flagAborted != 0:
			if c.state.Load()&flagPeerDone != 0 {
				return nil, syscall.EPIPE // nobody is there to take it, as with TCP in CLOSE-WAIT
			}
			return nil, syscall.ECONNRESET
		case free > 0:
			off := pos & (size - 1)
			return c.buf.mem[off:min(off+free, size)], nil
		case !wait:
			return nil, nil
		}
		select {
		case <-c.writable:
		case <-c.wdeadline.wait():
		}
	}
}

// commit gives n bytes of the send buffer to the network; false if CloseWrite
// came first.
func (c *Conn) commit(n int) bool {
	if n <= 0 {
		return true
	}
	pos := c.written()
	if !c.produced.CompareAndSwap(pos, pos+uint64(n)) {
		return false
	}
	c.stack.markDirty(c)
	c.stack.kick()
	return true
}

// ReadFrom implements io.ReaderFrom: r reads straight into registered memory.
// It returns when r ends, without closing the connection.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	if c.group == nil {
		return c.tcp.ReadFrom(r)
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if !c.hold() {
		return 0, c.opError("write", net.ErrClosed)
	}
	defer c.drop()
	if t, ok := r.(*net.TCPConn); ok {
		if s := newSocket(t); s != nil {
			r = s
		}
	}
	var total int64
	for {
		b, err := c.reserve(true)
		if err != nil {
			return total, c.opError("write", err)
		}
		n, err := r.Read(b)
		if !c.commit(n) {
			return total, c.opError("write", syscall.EPIPE)
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

// WriteTo implements io.WriterTo: w is written straight from the RMBE. It
// returns nil at the end of the peer's stream.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	if c.group == nil {
		return c.writeTCPTo(w)
	}
	return c.writeTo(w)
}

func (c *Conn) writeTo(w io.Writer) (int64, error) {
	c.rmu.Lock()
	defer c.rmu.Unlock()
	if !c.hold() {
		return 0, c.opError("read", net.ErrClosed)
	}
	defer c.drop()
	var total int64
	for {
		b, err := c.next()
		if errors.Is(err, io.EOF) {
			return total, nil
		}
		if err != nil {
			return total, c.opError("read", err)
		}
		n, err := w.Write(b)
		c.consume(n)
		total += int64(n)
		if err != nil {
			return total, err
		}
	}
}

func (c *Conn) writeTCPTo(w io.Writer) (int64, error) {
	n, err := c.writeEarly(w)
	if err != nil || n < 0 {
		return max(n, 0), err
	}
	m, err := c.tcp.WriteTo(w)
	return n + m, err
}

// writeEarly writes what was read before the fallback; -1 says that the stream
// ended there.
func (c *Conn) writeEarly(w io.Writer) (int64, error) {
	c.rmu.Lock()
	defer c.rmu.Unlock()
	if err := c.dropCrossing(); err != nil {
		if errors.Is(err, io.EOF) {
			return -1, nil
		}
		return 0, err
	}
	n, err := w.Write(c.early)
	c.early = c.early[n:]
	return int64(n), err
}

// CloseWrite ends our stream: the peer reads io.EOF after what was written. A
// Write that waits for room ends with syscall.EPIPE.
func (c *Conn) CloseWrite() error {
	if c.group == nil {
		return c.tcp.CloseWrite()
	}
	if c.closed.Load() || !c.hold() {
		return c.opError("close", net.ErrClosed)
	}
	defer c.drop()
	c.produced.Or(endOfStream)
	wakeUp(c.writable) // a Write that waits
	wakeUp(c.readable) // or AwaitEnd
	s := c.stack
	s.lock()
	defer s.unlock()
	c.sync()
	c.lc.Shutdown()
	c.group.flush(time.Now())
	return nil
}

// Close ends the connection. What was written is still delivered, in the
// background. Data that was received but not read makes it a reset, as with
// TCP.
func (c *Conn) Close() error { return c.end(false) }

// Abort resets the connection: the peer gets ECONNRESET.
func (c *Conn) Abort() error { return c.end(true) }

func (c *Conn) end(abort bool) error {
	if c.closed.Swap(true) {
		return c.opError("close", net.ErrClosed)
	}
	if c.group == nil {
		if abort {
			_ = c.tcp.SetLinger(0) // Close reports what matters
		}
		err := c.tcp.Close()
		if h := c.stack.cfg.Hooks.ConnClosed; h != nil {
			h(c.Info())
		}
		return err
	}
	s := c.stack
	s.lock()
	c.sync()
	if abort {
		c.lc.Abort(time.Now())
	} else {
		c.lc.Close(time.Now())
	}
	c.group.flush(time.Now())
	s.unlock()
	wakeUp(c.readable)
	wakeUp(c.writable)
	c.drop()
	return nil
}

// LocalAddr returns the TCP connection's local address.
func (c *Conn) LocalAddr() net.Addr { return c.tcp.LocalAddr() }

// RemoteAddr returns the TCP connection's peer.
func (c *Conn) RemoteAddr() net.Addr { return c.tcp.RemoteAddr() }

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline bounds Read and WriteTo; the zero time removes the bound.
func (c *Conn) SetReadDeadline(t time.Time) error {
	if c.group == nil {
		return c.tcp.SetReadDeadline(t)
	}
	if c.closed.Load() {
		return c.opError("set", net.ErrClosed)
	}
	c.rdeadline.set(t)
	return nil
}

// SetWriteDeadline bounds Write, not what is still to be delivered.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	if c.group == nil {
		return c.tcp.SetWriteDeadline(t)
	}
	if c.closed.Load() {
		return c.opError("set", net.ErrClosed)
	}
	c.wdeadline.set(t)
	return nil
}

// Unwrap returns the TCP connection of a connection that fell back, nil with
// SMC-R.
func (c *Conn) Unwrap() *net.TCPConn {
	if c.group != nil || len(c.early) > 0 || c.mayCross {
		return nil
	}
	return c.tcp
}

// Info describes the connection as it is now.
func (c *Conn) Info() Info {
	if c.group == nil {
		return c.info
	}
	c.stack.lock()
	defer c.stack.unlock()
	return c.infoLocked()
}

func (c *Conn) infoLocked() Info {
	i := c.info
	i.BytesSent, i.BytesRecv = c.written(), c.consumed.Load()
	i.GroupID, i.LinkID = c.group.id, uint8(c.lc.Link())
	i.Token = uint32(c.lc.Token())
	i.State = c.lc.Data().State().String()
	i.SendBuffer, i.RMBE, i.PeerRMBE = len(c.buf.mem), len(c.rmbe), int(c.lc.PeerRMBESize())
	i.RDMAWrites, i.CDCSent, i.CDCRecv = c.lc.Counters()
	return i
}

// Mode returns what carries the connection.
func (c *Conn) Mode() Mode { return c.info.Mode }

// Reason returns why the connection is TCP, 0 with SMC-R.
func (c *Conn) Reason() clc.Reason { return c.info.Reason }
