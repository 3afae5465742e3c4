// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"io"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// path is where a benchmark runs.
type path struct {
	name string
	open func(b *testing.B) (x, y *soft.Device)
	// tcp returns the two ends of a connection on the same path.
	tcp func(b *testing.B) (x, y net.Conn)
}

func paths() []path {
	same := func(_ testing.TB, f func()) { f() }
	all := []path{{
		name: "lo",
		open: func(b *testing.B) (x, y *soft.Device) { return loopback(b) },
		tcp:  func(b *testing.B) (x, y net.Conn) { return tcpPair(b, loopB, same, same) },
	}}
	for _, p := range []struct {
		name string
		mtu  int
	}{{"veth1500", 1500}, {"veth9000", 9000}} {
		all = append(all, path{
			name: p.name,
			open: func(b *testing.B) (x, y *soft.Device) {
				v := newVethPair(b, p.mtu)
				return active(b, v.a, soft.Config{Addr: v.a4}), active(b, v.b, soft.Config{Addr: v.b4})
			},
			tcp: func(b *testing.B) (x, y net.Conn) {
				v := newVethPair(b, p.mtu)
				return tcpPair(b, v.b4,
					func(t testing.TB, f func()) { inNS(t, v.a, f) }, func(t testing.TB, f func()) { inNS(t, v.b, f) })
			},
		})
	}
	return all
}

func tcpPair(b *testing.B, server netip.Addr, inA, inB func(testing.TB, func())) (x, y net.Conn) {
	b.Helper()
	var l net.Listener
	var err error
	inB(b, func() { l, err = net.Listen("tcp", netip.AddrPortFrom(server, 0).String()) })
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	inA(b, func() { x, err = net.Dial("tcp", l.Addr().String()) })
	if err != nil {
		b.Fatal(err)
	}
	if y, err = l.Accept(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = x.Close(); _ = y.Close() })
	return x, y
}

