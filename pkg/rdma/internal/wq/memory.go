// SPDX-License-Identifier: Apache-2.0

package wq

import "github.com/smcr-io/kube-smcr/pkg/rdma"

// Memory resolves addresses of work requests and of peers to registered memory of the
// queue pair's protection domain. A protocol asks once per message and keeps the slice
// while it works on the message; ForgetMemory of the protocol makes it ask again.
//
// Only the owner of the queue pair asks, and uses what it got while it owns the queue
// pair: a region is unmapped only after every queue pair of its domain was owned once
// and has forgotten it.
type Memory interface {
	// Local returns the memory of an SGE, or StatusLocalProtect. With write
	// the region needs LocalWrite.
	Local(s rdma.SGE, write bool) ([]byte, rdma.Status)
	// Remote returns the n bytes at addr of the region that the key opens to the peer.
	// The status says what is wrong, for protocols that tell the peer:
	//
	//	StatusRemoteInvalid  the domain has no region with this key
	//	StatusRemoteAccess   the region does not grant acc
	//	StatusRemoteOp       the region does not hold all of the bytes
	Remote(key rdma.RKey, addr uint64, n uint32, acc rdma.Access) ([]byte, rdma.Status)
	// Invalidate makes a key of the domain open nothing any more: a SEND with invalidate
	// was delivered. The region's LKey goes on. It reports whether there was such a key. The
	// protocol forgets what it resolved with it; another queue pair of the domain may end
	// the message that it is in the middle of.
	Invalidate(key rdma.RKey) bool
}
