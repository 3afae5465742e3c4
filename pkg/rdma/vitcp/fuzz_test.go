// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// FuzzQP gives a queue pair in RTS, with work in both directions, a hostile stream. Whatever it is, nothing
// panics, no byte outside what the peer may write changes, every work request completes at most once, and our own
// stream stays well formed.
//
// The input is a sequence of records: a length, what to do besides (post, expire a timer, forget or close
// memory, end the stream), and bytes of the stream. With bit 6 of the flags the record begins a segment, whose
// number and acknowledgement are relative to what the queue pair expects.
func FuzzQP(f *testing.F) { fuzzQP(f, reliable()) }

// FuzzQP_unreliable is the same without reliable reception: sends complete when TCP has them.
func FuzzQP_unreliable(f *testing.F) {
	a := reliable()
	a.Reliable = false
	fuzzQP(f, a)
}

func fuzzQP(f *testing.F, a Attr) {
	f.Helper()
	for _, g := range golden {
		b := unhex(f, g.hex)
		f.Add(append([]byte{byte(len(b)), 64 | 3}, b...))
		f.Add(append([]byte{byte(len(b)), 64 | 1}, append(b, append([]byte{byte(len(b)), 64 | 2}, b...)...)...))
	}
	for t := TypeSend; t < numTypes; t++ {
		for fl := range Flags(8) {
			for _, n := range []int{0, 4, 100} {
				h := Header{Type: t, Flags: fl}
				h.Length = uint16(h.PayloadOffset() + n)
				b := make([]byte, h.Length)
				h.Append(b[:0])
				if h.Type.hasRDMA() {
					RDMA{Length: uint32(n)}.Append(b[:HeaderLen])
				}
				f.Add(append([]byte{byte(len(b)), 64 | 3, 0}, b...))
				rec := append([]byte{byte(len(b)), 64 | 2}, b...)
				f.Add(append(rec, rec...))
			}
		}
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 4096 {
			return
		}
		z := newFuzzed(t, a)
		for len(in) >= 2 {
			n, flags := min(int(in[0]), len(in)-2), in[1]
			z.record(flags, in[2:2+n])
			in = in[2+n:]
		}
		z.finish()
	})
}

// fuzzed is the queue pair under fuzzing.
type fuzzed struct {
	t          *testing.T
	q          *QP
	mem        *testMemory
	now        time.Time
	secret, mr *region
	posted     map[uint64]int
	id         uint64
	tap        *tap
}

func newFuzzed(t *testing.T, a Attr) *fuzzed {
	t.Helper()
	z := &fuzzed{t: t, mem: &testMemory{}, now: time.Unix(0, 0), posted: map[uint64]int{}, tap: newTap(t)}
	z.mr = z.mem.add(4096, allAccess)
	z.mr.addr, z.mr.rkey = 0, 0 // what zeros in an RDMA header mean
	z.secret = z.mem.add(4096, rdma.LocalWrite)
	fillWith(z.secret.buf, 0x55)
	q, err := NewQP(QPConfig{Num: 1, MaxSendWR: 8, MaxRecvWR: 4, MaxSGE: 2, Memory: z.mem})
	if err != nil {
		t.Fatal(err)
	}
	z.q = q
	if err := q.Modify(z.now, rdma.QPAttr{State: rdma.QPInit, Access: allAccess}); err != nil {
		t.Fatal(err)
	}
	a.MaxTransfer, a.ReadWindow = 2048, 2
	if err := q.Start(z.now, Terms{Attr: a, First: 0xffff_fffe, PeerFirst: 0xffff_fffd, PeerPosted: 3}); err != nil {
		t.Fatal(err)
	}
	return z
}

