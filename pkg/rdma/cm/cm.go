// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// MaxPrivateData is the most private data that every adapter takes, in bytes. rdma_cm and Linux' siw have eight bits for its length, which
// includes the four bytes of RFC 6581.
const MaxPrivateData = 251

// Device is a device that connects its queue pairs itself.
type Device interface {
	rdma.Device
	// Dial connects a queue pair in INIT to a listener, from the device's address. Afterwards the queue pair is in RTS. An error leaves it
	// in INIT, if the peer was not reached, or in ERR; it is a [*RejectError] if the peer rejects.
	Dial(ctx context.Context, qp rdma.QP, to netip.AddrPort, o Options) (Conn, error)
	// Listen listens on an address of the device; port 0: any.
	Listen(at netip.AddrPort) (Listener, error)
	// Disconnect ends the connection of a queue pair in order. The queue pair goes to ERR, and the peer's has EventDisconnected. Wait for
	// the completion of all requests before: those that are under way may be lost.
	Disconnect(qp rdma.QP) error
	// AwaitEnd waits until the connection of a queue pair has ended, for whatever reason.
	AwaitEnd(ctx context.Context, qp rdma.QP) error
}

// Options say how a connection is set up.
type Options struct {
	// PrivateData goes to the peer's program with the Request or Reply: at most MaxPrivateData bytes.
	PrivateData []byte
	// ReadsServed and ReadsAsked are IRD and ORD: how many RDMA READs of the peer are served at a time, and how many of ours
	// may wait for the peer; 0: the device's default. Start-up fits them to the peer's.
	ReadsServed, ReadsAsked int
}

// Conn describes a connection that [Device.Dial] has made.
type Conn struct {
	PrivateData   []byte // of the Reply
	Local, Remote netip.AddrPort
}

// Listener waits for peers.
type Listener interface {
	Addr() net.Addr
	// Accept waits for the next request.
	Accept(ctx context.Context) (Request, error)
	// Close ends the listener, and rejects the requests that Accept has not returned. The others stay.
	Close() error
}

// Request is a peer that wants to be connected.
type Request interface {
	PrivateData() []byte
	LocalAddr() net.Addr
	RemoteAddr() net.Addr
	// Accept connects a queue pair in INIT, which is in RTS afterwards. After an error the request is rejected.
	Accept(ctx context.Context, qp rdma.QP, o Options) error
	// Reject refuses the request, with private data for the peer's program.
	Reject(privateData []byte) error
}

// RejectError says that the peer refused: its program, or its adapter; MPA does not tell which.
type RejectError struct {
	PrivateData []byte
	Err         error
}

func (e *RejectError) Error() string { return fmt.Sprintf("peer rejects: %v", e.Err) }

func (e *RejectError) Unwrap() error { return e.Err }
