// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"bytes"
	"testing"
)

// Packets of every size from every position have the bytes of the message.
func TestGatherList(t *testing.T) {
	message := []byte("0123456789abcdef")
	for size := 1; size <= len(message); size++ {
		for from := 0; from < len(message); from += size {
			var g gatherList
			g.reset()
			for _, end := range []span{{0, 3}, {3, 4}, {4, 11}, {11, 16}} {
				g.add(message[end.start:end.end])
			}
			g.seek(from)
			var got []byte
			for off := from; off < len(message); off += size {
				var p TxPacket
				n := min(size, len(message)-off)
				g.take(&p, n)
				if p.PayloadLen != n || (p.PayloadLen+p.Pad)%4 != 0 || p.Pad > 3 {
					t.Fatalf("payload of %d bytes with %d of padding, want %d", p.PayloadLen, p.Pad, n)
				}
				got = append(got, bytes.Join(p.Payload[:p.Segs], nil)...)
			}
			if want := message[from:]; !bytes.Equal(got, want) {
				t.Errorf("packets of %d bytes from byte %d: %q, want %q", size, from, got, want)
			}
		}
	}
}

func TestGatherList_forgets(t *testing.T) {
	var g gatherList
	g.add([]byte{1})
	g.ready = true
	g.forget()
	if g.ready || g.bufs[0] != nil {
		t.Errorf("memory is left: %+v", g)
	}
}
