// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// opCases are about what work requests move.
var opCases = []Case{
	{"Operations256", operations(rdma.MTU256)},
	{"Operations512", operations(rdma.MTU512)},
	{"Operations1024", operations(rdma.MTU1024)},
	{"Operations2048", operations(rdma.MTU2048)},
	{"Operations4096", operations(rdma.MTU4096)},
	{"Gather", testGather},
	{"Spill", testSpill},
	{"Inline", testInline},
	{"Unsignaled", testUnsignaled},
	{"SendMakesWritesVisible", testSendMakesWritesVisible},
	{"BothDirections", testBothDirections},
	{"ManyQueuePairs", testManyQueuePairs},
	{"PSNWraps", testPSNWraps},
	{"QueueFull", testQueueFull},
}

func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// operations tests every operation at one path MTU with sizes around the
// packet's, and that nothing beside the target changes.
func operations(mtu rdma.MTU) func(t *testing.T, net Net) {
	return func(t *testing.T, net Net) {
		if net.stream() && mtu != rdma.MTU1024 {
			return // one size of segments is as good as another
		}
		mtu := net.mtu(mtu)
		x, y := net.Pair(t, Options{MTU: mtu})
		m := mtu.Bytes()
		src, dst := x.MR.Bytes(), y.MR.Bytes()
		fill(src, uint64(m))
		const guard = 16
		for i, n := range []int{0, 1, 2, 3, 4, 44, m - 1, m, m + 1, 2*m - 3, 4*m + 5, 65536, 65537} {
			for _, op := range []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpWriteImm, rdma.OpRead} {
				if op == rdma.OpWriteImm && !net.A.Attr().WriteWithImm || op == rdma.OpRead && !net.A.Attr().RDMARead {
					continue
				}
				from, off := src, guard+i // unaligned
				if op == rdma.OpRead {
					from = dst
					fill(dst[:n+2*guard+i], uint64(n))
					clear(src[:n+2*guard+i])
				} else {
					fill(src[:n+2*guard+i], uint64(n))
					clear(dst[:n+2*guard+i])
				}
				want := bytes.Clone(from[off : off+n])
				w := x.Write(7, y, off, n)
				w.Op = op
				if op == rdma.OpWriteImm {
					w.Imm = 0xdeadbeef
					y.Recv(t, 3, 0, 0)
				}
				if op == rdma.OpSend {
					y.Recv(t, 3, off, n)
				}
				x.Send(t, w)
				c := AwaitOne(t, x.SendCQ, 7, rdma.StatusSuccess)
				if c.Op != op && (c.Op != rdma.OpWrite || op != rdma.OpWriteImm) || c.QPN != x.QP.Num() {
					t.Fatalf("%v of %d bytes: completion %+v", op, n, c)
				}
				switch op {
				case rdma.OpSend, rdma.OpWriteImm:
					r := AwaitOne(t, y.RecvCQ, 3, rdma.StatusSuccess)
					wantOp := rdma.OpRecv
					if op == rdma.OpWriteImm {
						wantOp = rdma.OpRecvWriteImm
					}
					if r.Op != wantOp || r.Bytes != uint32(n) || r.HasImm != (op == rdma.OpWriteImm) ||
						r.HasImm && r.Imm != 0xdeadbeef || r.QPN != y.QP.Num() ||
						net.B.Attr().WCDetails && r.SrcQP != x.QP.Num() {
						t.Fatalf("%v of %d bytes: receive completion %+v", op, n, r)
					}
				case rdma.OpWrite:
					x.awaitArrival(t, y)
				case rdma.OpRecv, rdma.OpRecvWriteImm:
				case rdma.OpRead:
					if c.Bytes != uint32(n) {
						t.Fatalf("READ of %d bytes: completion says %d", n, c.Bytes)
					}
				}
				to := dst
				if op == rdma.OpRead {
					to = src
				}
				if !bytes.Equal(to[off:off+n], want) {
					t.Fatalf("%v of %d bytes at MTU %v: the bytes differ", op, n, mtu)
				}
				for k := range guard {
					if to[off-1-k] != 0 || to[off+n+k] != 0 && k < guard-1 {
						t.Fatalf("%v of %d bytes at MTU %v touched bytes beside its target", op, n, mtu)
					}
				}
			}
		}
	}
}

func testGather(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{MTU: rdma.MTU256})
	fill(x.MR.Bytes(), 5)
	max := net.A.Attr().MaxSGE
	for _, n := range [][]int{{1, 2}, {3, 300}, {255, 1, 256}, {1, 1, 1, 1}, {1000, 0, 7, 4096}, {0, 0}} {
		if len(n) > max {
			n = n[:max]
		}
		var sgl []rdma.SGE
		var want []byte
		off := 13
		for _, k := range n {
			sgl = append(sgl, x.SGE(off, k))
			want = append(want, x.MR.Bytes()[off:off+k]...)
			off += k + 11
		}
		y.Recv(t, 1, 50, 10000)
		x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: sgl})
		r := AwaitOne(t, y.RecvCQ, 1, rdma.StatusSuccess)
		AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
		if int(r.Bytes) != len(want) || !bytes.Equal(y.MR.Bytes()[50:50+len(want)], want) {
			t.Errorf("gather of %v: %d bytes, or they differ", n, r.Bytes)
		}
	}
	sgl := make([]rdma.SGE, max+1)
	if n, err := x.QP.PostSend([]rdma.SendWR{{Op: rdma.OpSend, SGL: sgl}}); n != 0 || !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("%d SGEs: %d, %v, want ErrInvalid", max+1, n, err)
	}
}

