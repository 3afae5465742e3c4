// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
)

// bubble runs f with two devices on a fabric in virtual time.
func bubble(t *testing.T, seed uint64, f func(t *testing.T, n *softtest.Fabric, a, b *soft.Device)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := softtest.NewFabric(t, seed)
		f(t, n, n.Open(t, soft.Config{Name: "a", Addr: fabricAddrs[0]}), n.Open(t, soft.Config{Name: "b", Addr: fabricAddrs[1]}))
	})
}

// TestFabric_seeds moves data under faults of many seeds.
func TestFabric_seeds(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, seed, func(t *testing.T, n *softtest.Fabric, a, b *soft.Device) {
				r := rand.New(rand.NewPCG(seed, 9))
				n.SetFaults(softtest.Faults{
					Loss: r.Float64() * 0.05, Duplicate: r.Float64() * 0.05, Reorder: r.Float64() * 0.05, Corrupt: r.Float64() * 0.02,
					Delay: time.Duration(r.IntN(100)) * time.Microsecond, Jitter: time.Duration(r.IntN(200)) * time.Microsecond,
				})
				x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
				for i := range x.MR.Bytes() {
					x.MR.Bytes()[i] = byte(r.Uint32())
				}
				for i := range uint64(10) {
					y.Recv(t, i, 1000_000, 64)
					size := 1 + r.IntN(90_000)
					x.Send(t, x.Write(2*i, y, int(i)*90_000, size))
					x.Send(t, rdma.SendWR{ID: 2*i + 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(int(i), 44)}})
					rdmatest.AwaitOne(t, y.RecvCQ, i, rdma.StatusSuccess)
					if at := int(i) * 90_000; !bytes.Equal(x.MR.Bytes()[at:at+size], y.MR.Bytes()[at:at+size]) {
						t.Fatalf("message %d differs", i)
					}
				}
				rdmatest.Await(t, x.SendCQ, 20)
			})
		})
	}
}

func TestFabric_oneWayCut(t *testing.T) {
	for _, way := range []struct {
		name     string
		from, to int
		arrives  bool
	}{{"requests", 0, 1, false}, {"answers", 1, 0, true}} {
		t.Run(way.name, func(t *testing.T) {
			bubble(t, 1, func(t *testing.T, n *softtest.Fabric, a, b *soft.Device) {
				x, y := rdmatest.Pair(t, a, b, rdmatest.Options{Timeout: 14, RetryCount: 3})
				n.Cut(fabricAddrs[way.from], fabricAddrs[way.to], true)
				x.MR.Bytes()[0] = 0xaa
				start := time.Now()
				x.Send(t, x.Write(1, y, 0, 10_000))
				rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusRetryExceeded)
				rdmatest.AwaitEvent(t, x.Ctx, rdma.EventPathDown)
				// IBTA 9.7.6.1.3: a timeout is between one and four times
				// what was configured.
				if took, unit := time.Since(start), rdma.ACKTimeout(14); took < 4*unit || took > 16*unit {
					t.Errorf("gave up after %v, timeout is %v with 3 retries", took, unit)
				}
				if got := y.MR.Bytes()[0] == 0xaa; got != way.arrives {
					t.Errorf("the write arrived: %v, want %v", got, way.arrives)
				}
			})
		})
	}
}

// TestFabric_lastAcknowledgement: a program ends its queue pair as soon as it has
// what it waited for, and the peer's send is done nevertheless.
func TestFabric_lastAcknowledgement(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(y *rdmatest.End) error
	}{
		{"close", func(y *rdmatest.End) error { return y.QP.Close() }},
		{"close context", func(y *rdmatest.End) error { return y.Ctx.Close() }},
		{"error", func(y *rdmatest.End) error { return y.QP.Modify(rdma.QPAttr{State: rdma.QPError}) }},
		{"reset", func(y *rdmatest.End) error { return y.QP.Modify(rdma.QPAttr{State: rdma.QPReset}) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, 1, func(t *testing.T, n *softtest.Fabric, a, b *soft.Device) {
				n.SetFaults(softtest.Faults{Delay: 50 * time.Microsecond})
				x, y := rdmatest.Pair(t, a, b, rdmatest.Options{NoRetry: true})
				y.Recv(t, 1, 0, 64)
				x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 44)}})
				rdmatest.AwaitOne(t, y.RecvCQ, 1, rdma.StatusSuccess)
				if err := c.end(y); err != nil {
					t.Fatal(err)
				}
				rdmatest.AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
			})
		})
	}
}

