// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// end is one side of a modelled connection: the machine, and the memory that
// it only counts.
type end struct {
	name     string
	c        cdc.Conn
	sendRing cdc.Ring
	rmbeRing cdc.Ring
	send     []byte
	rmbe     []byte
	produced uint64
	consumed uint64
	key      byte               // of the stream that this side sends
	wire     []cdc.Transmission // sent and not arrived
	late     []cdc.Message      // of a lost link: arrived, and not looked at
	acks     int                // arrived, completion not seen
	done     bool               // shut down or closed
	state    cdc.State          // last seen
}

// streamByte is the byte of a stream at a position.
func streamByte(key byte, pos uint64) byte { return byte(pos*167+pos>>8) ^ key }

func newEnds(rng *rand.Rand, origin uint32) (a, b *end) {
	size := func() uint32 { return origin + 1 + rng.Uint32N(3000) }
	a, b = &end{name: "a", key: 1}, &end{name: "b", key: 2}
	for _, e := range []*end{a, b} {
		e.sendRing = cdc.Ring{Size: 1 + rng.Uint32N(5000)}
		e.rmbeRing = cdc.Ring{Origin: origin, Size: size()}
		e.send = make([]byte, e.sendRing.Size)
		e.rmbe = make([]byte, e.rmbeRing.Size)
		e.c = cdc.NewConn(cdc.Config{Local: e.rmbeRing, SendBuffer: e.sendRing.Size})
	}
	a.c.Activate(b.rmbeRing, 1)
	b.c.Activate(a.rmbeRing, 2)
	return a, b
}

func (e *end) write(n uint64) {
	n = min(n, uint64(e.sendRing.Size)-(e.produced-e.c.Completed()))
	if e.done {
		return
	}
	for range n {
		e.send[e.sendRing.Offset(e.produced)] = streamByte(e.key, e.produced)
		e.produced++
	}
	e.c.Produce(e.produced)
}

func (e *end) read(t testing.TB, n uint64, peer *end) {
	n = min(n, e.c.PeerProduced()-e.consumed)
	for range n {
		if got, want := e.rmbe[e.rmbeRing.Offset(e.consumed)], streamByte(peer.key, e.consumed); got != want {
			t.Fatalf("%s reads 0x%02x at %d, want 0x%02x", e.name, got, e.consumed, want)
		}
		e.consumed++
	}
	e.c.Consume(e.consumed)
}

func (e *end) transmit() {
	if e.c.Pending() {
		tr, _ := e.c.Next()
		e.wire = append(e.wire, tr)
	}
}

// arrive delivers the oldest transmission: the bytes are taken from the send
// buffer only now, as a retransmission would.
func (e *end) arrive(t *testing.T, peer *end) {
	if len(e.wire) == 0 {
		return
	}
	tr := e.wire[0]
	e.wire = e.wire[1:]
	e.place(t, peer, tr)
	if _, err := peer.c.HandleMessage(tr.Message); err != nil {
		t.Fatalf("%s refuses %v: %v", peer.name, tr.Message, err)
	}
	e.acks++
}

// place writes the bytes of a transmission into the peer's RMBE.
func (e *end) place(t testing.TB, peer *end, tr cdc.Transmission) {
	if tr.Len == 0 {
		return
	}
	if tr.Pos+uint64(tr.Len)-peer.consumed > uint64(peer.rmbeRing.Capacity()) {
		t.Fatalf("%s writes up to %d over unread bytes from %d", e.name, tr.Pos+uint64(tr.Len), peer.consumed)
	}
	pos := tr.Pos
	for _, s := range e.c.WriteSpans(tr) {
		for i := range s.Len {
			peer.rmbe[s.Offset+i] = e.send[e.sendRing.Offset(pos)]
			pos++
		}
	}
}

// failover loses the link of one direction: some of what was sent has arrived
// and waits to be looked at, the rest never will, and nothing is acknowledged
// any more.
func (e *end) failover(t *testing.T, rng *rand.Rand, peer *end) {
	for _, tr := range e.wire[:rng.IntN(len(e.wire)+1)] {
		e.place(t, peer, tr)
		e.late = append(e.late, tr.Message)
	}
	e.wire, e.acks = nil, 0
	e.c.Failover()
}

// arriveLate looks at the oldest message that came over a lost link, maybe
// long after newer ones.
func (e *end) arriveLate(t *testing.T, peer *end) {
	if len(e.late) == 0 {
		return
	}
	m := e.late[0]
	e.late = e.late[1:]
	if _, err := peer.c.HandleMessage(m); err != nil && !errors.Is(err, cdc.ErrStaleMessage) {
		t.Fatalf("%s refuses %v: %v", peer.name, m, err)
	}
}

func (e *end) complete() {
	if e.acks > 0 {
		e.acks--
		e.c.HandleSent()
	}
}

// Two connections, queues that keep order, and everything else at random:
// no byte is lost, changed or written over, and when both sides go on reading
// everything arrives.
func TestModel_streams(t *testing.T) { model(t, false) }

// The same with links lost at any moment, in each direction apart; only then
// may bytes that the peer has read be written again, and only those of the
// same stream positions.
func TestSection4_6_2_ModelFailover(t *testing.T) { model(t, true) }

