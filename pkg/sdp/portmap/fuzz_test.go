// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"net/netip"
	"testing"
	"time"
)

// FuzzLookup gives a lookup hostile datagrams at hostile times. It ends in time, sends what it may, and an answer is
// one that was in a PMAccept.
//
// The input is a sequence of records: a byte that says how long it takes and what happens, and for a
// datagram an edit of a good one.
func FuzzLookup(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0x40, 0x14, 1, 0x80, 0, 0})
	f.Add(bytes.Repeat([]byte{0xff, 0, 0}, 8))
	f.Add([]byte{0x41, 0x34, 0, 0x42, 0x14, 0, 0x43, 40, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		l, now := newLookup(), began
		requests, acks := 0, 0
		for ; len(in) >= 3; in = in[3:] {
			for b, ok := l.Poll(nil); ok; b, ok = l.Poll(nil) {
				switch m, err := ParseMessage(b); {
				case err != nil:
					t.Fatal(err)
				case m.Type == Request:
					requests++
				case m.Type == Ack:
					acks++
				default:
					t.Fatalf("sends %v", m)
				}
			}
			now = now.Add(time.Duration(in[0]&0x3f) * 50 * time.Millisecond)
			switch in[0] >> 6 {
			case 0, 3:
				l.HandleTimeout(now)
			case 1:
				b := answer(Accept).Append(nil)
				b[0] = in[1]
				b[int(in[2])%Len] ^= in[1] & 0x0f
				l.HandleDatagram(b)
			default:
				l.HandleDatagram(answer(Type(in[1] & 3)).Append(nil)[:min(int(in[2]), Len)])
			}
		}
		_, waits := l.NextTimeout()
		accepted := l.State() == Accepted
		if requests > DefaultTries || acks > 1 || acks == 1 && !accepted || waits != (l.State() == Waiting) {
			t.Fatalf("%v: %d PMReqs, %d PMAcks, waits: %v", l.State(), requests, acks, waits)
		}
		for range DefaultTries {
			now = now.Add(time.Minute)
			l.HandleTimeout(now)
		}
		if l.State() == Waiting {
			t.Fatalf("waits after %v", now.Sub(began))
		}
		if accepted {
			if sdp, _ := l.Answer(); !mayConnect(service.Addr(), sdp) {
				t.Fatalf("the answer is %v", sdp)
			}
		}
	})
}

// FuzzServer gives a server hostile datagrams of some peers. Whatever they are, it stays within its bounds, and an answer
// is as long as what is answered at most, and to nobody else.
func FuzzServer(f *testing.F) {
	f.Add([]byte{1, 0, 0, 1, 0x20, 0, 2, 0, 1, 3, 0xff, 7})
	f.Add(bytes.Repeat([]byte{7, 4, 6}, 40))
	f.Fuzz(func(t *testing.T, in []byte) {
		c := ServerConfig{MaxMappings: 2, MaxPending: 5, MaxPendingPerPeer: 2, MaxPeers: 3, PeerRate: 5, PeerBurst: 8, AckTimeout: time.Second}
		s, now := NewServer(c), began
		_ = s.Map(service, sdpAddr)
		for ; len(in) >= 3; in = in[3:] {
			now = now.Add(time.Duration(in[0]>>4) * 20 * time.Millisecond)
			from := netip.AddrFrom4([4]byte{10, 0, 0, in[0] & 7})
			m := answer(Type(in[1] & 3))
			m.CP, m.Handle = netip.AddrPortFrom(from, uint16(in[1]>>2&7)), uint64(in[1]>>5)
			b := m.Append(nil)
			switch in[2] & 15 {
			case 0:
				b = b[:in[2]>>4]
			case 1:
				b[0] ^= in[2]
			case 2:
				s.Unmap(service)
			case 3:
				_ = s.Map(service, sdpAddr)
			case 4:
				s.HandleConnect(m.CP, sdpAddr)
			case 5:
				b[47]++ // another service
			}
			a := s.HandleDatagram(now, from, service.Addr(), b, nil)
			if len(a) > 0 {
				r, err := ParseMessage(a)
				if q, _ := ParseMessage(b); err != nil || len(a) > len(b) || q.Type != Request || r.CP != q.CP || r.Handle != q.Handle || r.Type != Accept && r.Type != Deny {
					t.Fatalf("%v is answered by %v (%v)", q, r, err)
				}
			}
			st := s.Stats()
			if st.Pending > c.MaxPending || st.Peers > c.MaxPeers || st.Mappings > c.MaxMappings {
				t.Fatalf("beyond its bounds: %+v", st)
			}
			listed := 0
			for _, l := range s.byCP {
				listed += len(l)
			}
			if listed != st.Pending {
				t.Fatalf("%d transactions are listed, %d wait", listed, st.Pending)
			}
		}
		s.HandleTimeout(now.Add(c.AckTimeout))
		if st := s.Stats(); st.Pending != 0 || st.Accepted < st.Acked+st.Connected+st.Expired {
			t.Fatalf("in the end: %+v", st)
		}
	})
}

// BenchmarkServer_refuses: what a datagram costs that is denied, and one that is throttled.
func BenchmarkServer_refuses(b *testing.B) {
	for name, rate := range map[string]int{"denied": 1_000_000_000, "throttled": 1} {
		b.Run(name, func(b *testing.B) {
			s := NewServer(ServerConfig{PeerRate: rate, PeerBurst: rate})
			m := req().Append(nil)
			var out [Len]byte
			now := began
			b.ReportAllocs()
			for b.Loop() {
				now = now.Add(10)
				s.HandleDatagram(now, cpAddr.Addr(), service.Addr(), m, out[:0])
			}
		})
	}
}

// TestServer_refusesWithoutGarbage: what a server does not accept allocates nothing.
func TestServer_refusesWithoutGarbage(t *testing.T) {
	s := NewServer(ServerConfig{PeerRate: 1_000_000_000, PeerBurst: 1_000_000_000})
	var out [Len]byte
	for name, b := range map[string][]byte{"PMReq": req().Append(nil), "PMAck": answer(Ack).Append(nil), "PMDeny": answer(Deny).Append(nil)} {
		if n := testing.AllocsPerRun(100, func() { s.HandleDatagram(began, cpAddr.Addr(), service.Addr(), b, out[:0]) }); n > 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
