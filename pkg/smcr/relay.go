// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Relaying between a program's TCP connection and the network carries what
// copying bytes does not: urgent data at its place in the stream, and resets,
// even while the bytes themselves cannot move. Only the kernel knows where the
// urgent byte is, and only while the byte is unread, so the relay asks before each
// read (ppoll). That call takes the place of the read that would find nothing
// at the end, so a message costs two system calls, as without urgent data.

const (
	// stallFirst and stallMost are the pauses between looks at a socket whose
	// bytes have nowhere to go. Only then the poller does not tell what happens
	// there. The first is longer than bulk data waits for room, the last short
	// for a person who has pressed interrupt.
	stallFirst = 5 * time.Millisecond
	stallMost  = 250 * time.Millisecond
	// maxUrgentBuffer is how far a socket's send buffer grows so that urgent
	// data gets past a program that does not read: what Linux gives by itself
	// to a fast connection, twice.
	maxUrgentBuffer = 8 << 20
	// relayBytes is what RelayTCP reads at once.
	relayBytes = 64 << 10
)

// destination is where the bytes of a relay go.
type destination interface {
	// room returns where the next bytes go, nil if there is no room now.
	room() ([]byte, error)
	// took takes over how many came; an urgent byte comes alone. False says
	// that they have to wait.
	took(n int, urgent bool) (bool, error)
	// wait waits for room, and for what has to wait.
	wait() error
	// settle gives back what an idle relay does without: nothing is to be moved, and nobody
	// else moves anything meanwhile.
	settle()
}

// pump moves bytes from a socket to a destination.
type pump struct {
	s  *socket
	to destination
	d  *Direction // nil: it is not one's call
	// gate lets others call once while the pump waits for the poller. The fields below
	// belong to whoever is in the gate, or to receive.
	gate   gate
	err    error
	stuck  bool
	inline bool // becomeInline was called
}

// receive reads until the end of the stream, of which the urgent byte is a
// part, or until the pump is parked.
func (p *pump) receive() error {
	s, to := p.s, p.to
	p.gate.unpark()
	err := p.becomeInline()
	run := p.turn
	for err == nil && p.err == nil {
		// As long as nothing is stuck this one call of Read goes on: a new call would
		// forget what the poller has told, and the poller is not asked after each read
		// whether the socket is empty. The call keeps the socket from being closed,
		// so that nothing but the poller may wait inside.
		p.stuck = false
		err = s.raw.Read(run)
		p.gate.unpark()
		switch {
		case err == nil && p.stuck:
			err = to.wait()
		case p.err == nil && p.d.prodded(s.conn, &err) && p.park():
			return errParked
		}
	}
	switch {
	case errors.Is(p.err, io.EOF):
		return nil
	case p.err != nil: // then err may be that of a deadline that woke this goroutine
		return p.err
	}
	return err
}

// becomeInline has the socket give urgent bytes at their place in the stream.
func (p *pump) becomeInline() (err error) {
	if p.inline {
		return nil
	}
	p.inline = true
	cerr := p.s.raw.Control(func(fd uintptr) {
		err = os.NewSyscallError("setsockopt SO_OOBINLINE", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_OOBINLINE, 1))
	})
	return errors.Join(cerr, err)
}

// park has the pump wait without a goroutine. False: something came, or it cannot.
func (p *pump) park() bool {
	if !p.d.becomeParking() {
		return false
	}
	p.to.settle()
	p.gate.park()
	// What the socket has already is an event.
	err := p.d.arm(p.s.conn, unix.EPOLLIN|unix.EPOLLPRI|unix.EPOLLRDHUP)
	if err == nil && p.d.becomeParked() {
		return true
	}
	p.d.stay()
	p.gate.unpark()
	return false
}

// prod ends the poller's wait.
func (p *pump) prod() { _ = p.s.conn.SetReadDeadline(time.Unix(1, 0)) } // closed: the wait has ended

// turn moves bytes until the pump has to wait: false to wait for more bytes, true for
// anything else.
func (p *pump) turn(fd uintptr) bool {
	p.gate.unpark()
	p.d.stir()
	for more := true; more && p.err == nil && !p.stuck; {
		more, p.err = p.once(fd)
	}
	if p.err != nil || p.stuck {
		return true
	}
	p.gate.park()
	return false
}