func TestFabric_cutHeals(t *testing.T) {
	bubble(t, 1, func(t *testing.T, n *softtest.Fabric, a, b *soft.Device) {
		x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
		n.Cut(fabricAddrs[0], fabricAddrs[1], true)
		x.Send(t, x.Write(1, y, 0, 100_000))
		time.Sleep(100 * time.Millisecond) //nolint:forbidigo // virtual time: the test runs in a synctest bubble
		n.Cut(fabricAddrs[0], fabricAddrs[1], false)
		rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
	})
}

func TestFabric_linkEvents(t *testing.T) {
	bubble(t, 1, func(t *testing.T, n *softtest.Fabric, a, b *soft.Device) {
		x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
		n.SetLink(fabricAddrs[0], false)
		rdmatest.AwaitEvent(t, x.Ctx, rdma.EventPortDown)
		if s := a.Port().State; s != rdma.PortDown {
			t.Errorf("port is %v", s)
		}
		x.Send(t, x.Write(1, y, 0, 10))
		n.SetLink(fabricAddrs[0], true)
		rdmatest.AwaitEvent(t, x.Ctx, rdma.EventPortActive)
		rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
		select {
		case e := <-y.Ctx.Events():
			t.Errorf("the other side has event %+v", e)
		default:
		}
	})
}

// TestFabric_slowEventReader: port events are bounded, queue pair events stay.
func TestFabric_slowEventReader(t *testing.T) {
	bubble(t, 1, func(t *testing.T, n *softtest.Fabric, a, b *soft.Device) {
		x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
		w := y.Write(1, x, 0, 1)
		w.RKey ^= 1 << 20
		y.Send(t, w)
		rdmatest.AwaitOne(t, y.SendCQ, 1, rdma.StatusRemoteAccess)
		for range 500 {
			n.SetLink(fabricAddrs[0], false)
			synctest.Wait()
			n.SetLink(fabricAddrs[0], true)
			synctest.Wait()
		}
		var events []rdma.AsyncEvent
		for len(x.Ctx.Events()) > 0 {
			events = append(events, <-x.Ctx.Events())
			synctest.Wait()
		}
		if len(events) > 20 {
			t.Errorf("%d events were kept", len(events))
		}
		if !slices.ContainsFunc(events, func(e rdma.AsyncEvent) bool { return e.Kind == rdma.EventQPFatal }) {
			t.Error("the queue pair's event is lost")
		}
		if e := events[len(events)-1]; e.Kind != rdma.EventPortActive {
			t.Errorf("last event %v, want port active", e.Kind)
		}
	})
}

// hostile makes packets to a queue pair as anybody can.
type hostile struct {
	victim netip.AddrPort
	mr     rdma.MR // of the victim
	key    rdma.RKey
}

// packet returns a well-formed packet of an operation with its ICRC.
func (h hostile) packet(from netip.AddrPort, op rocev2.OpCode, dst rdma.QPN, psn rdma.PSN) []byte {
	p := rocev2.Packet{
		BTH:  rocev2.BTH{OpCode: op, PKey: rocev2.PKey, DestQP: dst, AckReq: true, PSN: psn},
		RETH: rocev2.RETH{Addr: h.mr.Addr(), RKey: h.key, Length: 4},
		AETH: rocev2.AETH{Syndrome: rocev2.SyndromeNAK(rocev2.NAKRemoteAccess)},
	}
	switch op {
	case rocev2.WriteOnly, rocev2.SendOnly:
		p.Payload = []byte("evil")
	case rocev2.SendMiddle:
		p.Payload = make([]byte, 4096)
	}
	hdr := p.AppendHeader(nil)
	c := rocev2.NewICRC(rocev2.Addresses{Src: from.Addr(), Dst: h.victim.Addr(), SrcPort: from.Port(), DstPort: h.victim.Port()})
	sum := c.Sum(0, hdr, [][]byte{p.Payload}, 0)
	return binary.LittleEndian.AppendUint32(append(hdr, p.Payload...), sum)
}

