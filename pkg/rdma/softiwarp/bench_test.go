// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"fmt"
	"io"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// streamBytes is a message of a stream, streamDepth how many are under way.
const (
	streamBytes = 1 << 20
	streamDepth = 4
)

// wires are the ways in which bytes are framed: with as long FPDUs as there are, and with those of
// an Ethernet frame's segment.
var wires = []struct {
	name string
	o    softiwarp.ConnectOptions
}{
	{"crc", softiwarp.ConnectOptions{MaxULPDU: iwarp.MaxOwnULPDU}},
	{"nocrc", softiwarp.ConnectOptions{MaxULPDU: iwarp.MaxOwnULPDU, NoCRC: true}},
	{"crc1442", softiwarp.ConnectOptions{MaxULPDU: 1442}},
	{"nocrc1442", softiwarp.ConnectOptions{MaxULPDU: 1442, NoCRC: true}},
}

// connected makes two connected ends on loopback.
func connected(t testing.TB, o softiwarp.ConnectOptions, bytes int) (x, y *rdmatest.End) {
	t.Helper()
	n := rdmatest.Net{A: open(t, "a", loopA), B: open(t, "b", loopB), Connect: connector(o, o)}
	return n.Pair(t, rdmatest.Options{MRBytes: bytes})
}

// waiter waits for completions without allocating.
type waiter struct {
	q   rdma.CQ
	wcs [16]rdma.WC
}

// some returns the number of completions that came, at least one, all of them good.
func (w *waiter) some(t testing.TB) int {
	for armed := false; ; armed = !armed {
		n, err := w.q.Poll(w.wcs[:])
		if err != nil {
			t.Fatal(err)
		}
		for i := range n {
			if c := &w.wcs[i]; c.Status != rdma.StatusSuccess {
				t.Fatalf("completion %+v (%v)", *c, c.Status)
			}
		}
		if n > 0 {
			return n
		}
		if armed {
			<-w.q.Notify()
		} else if err := w.q.Arm(false); err != nil {
			t.Fatal(err)
		}
	}
}

// poster posts one work request, again and again, with so many of them under way.
type poster struct {
	qp    rdma.QP
	w     waiter
	wrs   [1]rdma.SendWR
	depth int
	left  int
}

func newPoster(e *rdmatest.End, depth int, wr rdma.SendWR) *poster {
	wr.Flags |= rdma.SendSignaled
	return &poster{qp: e.QP, w: waiter{q: e.SendCQ}, wrs: [1]rdma.SendWR{wr}, depth: depth}
}

// post posts once there is room.
func (p *poster) post(t testing.TB) {
	for p.left == p.depth {
		p.left -= p.w.some(t)
	}
	if _, err := p.qp.PostSend(p.wrs[:]); err != nil {
		t.Fatal(err)
	}
	p.left++
}

// finish waits for all that is under way.
func (p *poster) finish(t testing.TB) {
	for p.left > 0 {
		p.left -= p.w.some(t)
	}
}

// fence returns a poster of a READ that ends after all that was written before has arrived.
func fence(x, y *rdmatest.End) *poster {
	return newPoster(x, 1, rdma.SendWR{Op: rdma.OpRead, SGL: []rdma.SGE{x.SGE(0, 1)}, RemoteAddr: y.MR.Addr(), RKey: y.MR.RKey()})
}

// taker posts receives again, as they complete.
type taker struct {
	qp    rdma.QP
	w     waiter
	wrs   [1]rdma.RecvWR
	ahead int // came before they were asked for
}

// newTaker posts the first receives, which all have the same place.
func newTaker(t testing.TB, e *rdmatest.End, n, bytes int) *taker {
	t.Helper()
	k := &taker{qp: e.QP, w: waiter{q: e.RecvCQ}, wrs: [1]rdma.RecvWR{{SGE: e.SGE(0, bytes)}}}
	for range n {
		k.post(t)
	}
	return k
}

func (k *taker) post(t testing.TB) {
	if _, err := k.qp.PostRecv(k.wrs[:]); err != nil {
		t.Fatal(err)
	}
}

// take takes one message.
func (k *taker) take(t testing.TB) {
	for k.ahead < 1 {
		got := k.w.some(t)
		k.ahead += got
		for range got {
			k.post(t)
		}
	}
	k.ahead--
}

// cpu reports the processor time of an operation, of both sides together: it says more than
// the clock on a busy machine.
func cpu(b *testing.B) (report func()) {
	used := func() float64 {
		var u unix.Rusage
		_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
		return float64(unix.TimevalToNsec(u.Utime) + unix.TimevalToNsec(u.Stime))
	}
	start := used()
	return func() { b.ReportMetric((used()-start)/float64(b.N), "cpu-ns/op") }
}

