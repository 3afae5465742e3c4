// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// end is one side of a modelled connection: the machine, and the buffers, of which the machine has only positions.
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
	urgent   uint64             // one past the last urgent byte made
	marks    map[uint64]bool    // all urgent bytes made, by position
	heardOf  uint64             // the last urgent byte of the peer that this side knows
	state    cdc.State          // last seen
}

// streamByte is the byte of a stream at a position.
func streamByte(key byte, pos uint64) byte { return byte(pos*167+pos>>8) ^ key }

func newEnds(rng *rand.Rand, origin, scale uint32) (a, b *end) {
	size := func() uint32 { return origin + 1 + rng.Uint32N(3000*scale) }
	a, b = &end{name: "a", key: 1}, &end{name: "b", key: 2}
	for _, e := range []*end{a, b} {
		e.sendRing = cdc.Ring{Size: 1 + rng.Uint32N(5000*scale)}
		e.rmbeRing = cdc.Ring{Origin: origin, Size: size()}
		e.send = make([]byte, e.sendRing.Size)
		e.rmbe = make([]byte, e.rmbeRing.Size)
		e.c = cdc.NewConn(cdc.Config{Local: e.rmbeRing, SendBuffer: e.sendRing.Size})
		e.marks = make(map[uint64]bool)
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

// writeUrgent is write with the last byte urgent.
func (e *end) writeUrgent(n uint64) {
	n = min(n, uint64(e.sendRing.Size)-(e.produced-e.c.Completed()))
	if e.done || n == 0 {
		return
	}
	if pos := e.produced + n; e.c.Urgent(pos) {
		e.urgent = pos
		e.marks[pos] = true
	}
	e.write(n)
}

func (e *end) transmit(t testing.TB, peer *end) {
	if !e.c.Pending() {
		return
	}
	tr, _ := e.c.Next()
	f, to := tr.Message.Flags, tr.Pos+uint64(tr.Len)
	if f.UrgentPresent() && (tr.Len == 0 || !e.marks[to]) {
		t.Fatalf("%s announces an urgent byte with %d bytes up to %d", e.name, tr.Len, to)
	}
	for m := range e.marks {
		if m > peer.consumed && m <= tr.Pos && tr.Len > 0 && peer.heardOf == m {
			t.Fatalf("%s writes from %d on, its urgent byte before %d is not consumed", e.name, tr.Pos, m)
		}
	}
	e.wire = append(e.wire, tr)
}

// hear hands a message of the peer to the machine.
func (e *end) hear(t testing.TB, m cdc.Message, peer *end) error {
	ev, err := e.c.HandleMessage(m)
	if ev&cdc.PeerUrgent != 0 && !e.c.PeerUrgentPending() {
		if e.heardOf = e.c.PeerUrgent(); !peer.marks[e.heardOf] {
			t.Fatalf("%s hears of an urgent byte before %d: %v", e.name, e.heardOf, m)
		}
	}
	return err
}

// arrive delivers the oldest transmission: the bytes are taken from the send
// buffer only now, as a retransmission would.
func (e *end) arrive(t testing.TB, peer *end) {
	if len(e.wire) == 0 {
		return
	}
	tr := e.wire[0]
	e.wire = e.wire[1:]
	e.place(t, peer, tr)
	if err := peer.hear(t, tr.Message, e); err != nil {
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
	if peer.c.PeerReleased() {
		t.Fatalf("%s writes up to %d into an RMBE that it has released", e.name, tr.Pos+uint64(tr.Len))
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
func (e *end) failover(t testing.TB, rng *rand.Rand, peer *end) {
	for _, tr := range e.wire[:rng.IntN(len(e.wire)+1)] {
		e.place(t, peer, tr)
		e.late = append(e.late, tr.Message)
	}
	e.wire, e.acks = nil, 0
	e.c.Failover()
}

// arriveLate looks at the oldest message that came over a lost link, maybe
// long after newer ones.
func (e *end) arriveLate(t testing.TB, peer *end) {
	if len(e.late) == 0 {
		return
	}
	m := e.late[0]
	e.late = e.late[1:]
	if err := peer.hear(t, m, e); err != nil && !errors.Is(err, cdc.ErrStaleMessage) {
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
func TestModel_streams(t *testing.T) { model(t, modelled{rounds: 200}, func(*end) {}) }

// The same with so much under way that writes fill datagrams, and the rest of them waits.
func TestModel_longStreams(t *testing.T) {
	model(t, modelled{rounds: 4, steps: 500, scale: 200}, func(*end) {})
	model(t, modelled{rounds: 4, steps: 500, scale: 200, failovers: true}, func(*end) {})
}

// The same with links lost at any moment, in each direction apart; only then
// may bytes that the peer has read be written again, and only those of the
// same stream positions.
func TestSection4_6_2_ModelFailover(t *testing.T) {
	model(t, modelled{rounds: 200, failovers: true}, func(*end) {})
}

// modelled is what a model plays: so many pairs of connections, for so many steps (0: 2000), with links that are lost or
// not, and with rings and writes so many times as large as usual (0: once).
type modelled struct {
	rounds, steps int
	scale         uint32
	failovers     bool
}

// model plays that; after is called after each step of an end.
func model(t *testing.T, m modelled, after func(*end)) {
	t.Helper()
	steps, scale := cmp.Or(m.steps, 2000), cmp.Or(m.scale, 1)
	some := uint64(4000 * scale) // bytes of a write, or a read, at most
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range m.rounds {
		origin := cdc.OriginLinux
		if rng.IntN(2) == 0 {
			origin = cdc.OriginRFC
		}
		a, b := newEnds(rng, origin, scale)
		for range steps {
			e, p := a, b
			if rng.IntN(2) == 0 {
				e, p = b, a
			}
			switch rng.IntN(8) {
			case 0:
				if rng.IntN(8) == 0 {
					e.writeUrgent(1 + rng.Uint64N(some))
				} else {
					e.write(rng.Uint64N(some))
				}
			case 1:
				e.read(t, rng.Uint64N(some), p)
			case 2, 3:
				e.transmit(t, p)
			case 4:
				e.arrive(t, p)
			case 5:
				e.complete()
			case 6:
				switch rng.IntN(500) {
				case 0:
					e.c.Shutdown()
					e.done = true
				case 1, 2:
					e.c.Coalesce(rng.Uint32N(2000))
				case 3, 4:
					e.c.RequestUpdate()
				default:
					if rng.IntN(4) == 0 {
						e.c.Flush()
					}
				}
			case 7:
				e.arriveLate(t, p)
				if m.failovers && rng.IntN(10) == 0 {
					e.failover(t, rng, p)
				}
			}
			after(e)
			after(p)
		}
		runUntilQuiet(t, a, b, rng, m.failovers)
		for _, e := range []*end{a, b} {
			e.c.Shutdown()
		}
		runUntilQuiet(t, a, b, rng, m.failovers)
		for _, e := range []*end{a, b} {
			if !e.c.PeerIsDone() {
				t.Fatalf("%s: the peer is not done, state %v", e.name, e.c.State())
			}
			if ev := e.c.Close(); ev != 0 {
				t.Fatalf("%s: close gives events %b", e.name, ev)
			}
		}
		runUntilQuiet(t, a, b, rng, m.failovers)
		for _, e := range []*end{a, b} {
			if e.c.State() != cdc.Closed || !e.c.PeerReleased() || e.c.WasAborted() || e.c.InFlight() != 0 {
				t.Fatalf("%s: state %v, %d in flight", e.name, e.c.State(), e.c.InFlight())
			}
		}
	}
}

// quietSteps is more than a full send buffer needs through an RMBE of one byte.
const quietSteps = 50000

// runUntilQuiet goes on, reading all, until nothing moves; then all that was
// produced must have been consumed.
func runUntilQuiet(t *testing.T, a, b *end, rng *rand.Rand, failovers bool) {
	t.Helper()
	left := 0 // links to be lost meanwhile
	if failovers {
		left = rng.IntN(4)
	}
	for range quietSteps {
		for _, e := range [][2]*end{{a, b}, {b, a}} {
			if left > 0 && rng.IntN(5) == 0 {
				e[0].failover(t, rng, e[1])
				left--
			}
			if e[0].c.Coalesced() {
				e[0].c.Flush()
			}
			e[0].transmit(t, e[1])
			e[0].arriveLate(t, e[1])
			e[0].arrive(t, e[1])
			e[0].complete()
			e[1].read(t, 1<<20, e[0])
		}
		if len(a.wire)+len(b.wire)+len(a.late)+len(b.late)+a.acks+b.acks == 0 && !a.c.Pending() && !b.c.Pending() && !a.c.Coalesced() && !b.c.Coalesced() {
			break
		}
	}
	for _, e := range [][2]*end{{a, b}, {b, a}} {
		if e[0].produced != e[1].consumed {
			t.Fatalf("%s produced %d, %s consumed %d; window %d, pending %t",
				e[0].name, e[0].produced, e[1].name, e[1].consumed, e[0].c.Window(), e[0].c.Pending())
		}
		if e[0].urgent != e[1].heardOf {
			t.Fatalf("%s made the byte before %d urgent, %s heard of %d", e[0].name, e[0].urgent, e[1].name, e[1].heardOf)
		}
	}
}

// Connections that end in any way at any moment, with links lost meanwhile:
// both sides end, nothing is written into an RMBE that was released, and both
// may use theirs again.
func TestSection4_8_ModelEnds(t *testing.T) { modelEnds(t, 2000, func(*end) {}) }

func modelEnds(t *testing.T, rounds int, after func(*end)) {
	t.Helper()
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range rounds {
		a, b := newEnds(rng, cdc.OriginRFC, 1)
		for range 50 + rng.IntN(200) {
			e, p := a, b
			if rng.IntN(2) == 0 {
				e, p = b, a
			}
			e.endingStep(t, rng, p)
			after(e)
			after(p)
		}
		for range quietSteps {
			for _, e := range [][2]*end{{a, b}, {b, a}} {
				e[0].transmit(t, e[1])
				e[0].arriveAny(t, e[1])
				e[0].arriveAny(t, e[1])
				e[0].complete()
				e[1].readAny(t, e[0])
				after(e[0])
				after(e[1])
			}
			if len(a.wire)+len(b.wire)+len(a.late)+len(b.late)+a.acks+b.acks > 0 || a.c.Pending() || b.c.Pending() {
				continue
			}
			a.c.Close()
			b.c.Close()
			if a.c.State() == cdc.Closed && b.c.State() == cdc.Closed {
				break
			}
		}
		for _, e := range []*end{a, b} {
			if e.c.State() != cdc.Closed || !e.c.PeerReleased() || e.c.InFlight() != 0 {
				t.Fatalf("%s: state %v, peer released: %t, %d in flight", e.name, e.c.State(), e.c.PeerReleased(), e.c.InFlight())
			}
		}
	}
}

// endingStep is any step, also of the end.
func (e *end) endingStep(t testing.TB, rng *rand.Rand, peer *end) {
	switch rng.IntN(40) {
	case 0:
		e.c.Shutdown()
		e.done = true
	case 1:
		e.c.Close()
		e.done = true
	case 2:
		if rng.IntN(4) == 0 {
			e.c.Abort()
			e.done = true
		}
	case 3, 4:
		e.failover(t, rng, peer)
	case 5, 6, 7, 8, 9:
		if e.c.State() != cdc.Closed {
			e.write(rng.Uint64N(2000))
		}
	case 10, 11, 12, 13, 14:
		e.readAny(t, peer)
	case 15, 16, 17, 18, 19, 20, 21, 22:
		e.transmit(t, peer)
	case 23, 24, 25, 26, 27, 28, 29, 30:
		e.arriveAny(t, peer)
	default:
		e.complete()
	}
}

// readAny reads all there is, unless the connection was reset.
func (e *end) readAny(t testing.TB, peer *end) {
	if !e.c.WasAborted() && e.c.State() != cdc.Closed {
		e.read(t, 1<<20, peer)
	}
}

// arriveAny delivers the oldest transmission, over a lost link or not.
func (e *end) arriveAny(t testing.TB, peer *end) {
	e.arriveLate(t, peer)
	e.arrive(t, peer)
}

// fuzzed is a connection whose peer may say anything; what it sends itself is
// checked.
type fuzzed struct {
	t                  *testing.T
	c                  cdc.Conn
	ring               cdc.Ring
	produced, consumed uint64
	told               uint64 // send position announced
	ended              bool   // our C or A is out
	seq                uint16
}

// transmit checks all that the connection sends.
func (f *fuzzed) transmit(deliver bool) {
	for f.c.Pending() {
		window := f.c.Window()
		tr, _ := f.c.Next()
		m, to := tr.Message, tr.Pos+uint64(tr.Len)
		switch {
		case tr.Validation != m.Flags.FailoverValidation() || tr.Validation && (tr.Len != 0 || cdc.SeqNewer(m.Seq, f.seq)):
			f.t.Fatalf("validation %+v after message %d", tr, f.seq)
		case tr.Validation:
		case m.Seq != f.seq+1:
			f.t.Fatalf("%v after %d", m, f.seq)
		case tr.Len > window || tr.Len > 0 && (to < f.told || f.ended):
			f.t.Fatalf("%+v with a window of %d, told %d, ended %t", tr, window, f.told, f.ended)
		case m.Prod != f.ring.Cursor(max(f.told, to)) || to > f.produced:
			f.t.Fatalf("%+v, told %d, produced %d", tr, f.told, f.produced)
		default:
			f.seq, f.told = m.Seq, max(f.told, to)
			f.ended = f.ended || m.Flags.Closed() || m.Flags.Abort()
		}
		if deliver {
			f.c.HandleSent()
		}
	}
}

// hear hands a message in and checks what it did.
func (f *fuzzed) hear(m cdc.Message) {
	before := f.c.PeerProduced()
	_, err := f.c.HandleMessage(m)
	p := f.c.PeerProduced()
	if p < before || p-f.c.Announced() > uint64(f.ring.Capacity()) || err != nil && p != before {
		f.t.Fatalf("%v, error %v: position from %d to %d, announced %d", m, err, before, p, f.c.Announced())
	}
	if f.c.PeerUrgent() > p {
		f.t.Fatalf("%v: urgent byte before %d, the peer wrote %d", m, f.c.PeerUrgent(), p)
	}
	if f.c.Window() > f.ring.Capacity() {
		f.t.Fatalf("%v: window of %d", m, f.c.Window())
	}
}

// step is the application and the link after a message; the reserved bytes of
// the message choose what happens.
func (f *fuzzed) step(choice []byte) {
	const buffer = 1 << 16
	if choice[0] == 1 {
		f.c.Failover()
	}
	if room := uint64(buffer) - (f.produced - f.c.Completed()); room > 100 && f.c.State() != cdc.Closed {
		if choice[1] == 1 {
			f.c.Urgent(f.produced + 100)
		}
		f.produced += 100 + min(uint64(choice[2])<<8, room-100)
		f.c.Produce(f.produced)
	}
	f.consumed += (f.c.PeerProduced() - f.consumed) / 2
	f.c.Consume(f.consumed)
	switch choice[3] {
	case 1:
		f.c.Shutdown()
	case 2:
		f.c.Close()
	case 3:
		f.c.RequestUpdate()
	case 4:
		f.c.Coalesce(1000)
	case 5:
		f.c.Flush()
	}
}

// Whatever bytes a peer sends, and whenever links are lost, the invariants of
// the positions hold, what we send is right, and the connection can still be
// ended.
func FuzzConnHandleMessage(f *testing.F) {
	for _, name := range []string{"41-v1-subsequent-contact", "43-v1-abnormal-close-unread-data", "08-flow-control-slow-reader", "07-oob-urgent", "21-failover-client-netdev-down"} {
		msgs, _ := conversation(f, name)
		var b []byte
		for i, m := range msgs[:min(len(msgs), 20)] {
			b = m.Append(b)
			b[len(b)-4] = byte(i % 3)
			b[len(b)-3] = byte(i % 2)
			b[len(b)-2] = byte(i % 7)
			b[len(b)-1] = byte(i % 11)
		}
		f.Add(b, false)
		f.Add(b, true)
	}
	f.Fuzz(func(t *testing.T, b []byte, eyecatcher bool) {
		x := fuzzed{t: t, ring: cdc.Ring{Size: 1 << 16}}
		if eyecatcher {
			x.ring.Origin = cdc.OriginRFC
		}
		x.c = cdc.NewConn(cdc.Config{Local: x.ring, SendBuffer: 1 << 16})
		x.c.Activate(x.ring, 1)
		for ; len(b) >= cdc.Size; b = b[cdc.Size:] {
			m, err := cdc.Parse(b)
			if err != nil {
				continue
			}
			x.hear(m)
			x.step(b[cdc.Size-4:])
			x.transmit(b[2]&1 == 0)
		}
		x.c.Abort()
		for x.c.Pending() || x.c.InFlight() > 0 {
			x.transmit(true)
			for x.c.InFlight() > 0 {
				x.c.HandleSent()
			}
		}
		if !x.c.WasAborted() && x.c.State() != cdc.Closed {
			t.Fatalf("not ended: %v", x.c.State())
		}
	})
}
