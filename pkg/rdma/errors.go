// SPDX-License-Identifier: Apache-2.0

package rdma

import "errors"

// Errors of the verbs. Providers wrap them with what was being done.
var (
	ErrClosed       = errors.New("rdma: object is closed")
	ErrInvalid      = errors.New("rdma: invalid argument")
	ErrState        = errors.New("rdma: not allowed in this queue pair state")
	ErrQueueFull    = errors.New("rdma: queue is full")
	ErrNoResources  = errors.New("rdma: device has no resources left")
	ErrNotSupported = errors.New("rdma: not supported by this device")
	ErrBusy         = errors.New("rdma: object is still in use")
	ErrCQOverrun    = errors.New("rdma: completion queue overrun")

	// ErrPeerAccess is the reason of an [EventQPFatal] whose queue pair refused a
	// request with NAK remote access error. Other mistakes of the peer, a region that
	// is closed under a request that had been accepted, and failures of the device are
	// other reasons. The event may come when the queue pair is closed already.
	ErrPeerAccess = errors.New("rdma: peer's request named a key, address or right that it does not have")
)
