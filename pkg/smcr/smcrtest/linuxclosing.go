// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// linuxClosing is how far a connection of the kernel's model is closed. D, C and A are the
// flags of CDC messages (RFC 7609 §4.8): sending done, closed, abort.
type linuxClosing struct {
	resend              bool // closing flags may be lost with a link
	shut, closed, reset bool // by the application
	sentD, sentC, sentA bool
	gotD, gotC, gotA    bool
	second              bool // we sent D after the peer's
	silent              bool // reset by the peer when both had sent D, we second: the kernel does not answer
	eofSeen             bool
	killed              bool // with its group or its rendezvous
}

// aborted reports that the connection was reset by either side.
func (c *linuxClosing) aborted() bool { return c.reset || c.gotA || c.killed }

// hasSentAny reports whether a closing flag was sent.
func (c *linuxClosing) hasSentAny() bool { return c.sentD || c.sentC || c.sentA }

// hasSentLast reports whether our last word was sent, or there is none.
func (c *linuxClosing) hasSentLast() bool { return c.sentC || c.sentA || c.silent }

// hasGotLast reports whether the peer's last word came.
func (c *linuxClosing) hasGotLast() bool { return c.gotC || c.gotA }

// isEnding reports whether the connection is in one of the kernel's closing states: it just moves to another
// link, without a validation message.
func (c *linuxClosing) isEnding() bool {
	return c.closed || c.hasGotLast() || c.reset || c.gotD || c.sentD
}

// isOver reports whether application and peer are done, and know it.
func (c *linuxClosing) isOver() bool {
	return c.closed && c.hasSentLast() && c.hasGotLast() && !c.resend
}

// abortDue reports whether the next message resets: the application does, or answers the
// peer's reset by closing.
func (c *linuxClosing) abortDue() bool { return c.reset || c.gotA && c.closed }

// take takes the peer's flags.
func (c *linuxClosing) take(f cdc.Flags) {
	c.gotD = c.gotD || f.SendingDone()
	c.gotC = c.gotC || f.Closed()
	c.gotA = c.gotA || f.Abort()
	if c.gotA && c.second && !c.hasSentLast() {
		c.silent, c.resend = true, false
	}
}

// sent notes the flags that the next message has.
func (c *linuxClosing) sent(d, closed, abort bool) {
	c.resend = false
	c.second = c.second || d && !abort && !c.sentD && c.gotD
	c.sentD = c.sentD || d && !abort
	c.sentC = c.sentC || closed
	c.sentA = c.sentA || abort
}

// flags are the closing flags of a message.
func (c *linuxClosing) flags() cdc.Flags {
	var f cdc.Flags
	if c.sentD {
		f = f.WithSendingDone()
	}
	if c.sentC {
		f = f.WithClosed()
	}
	if c.sentA {
		f = f.WithAbort()
	}
	return f
}

func (c *linuxClosing) String() string {
	return fmt.Sprintf("sent D %t C %t A %t, got D %t C %t A %t, killed %t", c.sentD, c.sentC, c.sentA, c.gotD, c.gotC, c.gotA, c.killed)
}
