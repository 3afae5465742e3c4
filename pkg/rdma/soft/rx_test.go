// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// TestAttack_stormAllocatesNothing: packets that are dropped, from however many addresses
// and ports, cost the receiver no memory.
func TestAttack_stormAllocatesNothing(t *testing.T) {
	for _, local := range []string{"192.0.2.1", "fd00::1"} {
		q := silent(t, Config{Addr: netip.MustParseAddr(local)}) // without a peer
		d := q.dev
		r := &receiver{dev: d}
		junk := make([]byte, 16)
		msgs := make([]Message, rxBatch)
		good := make([][]byte, rxBatch)
		for i := range good {
			hdr := (&rocev2.Packet{BTH: rocev2.BTH{OpCode: rocev2.SendOnly, PKey: rocev2.PKey, DestQP: []rdma.QPN{q.Num(), 1}[i%2]}}).AppendHeader(nil)
			good[i] = binary.LittleEndian.AppendUint32(hdr, 0)
		}
		port, addr := uint16(0), d.cfg.Addr
		storm := func() {
			for i := range msgs {
				if port++; i%3 == 0 {
					addr = addr.Next()
				}
				peer := netip.AddrPortFrom(addr, port)
				msgs[i] = Message{Peer: peer, Data: junk}
				if i%3 != 0 {
					c := rocev2.NewICRC(rocev2.Addresses{Src: addr, SrcPort: port, Dst: d.cfg.Addr, DstPort: rocev2.Port})
					b := good[i]
					binary.LittleEndian.PutUint32(b[len(b)-rocev2.ICRCLen:], c.Sum(0, b[:len(b)-rocev2.ICRCLen], nil, 0))
					msgs[i].Data = b
				}
			}
			r.take(msgs)
		}
		storm()
		if n := testing.AllocsPerRun(2000, storm); n != 0 {
			t.Errorf("%s: %v allocations for %d packets", local, n, rxBatch)
		}
		s := d.Stats()
		if s.RxBadICRC == 0 || s.RxUnknownQP == 0 || s.RxWrongSource == 0 || s.RxPackets != s.RxBadICRC+s.RxUnknownQP+s.RxWrongSource {
			t.Errorf("%s: counters %+v", local, s)
		}
	}
}
