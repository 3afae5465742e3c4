// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// life is how long a connection and its memory last. With SMC-R the memory outlives Close:
// what was written is still delivered, and the peer may still write.
//
//	users  2  the application, until Close, and the group, until the peer writes no more
//	      +1  each call under way: Read, Write, ...
//	       0  the memory goes to the next connection, and the TCP connection ends
type life struct {
	users  atomic.Int32 // who may touch the connection's memory; with SMC-R only
	closed atomic.Bool  // by the application

	// Guarded by the turn.
	opened  bool // the rendezvous has handed the connection over
	keepTCP bool // the TCP connection outlives this one: it falls back
	// halfOpen is the address whose place a connection has that was given up before its
	// Confirm, and until is how long; not valid: none.
	halfOpen netip.Addr
	until    time.Time
}

// abandon has a connection whose client owes its Confirm keep the client's place: the client may
// know of its RMBE, which is not free. It has the place for as long as the group waits for the client's word
// (becomeZombie in package linkgroup); then the RMBE is one of those of the group, of which each has so many.
func (c *Conn) abandon(now time.Time, addr netip.Addr) {
	c.life.halfOpen, c.life.until = addr, now.Add(linkgroup.ZombieGrace)
	c.group.abandoned++
}

// endAbandoned gives the place back.
func (c *Conn) endAbandoned() {
	if c.life.halfOpen.IsValid() {
		c.stack.halfOpen.leave(c.life.halfOpen)
		c.life.halfOpen = netip.Addr{}
		c.group.abandoned--
	}
}

// endAbandoned gives the places of connections back that had them for long enough.
func (g *group) endAbandoned(now time.Time) {
	for i := 0; g.abandoned > 0 && i < len(g.shells); i++ {
		if c := g.shells[i]; c != nil && !now.Before(c.life.until) {
			c.endAbandoned()
		}
	}
}

// begin counts the application and the group as users.
func (l *life) begin() { l.users.Store(2) }

// ref counts one more user, unless there is none any more: then the memory may be the next
// connection's.
func (l *life) ref() bool {
	for {
		n := l.users.Load()
		if n == 0 {
			return false
		}
		if l.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// unref takes back a ref; true: it was the last one.
func (l *life) unref() (last bool) { return l.users.Add(-1) == 0 }

// isOver reports whether the connection has no user any more.
func (l *life) isOver() bool { return l.users.Load() == 0 }

// ref keeps the connection's memory from being reused until unref. It returns false when
// the memory may be reused already.
func (c *Conn) ref() bool { return c.life.ref() }

// unref takes back a ref; the last one gives the memory back.
func (c *Conn) unref() {
	if c.life.unref() {
		c.wipeAndRelease()
	}
}

// unrefLocked is unref for the holder of the turn.
func (c *Conn) unrefLocked() {
	if c.life.unref() {
		c.stack.wg.Go(c.wipeAndRelease) // which takes the turn
	}
}

func (c *Conn) wipeAndRelease() {
	// The next connection must not see the bytes of this one. After a reset there may be
	// some that the peer wrote and never announced.
	if c.streams.has(flagReset) {
		c.wipeRMBE()
	} else {
		c.recv.wipe(c.streams.peerProduced.Load())
	}
	c.send.wipe(c.streams.written())
	s := c.stack
	s.lock()
	defer s.unlock()
	c.release()
}

// wipeRMBE clears all of the RMBE. To give its pages back does that, too, and takes no time for those
// that nobody has touched, which are most of a large one's.
func (c *Conn) wipeRMBE() {
	s, r := c.stack, c.recv.region
	s.lock()
	n := len(c.recv.rmbe)
	given := r.canDiscard() && r.discard(c.recv.element*n, n)
	s.unlock()
	if !given {
		c.recv.wipeAll()
	}
}

// release gives the memory back; the caller holds the turn.
func (c *Conn) release() {
	s := c.stack
	if _, ok := s.conns[c]; !ok {
		return
	}
	delete(s.conns, c)
	c.endAbandoned()
	s.tcpWatch.remove(c)
	s.dialogue.forget(c)
	defer s.checkEmpty()
	s.counters.past.countConn(c)
	info := c.infoLocked()
	c.giveSend()
	c.recv.deadline.Stop()
	c.send.deadline.Stop()
	c.send.coalesce.stop()
	c.group.shells[c.lc.Slot()] = nil
	c.lc.Release(time.Now())
	c.group.flush(time.Now())
	c.group.freeIfUnused()
	if !c.life.keepTCP {
		_ = c.tcp.Close() // SMC-R has ended in order; TCP ends last
	}
	if h := s.cfg.Hooks.ConnClosed; h != nil && c.life.opened {
		h(info)
	}
}

// giveSend gives the send buffer back, of a connection that has sent what was in it or has not begun; the
// caller holds the turn.
func (c *Conn) giveSend() {
	if c.send.buf.arena != nil {
		_ = c.group.mem.giveSend(c.send.buf) // the region is unmapped either way
		c.send.buf = &sendBuffer{}
	}
}

// groupDone is called when the machine says that the peer will not write the RMBE again.
// The caller holds the turn, which the last unref takes, so another goroutine does it.
func (c *Conn) groupDone() {
	c.raise(flagAborted)
	c.unrefLocked()
}

// Close ends the connection. What was written is still delivered, in the
// background. Data that was received but not read makes the end a reset, as with
// TCP.
func (c *Conn) Close() error { return c.end(false) }

// Abort resets the connection: the peer gets ECONNRESET, after what was written if the peer had room for it.
func (c *Conn) Abort() error { return c.end(true) }

func (c *Conn) end(abort bool) error {
	if c.life.closed.Swap(true) {
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
	c.streams.end() // a Write that is under way has its bytes before the end, or an error
	s := c.stack
	s.lock()
	c.sync()
	if abort {
		c.lc.Flush() // nothing that was written goes out after the reset
		c.group.flush(time.Now())
		c.lc.Abort(time.Now())
	} else {
		c.lc.Close(time.Now())
	}
	c.group.flush(time.Now())
	s.unlock()
	c.recv.wake()
	c.send.wake()
	c.unref()
	return nil
}
