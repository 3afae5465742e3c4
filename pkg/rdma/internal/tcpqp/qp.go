// SPDX-License-Identifier: Apache-2.0

package tcpqp

import (
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
)

// Stream is the protocol of a queue pair on a stream of bytes.
type Stream interface {
	softdev.Machine
	// RxBuffers appends to dst where the next bytes of the stream go, in order; HandleRx says
	// that n bytes were put there, and HandleEnd that nothing more comes, with an error if the
	// connection is lost. PostRecv may come in between.
	RxBuffers(dst [][]byte) [][]byte
	HandleRx(now time.Time, n int) error
	HandleEnd(now time.Time, err error)
	// TxBuffers appends to dst what is to be sent, in order, and HandleTx says that TCP took
	// the first n bytes of it.
	TxBuffers(now time.Time, dst [][]byte) [][]byte
	HandleTx(now time.Time, n int)
	// TxEnded reports whether our half of the stream may end; Closed, whether the connection
	// is of no more use.
	TxEnded() bool
	Closed() bool
}

// Aborter is a [Stream] whose end in order may say what is not true.
type Aborter interface {
	// Aborted reports whether the stream ends by a reset. It is then also Closed.
	Aborted() bool
}

// QP is a queue pair on a TCP connection. A provider embeds it, and calls Init before it
// gives it away. It has all of [softdev.Carrier] but CheckModify. Methods without a word on
// that are for the owner of the queue pair.
type QP struct {
	softdev.QP
	stream  Stream
	aborter Aborter // the same, or nil
	host    *Host

	link     *link     // nil: no connection
	txAfter  time.Time // nothing is sent before
	endAfter time.Time // our half does not end before
	retry    time.Time // when one of both is due; zero: nothing waits for them
	rx, tx   [][]byte  // for the pieces of a system call
	vec      vector
}

// Init says what the queue pair's protocol is, and whose its goroutines are.
func (q *QP) Init(h *Host, s Stream) {
	q.host, q.stream = h, s
	q.aborter, _ = s.(Aborter)
}

// Attach gives the queue pair a connection, which is its own from now on, and begins to
// receive. The caller steps.
func (q *QP) Attach(c *net.TCPConn) error {
	if q.link != nil {
		return fmt.Errorf("attach connection to queue pair %v, which has one: %w", q.Num(), rdma.ErrState)
	}
	l, err := newLink(q.host, c)
	if err != nil {
		return err
	}
	_ = c.SetDeadline(time.Time{}) // a deadline of the streaming mode says nothing here
	q.txAfter, q.endAfter, q.retry = time.Time{}, time.Time{}, time.Time{}
	if err := q.host.run(l, func() { l.read(q) }); err != nil {
		return err
	}
	q.link = l
	return nil
}

// Detach takes the connection back, nil if there is none. The function that it returns waits
// for the goroutines, which the caller must not do while it owns the queue pair; then the
// connection is the caller's.
func (q *QP) Detach() (*net.TCPConn, func()) {
	l := q.link
	if l == nil {
		return nil, func() {}
	}
	q.link, q.retry = nil, time.Time{}
	l.letGo(true)
	return l.conn, func() {
		<-l.reader
		_ = l.conn.SetDeadline(time.Time{})
	}
}

// Attached reports whether the queue pair has a connection.
func (q *QP) Attached() bool { return q.link != nil }

// Conn returns the connection for what is no traffic, nil if there is none.
func (q *QP) Conn() *net.TCPConn {
	if q.link == nil {
		return nil
	}
	return q.link.conn
}

// DelayTx has nothing sent before a time.
func (q *QP) DelayTx(until time.Time) { q.txAfter = until }

// DelayEnd has our half of the connection not end before a time.
func (q *QP) DelayEnd(until time.Time) { q.endAfter = until }

// Machine implements [softdev.Carrier].
func (q *QP) Machine() softdev.Machine { return q.stream }

// Modified implements [softdev.Carrier].
func (q *QP) Modified(rdma.QPAttr) {}

// Retry implements [softdev.Carrier].
func (q *QP) Retry() time.Time { return q.retry }