// once makes one read; more says that there may be something to read, so that
// the poller need not be asked.
func (p *pump) once(fd uintptr) (more bool, err error) {
	s := p.s
	has := s.look(fd)
	if has == 0 {
		return false, nil
	}
	// The mark is before the next byte, or elsewhere: then a read does not go
	// beyond the mark. In particular an urgent byte that was announced may come at any
	// time, also while the bytes before it are read.
	urgent := false
	if has&unix.POLLPRI != 0 {
		if urgent, err = atMark(int(fd)); err != nil {
			return false, err
		}
	}
	b, err := p.to.room()
	if err != nil || len(b) == 0 {
		p.stuck = err == nil
		return false, err
	}
	if urgent {
		b = b[:1]
	}
	s.r.buf, s.r.n, s.r.errno = b, 0, 0
	done := s.read(fd)
	s.r.buf = nil
	switch {
	case !done:
		return false, nil
	case s.r.errno != 0:
		return false, s.opError("read", s.r.errno)
	case s.r.n == 0:
		return false, io.EOF
	}
	// A read that was not filled has emptied the socket, if the socket had nothing
	// but bytes. What comes later wakes the poller.
	n := s.r.n
	ok, err := p.to.took(n, urgent)
	p.stuck = !ok && err == nil
	return n == len(b) || has != unix.POLLIN, err
}

// probeStalled is probe from outside of a read.
func (s *socket) probeStalled() (urgent bool, err error) {
	cerr := s.raw.Control(func(fd uintptr) { urgent, err = s.probe(fd) })
	return urgent, errors.Join(cerr, err)
}

// probe looks at a socket whose bytes have nowhere to go: whether the connection was
// reset, and whether there is urgent data in the socket, or behind what the socket can take.
func (s *socket) probe(fd uintptr) (urgent bool, err error) {
	has := s.look(fd)
	if has&unix.POLLERR != 0 {
		return false, s.pendingError(int(fd))
	}
	if has&unix.POLLIN != 0 {
		s.reopen.look(int(fd), time.Now())
	}
	if has&unix.POLLPRI != 0 {
		return true, nil
	}
	// The kernel tells of an urgent byte that did not arrive yet only where urgent bytes
	// are not part of the stream. The next byte is here and is an ordinary one,
	// so nothing happens to an urgent byte while they are not.
	if has&unix.POLLIN == 0 {
		return false, nil
	}
	if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_OOBINLINE, 0); err != nil {
		return false, os.NewSyscallError("setsockopt SO_OOBINLINE", err)
	}
	var b [1]byte
	_, _, err = unix.Recvfrom(int(fd), b[:], unix.MSG_OOB|unix.MSG_PEEK|unix.MSG_DONTWAIT)
	serr := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_OOBINLINE, 1)
	return err == nil || errors.Is(err, unix.EAGAIN), os.NewSyscallError("setsockopt SO_OOBINLINE", serr)
}

// pendingError is the error that the socket's next call would report.
func (s *socket) pendingError(fd int) error {
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && code == 0 {
		code = int(syscall.ECONNRESET) // reported before
	}
	return errors.Join(s.opError("read", syscall.Errno(code)), os.NewSyscallError("getsockopt SO_ERROR", err))
}

// growSendBuffer lets a socket take more bytes at once. Without CAP_NET_ADMIN
// nothing happens.
func growSendBuffer(fd, bytes int) {
	size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err == nil && size < maxUrgentBuffer {
		// The kernel doubles the value, to allow for what its buffers cost.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, min(size/2+bytes, maxUrgentBuffer/2))
	}
}

// RelayTo is WriteTo for a caller that is the only writer of w. Urgent data is
// written as such. Small arrivals are written by whoever finds them, without
// waking the caller. A reset ends RelayTo also while w takes no more bytes; what
// was not written by then is lost.
func (c *Conn) RelayTo(w *net.TCPConn) (int64, error) { return do(c.relayTo(w)) }

// StartRelayTo is RelayTo as a call of d, which gives the result to then. Nobody may set deadlines
// meanwhile.
func (c *Conn) StartRelayTo(d *Direction, w *net.TCPConn, then func(int64, error)) {
	d.start(c.relayTo(w), then)
}

func (c *Conn) relayTo(w *net.TCPConn) task {
	if c.group == nil {
		f := newTCPRelay(w, c.tcp)
		f.early = func() (int64, error) { return c.fallback.writeEarly(c.tcp, w) }
		return f
	}
	return &outlet{c: c, w: w}
}

// outlet is a RelayTo under way.
type outlet struct {
	c     *Conn
	w     *net.TCPConn
	s     *socket
	d     *Direction
	start uint64 // where in the peer's stream it began
}

func (o *outlet) begin(d *Direction) error {
	o.c.recv.mu.Lock()
	return o.beginLocked(d)
}