// testSpill receives messages that end in the first element of their buffer, in
// the second, and behind both.
func testSpill(t *testing.T, net Net) {
	const head, spill, headAt, spillAt = 44, 1000, 16, 8192
	for _, n := range []int{0, 1, head - 1, head, head + 1, 256, 300, head + spill, head + spill + 1} {
		x, y := net.Pair(t, Options{MTU: rdma.MTU256})
		src, dst := x.MR.Bytes(), y.MR.Bytes()
		fill(src[:n], uint64(n))
		r := rdma.RecvWR{ID: 3, SGE: y.SGE(headAt, head), Spill: y.SGE(spillAt, spill)}
		if k, err := y.QP.PostRecv([]rdma.RecvWR{r}); k != 1 || err != nil {
			t.Fatalf("post receive: %d, %v", k, err)
		}
		x.Send(t, rdma.SendWR{ID: 7, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, n)}})
		want := make([]byte, len(dst))
		if n > head+spill {
			y.awaitLocal(t, y.RecvCQ, 3, rdma.StatusLocalLength)
			x.awaitRemote(t, y, 7, rdma.StatusRemoteInvalid)
			// What had come before the length was known may be there.
			clear(dst[headAt : headAt+head])
			clear(dst[spillAt : spillAt+spill])
		} else {
			if c := AwaitOne(t, y.RecvCQ, 3, rdma.StatusSuccess); int(c.Bytes) != n {
				t.Errorf("%d bytes: completion says %d", n, c.Bytes)
			}
			AwaitOne(t, x.SendCQ, 7, rdma.StatusSuccess)
			copy(want[spillAt:], src[copy(want[headAt:headAt+head], src[:n]):n])
		}
		if !bytes.Equal(dst, want) {
			t.Errorf("%d bytes: the region is not as it should be", n)
		}
	}
}

func testInline(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	max := net.A.Attr().MaxInline
	if max == 0 {
		t.Log("the device has no inline sends")
		return
	}
	buf := make([]byte, max)
	for n := 0; n <= max; n++ {
		fill(buf[:n], uint64(n))
		want := bytes.Clone(buf[:n])
		y.Recv(t, 1, 0, max)
		x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled | rdma.SendInline, Inline: buf[:n]})
		clear(buf) // ours again
		r := AwaitOne(t, y.RecvCQ, 1, rdma.StatusSuccess)
		AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
		if int(r.Bytes) != n || !bytes.Equal(y.MR.Bytes()[:n], want) {
			t.Fatalf("inline send of %d bytes differs", n)
		}
	}
	w := rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendInline, Inline: make([]byte, max+1)}
	if n, err := x.QP.PostSend([]rdma.SendWR{w}); n != 0 || !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("%d inline bytes: %d, %v, want ErrInvalid", max+1, n, err)
	}
}

func testUnsignaled(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{SendWR: 16})
	// Far more than the queue holds: every 8th completion frees its
	// predecessors too.
	for i := range uint64(200) {
		w := x.Write(i, y, 64, 32)
		if i%8 != 7 {
			w.Flags = 0
		}
		x.Send(t, w)
		if i%8 == 7 {
			AwaitOne(t, x.SendCQ, i, rdma.StatusSuccess)
		}
	}
	if n, err := x.SendCQ.Poll(make([]rdma.WC, 4)); n != 0 || err != nil {
		t.Errorf("%d completions left, %v", n, err)
	}
}

// testSendMakesWritesVisible: what was written before a SEND is there when
// the SEND completes at the peer. SMC-R's CDC messages stand on that.
func testSendMakesWritesVisible(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	const n, at = 100_000, 4096
	for round := range 30 {
		for i := range n {
			x.MR.Bytes()[at+i] = byte(round + i)
		}
		y.Recv(t, uint64(round), 0, 44)
		first, second := x.Write(1, y, at, n/2), x.Write(2, y, at+n/2, n/2)
		first.Flags, second.Flags = 0, 0
		send := rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.SendSignaled | x.solicited(), SGL: []rdma.SGE{x.SGE(0, 44)}}
		if k, err := x.QP.PostSend([]rdma.SendWR{first, second, send}); k != 3 || err != nil {
			t.Fatalf("post: %d, %v", k, err)
		}
		if w := AwaitOne(t, y.RecvCQ, uint64(round), rdma.StatusSuccess); !w.Solicit && net.B.Attr().WCDetails {
			t.Error("the solicited event bit is lost")
		}
		if !bytes.Equal(y.MR.Bytes()[at:at+n], x.MR.Bytes()[at:at+n]) {
			t.Fatalf("round %d: the SEND overtook the WRITEs", round)
		}
		AwaitOne(t, x.SendCQ, 3, rdma.StatusSuccess)
	}
}