func (z *fuzzed) record(flags byte, raw []byte) {
	if flags&1 != 0 {
		z.post(flags)
	}
	if flags&2 != 0 {
		z.id++
		if n, err := z.q.PostRecv([]rdma.RecvWR{{ID: z.id, SGE: z.mr.sge(2048, int(flags)*4)}}); err == nil && n == 1 {
			z.posted[z.id]++
		}
	}
	if flags&4 != 0 {
		z.now = z.now.Add(time.Millisecond)
		if at, ok := z.q.NextTimeout(); ok && at.Before(z.now) {
			z.q.HandleTimeout(z.now)
		}
	}
	if flags&8 != 0 {
		z.q.ForgetMemory(time.Time{})
	}
	b := append([]byte(nil), raw...)
	if flags&64 != 0 && len(b) >= HeaderLen {
		z.relate(b)
	}
	for len(b) > 0 {
		bufs := z.q.RxBuffers(nil)
		n := 0
		for _, to := range bufs {
			k := copy(to, b)
			b, n = b[k:], n+k
		}
		if n == 0 {
			break
		}
		_ = z.q.HandleRx(z.now, n)
		if flags&16 == 0 {
			z.poll()
		}
		z.transmit(int(flags))
	}
	if flags&0xa0 == 0xa0 {
		z.mr.gone = true
		z.q.ForgetMemory(time.Time{})
	}
	z.transmit(int(flags))
	z.check()
}

// relate makes the number and the acknowledgement of a segment relative to what is expected.
func (z *fuzzed) relate(b []byte) {
	h, _ := ParseHeader(b[:HeaderLen])
	h.Message = z.q.rsp.delivered + 1 + uint32(int8(h.Message))>>7
	if h.Type == TypeReadResponse {
		if w, n := z.q.req.oldestRead(); w != nil {
			h.Message = n
			if len(b) >= HeaderLen+RDMALen {
				RDMA{Addr: w.addr, Handle: w.rkey, Length: w.length}.Append(b[HeaderLen:HeaderLen])
			}
		}
	}
	h.Ack += z.q.req.acked
	if z.q.rsp.msg.active {
		h.Message, h.Offset = z.q.rsp.msg.number, z.q.rsp.msg.got
	}
	version := b[0]
	h.Append(b[:0])
	b[0] = version
}

func (z *fuzzed) post(flags byte) {
	ops := []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpWriteImm, rdma.OpRead}
	z.id++
	w := rdma.SendWR{ID: z.id, Op: ops[flags>>1&3], Flags: rdma.SendSignaled, SGL: []rdma.SGE{z.mr.sge(0, int(flags)*8)}}
	if n, err := z.q.PostSend(z.now, []rdma.SendWR{w}); err == nil && n == 1 {
		z.posted[w.ID]++
	}
}

// transmit takes a part of what there is to send, or all.
func (z *fuzzed) transmit(part int) {
	for range 20 {
		total := 0
		for _, b := range z.q.TxBuffers(z.now, nil) {
			if part&32 != 0 && total+len(b) > part {
				b = b[:max(0, part-total)]
			}
			z.tap.see(b)
			total += len(b)
		}
		if total == 0 {
			return
		}
		z.q.HandleTx(z.now, total)
		if part&32 != 0 {
			return
		}
	}
}

func (z *fuzzed) poll() {
	var wcs [5]wq.Completion
	for {
		n := z.q.PollWC(wcs[:])
		for _, c := range wcs[:n] {
			z.posted[c.WC.ID]--
			if z.posted[c.WC.ID] < 0 {
				z.t.Fatalf("work request %d completed twice", c.WC.ID)
			}
		}
		if n == 0 {
			return
		}
	}
}

func (z *fuzzed) check() {
	z.mem.intact(z.t)
	for i, v := range z.secret.buf {
		if v != byte(i*7)+byte(i>>8)+0x55 {
			z.t.Fatalf("byte %d of a region without remote rights written", i)
		}
	}
	r := &z.q.req
	if z.q.State() == rdma.QPRTS && (r.queue.cur-r.queue.head > 8 || r.queue.tail-r.queue.cur > 8 || r.reads < 0 || r.reads > 2) {
		z.t.Fatalf("head %d, cur %d, tail %d, %d READs", r.queue.head, r.queue.cur, r.queue.tail, r.reads)
	}
}

// finish ends the queue pair: everything that was posted has completed then.
func (z *fuzzed) finish() {
	if err := z.q.Modify(z.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
		z.t.Fatal(err)
	}
	z.poll()
	for id, n := range z.posted {
		if n != 0 {
			z.t.Fatalf("work request %d did not complete", id)
		}
	}
}