// TestAttack_spoofedPackets sends a queue pair what it must not act on: junk, damaged
// packets, well-formed ones from an address that is not its peer's or for another queue
// pair. Each is counted by its reason.
func TestAttack_spoofedPackets(t *testing.T) {
	bubble(t, 1, func(t *testing.T, n *softtest.Fabric, a, b *soft.Device) {
		x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
		h := hostile{b.Addr(), y.MR, y.MR.RKey()}
		evil := netip.AddrPortFrom(netip.MustParseAddr("fd00::bad"), 4791)
		before := bytes.Clone(y.MR.Bytes())
		r := rand.New(rand.NewPCG(1, 1))
		good := rdma.PSN(x.QP.Num()) & rdma.PSNMask // Pair starts there
		ops := []rocev2.OpCode{rocev2.WriteOnly, rocev2.SendOnly, rocev2.SendMiddle, rocev2.ReadRequest, rocev2.Acknowledge}
		for i := range 3000 {
			b := make([]byte, r.IntN(200))
			for k := range b {
				b[k] = byte(r.Uint32())
			}
			n.Inject(a.Addr(), h.victim, b)
			w := h.packet(a.Addr(), rocev2.WriteOnly, y.QP.Num(), good)
			w[r.IntN(len(w))] ^= byte(1 << r.IntN(8)) // damaged; the variant byte 4 may pass
			if w[4] == 0 {
				n.Inject(a.Addr(), h.victim, w)
			}
			op := ops[i%len(ops)]
			n.Inject(evil, h.victim, h.packet(evil, op, y.QP.Num(), good))
			n.Inject(a.Addr(), h.victim, h.packet(a.Addr(), op, y.QP.Num()^0x800000, good))
			n.Inject(a.Addr(), h.victim, h.packet(a.Addr(), 0xff, y.QP.Num(), good)) // no operation
			if i%100 == 0 {
				synctest.Wait() // the receiver keeps up
			}
		}
		synctest.Wait()
		if !bytes.Equal(before, y.MR.Bytes()) {
			t.Fatal("memory changed")
		}
		s := b.Stats()
		if s.RxWrongSource != 3000 || s.RxUnknownQP != 3000 || s.RxBadICRC < 5000 || s.RxMalformed < 3000 {
			t.Errorf("counters %+v", s)
		}
		if s := y.QP.State(); s != rdma.QPRTS {
			t.Errorf("the queue pair is in %v", s)
		}
		// The same packet from the peer is what it needs to be to get in.
		n.Inject(a.Addr(), h.victim, h.packet(a.Addr(), rocev2.WriteOnly, y.QP.Num(), good))
		synctest.Wait()
		if got := string(y.MR.Bytes()[:4]); got != "evil" {
			t.Errorf("the control packet wrote %q", got)
		}
	})
}

