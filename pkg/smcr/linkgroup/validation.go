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

// AwaitsEarlier reports whether a message is a failover validation message that
// would reset its connection, because a message that the peer knows to be
// acknowledged was not handed in (§4.6.1). The shell asks before HandleRecv:
// what arrived over the lost link may still wait in a completion queue that it
// has not come to yet, and must be handed in first. If the answer is the same
// then, data is lost.
func (g *Group) AwaitsEarlier(b []byte) bool {
	if !cdc.IsValidation(b) {
		return false
	}
	m, err := cdc.Parse(b)
	if err != nil {
		return false
	}
	c := g.conns.byToken(m.Token)
	return c != nil && c.data.Misses(m)
}