// BenchmarkStream moves 64 KiB per operation: WRITEs with 16 outstanding, and
// the same bytes through one TCP connection.
func BenchmarkStream(b *testing.B) {
	const size, depth = 64 << 10, 16
	for _, p := range paths() {
		b.Run(p.name+"/write", func(b *testing.B) {
			d, e := p.open(b)
			x, y := rdmatest.Pair(b, d, e, rdmatest.Options{MRBytes: size * depth})
			wcs := make([]rdma.WC, depth)
			wr := make([]rdma.SendWR, 1)
			sgl := make([]rdma.SGE, 1)
			b.SetBytes(size)
			b.ReportAllocs()
			posted, done := 0, 0
			defer cpu(b)()
			for b.Loop() {
				for posted-done == depth {
					done += awaitSome(b, x.SendCQ, wcs)
				}
				off := posted % depth * size
				sgl[0] = x.SGE(off, size)
				wr[0] = rdma.SendWR{
					ID: uint64(posted), Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: sgl,
					RemoteAddr: y.MR.Addr() + uint64(off), RKey: y.MR.RKey(),
				}
				if _, err := x.QP.PostSend(wr); err != nil {
					b.Fatal(err)
				}
				posted++
			}
			for done < posted {
				done += awaitSome(b, x.SendCQ, wcs)
			}
			s, _ := d.QPStats(x.QP.Num())
			b.ReportMetric(float64(s.Retransmits)/float64(b.N), "resent/op")
			b.ReportMetric(float64(s.Timeouts), "timeouts")
			b.ReportMetric(float64(s.Probes), "probes")
			b.ReportMetric(float64(s.NAKSeqReceived), "naks")
		})
		b.Run(p.name+"/tcp", func(b *testing.B) {
			x, y := p.tcp(b)
			done := make(chan struct{})
			go func() {
				defer close(done)
				buf := make([]byte, size)
				for {
					if _, err := y.Read(buf); err != nil {
						return
					}
				}
			}()
			buf := make([]byte, size)
			b.SetBytes(size)
			defer cpu(b)()
			for b.Loop() {
				if _, err := x.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
			_ = x.Close()
			<-done
		})
	}
}

// cpu reports the processor time of an operation, of both sides together: it
// says more than the clock on a busy machine.
func cpu(b *testing.B) (report func()) {
	used := func() float64 {
		var u unix.Rusage
		_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
		return float64(unix.TimevalToNsec(u.Utime) + unix.TimevalToNsec(u.Stime))
	}
	start := used()
	return func() { b.ReportMetric((used()-start)/float64(b.N), "cpu-ns/op") }
}

// awaitSome returns the number of completions that came, at least one.
func awaitSome(t testing.TB, q rdma.CQ, wcs []rdma.WC) int {
	for armed := false; ; armed = !armed {
		n, err := q.Poll(wcs)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range wcs[:n] {
			if w.Status != rdma.StatusSuccess {
				t.Fatalf("completion %+v (%v)", w, w.Status)
			}
		}
		if n > 0 {
			return n
		}
		if armed {
			<-q.Notify()
		} else if err := q.Arm(false); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkPingPong sends 44 bytes, the size of an SMC-R message, there and
// back.
func BenchmarkPingPong(b *testing.B) {
	const size = 44
	for _, p := range paths() {
		b.Run(p.name+"/send", func(b *testing.B) {
			d, e := p.open(b)
			x, y := rdmatest.Pair(b, d, e, rdmatest.Options{})
			done := make(chan struct{})
			play := func(e *rdmatest.End) func(first bool, more func() bool) {
				wcs := make([]rdma.WC, 16)
				recv := []rdma.RecvWR{{SGE: e.SGE(0, 64)}}
				send := []rdma.SendWR{{Op: rdma.OpSend, Flags: rdma.SendInline | rdma.SendSolicited, Inline: make([]byte, size)}}
				return func(first bool, more func() bool) {
					for i := 0; more(); i++ {
						if first {
							post(b, e, recv, send, i)
						}
						awaitSome(b, e.RecvCQ, wcs)
						if !first {
							post(b, e, recv, send, i)
						}
						_, _ = e.SendCQ.Poll(wcs)
					}
				}
			}
			var stop bool
			if _, err := y.QP.PostRecv([]rdma.RecvWR{{SGE: y.SGE(0, 64)}, {SGE: y.SGE(0, 64)}}); err != nil {
				b.Fatal(err)
			}
			go func() {
				defer close(done)
				play(y)(false, func() bool { return !stop })
			}()
			b.ReportAllocs()
			defer cpu(b)()
			play(x)(true, b.Loop)
			stop = true // the other side sees it after the last message
			_, _ = x.QP.PostRecv([]rdma.RecvWR{{SGE: x.SGE(0, 64)}})
			if _, err := x.QP.PostSend([]rdma.SendWR{{Op: rdma.OpSend, SGL: []rdma.SGE{x.SGE(0, 1)}}}); err != nil {
				b.Fatal(err)
			}
			<-done
		})
		b.Run(p.name+"/tcp", func(b *testing.B) {
			x, y := p.tcp(b)
			done := make(chan struct{})
			go func() {
				defer close(done)
				buf := make([]byte, size)
				for {
					if _, err := io.ReadFull(y, buf); err != nil {
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
	}
}

// post puts a receive buffer and a message; every 16th is signaled, so that
// the send queue is freed.
func post(b *testing.B, e *rdmatest.End, recv []rdma.RecvWR, send []rdma.SendWR, i int) {
	if _, err := e.QP.PostRecv(recv); err != nil {
		b.Fatal(err)
	}
	send[0].Flags &^= rdma.SendSignaled
	if i%16 == 0 {
		send[0].Flags |= rdma.SendSignaled
	}
	if _, err := e.QP.PostSend(send); err != nil {
		b.Fatal(err)
	}
}
