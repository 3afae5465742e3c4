// SPDX-License-Identifier: Apache-2.0

package rocev2

// gatherList is the memory of the message that is being sent, in pieces, and the position
// in it from which the next packet takes its payload.
type gatherList struct {
	ready bool // the memory is that of the work request at cur, the position that of nxt
	bufs  [MaxSGE][]byte
	nbufs int
	seg   int // the piece of the position
	off   int // the position in that piece
}

// reset begins a list without pieces.
func (g *gatherList) reset() { g.nbufs, g.seg = 0, 0 }

// add appends a piece.
func (g *gatherList) add(b []byte) {
	g.bufs[g.nbufs] = b
	g.nbufs++
}

// seek moves the position from the start of the list to a byte of the message.
func (g *gatherList) seek(off int) {
	g.off = off
	for g.seg < g.nbufs && g.off >= len(g.bufs[g.seg]) {
		g.off -= len(g.bufs[g.seg])
		g.seg++
	}
}

// take makes the next n bytes of the message the payload of a packet.
func (g *gatherList) take(t *TxPacket, n int) {
	t.PayloadLen = n
	t.Pad = padLen(n)
	for n > 0 {
		b := g.bufs[g.seg][g.off:]
		if len(b) > n {
			b = b[:n:n]
			g.off += n
		} else {
			g.seg++
			g.off = 0
		}
		t.Payload[t.Segs] = b
		t.Segs++
		n -= len(b)
	}
}

// leave ends the message: the memory is looked up again before the next packet.
func (g *gatherList) leave() { g.ready = false }

// forget is leave without keeping the pieces.
func (g *gatherList) forget() {
	g.ready = false
	g.bufs = [MaxSGE][]byte{}
}