// stream writes total bytes in pieces from one end to the other, each piece
// announced by a SEND, and checks the bytes. It is its own flow control: a
// piece starts when the one before is complete at both ends.
func stream(t testing.TB, x, y *End, base, piece, rounds int, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 2))
	for i := range rounds {
		n := 1 + r.IntN(piece)
		fill(x.MR.Bytes()[base:base+n], r.Uint64())
		y.Recv(t, uint64(i), base+piece, 64)
		w := x.Write(1, y, base, n)
		w.Flags = 0
		x.Send(t, w)
		x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(base, min(n, 44))}})
		AwaitOne(t, y.RecvCQ, uint64(i), rdma.StatusSuccess)
		if !bytes.Equal(x.MR.Bytes()[base:base+n], y.MR.Bytes()[base:base+n]) {
			t.Errorf("round %d: %d bytes differ", i, n)
			return
		}
		AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
	}
}

// testBothDirections has one goroutine for each direction, so that posts meet
// the receiver.
func testBothDirections(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		stream(t, y, x, 512<<10, 100_000, 30, 1)
	}()
	stream(t, x, y, 0, 100_000, 30, 2)
	<-done
}

func testManyQueuePairs(t *testing.T, net Net) {
	const pairs = 8
	done := make(chan struct{}, pairs)
	for i := range pairs {
		x, y := net.Pair(t, Options{MRBytes: 128 << 10})
		if i%2 == 1 {
			x, y = y, x
		}
		go func() {
			defer func() { done <- struct{}{} }()
			stream(t, x, y, 0, 60_000, 10, uint64(i))
		}()
	}
	for range pairs {
		<-done
	}
}

func testPSNWraps(t *testing.T, net Net) {
	if net.stream() {
		return
	}
	x, y := NewEnd(t, net.A, Options{MTU: rdma.MTU256}), NewEnd(t, net.B, Options{MTU: rdma.MTU256})
	const n = 256 * 20
	ax, ay := x.Attrs(y), y.Attrs(x)
	ax[2].SQPSN, ay[1].RQPSN = rdma.PSNMask-7, rdma.PSNMask-7
	for i := range ax {
		if err := errors.Join(x.QP.Modify(ax[i]), y.QP.Modify(ay[i])); err != nil {
			t.Fatalf("modify: %v", err)
		}
	}
	fill(x.MR.Bytes()[:n], 3)
	x.Send(t, x.Write(1, y, 0, n))
	AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
	if !bytes.Equal(x.MR.Bytes()[:n], y.MR.Bytes()[:n]) {
		t.Error("the bytes differ")
	}
	w := x.Write(2, y, n, n)
	w.Op = rdma.OpRead
	x.Send(t, w)
	AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
}

func testQueueFull(t *testing.T, net Net) {
	x, y := NewEnd(t, net.A, Options{SendWR: 16, RecvWR: 16}), NewEnd(t, net.B, Options{})
	atOnce := 1
	if net.stream() {
		net.connect(t, x, y)
		atOnce = 1000 // nothing completes before all of a call are in the queue
	} else {
		x.Connect(t, y) // the peer does not listen yet, so that nothing completes
	}
	var sent uint64
	for {
		wrs := make([]rdma.SendWR, atOnce)
		for i := range wrs {
			wrs[i] = x.Write(sent+uint64(i), y, 0, 8)
		}
		n, err := x.QP.PostSend(wrs)
		sent += uint64(n)
		if err != nil {
			if !errors.Is(err, rdma.ErrQueueFull) {
				t.Fatalf("post send: %v, want ErrQueueFull", err)
			}
			break
		}
		if sent > 1000 {
			t.Fatal("a queue of 16 takes 1000 sends")
		}
	}
	received := 0
	for {
		n, err := x.QP.PostRecv([]rdma.RecvWR{{SGE: x.SGE(0, 8)}})
		received += n
		if err != nil {
			if !errors.Is(err, rdma.ErrQueueFull) {
				t.Fatalf("post receive: %v, want ErrQueueFull", err)
			}
			break
		}
		if received > 1000 {
			t.Fatal("a queue of 16 takes 1000 receives")
		}
	}
	if sent < 16 || received < 16 {
		t.Fatalf("queues of 16 took %d sends and %d receives", sent, received)
	}
	if !net.stream() {
		y.Connect(t, x)
	}
	for id, w := range Await(t, x.SendCQ, int(sent)) {
		if w.ID != uint64(id) || w.Status != rdma.StatusSuccess {
			t.Fatalf("completion %d is %+v", id, w)
		}
	}
	x.Send(t, x.Write(1, y, 0, 8))
	AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
}
