// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// An attack is what a round does with its link.
type attack struct {
	name   string
	victim bool // there is another peer with a link group of its own
	play   func(p *peer)
}

// Numbers of messages of one attack.
const (
	damaged = 40
	storm   = 400
)

// attacks is the table of all attacks.
var attacks = []attack{
	{name: "damaged LLC messages", play: func(p *peer) {
		p.repeat(damaged, func() bool { return p.send(p.damage(p.anyLLC())) })
	}},
	{name: "damaged CDC messages", play: func(p *peer) {
		p.repeat(damaged, func() bool { return p.send(p.damage(p.cdc().Append(nil))) })
	}},
	{name: "random bytes", play: func(p *peer) {
		p.repeat(damaged, func() bool { return p.send(p.bytes(p.rnd.IntN(200))) })
	}},
	{name: "wrong lengths", play: func(p *peer) {
		for _, n := range []int{0, 1, 2, 3, 4, 43, 45, 88, 100, 4095, slotBytes} {
			m := append(p.anyLLC(), make([]byte, slotBytes)...)
			if !p.send(m[:n]) {
				return
			}
		}
	}},
	{name: "CDC messages with wrong lengths", play: func(p *peer) {
		for _, n := range []int{1, 4, 28, 43, 45, 100} {
			m := append(p.cdc().Append(nil), make([]byte, 100)...)
			if !p.send(m[:n]) {
				return
			}
		}
	}},
	{name: "answers that nobody asked for", play: func(p *peer) {
		p.repeat(damaged, func() bool {
			b := p.anyLLC()
			b[3] |= 0x80 // R
			return p.send(b)
		})
	}},
	{name: "requests at the wrong time", play: func(p *peer) {
		p.repeat(damaged, func() bool { return p.send(p.anyLLC()) })
	}},
	{name: "unknown connections", play: func(p *peer) {
		p.repeat(damaged, func() bool {
			m := p.cdc()
			m.Token = cdc.AlertToken(p.rnd.Uint32())
			return p.send(m.Append(nil))
		})
	}},
	{name: "impossible cursors", play: func(p *peer) {
		p.repeat(damaged, func() bool {
			m := p.cdc()
			m.Prod = cdc.Cursor{Wrap: uint16(p.rnd.Uint32()), Count: p.rnd.Uint32()}
			m.Cons = cdc.Cursor{Wrap: uint16(p.rnd.Uint32()), Count: p.rnd.Uint32()}
			return p.send(m.Append(nil))
		})
	}},
	{name: "writes into the next elements of its RMB", play: func(p *peer) {
		size := uint64(p.accept.RMBESize.Bytes())
		p.write(p.rmbe()+size, p.accept.RKey, slotBytes) // the first RMB has two elements
	}},
	{name: "storm of messages", play: func(p *peer) {
		p.repeat(storm, func() bool { return p.send(p.test()) })
	}},
	{name: "storm without taking the answers", play: func(p *peer) {
		p.deaf = true
		p.repeat(storm, func() bool { return p.send(p.test()) })
	}},
	// Who asks for memory that is not its own three times is barred for a minute: these are
	// the last ones, and three.
	{name: "wrong rkey", play: func(p *peer) {
		p.write(p.rmbe(), p.accept.RKey^rdma.RKey(1+p.rnd.Uint32N(1<<31)), 64)
	}},
	{name: "writes outside the RMB", play: func(p *peer) {
		if p.rnd.Uint32()&1 == 0 {
			p.write(p.rmbe()+1<<40, p.accept.RKey, 64)
			return
		}
		p.write(p.accept.RMBAddr-64, p.accept.RKey, 128)
	}},
	{name: "writes into the RMB of another link group", victim: true, play: func(p *peer) {
		v := p.victim
		p.write(v.rmbe(), v.accept.RKey, 64)
		v.quiesce(quietTime)
	}},
}

func (p *peer) repeat(n int, f func() bool) {
	for range n {
		if !f() {
			return
		}
		p.poll()
	}
}

func (p *peer) bytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(p.rnd.Uint32())
	}
	return b
}

// damage changes some bytes, more often in front.
func (p *peer) damage(b []byte) []byte {
	for range 1 + p.rnd.IntN(6) {
		b[p.rnd.IntN(1+p.rnd.IntN(len(b)))] = byte(p.rnd.Uint32())
	}
	return b
}

// rmbe is where the server's RMBE begins.
func (p *peer) rmbe() uint64 {
	addr, _ := p.accept.RMBEAddr()
	return addr
}

// cdc is a message for our connection that says that nothing has happened.
func (p *peer) cdc() cdc.Message {
	return cdc.Message{Seq: uint16(p.rnd.Uint32N(8)), Token: cdc.AlertToken(p.accept.AlertToken), Flags: cdc.Flags(p.rnd.Uint32N(4) * p.rnd.Uint32())}
}

func (p *peer) test() []byte {
	return llc.TestLink{Header: llc.Header{Version: llc.Version2}, UserData: [16]byte(p.bytes(16))}.Append(nil)
}

// anyLLC is a message that is right in itself.
func (p *peer) anyLLC() []byte {
	h := llc.Header{Version: llc.Version2}
	gid := p.d.GIDs()[0]
	id := llc.LinkID(p.rnd.Uint32N(4))
	switch p.rnd.IntN(8) {
	case 0:
		return llc.ConfirmLink{Header: h, MAC: gid.MAC, GID: gid.GID, QPN: p.qp.Num(), Link: id, MaxLinks: 2}.Append(nil)
	case 1:
		return llc.AddLink{Header: h, Dialect: llc.DialectLinux, MAC: gid.MAC, GID: gid.GID, QPN: p.qp.Num(), Link: id, MTU: p.mtu()}.Append(nil)
	case 2:
		return llc.DeleteLink{Header: h, Link: id + 1, Orderly: p.rnd.IntN(2) == 0, Reason: llc.DeleteLostPath}.Append(nil)
	case 3:
		return llc.RequestAddLink{Header: h, GIDs: []rdma.GID{gid.GID}}.Append(nil)
	case 4:
		return llc.ConfirmRKey{Header: h, Others: uint8(p.rnd.Uint32N(5)), This: llc.RToken{RKey: rdma.RKey(p.rnd.Uint32()), VAddr: p.rnd.Uint64()}}.Append(nil)
	case 5:
		return llc.DeleteRKeyV2{Header: h, RKeys: []rdma.RKey{p.rmb.RKey(), rdma.RKey(p.rnd.Uint32())}}.Append(nil)
	case 6:
		return llc.ConfirmRKeyContinuation{Header: h}.Append(nil)
	}
	return p.test()
}
