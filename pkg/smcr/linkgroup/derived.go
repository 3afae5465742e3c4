// SPDX-License-Identifier: Apache-2.0

package linkgroup

import "fmt"

// derived is what parts of a group keep although it follows from the rest of the group, so that
// nobody has to count. No snapshot has it: [Restore] sets it, and check compares it.
type derived struct {
	present       uint8 // of linkTable
	conns, awaits [MaxLinks]int
	slots         [(maxSlots + 63) / 64]uint64
	n, zombies    int // of connTable
	rmbs          []rmbCounts
}

// rmbCounts are the derived counts of an RMB.
type rmbCounts struct{ used, zombies int }

// derive counts anew.
func derive(g *Group) derived {
	d := derived{rmbs: make([]rmbCounts, len(g.keys.rmbs))}
	for i := range g.links.at {
		if g.links.at[i].state != linkDown {
			d.present |= 1 << i
		}
	}
	for i, r := range g.keys.rmbs {
		for k := range r.elements {
			if !r.elements[k].isFree() {
				d.rmbs[i].used++
			}
		}
	}
	for slot, c := range g.conns.list {
		if c == nil {
			continue
		}
		d.slots[slot/64] |= 1 << (slot % 64)
		d.n++
		d.conns[c.dest().index]++
		if l := c.at(c.awaits); l != nil {
			d.awaits[l.index]++
		}
		if !c.zombie {
			continue
		}
		d.zombies++
		for i, r := range g.keys.rmbs {
			if r == c.rmb {
				d.rmbs[i].zombies++
			}
		}
	}
	return d
}

// set gives the parts what they keep.
func (d *derived) set(g *Group) {
	g.links.present = d.present
	for i := range g.links.at {
		g.links.at[i].conns, g.links.at[i].awaiting = d.conns[i], d.awaits[i]
	}
	g.links.classify()
	for i, r := range g.keys.rmbs {
		r.usedCount, r.zombies = d.rmbs[i].used, d.rmbs[i].zombies
	}
	g.conns.slots, g.conns.n, g.conns.zombies = d.slots, d.n, d.zombies
}

// check compares what the parts keep.
func (d *derived) check(g *Group) error {
	for i := range g.links.at {
		switch l := &g.links.at[i]; {
		case (d.present^g.links.present)>>i&1 != 0:
			return fmt.Errorf("link %d is %v, the set of links is %08b", i, l.state, g.links.present)
		case l.conns != d.conns[i]:
			return fmt.Errorf("link %d counts %d connections, there are %d", i, l.conns, d.conns[i])
		case l.awaiting != d.awaits[i]:
			return fmt.Errorf("link %d counts %d connections that await their SENDs, there are %d", i, l.awaiting, d.awaits[i])
		}
	}
	for i, r := range g.keys.rmbs {
		if is := (rmbCounts{r.usedCount, r.zombies}); is != d.rmbs[i] {
			return fmt.Errorf("RMB %d counts %+v elements, there are %+v", r.id, is, d.rmbs[i])
		}
	}
	t := &g.conns
	if t.n != d.n || t.zombies != d.zombies || t.slots != d.slots {
		return fmt.Errorf("the group counts %d connections, %d of them given up, in slots %x; there are %d, %d and %x",
			t.n, t.zombies, t.slots, d.n, d.zombies, d.slots)
	}
	return nil
}
