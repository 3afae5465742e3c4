// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"fmt"
	"net"
	"time"
)

// Coalesce says which data waits for more (RFC 7609 §4.5.2). The zero value lets
// nothing wait.
type Coalesce struct {
	// Bytes is the size from which data goes at once.
	Bytes int
	// Delay is how long less than that waits.
	Delay time.Duration
}

func (o Coalesce) validate() error {
	switch {
	case o == Coalesce{}:
		return nil
	case o.Bytes < 2 || o.Bytes > maxCoalesceBytes:
		return fmt.Errorf("smcr config: Coalesce.Bytes %d: want 2 to %d", o.Bytes, maxCoalesceBytes)
	case o.Delay <= 0 || o.Delay > maxCoalesceDelay:
		return fmt.Errorf("smcr config: Coalesce.Delay %v: want more than 0, at most %v", o.Delay, maxCoalesceDelay)
	}
	return nil
}

const (
	// maxCoalesceBytes is half of the smallest send buffer: from there on data
	// goes, since the writer might wait for room.
	maxCoalesceBytes = 8 << 10
	// maxCoalesceDelay is what TCP's Nagle algorithm costs at worst: the
	// peer's delayed acknowledgement.
	maxCoalesceDelay = 200 * time.Millisecond
)

// coalescer is whether the small pieces of a connection wait for more, and how long. A coalescer
// is guarded by the turn.
type coalescer struct {
	on    bool        // small pieces wait
	timer *time.Timer // of the pieces that wait now; the timer may have run out
	armed bool        // flushCoalesced is still to come
}

// startCoalescing applies the configuration; the caller holds the turn.
func (c *Conn) startCoalescing() { c.coalesceLocked(c.stack.cfg.Coalesce.Bytes > 0) }

func (c *Conn) coalesceLocked(on bool) {
	if c.send.coalesce.on = on; on {
		c.lc.Coalesce(uint32(c.stack.cfg.Coalesce.Bytes))
	} else {
		c.lc.Coalesce(0)
	}
}

// armCoalesce starts the timer of data that began to wait; the caller holds the
// turn.
func (c *Conn) armCoalesce() {
	h := &c.send.coalesce
	if h.armed || !c.lc.Data().Coalesced() {
		return
	}
	h.armed = true
	if h.timer == nil {
		h.timer = time.AfterFunc(c.stack.cfg.Coalesce.Delay, c.flushCoalesced)
	} else {
		h.timer.Reset(c.stack.cfg.Coalesce.Delay)
	}
}

// flushCoalesced sends what has waited long enough.
func (c *Conn) flushCoalesced() {
	s := c.stack
	s.lock()
	defer s.unlock()
	c.send.coalesce.armed = false
	if _, ok := s.conns[c]; ok {
		c.lc.Flush()
		c.group.flush(time.Now())
	}
}

// stop lets go of the timer.
func (h *coalescer) stop() {
	if h.timer != nil {
		h.timer.Stop()
	}
}

// SetNoDelay says whether small pieces are sent at once: always if noDelay,
// else as [Config].Coalesce says, which is how a connection begins. Over TCP
// SetNoDelay sets TCP_NODELAY.
func (c *Conn) SetNoDelay(noDelay bool) error {
	if c.group == nil {
		return c.tcp.SetNoDelay(noDelay)
	}
	return c.withTurn(func() { c.coalesceLocked(!noDelay && c.stack.cfg.Coalesce.Bytes > 0) })
}

// Flush sends what waits for more. Over TCP it does nothing: what waits there waits in the kernel.
func (c *Conn) Flush() error {
	if c.group == nil {
		return nil
	}
	return c.withTurn(c.lc.Flush)
}

// withTurn tells the machine what was written, calls f and carries out what
// follows.
func (c *Conn) withTurn(f func()) error {
	if c.life.closed.Load() || !c.ref() {
		return c.opError("set", net.ErrClosed)
	}
	defer c.unref()
	c.stack.lock()
	defer c.stack.unlock()
	c.sync()
	f()
	c.group.flush(time.Now())
	return nil
}
