// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"math/rand/v2"
	"testing"
)

// The table finds a connection by its token, also where several slots share the
// token's last byte; a token that is not ours, or not any more, finds none.
func TestConnTable(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var table connTable
	var conns []*Conn
	for range maxSlots {
		c := &Conn{}
		table.add(rng, c)
		conns = append(conns, c)
	}
	for _, c := range conns {
		if table.byToken(c.token) != c || c.token&0xff == 0 {
			t.Fatalf("token 0x%08x of slot %d", uint32(c.token), c.slot)
		}
	}
	if table.byToken(0) != nil || table.byToken(conns[0].token+256) != nil {
		t.Error("a token that nobody has finds a connection")
	}
	gone := conns[slotsPerByte]
	if !table.remove(gone) || table.remove(gone) || table.n != maxSlots-1 || table.byToken(gone.token) != nil {
		t.Error("a connection is removed twice, or found afterwards")
	}
	c := &Conn{}
	if table.add(rng, c); c.slot != gone.slot {
		t.Errorf("slot %d, want %d, which is free", c.slot, gone.slot)
	}
}
