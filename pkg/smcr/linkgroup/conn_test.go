// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
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

// Who has something to send waits once, behind those who came before, and may wait again.
func TestConnQueue(t *testing.T) {
	var q connQueue
	conns := []*Conn{{slot: 0}, {slot: 1}, {slot: 2}}
	var got []int
	for _, c := range slices.Concat(conns, conns) {
		q.push(c)
	}
	first := q.pop()
	q.push(first)
	for !q.empty() {
		got = append(got, q.pop().slot)
	}
	if want := []int{1, 2, 0}; first != conns[0] || !slices.Equal(got, want) {
		t.Errorf("slot %d comes first, then %v, want 0 and %v", first.slot, got, want)
	}
	if q.push(conns[1]); q.pop() != conns[1] || !q.empty() {
		t.Error("an empty queue does not begin anew")
	}
	if n := testing.AllocsPerRun(100, func() { q.push(conns[0]); q.pop() }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// RFC 7609 §4.7: what goes over the end of the peer's RMBE is two writes, and each of them has up
// to two pieces of our send buffer, in the order of the stream.
func TestConn_appendWrites(t *testing.T) {
	g, _ := formed(Client)
	l := g.links.first()
	c := &Conn{g: g, link: l.place(), offset: 0x2000, peerRMB: &rtoken{}}
	c.peerRMB.set(l.index, RToken{RKey: 7, VAddr: 0x100000})
	c.data = cdc.NewConn(cdc.Config{Local: cdc.Ring{Size: 16}, SendBuffer: 10})
	c.data.Activate(cdc.Ring{Size: 16}, 1)
	write := func(offset int, spans ...cdc.Span) Output {
		o := Output{Kind: OutWrite, Conn: c, RemoteAddr: 0x102000 + uint64(offset), RKey: 7}
		copy(o.Local[:], spans)
		return o
	}
	for _, w := range []struct {
		name string
		t    cdc.Transmission
		want []Output
	}{
		{"no data", cdc.Transmission{Pos: 3}, nil},
		{"in one piece", cdc.Transmission{Pos: 2, Len: 5}, []Output{write(2, cdc.Span{Offset: 2, Len: 5})}},
		{"our buffer wraps", cdc.Transmission{Pos: 8, Len: 4}, []Output{write(8, cdc.Span{Offset: 8, Len: 2}, cdc.Span{Len: 2})}},
		{
			"both wrap",
			cdc.Transmission{Pos: 14, Len: 8},
			[]Output{write(14, cdc.Span{Offset: 4, Len: 2}), write(0, cdc.Span{Offset: 6, Len: 4}, cdc.Span{Len: 2})},
		},
	} {
		t.Run(w.name, func(t *testing.T) {
			before := c.writes
			got := c.appendWrites(nil, w.t)
			same := cmp.Comparer(func(a, b *Conn) bool { return a == b })
			if d := cmp.Diff(w.want, got, same); d != "" || c.writes-before != uint64(len(got)) {
				t.Errorf("%d writes are counted (-want +got):\n%s", c.writes-before, d)
			}
		})
	}
}
