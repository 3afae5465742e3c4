// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// check tests what must hold between any two steps.
func check(g *Group) error {
	up, active := 0, 0
	ids := map[llc.LinkID]LinkIndex{}
	for i := range g.links.at {
		l := &g.links.at[i]
		if l.isUp() {
			up++
		}
		if l.state == linkActive {
			active++
		}
		if err := checkLink(g, l); err != nil {
			return err
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
		if active == 0 && up < 2 { // of two that drain the second one is kept
			return fmt.Errorf("group is %v with %d links, none of which is ACTIVE", g.state, up)
		}
	case Dead:
		if up > 0 || g.adding.isUnderWay() || len(g.requests.line) > 0 {
			return fmt.Errorf("dead group with %d links, %d exchanges", up, len(g.requests.line))
		}
	case Forming:
	}
	if err := checkExchanges(g); err != nil {
		return err
	}
	for _, c := range g.conns.list {
		if c == nil {
			continue
		}
		if err := checkConn(g, c); err != nil {
			return err
		}
	}
	for _, r := range g.keys.rmbs {
		held := slices.ContainsFunc(r.elements, func(e element) bool { return e.held })
		if r.state == rmbForgotten && (held || r.usedCount == 0) {
			return fmt.Errorf("RMB %d, which the peer has forgotten, has %d elements out of use, held back: %t", r.id, r.usedCount, held)
		}
	}
	d := derive(g)
	return d.check(g)
}

func checkLink(g *Group, l *link) error {
	if l.state == linkDown && (len(l.queue) > 0 || l.inflight != 0 || !l.ready.empty() || !l.drainBy.IsZero()) {
		return fmt.Errorf("link %d is down and has something to do", l.index)
	}
	if l.state != linkDraining && !l.drainBy.IsZero() {
		return fmt.Errorf("link %d is %v and drains", l.index, l.state)
	}
	for _, r := range g.keys.rmbs {
		if l.state > linkWanted && r.registered>>l.local.RNIC&1 == 0 {
			return fmt.Errorf("RMB %d is not registered with RNIC %d of link %d", r.id, l.local.RNIC, l.index)
		}
	}
	if l.inflight < 0 || l.inflight > SendBudget {
		return fmt.Errorf("link %d: %d SENDs under way", l.index, l.inflight)
	}
	if l.untilLong < 0 || l.untilLong > l.inflight {
		return fmt.Errorf("link %d: a long message is SEND %d of %d under way", l.index, l.untilLong, l.inflight)
	}
	return nil
}

func checkExchanges(g *Group) error {
	if s := g.adding.step; s != addNone && (g.links.at[g.adding.link].state != linkForming) != (s == addWantEndpoint) {
		return fmt.Errorf("link %d is %v while %v is waited for", g.adding.link, g.links.at[g.adding.link].state, s)
	}
	switch s := g.side.(type) {
	case *client:
		if l := g.links.in(s.spare); l != nil && l.state != linkForming {
			return fmt.Errorf("spare link %d is %v", l.index, l.state)
		}
	case *server:
		if s.asked.via != noPlace && !g.requests.has(exchangeAddLink) {
			return fmt.Errorf("no exchange will answer the client's request for a link")
		}
	}
	return nil
}

func checkConn(g *Group, c *Conn) error {
	if g.state == Active && (c.data.AwaitsDelivery() && c.awaits == noPlace || c.awaits != noPlace && c.awaits != c.link) {
		return fmt.Errorf("connection 0x%08x is on link %d and awaits its SENDs on %d", uint32(c.token), c.at(c.link).index, c.awaits)
	}
	if (g.state == Active || g.state == Draining) && (!c.at(c.link).isUp() || !c.dest().isUp()) {
		return fmt.Errorf("connection 0x%08x is on link %d, %v, and wants to %d, %v",
			uint32(c.token), c.at(c.link).index, c.at(c.link).state, c.dest().index, c.dest().state)
	}
	if c.target != noPlace && (c.data.InFlight() == 0 || c.data.Repeats() && c.data.Pending()) && !c.queued && g.state == Active {
		return fmt.Errorf("connection 0x%08x waits for nothing before it moves", uint32(c.token))
	}
	return nil
}