func model(t *testing.T, failovers bool) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	for range 200 {
		origin := cdc.OriginLinux
		if rng.IntN(2) == 0 {
			origin = cdc.OriginRFC
		}
		a, b := newEnds(rng, origin)
		for range 2000 {
			e, p := a, b
			if rng.IntN(2) == 0 {
				e, p = b, a
			}
			switch rng.IntN(8) {
			case 0:
				e.write(rng.Uint64N(4000))
			case 1:
				e.read(t, rng.Uint64N(4000), p)
			case 2, 3:
				e.transmit()
			case 4:
				e.arrive(t, p)
			case 5:
				e.complete()
			case 6:
				if rng.IntN(500) == 0 {
					e.c.Shutdown()
					e.done = true
				}
			case 7:
				e.arriveLate(t, p)
				if failovers && rng.IntN(10) == 0 {
					e.failover(t, rng, p)
				}
			}
		}
		settle(t, a, b, rng, failovers)
		for _, e := range []*end{a, b} {
			e.c.Shutdown()
		}
		settle(t, a, b, rng, failovers)
		for _, e := range []*end{a, b} {
			if !e.c.PeerIsDone() {
				t.Fatalf("%s: the peer is not done, state %v", e.name, e.c.State())
			}
			if ev := e.c.Close(); ev != 0 {
				t.Fatalf("%s: close gives events %b", e.name, ev)
			}
		}
		settle(t, a, b, rng, failovers)
		for _, e := range []*end{a, b} {
			if e.c.State() != cdc.Closed || !e.c.PeerReleased() || e.c.WasAborted() || e.c.InFlight() != 0 {
				t.Fatalf("%s: state %v, %d in flight", e.name, e.c.State(), e.c.InFlight())
			}
		}
	}
}

// settle goes on, reading all, until nothing moves; then all that was
// produced must have been consumed.
func settle(t *testing.T, a, b *end, rng *rand.Rand, failovers bool) {
	t.Helper()
	left := 0 // links to be lost meanwhile
	if failovers {
		left = rng.IntN(4)
	}
	for range 10000 {
		for _, e := range [][2]*end{{a, b}, {b, a}} {
			if left > 0 && rng.IntN(5) == 0 {
				e[0].failover(t, rng, e[1])
				left--
			}
			e[0].transmit()
			e[0].arriveLate(t, e[1])
			e[0].arrive(t, e[1])
			e[0].complete()
			e[1].read(t, 1<<20, e[0])
		}
		if len(a.wire)+len(b.wire)+len(a.late)+len(b.late)+a.acks+b.acks == 0 && !a.c.Pending() && !b.c.Pending() {
			break
		}
	}
	for _, e := range [][2]*end{{a, b}, {b, a}} {
		if e[0].produced != e[1].consumed {
			t.Fatalf("%s produced %d, %s consumed %d; window %d, pending %t",
				e[0].name, e[0].produced, e[1].name, e[1].consumed, e[0].c.Window(), e[0].c.Pending())
		}
	}
}

// Whatever bytes a peer sends, the invariants of the positions hold and the
// connection can still be ended.
func FuzzConnHandleMessage(f *testing.F) {
	for _, name := range []string{"41-v1-subsequent-contact", "43-v1-abnormal-close-unread-data", "08-flow-control-slow-reader"} {
		msgs, _ := conversation(f, name)
		var b []byte
		for _, m := range msgs[:min(len(msgs), 20)] {
			b = m.Append(b)
		}
		f.Add(b, false)
		f.Add(b, true)
	}
	f.Fuzz(func(t *testing.T, b []byte, eyecatcher bool) {
		ring := cdc.Ring{Size: 1 << 16}
		if eyecatcher {
			ring.Origin = cdc.OriginRFC
		}
		c := cdc.NewConn(cdc.Config{Local: ring, SendBuffer: 1 << 16})
		c.Activate(ring, 1)
		var produced, consumed uint64
		for ; len(b) >= cdc.Size; b = b[cdc.Size:] {
			m, err := cdc.Parse(b)
			if err != nil {
				continue
			}
			before := c.PeerProduced()
			_, err = c.HandleMessage(m)
			if p := c.PeerProduced(); p < before || p-c.Announced() > uint64(ring.Capacity()) || err != nil && p != before {
				t.Fatalf("%v, error %v: position from %d to %d, announced %d", m, err, before, p, c.Announced())
			}
			if c.Window() > ring.Capacity() {
				t.Fatalf("%v: window of %d", m, c.Window())
			}
			if room := uint64(1<<16) - (produced - c.Completed()); room > 100 && c.State() != cdc.Closed {
				produced += 100
				c.Produce(produced)
			}
			consumed += (c.PeerProduced() - consumed) / 2
			c.Consume(consumed)
			for c.Pending() {
				c.Next()
				if b[2]&1 == 0 {
					c.HandleSent()
				}
			}
		}
		c.Abort()
		for c.InFlight() > 0 {
			c.HandleSent()
		}
		for c.Pending() {
			c.Next()
		}
		if !c.WasAborted() && c.State() != cdc.Closed {
			t.Fatalf("not ended: %v", c.State())
		}
	})
}