// TestAttack_wrongPSN: who spoofs the peer's address and knows the queue pair number, and
// even its keys, but not the PSN, changes nothing with any other PSN, near or far.
func TestAttack_wrongPSN(t *testing.T) {
	bubble(t, 1, func(t *testing.T, n *softtest.Fabric, a, b *soft.Device) {
		x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
		fill := func(id uint64, c byte) {
			copy(x.MR.Bytes(), bytes.Repeat([]byte{c}, 5000))
			x.Send(t, x.Write(id, y, 0, 5000))
			rdmatest.AwaitOne(t, x.SendCQ, id, rdma.StatusSuccess)
		}
		fill(1, 'a')
		s, _ := b.QPStats(y.QP.Num())
		next := rdma.PSN(x.QP.Num()).Add(int(s.RxPackets)) // one packet each so far
		y.Recv(t, 9, 900_000, 100)
		before := bytes.Clone(y.MR.Bytes())
		for _, key := range []rdma.RKey{y.MR.RKey(), y.MR.RKey() ^ 1} {
			h := hostile{b.Addr(), y.MR, key}
			for _, op := range []rocev2.OpCode{rocev2.WriteOnly, rocev2.SendOnly, rocev2.SendMiddle, rocev2.WriteLast, rocev2.ReadRequest, rocev2.Acknowledge} {
				for _, off := range []int{1, 2, 100, 1 << 16, 1 << 22, 1<<23 - 1} {
					for _, psn := range []rdma.PSN{next.Add(off), next.Add(-off)} {
						for range 20 {
							n.Inject(a.Addr(), h.victim, h.packet(a.Addr(), op, y.QP.Num(), psn))
						}
						synctest.Wait()
					}
				}
			}
		}
		if !bytes.Equal(before, y.MR.Bytes()) {
			t.Error("memory changed")
		}
		fill(2, 'b')
		if s := y.QP.State(); s != rdma.QPRTS || y.MR.Bytes()[4999] != 'b' {
			t.Errorf("the queue pair is in %v", s)
		}
		if k, err := y.RecvCQ.Poll(make([]rdma.WC, 1)); k != 0 || err != nil {
			t.Errorf("%d messages received, %v", k, err)
		}
		if n := b.Stats().RxWrongSource; n != 0 {
			t.Errorf("%d packets from the peer's address were taken for another's", n)
		}
	})
}

// stubborn is a wire that takes little and often nothing.
type stubborn struct {
	soft.Wire
	rng *rand.Rand
	mu  chan struct{}
}

func (s *stubborn) Send(msgs []soft.Message) (int, error) {
	s.mu <- struct{}{}
	defer func() { <-s.mu }()
	switch s.rng.IntN(4) {
	case 0:
		return 0, soft.ErrWouldBlock
	case 1:
		n, _ := s.Wire.Send(msgs[:s.rng.IntN(len(msgs)+1)])
		return n, soft.ErrWouldBlock
	case 2:
		// Not an acknowledgement: it may be the one NAK that ends a queue pair.
		if s.rng.IntN(20) == 0 && len(msgs) > 0 && rocev2.OpCode(msgs[0].Bufs[0][0]) != rocev2.Acknowledge {
			return 0, fmt.Errorf("no route, says the test")
		}
	}
	return s.Wire.Send(msgs)
}

func TestDevice_sendsAgainWhenTheWireIsFull(t *testing.T) {
	for _, c := range rdmatest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := softtest.NewFabric(t, 3)
				open := func(i int) *soft.Device {
					at := netip.AddrPortFrom(fabricAddrs[i], 4791)
					d, err := soft.Open(soft.Config{Name: "d", Addr: fabricAddrs[i], Wire: &stubborn{
						n.Wire(at), rand.New(rand.NewPCG(3, uint64(i))), make(chan struct{}, 1),
					}})
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { _ = d.Close() })
					return d
				}
				c.Run(t, between(open(0), open(1)))
			})
		})
	}
}

// A context that wants to poll for ever does not keep the receiver from waiting.
func TestDevice_pollsForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := softtest.NewFabric(t, 3)
		open := func(i int) *soft.Device {
			d, err := soft.Open(soft.Config{Name: "d", Addr: fabricAddrs[i], Wire: n.Wire(netip.AddrPortFrom(fabricAddrs[i], 4791))})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = d.Close() })
			return d
		}
		x, y := rdmatest.Pair(t, open(0), open(1), rdmatest.Options{})
		var calls atomic.Int64
		y.Ctx.(rdma.IdlePoller).OnIdle(func() bool { calls.Add(1); return true })
		y.RecvCQ.OnNotify(func() {})
		if err := y.RecvCQ.Arm(false); err != nil {
			t.Fatal(err)
		}
		y.Recv(t, 1, 0, 64)
		x.Send(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{x.SGE(0, 4)}})
		<-time.After(time.Second) // of the bubble's clock
		first := calls.Load()
		<-time.After(time.Second)
		if again := calls.Load(); first == 0 || again != first {
			t.Errorf("asked %d times in the first second, %d in the next one", first, again-first)
		}
	})
}
