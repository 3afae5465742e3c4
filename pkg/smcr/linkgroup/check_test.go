// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"strings"
	"testing"
	"time"
)

// The simulator, the fuzzers and Restore trust check: it must say of each thing that cannot
// be what it is.
func TestCheck(t *testing.T) {
	now := time.Unix(1, 0)
	end := func(g *Group) {
		for i := range g.links.at {
			g.links.becomeDown(&g.links.at[i])
		}
		g.state = Dead
	}
	for want, spoil := range map[string]func(g *Group, l *link, c *Conn){
		"links 0 and 1 have number 1":                    func(_ *Group, l *link, _ *Conn) { l.id = 1 },
		"dead group with 2 links":                        func(g *Group, _ *link, _ *Conn) { g.state = Dead },
		"link 1 is ACTIVE, the set of links is 00000001": func(g *Group, _ *link, _ *Conn) { g.links.present = 1 },
		"link 2 is DOWN, the set of links is 00000111":   func(g *Group, _ *link, _ *Conn) { g.links.present |= 4 },
		"link 2 is down and has something to do":         func(g *Group, _ *link, _ *Conn) { g.links.at[2].inflight = 1 },
		"link 3 is down and has something to do":         func(g *Group, _ *link, _ *Conn) { g.links.at[3].queue = make([]message, 1) },
		"link 4 is down and has something to do":         func(g *Group, _ *link, _ *Conn) { g.links.at[4].ready.push(&Conn{}) },
		"link 5 is down and has something to do":         func(g *Group, _ *link, _ *Conn) { g.links.at[5].drainBy = now },
		"link 1 is ACTIVE and drains":                    func(_ *Group, l *link, _ *Conn) { l.drainBy = now },
		"RMB 1 is not registered with RNIC 1 of link 1":  func(g *Group, _ *link, _ *Conn) { g.keys.rmbs[0].registered = 1 },
		"link 1: -1 SENDs under way":                     func(_ *Group, l *link, _ *Conn) { l.inflight = -1 },
		"link 1: 41 SENDs under way":                     func(_ *Group, l *link, _ *Conn) { l.inflight = SendBudget + 1 },
		"link 1: a long message is SEND 2 of 1":          func(_ *Group, l *link, _ *Conn) { l.untilLong = 2 },
		"spare link 1 is ACTIVE":                         func(g *Group, l *link, _ *Conn) { g.side = &client{spare: l.place()} },
		"link 1 counts 2 connections, there are 1":       func(_ *Group, l *link, _ *Conn) { l.conns++ },
		"link 0 counts 1 connections that await":         func(g *Group, _ *link, _ *Conn) { g.links.at[0].awaiting++ },
		"RMB 1 counts {used:2 zombies:0} elements":       func(g *Group, _ *link, _ *Conn) { g.keys.rmbs[0].usedCount++ },
		"RMB 1 counts {used:1 zombies:1} elements":       func(g *Group, _ *link, _ *Conn) { g.keys.rmbs[0].zombies++ },
		"counts 2 connections, 0 of them given up":       func(g *Group, _ *link, _ *Conn) { g.conns.n++ },
		"counts 1 connections, 1 of them given up":       func(g *Group, _ *link, _ *Conn) { g.conns.zombies++ },
		"0 of them given up, in slots [3 0":              func(g *Group, _ *link, _ *Conn) { g.conns.slots[0] |= 2 },
		"is on link 1 and awaits its SENDs on 1":         func(g *Group, _ *link, c *Conn) { c.setAwaits(&g.links.at[0]) },
		"is on link 1 and awaits its SENDs on 0":         func(_ *Group, _ *link, c *Conn) { c.data.Shutdown() },
		"is on link 2, DOWN, and wants to 2, DOWN":       func(g *Group, _ *link, c *Conn) { c.link = g.links.at[2].place() },
		"is on link 1, ACTIVE, and wants to 2, DOWN":     func(g *Group, _ *link, c *Conn) { c.target = g.links.at[2].place() },
		"RMB 1, which the peer has forgotten, has 1": func(g *Group, _ *link, _ *Conn) {
			g.keys.rmbs[0].becomeForgotten()
			g.keys.rmbs[0].elements[0].becomeHeld()
		},
		"none of which is ACTIVE": func(g *Group, l *link, _ *Conn) {
			g.links.at[0].state, l.state = linkForming, linkDraining
		},
		"dead group with 0 links, 1 exchanges": func(g *Group, _ *link, _ *Conn) {
			end(g)
			g.requests.line = make([]exchange, 1)
		},
		"dead group with 0 links, 0 exchanges": func(g *Group, _ *link, _ *Conn) {
			end(g)
			g.adding.step = addWaitReply
		},
		"link 1 is ACTIVE while CONFIRM LINK is waited for": func(g *Group, l *link, _ *Conn) {
			g.adding.step, g.adding.link = addWaitConfirm, l.index
		},
		"link 2 is FORMING while an RNIC is waited for": func(g *Group, _ *link, _ *Conn) {
			l := g.links.free()
			g.links.becomeForming(l, Endpoint{})
			g.adding.step, g.adding.link = addWantEndpoint, l.index
		},
		"no exchange will answer the client's request": func(g *Group, l *link, _ *Conn) {
			g.side = &server{asked: wish{via: l.place()}}
		},
		"is on link 2, DOWN, and wants to 0, ACTIVE": func(g *Group, _ *link, c *Conn) {
			c.link, c.target = g.links.at[2].place(), g.links.at[0].place()
		},
		"waits for nothing before it moves": func(g *Group, l *link, c *Conn) {
			g.HandleSent(now, l.index, uint64(c.token))
			c.target = g.links.at[0].place()
		},
	} {
		t.Run(want, func(t *testing.T) {
			g, _, l := pair(Client)
			c := writing(t, g, l)
			if err := check(g); err != nil {
				t.Fatal(err)
			}
			spoil(g, l, c)
			if err := check(g); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v", err)
			}
		})
	}
}