// ForgetMemory implements [softdev.Carrier]: the kernel has copies of what it took.
func (q *QP) ForgetMemory() {
	clear(q.rx[:cap(q.rx)])
	clear(q.tx[:cap(q.tx)])
	q.vec.forget()
}

// SayLast implements [softdev.Carrier]: a Terminate, if not all was done.
func (q *QP) SayLast(now time.Time) {
	if q.link != nil && q.stream.State() != rdma.QPReset {
		_ = q.stream.Modify(now, rdma.QPAttr{State: rdma.QPError}) // allowed from there
		q.Transmit(now)
	}
}

// aborted reports whether the connection ends by a reset.
func (q *QP) aborted() bool { return q.aborter != nil && q.aborter.Aborted() }

// Drop implements [softdev.Carrier]: the connection ends.
func (q *QP) Drop() {
	if l := q.link; l != nil {
		q.link, q.retry = nil, time.Time{}
		l.endAfter, l.aborted = q.endAfter, q.aborted()
		l.letGo(false)
	}
}

// Transmit implements [softdev.Carrier].
func (q *QP) Transmit(now time.Time) {
	l := q.link
	if l == nil {
		return
	}
	q.retry = time.Time{}
	if now.Before(q.txAfter) {
		q.retry = q.txAfter
		return
	}
	q.write(now, l)
	if !l.full && !l.ended && q.stream.TxEnded() && !q.aborted() {
		if now.Before(q.endAfter) {
			q.retry = q.endAfter
		} else {
			l.ended = true
			_ = unix.Shutdown(l.fd, unix.SHUT_WR) // an error is the reader's, too
		}
	}
	if q.stream.Closed() {
		q.Drop()
	}
}

// write gives TCP what it takes.
func (q *QP) write(now time.Time, l *link) {
	for !l.full && l.txErr == nil {
		q.tx = q.stream.TxBuffers(now, q.tx[:0])
		if len(q.tx) == 0 {
			return
		}
		n, err := q.vec.send(l.fd, q.tx)
		if n > 0 {
			q.stream.HandleTx(now, n)
		}
		switch {
		case errors.Is(err, unix.EAGAIN):
			q.awaitRoom(l)
		case err != nil:
			// What the peer said before may be there to be read: the reader tells then.
			if l.txErr = err; l.rxEnded {
				q.stream.HandleEnd(now, err)
			}
		}
	}
}

// awaitRoom has the writer wait until the socket has room.
func (q *QP) awaitRoom(l *link) {
	l.full = true
	if !l.writing {
		l.writing = true
		l.writers.Go(func() { l.write(q) })
	}
	select {
	case l.wake <- struct{}{}:
	default: // it was told, and looks after that
	}
}

// room is called when the socket may have room, and reports whether that was enough.
func (q *QP) room(l *link) bool {
	q.Lock()
	defer q.Unlock()
	if q.Dead() || q.link != l {
		return true
	}
	l.full = false
	q.Step(time.Now())
	return q.link != l || !l.full
}

// received says how a look at the socket ended.
type received uint8

const (
	rxMore received = iota // there may be more
	rxWait                 // there is nothing now
	rxOver                 // there is nothing more for this queue pair
)

// receive reads once.
func (q *QP) receive(l *link) received {
	q.Lock()
	defer q.Unlock()
	if q.Dead() || q.link != l {
		return rxOver
	}
	q.rx = q.stream.RxBuffers(q.rx[:0])
	if len(q.rx) == 0 {
		return rxOver
	}
	n, err := q.vec.receive(l.fd, q.rx)
	if errors.Is(err, unix.EAGAIN) {
		return rxWait
	}
	q.TakeRecvs()
	now := time.Now()
	switch {
	case err != nil:
		l.rxEnded = true
		if l.txErr == nil {
			l.txErr = err
		}
		q.stream.HandleEnd(now, l.txErr)
	case n == 0:
		l.rxEnded = true
		q.stream.HandleEnd(now, l.txErr)
	default:
		_ = q.stream.HandleRx(now, n) // an error ends the queue pair, whose event tells of the error
	}
	q.Step(now)
	if l.rxEnded {
		return rxOver
	}
	return rxMore
}
