// SPDX-License-Identifier: Apache-2.0

package tcpqp

import (
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// link is a connection of a queue pair. It is closed, or given back, only after it was let
// go, so that its descriptor is valid for whoever owns the queue pair and finds it there.
type link struct {
	host *Host
	conn *net.TCPConn
	raw  syscall.RawConn
	fd   int

	// The queue pair's owner has these.
	writing bool  // the writer was started
	full    bool  // the socket has no room: the writer waits for some
	rxEnded bool  // nothing more comes
	ended   bool  // our half is ended
	txErr   error // TCP takes nothing more

	endAfter time.Time     // our half does not end before
	aborted  bool          // the connection ends by a reset
	wake     chan struct{} // the socket has no room: tells the writer
	gone     chan struct{}
	kept     atomic.Bool // whoever let it go wants it back
	writers  sync.WaitGroup
	reader   chan struct{} // closed when the reader has ended
}

func newLink(h *Host, c *net.TCPConn) (*link, error) {
	l := &link{host: h, conn: c, wake: make(chan struct{}, 1), gone: make(chan struct{}), reader: make(chan struct{})}
	var err error
	if l.raw, err = c.SyscallConn(); err != nil {
		return nil, fmt.Errorf("take over connection: %w: %w", rdma.ErrInvalid, err)
	}
	if err = l.raw.Control(func(fd uintptr) { l.fd = int(fd) }); err != nil {
		return nil, fmt.Errorf("take over connection: %w: %w", rdma.ErrInvalid, err)
	}
	if err = c.SetNoDelay(true); err != nil {
		return nil, fmt.Errorf("take over connection: %w: %w", rdma.ErrInvalid, err)
	}
	return l, nil
}

// past is a deadline that wakes who waits in the network poller.
func past() time.Time { return time.Unix(1, 0) }

// letGo has both goroutines end what they do with the queue pair. The owner of the queue pair
// calls letGo.
func (l *link) letGo(keep bool) {
	l.kept.Store(keep)
	_ = l.conn.SetDeadline(past())
	close(l.gone)
}

// read is the reader: it receives until the connection was let go, and then ends it.
func (l *link) read(q *QP) {
	defer close(l.reader)
	defer l.host.forget(l)
	poller := l.host.dev.Poller()
	_ = l.raw.Read(func(uintptr) bool {
		for {
			switch q.receive(l) {
			case rxMore:
			case rxOver:
				return true
			case rxWait:
				if !poller.Idle() {
					return false
				}
			}
		}
	}) // an error says that it was let go
	<-l.gone
	l.writers.Wait()
	if !l.kept.Load() {
		l.linger()
	}
}

// write is the writer: whenever the socket is full, the writer waits for room, and transmits until
// all is sent.
func (l *link) write(q *QP) {
	room := func(uintptr) bool { return q.room(l) }
	for {
		select {
		case <-l.wake:
			_ = l.raw.Write(room) // an error says that it was let go
		case <-l.gone:
			return
		}
	}
}

// linger ends the connection without a reset, as far as the peer lets it.
func (l *link) linger() {
	defer func() { _ = l.conn.Close() }()
	if l.aborted {
		_ = l.conn.SetLinger(0) // an error says that it is broken already
		return
	}
	defer l.host.lingering.Add(-1)
	if l.host.lingering.Add(1) > maxLingering || l.txErr != nil || l.rxEnded && l.ended {
		return
	}
	if d := time.Until(l.endAfter); d > 0 && !l.ended {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-l.host.done:
			return
		}
	}
	if !l.ended && l.conn.CloseWrite() != nil || l.rxEnded {
		return
	}
	_ = l.conn.SetReadDeadline(time.Now().Add(maxLinger))
	_, _ = io.Copy(io.Discard, l.conn)
}