// rest implements [rester]: what is small is written without a goroutine, so until much comes, or the end,
// the call needs none.
func (o *outlet) rest(d *Direction) bool {
	if !o.c.recv.mu.TryLock() || o.beginLocked(d) != nil {
		return false // begin will wait, or say why not
	}
	d.becomeResting()
	k := o.c.recv.sink.Load()
	k.park()
	if b, err := o.c.peek(false); err != nil || len(b) > 0 {
		d.stay()
		k.unpark()
	}
	return true
}

// beginLocked is begin for a caller that has recv.mu, and has it afterwards if there is no error.
func (o *outlet) beginLocked(d *Direction) error {
	c := o.c
	s := newSocket(o.w)
	if s == nil {
		c.recv.mu.Unlock()
		return c.opError("read", net.ErrClosed)
	}
	if !c.ref() {
		c.recv.mu.Unlock()
		return c.opError("read", net.ErrClosed)
	}
	s.stall = c.relayStalls
	o.s, o.d, o.start = s, d, c.streams.consumed.Load()
	c.recv.sink.Store(newSink(s))
	c.recv.waiter.Store(d)
	return nil
}

func (o *outlet) end(err error) (int64, error) {
	c := o.c
	n := int64(c.streams.consumed.Load() - o.start)
	c.recv.waiter.Store(nil)
	c.recv.sink.Store(nil)
	c.unref()
	c.recv.mu.Unlock()
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

func (o *outlet) run() error {
	c, s := o.c, o.s
	c.recv.sink.Load().unpark()
	for {
		b, err := c.peek(false)
		if err != nil {
			return c.opError("read", err)
		}
		if len(b) == 0 {
			if o.park() {
				return errParked
			}
			c.recv.await()
			continue
		}
		o.d.stir()
		write := s.Write
		if pos, mark := c.streams.consumed.Load(), c.urgent.mark.Load(); mark > pos {
			if before := mark - 1 - pos; before > 0 {
				b = b[:min(before, uint64(len(b)))]
			} else {
				b, write = b[:1], s.WriteUrgent
			}
		}
		n, err := write(b)
		c.consume(n)
		if err != nil {
			if c.streams.has(flagReset) {
				err = c.opError("read", c.whyReset())
			}
			return err
		}
	}
}

// park has the call wait without a goroutine: the holder of the turn goes on writing what is
// small. False: something came.
func (o *outlet) park() bool {
	if !o.d.becomeParking() {
		return false
	}
	k := o.c.recv.sink.Load()
	k.park()
	if b, err := o.c.peek(false); err == nil && len(b) == 0 && o.d.becomeParked() {
		return true
	}
	o.d.stay()
	k.unpark()
	return false
}

func (o *outlet) prod() { wakeUp(o.c.recv.readable) }

// relayStalls is asked when the socket that RelayTo writes to is full.
func (c *Conn) relayStalls(fd int) bool {
	state := c.streams.flags.Load()
	if state&flagReset != 0 {
		return false
	}
	if state&flagPeerUrgent != 0 || c.urgent.mark.Load() > c.streams.consumed.Load() {
		// The program hears of urgent data only if its own TCP does. For that the bytes
		// before the urgent one must leave the RMBE (RFC 7609 §4.7.6).
		growSendBuffer(fd, len(c.recv.rmbe))
	}
	return true
}

// RelayFrom is ReadFrom for a caller that is the only reader of r. Urgent data
// is sent as such, and announced while it cannot be sent yet. A reset of r
// ends RelayFrom also while the peer takes no more bytes.
func (c *Conn) RelayFrom(r *net.TCPConn) (int64, error) { return do(c.relayFrom(r)) }

// StartRelayFrom is RelayFrom as a call of d, which gives the result to then. Nobody may set
// deadlines meanwhile; who closes r calls d.Wake.
func (c *Conn) StartRelayFrom(d *Direction, r *net.TCPConn, then func(int64, error)) {
	d.start(c.relayFrom(r), then)
}

func (c *Conn) relayFrom(r *net.TCPConn) task {
	if c.group == nil {
		return newTCPRelay(c.tcp, r)
	}
	return newIntake(c, r)
}

func (f *intake) begin(d *Direction) error {
	c := f.c
	f.s, f.d = newSocket(f.from), d
	c.send.mu.Lock()
	if f.s == nil || !c.ref() {
		c.send.mu.Unlock()
		return c.opError("write", net.ErrClosed)
	}
	c.send.intake.Store(f)
	return nil
}

func (f *intake) run() error { return f.receive() }

func (f *intake) end(err error) (int64, error) {
	c := f.c
	if f.err != nil || f.d != nil {
		_ = f.from.SetReadDeadline(time.Time{}) // pollAnswer or prod may have set one; fails if closed: nobody waits
	}
	c.send.intake.Store(nil)
	c.unref()
	c.send.mu.Unlock()
	return f.total, err
}

func (f *intake) room() ([]byte, error) {
	b, err := f.c.reserve(anyLength, false)
	return b, f.c.opError("write", err)
}

// wait waits for room, and looks at the socket meanwhile.
func (f *intake) wait() error {
	c := f.c
	pause := stallFirst
	if f.timer == nil {
		f.timer = time.NewTimer(pause)
	} else {
		f.timer.Reset(pause)
	}
	defer f.timer.Stop()
	for {
		select {
		case <-c.send.writable:
		case <-c.send.deadline.Wait():
		case <-f.timer.C:
			if err := f.probe(); err != nil {
				return err
			}
			pause = min(2*pause, stallMost)
			f.timer.Reset(pause)
		}
		if b, err := c.reserve(anyLength, false); err != nil || len(b) > 0 {
			return c.opError("write", err)
		}
	}
}

// settle gives the pages of the send buffer back if all of it has arrived: the next bytes find other
// pages. Those of the RMBE the stack gives back.
func (f *intake) settle() {
	c, s := f.c, f.c.stack
	pos := c.streams.written()
	if pos == c.send.settled || !c.cool.able {
		return
	}
	s.lock()
	defer s.unlock()
	s.devices.drainSends(time.Now()) // nobody looks for what was sent last before the next message
	c.send.settle(c.lc.Data().Completed(), pos)
}

// probe announces urgent data that has to wait (RFC 7609 §4.7.6).
func (f *intake) probe() error {
	urgent, err := f.s.probeStalled()
	if urgent && !f.announced {
		f.announced = true
		f.c.urgent.at.Store(urgentAhead)
		f.c.stack.marks.moved(f.c)
		f.c.stack.kick()
	}
	return err
}

func (f *intake) took(n int, urgent bool) (bool, error) {
	ok := false
	if urgent {
		f.announced = false
		ok = f.c.commitUrgent()
	} else {
		ok = f.c.commit(n)
	}
	if !ok {
		return false, f.c.opError("write", syscall.EPIPE)
	}
	f.total += int64(n)
	return true, nil
}

// RelayTCP writes to dst what arrives on src, urgent data as such, until src
// ends. The caller must be the only reader of src and the only writer of dst.
func RelayTCP(dst, src *net.TCPConn) (int64, error) { return do(newTCPRelay(dst, src)) }

// StartRelayTCP is RelayTCP as a call of d, which gives the result to then. Nobody may set
// deadlines meanwhile; who closes src calls d.Wake.
func StartRelayTCP(d *Direction, dst, src *net.TCPConn, then func(int64, error)) {
	d.start(newTCPRelay(dst, src), then)
}

// tcpRelay is a RelayTCP under way.
type tcpRelay struct {
	pump
	dst, src *net.TCPConn
	out      *socket // of dst
	// early, unless nil, writes what was read from the source before, -1 if that was all of the
	// stream.
	early    func() (int64, error)
	earlyErr error
	ended    bool // early has said so
	total    int64
	buf      *[relayBytes]byte // nil: it would be empty
	rest     []byte            // the part of buf that has to wait
	mark     bool              // rest is the urgent byte
	pause    time.Duration     // of the stall
	ahead    bool              // urgent data was seen in the source and is not written yet
	try      func(fd uintptr) bool
}

func newTCPRelay(dst, src *net.TCPConn) *tcpRelay { return &tcpRelay{dst: dst, src: src} }

func (f *tcpRelay) begin(d *Direction) error {
	from, to := newSocket(f.src), newSocket(f.dst)
	if from == nil || to == nil {
		return net.ErrClosed
	}
	f.s, f.to, f.d, f.out = from, f, d, to
	f.try = func(fd uintptr) bool {
		to.w.do(syscall.SYS_WRITE, fd)
		return true
	}
	to.stall = f.stalls
	if f.early == nil {
		return nil
	}
	if f.earlyErr = f.becomeInline(); f.earlyErr == nil { // early may read
		var n int64
		n, f.earlyErr = f.early() // it may wait for the source, and cannot be prodded
		f.total, f.ended = max(n, 0), n < 0
	}
	return nil
}

func (f *tcpRelay) run() error {
	if f.earlyErr != nil || f.ended {
		return f.earlyErr
	}
	return f.receive()
}

func (f *tcpRelay) end(err error) (int64, error) {
	if f.buf != nil {
		relayBuffers.Put(f.buf)
	}
	if f.d != nil {
		_ = f.src.SetReadDeadline(time.Time{}) // prod may have set one; fails if closed: nobody waits
	}
	return f.total, err
}

// relayBuffers are shared by all connections, so that idle ones have none.
var relayBuffers = sync.Pool{New: func() any { return new([relayBytes]byte) }} //nolint:gochecknoglobals // a cache of the process

func (f *tcpRelay) room() ([]byte, error) {
	if f.buf == nil {
		f.buf = relayBuffers.Get().(*[relayBytes]byte)
	}
	return f.buf[:], nil
}

// took writes what the destination takes at once.
func (f *tcpRelay) took(n int, urgent bool) (bool, error) {
	w := &f.out.w
	w.buf, w.flags, w.n, w.errno = f.buf[:n], 0, 0, 0
	if urgent {
		w.flags = unix.MSG_OOB
	}
	err := f.out.raw.Write(f.try)
	f.rest, f.mark = w.buf[w.n:], urgent
	w.buf, w.flags = nil, 0
	f.total += int64(n - len(f.rest))
	switch {
	case err != nil:
		return false, err
	case w.errno != 0:
		return false, f.out.opError("write", w.errno)
	case len(f.rest) > 0:
		return false, nil
	}
	f.done()
	return true, nil
}

func (f *tcpRelay) settle() {
	if f.buf != nil {
		relayBuffers.Put(f.buf)
		f.buf = nil
	}
}

func (f *tcpRelay) done() {
	f.ahead = f.ahead && !f.mark
	relayBuffers.Put(f.buf)
	f.buf, f.rest = nil, nil
}

// wait writes the rest, and looks at the source meanwhile.
func (f *tcpRelay) wait() error {
	write := f.out.Write
	if f.mark {
		write = f.out.WriteUrgent
	}
	f.pause = 0
	for {
		n, err := write(f.rest)
		f.rest = f.rest[n:]
		f.total += int64(n)
		stalled := errors.Is(err, os.ErrDeadlineExceeded)
		if err != nil && !stalled {
			return err
		}
		if f.pause > 0 {
			if err := f.out.conn.SetWriteDeadline(time.Time{}); err != nil {
				return err
			}
		}
		if !stalled {
			f.done()
			return nil
		}
		urgent, err := f.s.probeStalled()
		if err != nil {
			return err
		}
		f.ahead = f.ahead || urgent
	}
}

// stalls is asked when the destination is full.
func (f *tcpRelay) stalls(fd int) bool {
	if f.ahead || f.mark {
		growSendBuffer(fd, relayBytes)
	}
	f.pause = min(max(2*f.pause, stallFirst), stallMost)
	return f.out.conn.SetWriteDeadline(time.Now().Add(f.pause)) == nil
}

// AwaitEnd waits, after the peer's stream has ended, until ours has too; or for
// the reset that a reader would not see any more. AwaitEnd returns nil if the
// streams have ended.
func (c *Conn) AwaitEnd() error {
	_, err := do(c.awaitEnd())
	return err
}

// StartAwaitEnd is AwaitEnd as a call of d, which gives the result to then.
func (c *Conn) StartAwaitEnd(d *Direction, then func(error)) {
	d.start(c.awaitEnd(), func(_ int64, err error) { then(err) })
}

func (c *Conn) awaitEnd() task {
	if c.group == nil {
		return &tcpEnd{conn: c.tcp}
	}
	return &connEnd{c: c}
}

// connEnd is an AwaitEnd under way.
type connEnd struct {
	c *Conn
	d *Direction
}

func (e *connEnd) begin(d *Direction) error {
	e.d = d
	e.c.recv.mu.Lock()
	e.c.recv.waiter.Store(d)
	return nil
}

func (e *connEnd) end(err error) (int64, error) {
	e.c.recv.waiter.Store(nil)
	e.c.recv.mu.Unlock()
	return 0, err
}

func (e *connEnd) run() error {
	for {
		if over, err := e.isOver(); over {
			return err
		}
		if e.park() {
			return errParked
		}
		<-e.c.recv.readable
	}
}

func (e *connEnd) isOver() (bool, error) {
	switch c := e.c; {
	case c.life.closed.Load():
		return true, c.opError("read", net.ErrClosed)
	case c.streams.has(flagReset):
		return true, c.opError("read", c.whyReset())
	case c.streams.ended():
		return true, nil
	}
	return false, nil
}

// park has the call wait without a goroutine. False: something came, or it cannot.
func (e *connEnd) park() bool {
	if !e.d.becomeParking() {
		return false
	}
	if over, _ := e.isOver(); !over && e.d.becomeParked() {
		return true
	}
	e.d.stay()
	return false
}

func (e *connEnd) prod() { wakeUp(e.c.recv.readable) }
