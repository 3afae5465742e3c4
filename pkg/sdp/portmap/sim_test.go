// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// A net carries datagrams between clients and a server, and loses, doubles and reorders them.
type network struct {
	rnd    *rand.Rand
	now    time.Time
	queue  flights
	seq    int
	loss   float64
	double float64
}

type flight struct {
	at     time.Time
	seq    int
	b      []byte
	client int // to or from which
	up     bool
}

type flights []flight

func (f flights) Len() int { return len(f) }
func (f flights) Less(i, j int) bool {
	return f[i].at.Before(f[j].at) || f[i].at.Equal(f[j].at) && f[i].seq < f[j].seq
}
func (f flights) Swap(i, j int) { f[i], f[j] = f[j], f[i] }
func (f *flights) Push(x any)   { *f = append(*f, x.(flight)) }
func (f *flights) Pop() any {
	old := *f
	x := old[len(old)-1]
	*f = old[:len(old)-1]
	return x
}

func (n *network) send(b []byte, client int, up bool) {
	copies := 1
	if n.rnd.Float64() < n.double {
		copies = 2
	}
	for range copies {
		if n.rnd.Float64() < n.loss {
			continue
		}
		n.seq++
		delay := time.Duration(n.rnd.Int64N(int64(400 * time.Millisecond))) // longer than the first timeout
		heap.Push(&n.queue, flight{n.now.Add(delay), n.seq, append([]byte(nil), b...), client, up})
	}
}

// TestSection7_2_Recovery: whatever is lost, doubled and reordered, and whatever the owner does with his table meanwhile, each
// client ends with an answer that was true once or with none, acknowledges at most once, and nothing is
// left at the server (§7.2).
func TestSection7_2_Recovery(t *testing.T) {
	seed := testenv.Seed(t)
	for i := range uint64(2000) {
		if err := simulate(seed + i); err != nil {
			t.Fatalf("seed %d: %v", seed+i, err)
		}
	}
}

func simulate(seed uint64) error {
	const clients = 6
	rnd := rand.New(rand.NewPCG(seed, 1))
	n := &network{rnd: rnd, now: began, loss: rnd.Float64() * 0.9, double: rnd.Float64() * 0.5}
	if rnd.IntN(4) == 0 {
		n.loss = 0
	}
	s := NewServer(ServerConfig{CacheTime: CacheTime(rnd.IntN(256)), MaxPending: 1 + rnd.IntN(clients), MaxPendingPerPeer: 1 + rnd.IntN(clients)})
	said := map[netip.AddrPort]bool{} // SDP addresses that there were
	flip := func() {
		if rnd.IntN(2) == 0 {
			s.Unmap(service)
			return
		}
		sdp := netip.AddrPortFrom(service.Addr(), uint16(35000+rnd.IntN(3)))
		said[sdp] = true
		_ = s.Map(service, sdp)
	}
	flip()
	var all [clients]*Lookup
	var acks, acksHeard [clients]int
	for i := range all {
		all[i] = NewLookup(n.now, LookupConfig{Service: service, CP: netip.AddrPortFrom(cpAddr.Addr(), uint16(i+1)), Handle: rnd.Uint64()})
	}
	poll := func() {
		for i, l := range all {
			for b, ok := l.Poll(nil); ok; b, ok = l.Poll(nil) {
				if m, _ := ParseMessage(b); m.Type == Ack {
					acks[i]++
				}
				n.send(b, i, true)
			}
		}
	}
	poll()
	for range 10_000 {
		next, some := n.next(s, all[:])
		if !some {
			return check(s, all[:], acks[:], acksHeard[:], said, n.loss == 0)
		}
		n.now = next
		for len(n.queue) > 0 && !n.queue[0].at.After(n.now) {
			f := heap.Pop(&n.queue).(flight)
			switch {
			case !f.up:
				all[f.client].HandleDatagram(f.b)
			default:
				before := s.Stats().Acked
				if a := s.HandleDatagram(n.now, cpAddr.Addr(), service.Addr(), f.b, nil); len(a) > 0 {
					n.send(a, f.client, false)
				}
				acksHeard[f.client] += int(s.Stats().Acked - before)
			}
		}
		s.HandleTimeout(n.now)
		for _, l := range all {
			l.HandleTimeout(n.now)
		}
		if rnd.IntN(8) == 0 {
			flip()
		}
		poll()
	}
	return fmt.Errorf("goes on after %v", n.now.Sub(began))
}

// next returns when something happens next.
func (n *network) next(s *Server, all []*Lookup) (at time.Time, some bool) {
	consider := func(t time.Time, ok bool) {
		if ok && (!some || t.Before(at)) {
			at, some = t, true
		}
	}
	if len(n.queue) > 0 {
		consider(n.queue[0].at, true)
	}
	consider(s.NextTimeout())
	for _, l := range all {
		consider(l.NextTimeout())
	}
	return at, some
}

func check(s *Server, all []*Lookup, acks, acksHeard []int, said map[netip.AddrPort]bool, lossless bool) error {
	for i, l := range all {
		want := 0
		switch l.State() {
		case Accepted:
			want = 1
			if sdp, _ := l.Answer(); !said[sdp] {
				return fmt.Errorf("client %d was told of %v", i, sdp)
			}
		case NoAnswer:
			if lossless {
				return fmt.Errorf("client %d had no answer, and nothing was lost", i)
			}
		case Denied:
		default:
			return fmt.Errorf("client %d ends in %v", i, l.State())
		}
		if acks[i] != want || acksHeard[i] > 2 { // one doubled PMAck may end the transaction of a late PMReq
			return fmt.Errorf("client %d, %v: %d PMAcks, of which %d ended a transaction", i, l.State(), acks[i], acksHeard[i])
		}
	}
	st := s.Stats()
	answered := st.Accepted + st.DeniedUnknown + st.DeniedForeign + st.DeniedPeer + st.DeniedFull
	if st.Pending != 0 || len(s.byCP) != 0 || st.Requests != answered {
		return fmt.Errorf("server is left with %+v", st)
	}
	for _, p := range s.peers.known {
		if p.pending != 0 {
			return fmt.Errorf("peer %v is left with %d transactions", p.key, p.pending)
		}
	}
	return nil
}
