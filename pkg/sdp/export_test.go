// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"context"
	"net"
)

// AwaitPeer is what a suspended connection waits with.
var AwaitPeer = awaitPeer

// ComeBack is what answers a peer that has moved.
func (c *Conn) ComeBack(ctx context.Context, port uint16) (*net.TCPConn, error) {
	return c.comeBack(ctx, port)
}
