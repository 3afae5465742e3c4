// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"sync"
	"syscall"
)

// Out-of-band data, which net.Conn does not have, is a single byte of the stream that the peer is told of before it has
// read what precedes the byte (§9.5.3). The methods stand for what programs use with TCP, as those of pkg/smcr do:
// WriteUrgent and ReadUrgent are send and recv with MSG_OOB, SetUrgentInline is SO_OOBINLINE, UrgentNotify is SIGURG.

// urgent is what is known of the peer's out-of-band data.
type urgent struct {
	mu     sync.Mutex // guards what follows
	inline bool
	value  byte // what ReadUrgent returns
	fresh  bool // ReadUrgent has not returned value yet
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

// take keeps an out-of-band byte for ReadUrgent, and reports whether Read has to leave it out: not if such bytes are inline.
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

// ReadUrgent returns the last out-of-band byte that reads have come to, once. If there is none it fails with EAGAIN, also when the peer has
// announced one: unlike with TCP, what precedes the byte must be read first. With SetUrgentInline it fails with EINVAL.
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

// SetUrgentInline says whether out-of-band bytes stay in the stream that Read sees. A read ends behind each of them.
func (c *Conn) SetUrgentInline(inline bool) {
	c.urgent.mu.Lock()
	c.urgent.inline = inline
	c.urgent.mu.Unlock()
}

// UrgentNotify returns a channel that has a token when the peer has announced an out-of-band byte.
func (c *Conn) UrgentNotify() <-chan struct{} { return c.urgent.notify }