// BenchmarkStream moves 1 MiB per operation, four of them under way: from region to region by WRITE,
// by READ, into receives by SEND, and through TCP from one slice to another.
func BenchmarkStream(b *testing.B) {
	b.Run("tcp", func(b *testing.B) {
		x, y := tcpPair(b)
		done := make(chan struct{})
		go func() {
			defer close(done)
			buf := make([]byte, streamBytes)
			for {
				if _, err := io.ReadFull(y, buf); err != nil {
					_ = y.Close()
					return
				}
			}
		}()
		buf := make([]byte, streamBytes)
		b.SetBytes(streamBytes)
		defer cpu(b)()
		for b.Loop() {
			if _, err := x.Write(buf); err != nil {
				b.Fatal(err)
			}
		}
		_ = x.Close()
		<-done
	})
	for _, w := range wires {
		for _, op := range []rdma.Opcode{rdma.OpWrite, rdma.OpRead, rdma.OpSend} {
			b.Run(fmt.Sprintf("%s/%v", w.name, op), func(b *testing.B) { benchStream(b, w.o, op) })
		}
	}
}

func benchStream(b *testing.B, o softiwarp.ConnectOptions, op rdma.Opcode) {
	x, y := connected(b, o, streamBytes)
	wr := rdma.SendWR{Op: op, SGL: []rdma.SGE{x.SGE(0, streamBytes)}}
	if op != rdma.OpSend {
		wr.RemoteAddr, wr.RKey = y.MR.Addr(), y.MR.RKey()
	}
	p, last := newPoster(x, streamDepth, wr), fence(x, y)
	b.SetBytes(streamBytes)
	b.ReportAllocs()
	if op == rdma.OpSend {
		k := newTaker(b, y, 32, streamBytes)
		// The sender is never more than the receives ahead: those under way and in TCP.
		done, tokens := make(chan struct{}), make(chan struct{}, 16)
		go func() {
			defer close(done)
			for range tokens {
				k.take(b)
			}
		}()
		defer func() { close(tokens); <-done }()
		defer cpu(b)()
		for b.Loop() {
			tokens <- struct{}{}
			p.post(b)
		}
	} else {
		defer cpu(b)()
		for b.Loop() {
			p.post(b)
		}
	}
	p.finish(b)
	last.post(b)
	last.finish(b)
}

// BenchmarkRoundTrip sends 64 bytes there and back.
func BenchmarkRoundTrip(b *testing.B) {
	const size = 64
	b.Run("tcp", func(b *testing.B) {
		x, y := tcpPair(b)
		done := make(chan struct{})
		go func() {
			defer close(done)
			buf := make([]byte, size)
			for {
				if _, err := io.ReadFull(y, buf); err != nil {
					_ = y.Close()
					return
				}
				if _, err := y.Write(buf); err != nil {
					return
				}
			}
		}()
		buf := make([]byte, size)
		defer cpu(b)()
		for b.Loop() {
			if _, err := x.Write(buf); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(x, buf); err != nil {
				b.Fatal(err)
			}
		}
		_ = x.Close()
		<-done
	})
	b.Run("crc/SEND", func(b *testing.B) {
		e := newEcho(b, size)
		b.ReportAllocs()
		defer cpu(b)()
		for b.Loop() {
			e.round(b)
		}
	})
}

// echo is a peer that sends back what comes.
type echo struct {
	send *poster
	recv *taker
}

// newEcho starts the peer, which ends with the test.
func newEcho(t testing.TB, size int) *echo {
	t.Helper()
	x, y := connected(t, softiwarp.ConnectOptions{}, 1<<16)
	message := rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendInline, Inline: make([]byte, size)}
	e := &echo{newPoster(x, 16, message), newTaker(t, x, 16, size)}
	there, back := newTaker(t, y, 16, size), newPoster(y, 16, message)
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			there.take(t)
			if stop.Load() {
				return
			}
			back.post(t)
		}
	}()
	t.Cleanup(func() {
		stop.Store(true) // the peer sees it after the last message
		e.send.post(t)
		<-done
	})
	return e
}

func (e *echo) round(t testing.TB) {
	e.send.post(t)
	e.recv.take(t)
}

// TestDataPath_allocatesNothing is for both sides: AllocsPerRun counts those of all goroutines.
func TestDataPath_allocatesNothing(t *testing.T) {
	const messages, batch = 100, 10
	for _, w := range wires {
		for _, size := range []int{64, 64 << 10, streamBytes} {
			for _, op := range []rdma.Opcode{rdma.OpWrite, rdma.OpRead, rdma.OpSend} {
				t.Run(fmt.Sprintf("%s/%d/%v", w.name, size, op), func(t *testing.T) {
					x, y := connected(t, w.o, streamBytes)
					wr := rdma.SendWR{Op: op, SGL: []rdma.SGE{x.SGE(0, size)}}
					if op != rdma.OpSend {
						wr.RemoteAddr, wr.RKey = y.MR.Addr(), y.MR.RKey()
					}
					p, last, k := newPoster(x, streamDepth, wr), fence(x, y), newTaker(t, y, 32, size)
					move := func() {
						for range batch {
							p.post(t)
							if op == rdma.OpSend {
								k.take(t)
							}
						}
						p.finish(t)
						last.post(t)
						last.finish(t)
					}
					move() // what grows once
					if got := testing.AllocsPerRun(messages/batch, move); got != 0 {
						t.Errorf("%v allocations in %d messages", got, batch)
					}
				})
			}
		}
	}
	t.Run("round trip", func(t *testing.T) {
		e := newEcho(t, 64)
		if got := testing.AllocsPerRun(messages, func() { e.round(t) }); got != 0 {
			t.Errorf("%v allocations per round trip", got)
		}
	})
}
