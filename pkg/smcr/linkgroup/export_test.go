// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// Check tests what must hold between any two steps.
func (g *Group) Check() error {
	up := 0
	ids := map[llc.LinkID]LinkIndex{}
	for i := range g.links {
		l := &g.links[i]
		if l.isUp() {
			up++
		}
		if (l.state != linkDown) != (g.present&(1<<i) != 0) {
			return fmt.Errorf("link %d is %v, the set of links is %08b", i, l.state, g.present)
		}
		if l.state == linkDown && (len(l.queue) > 0 || l.inflight != 0 || !l.ready.empty() || !l.drainBy.IsZero()) {
			return fmt.Errorf("link %d is down and has something to do", i)
		}
		if l.inflight < 0 || l.inflight > SendBudget {
			return fmt.Errorf("link %d: %d SENDs under way", i, l.inflight)
		}
		if l.state > linkWanted && l.id != 0 {
			if o, ok := ids[l.id]; ok {
				return fmt.Errorf("links %d and %d have number %d", o, i, l.id)
			}
			ids[l.id] = l.index
		}
	}
	switch g.state {
	case Active, Draining:
		if up == 0 {
			return fmt.Errorf("group is %v without a link", g.state)
		}
	case Dead:
		if up > 0 || g.adding.step != addNone || len(g.flows) > 0 {
			return fmt.Errorf("dead group with %d links, %d exchanges", up, len(g.flows))
		}
	case Forming:
	}
	if s := g.adding.step; s != addNone && (g.links[g.adding.link].state != linkForming) != (s == addWantEndpoint) {
		return fmt.Errorf("link %d is %v in step %d of its exchange", g.adding.link, g.links[g.adding.link].state, s)
	}
	if g.spare != nil && g.spare.state != linkForming {
		return fmt.Errorf("spare link %d is %v", g.spare.index, g.spare.state)
	}
	if g.asked.via != nil && !slices.ContainsFunc(g.flows, func(f flow) bool { return f.kind == flowAddLink }) {
		return fmt.Errorf("no exchange will answer the client's request for a link")
	}
	return g.checkConns()
}

func (g *Group) checkConns() error {
	var conns, awaiting [MaxLinks]int
	for _, c := range g.conns {
		if c == nil {
			continue
		}
		conns[c.dest().index]++
		if c.awaits != nil {
			awaiting[c.awaits.index]++
		}
		if g.state == Active && (c.data.AwaitsDelivery() && c.awaits == nil || c.awaits != nil && c.awaits != c.link) {
			return fmt.Errorf("connection 0x%08x is on link %d and awaits its SENDs on %+v", uint32(c.token), c.link.index, c.awaits)
		}
		if (g.state == Active || g.state == Draining) && (!c.link.isUp() || !c.dest().isUp()) {
			return fmt.Errorf("connection 0x%08x is on link %d, %v, and wants to %d, %v",
				uint32(c.token), c.link.index, c.link.state, c.dest().index, c.dest().state)
		}
		if c.target != nil && (c.data.InFlight() == 0 || c.data.Repeats() && c.data.Pending()) && !c.queued && g.state == Active {
			return fmt.Errorf("connection 0x%08x waits for nothing before it moves", uint32(c.token))
		}
	}
	for i, n := range conns {
		if g.links[i].conns != n {
			return fmt.Errorf("link %d counts %d connections, there are %d", i, g.links[i].conns, n)
		}
		if g.links[i].awaiting != awaiting[i] {
			return fmt.Errorf("link %d counts %d connections that await their SENDs, there are %d", i, g.links[i].awaiting, awaiting[i])
		}
	}
	return nil
}
