// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"sync"
	"syscall"
)

// Out-of-band data is what net.Conn does not know: a byte of the stream at a time of which the peer hears before it has
// read what precedes it (§9.5.3). These methods are TCP's options and flags of the same names, as pkg/smcr has
// them: WriteUrgent and ReadUrgent are send and recv with MSG_OOB, SetUrgentInline is SO_OOBINLINE, UrgentNotify is SIGURG.

// urgent is what is known of the peer's out-of-band data.
type urgent struct {
	mu     sync.Mutex // guards what follows
	inline bool
	value  byte // that ReadUrgent returns
	fresh  bool // it has not yet
	notify chan struct{}
}

func (u *urgent) init() { u.notify = make(chan struct{}, 1) }

// announce says that an out-of-band byte will come.
func (u *urgent) announce() {
	select {
	case u.notify <- struct{}{}:
	default:
	}
}

// take takes an out-of-band byte out of the stream, and reports whether it is not part of it.
func (u *urgent) take(b byte) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.inline {
		return false
	}
	u.value, u.fresh = b, true
	return true
}

// WriteUrgent writes p, whose last byte is out-of-band data.
func (c *Conn) WriteUrgent(p []byte) (int, error) {
	n, err := c.write(p, true)
	return n, c.opError("write", err)
}

// ReadUrgent returns the last out-of-band byte that reads have come to, once. Without one it fails with EAGAIN: unlike with TCP,
// the byte is not to be had before what precedes it was read.
func (c *Conn) ReadUrgent() (byte, error) {
	u := &c.urgent
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.inline:
		return 0, c.opError("read", syscall.EINVAL)
	case !u.fresh:
		return 0, c.opError("read", syscall.EAGAIN)
	}
	u.fresh = false
	return u.value, nil
}

// SetUrgentInline leaves out-of-band bytes in the stream that Read sees; a read ends behind each.
func (c *Conn) SetUrgentInline(inline bool) {
	c.urgent.mu.Lock()
	c.urgent.inline = inline
	c.urgent.mu.Unlock()
}

// UrgentNotify has a token when the peer has said that an out-of-band byte will come.
func (c *Conn) UrgentNotify() <-chan struct{} { return c.urgent.notify }
