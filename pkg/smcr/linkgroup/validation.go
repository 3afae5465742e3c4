// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// TellsOfLinks reports whether the peer says by a message which links have gone, or that it has
// heard so: afterwards it writes nothing over those that we gave up. The shell asks before
// HandleRecv, which may give up other links.
func TellsOfLinks(b []byte) bool { return llc.TypeOf(b) == llc.TypeDeleteLink }

// AwaitsEarlier reports whether a message that came over a link would reset its connection, because
// an earlier one was not handed in: a failover validation message that names a message which the peer knows to be
// acknowledged (§4.6.1), or a message over another link than before, without a validation message, that
// leaves numbers out and announces bytes. The shell asks before HandleRecv:
// what arrived over the other link may still wait in a completion queue that it
// has not come to yet, and must be handed in first. If the answer is the same
// then, data is lost.
func (g *Group) AwaitsEarlier(index LinkIndex, b []byte) bool {
	if len(b) == 0 || b[0] != cdc.Type {
		return false
	}
	m, err := cdc.Parse(b)
	if err != nil {
		return false
	}
	c := g.conns.byToken(m.Token)
	return c != nil && (c.data.Misses(m) || c.skips(&g.links.at[index], m))
}

// skips reports whether a message announces bytes that may never have been written: the peer has changed the link
// of the connection, without a validation message, and messages are left out. What is handed in of a link that is closed by now
// is not told apart from what a validation message over another link came before.
func (c *Conn) skips(l *link, m cdc.Message) bool {
	switch {
	case l.place() == c.peerLink || !c.data.Skips(m):
		return false
	case l.isUp():
		return c.cameTo&bitOf(l) == 0
	default:
		return !c.data.IsReplaying()
	}
}
