// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"errors"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// ErrWouldBlock says that a wire cannot take more now. The device tries the
// rest again soon.
var ErrWouldBlock = errors.New("soft: the wire takes no more now")

// Wire moves datagrams for a device. Send may be called by several goroutines
// at once, Receive by one.
type Wire interface {
	// Send sends messages in order and returns how many were taken. With an
	// error other than ErrWouldBlock, msgs[n] is the message that could not
	// be sent: it is lost, and the rest may still go.
	Send(msgs []Message) (n int, err error)
	// Receive calls take with what arrives, again and again. The messages and
	// their data are valid until take returns. When nothing is left it calls
	// idle before it waits; if that returns true it looks again at once.
	// Receive returns an error when the wire is closed, and when receiving
	// failed: then it may be called again.
	Receive(take func(msgs []Message), idle func() bool) error
	// MaxSegments is the largest number of datagrams in a message to send.
	MaxSegments() int
	// Close ends Receive, and may wait for it.
	Close() error
}

// Message is one datagram, or a run of datagrams to or from one peer that all
// have SegmentBytes but the last, which may be shorter.
type Message struct {
	Peer         netip.AddrPort
	SegmentBytes int      // 0: one datagram
	Flow         uint8    // to send: 0 to 7; all messages of a call have the same
	Bufs         [][]byte // to send: gathered
	Data         []byte   // received
}

// LinkWatcher is a [Wire] that knows the state of its link. Without it a
// device's port is always active.
type LinkWatcher interface {
	Link() LinkState
	// LinkChanged has a token after Link changed.
	LinkChanged() <-chan struct{}
}

// Receive is [Wire.Receive], or the same of a further receiver.
type Receive = func(take func(msgs []Message), idle func() bool) error

// Spreader is a [Wire] that may have further receivers, at once or later: it gives
// each to start, which does not wait. Each is called by a goroutine of its own, and
// returns [net.ErrClosed] when that is no longer needed. After Close there are no more.
type Spreader interface {
	Spread(start func(Receive))
	// Receivers is how many receive now.
	Receivers() int
}

// PortSender is a [Wire] whose datagrams have other source ports than the
// device's, one for each flow. The ICRC covers them.
type PortSender interface {
	SourcePort(flow uint8) uint16
}

// LinkState is the state of the interface and address under a wire.
type LinkState struct {
	Up       bool // the address is there and the interface has a carrier
	MTUBytes int
	// MaxMTUBytes is the largest MTU, and MTUBytes the smallest, where packets may leave by several
	// interfaces, as with an address on loopback; 0: all have MTUBytes.
	MaxMTUBytes int
	NetDev      string
	MAC         rdma.MAC
	// PrefixBits is the length of the address's subnet; 0 if it is not known.
	PrefixBits int
}
