// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"context"
	"net"

	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// NewSoftAdapter is what a stack makes of a device in software if Hello goes in the MPA Request.
func NewSoftAdapter(d *softiwarp.Device) cm.Device { return &softAdapter{Device: d} }

// AwaitPeer is what a suspended connection waits with.
var AwaitPeer = awaitPeer

// GiveUp is what a dialer does that has waited long enough.
var GiveUp = giveUp

// ComeBack is what answers a peer that has moved.
func (c *Conn) ComeBack(ctx context.Context, port uint16) (*net.TCPConn, error) {
	return c.moves.comeBack(ctx, port)
}

// BuffersOf is how many Buffers a connection remembers.
func BuffersOf(c *Conn) int {
	c.lock()
	defer c.unlock()
	return len(c.ep.buffers)
}
