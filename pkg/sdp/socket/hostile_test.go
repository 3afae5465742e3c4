// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// hostile are the messages of one kind that a peer may send to do harm: of every form, and of values at all bounds.
func hostile(mid bsdh.MID) []bsdh.Message {
	var all []bsdh.Message
	for _, n := range []uint32{0, 1, 37, 900, bsdh.MaxBytes, 1<<32 - 1} {
		m := bsdh.Message{MID: mid, Bufs: uint16(n), Bytes: n, Port: uint16(n)}
		m.Advert = bsdh.Advert{Len: n, Key: rdma.RKey(n), Addr: 1<<64 - 1 - uint64(n), NonDiscards: n}
		m.Change = bsdh.ModeWord{Mode: bsdh.Mode(n % 3), Send: n&1 != 0}
		all = append(all, m)
		if mid >= bsdh.SinkAvail {
			m.Payload = make([]byte, 1+n%800)
			m.Flags = bsdh.OOBPending
			all = append(all, m)
			m.Flags = bsdh.OOBPresent | bsdh.RequestPipelined
			all = append(all, m)
		}
	}
	return all
}

// Every message in every state: it is in order, or ends the connection with ErrProtocol and nothing else. After that no key
// is left, and every buffer is back.
func TestHostileMessages(t *testing.T) {
	cfg := Config{ZcopyBytes: 1000, RecvBytes: 900, RecvBuffers: 8, MaxAdverts: 4, Keep: true, Suspends: true, MaxRecvBytes: 2000}
	for _, e := range endings {
		for mid := range 256 {
			if bsdh.MID(mid).HeadersLen() == bsdh.HeaderLen && mid > int(bsdh.SuspCommAck) && mid < int(bsdh.Data) {
				continue // there is no such kind; TestSection6_1_1_Kinds
			}
			for i, m := range hostile(bsdh.MID(mid)) {
				w, a, b := pair(t, cfg, cfg)
				w.gone = true
				e.bring(w, a, b)
				a.out = nil
				var inv *rdma.RKey
				if i%2 == 1 {
					key := b.lastKey // perhaps the right one
					inv = &key
				}
				for range 20 { // and without end
					if len(b.posted) == 0 {
						break
					}
					m.Seq, m.Ack = b.s.credits.received+1, max(b.s.credits.peerAck+1, 1)-1
					at := b.posted[0]
					b.posted, b.buffers[at] = b.posted[1:], m.Append(nil, bsdh.LayoutFigures)
					err := b.s.HandleRecv(w.now, at, b.buffers[at], inv)
					if err != nil && (!errors.Is(err, ErrProtocol) || b.s.State() != StateClosed && b.s.State() != StateAbort) {
						t.Fatalf("%s, %v %d: %v, %v", e.name, m.MID, i, err, b.s.State())
					}
					b.run()
				}
				if v := b.s.Snapshot(); len(v.PeerSinks)+len(v.PeerSrcs) > cfg.MaxAdverts {
					t.Fatalf("%s, %v %d: %d adverts", e.name, m.MID, i, len(v.PeerSinks)+len(v.PeerSrcs))
				}
				b.targets, b.done = nil, nil
				b.s.Abort(w.now)
				b.s.HandleTimeout(w.now.Add(time.Hour))
				b.s.HandleDown(errors.New("gone"))
				b.run()
				if b.s.State() != StateClosed || len(b.keys)+len(b.writes) > 0 {
					t.Fatalf("%s, %v %d: %v, keys %v, writes %v", e.name, m.MID, i, b.s.State(), b.keys, b.writes)
				}
			}
		}
	}
}
