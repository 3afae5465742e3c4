// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// FuzzQPHandlePacket gives a queue pair in RTS, with work in both directions,
// a string of hostile packets. Whatever they are, nothing panics, no byte
// outside what the peer may write changes, and every work request completes
// at most once.
//
// The input is a sequence of records: a length, what to do besides (post,
// expire a timer, forget memory, let time pass), and the packet. A record's
// PSN is relative to what the queue pair expects, so that the fuzzer gets
// beyond the PSN check; bit 6 of the flags keeps it as it is.
func FuzzQPHandlePacket(f *testing.F) {
	for i, c := range captures(f) {
		if i%40 == 0 && len(c.udp) < 250 {
			f.Add(append([]byte{byte(len(c.udp)), 1}, c.udp...))
		}
	}
	for op := range numOpCodes {
		for _, n := range []int{0, 4, 64} {
			b := make([]byte, OpCode(op).HeaderLen()+n+ICRCLen)
			b[0] = byte(op)
			rec := append([]byte{byte(len(b)), 3}, b...)
			f.Add(append(rec, rec...))
		}
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 4096 {
			return
		}
		z := newFuzzed(t)
		for len(in) >= 2 {
			n, flags := int(in[0]), in[1]
			in = in[2:]
			if n > len(in) {
				n = len(in)
			}
			z.record(flags, in[:n])
			in = in[n:]
		}
		z.finish()
	})
}

// fuzzed is the queue pair under fuzzing.
type fuzzed struct {
	t      *testing.T
	q      *QP
	mem    *testMemory
	now    time.Time
	secret *region // registered, without remote rights
	mr     *region
	posted map[uint64]int
	id     uint64
	pkt    Packet
	tx     [7]TxPacket
}

func newFuzzed(t *testing.T) *fuzzed {
	z := &fuzzed{t: t, mem: &testMemory{}, now: time.Unix(0, 0), posted: map[uint64]int{}}
	z.mr = z.mem.add(4096, allAccess)
	z.mr.addr, z.mr.rkey = 0, 0 // what zeros in a RETH mean
	z.secret = z.mem.add(4096, rdma.LocalWrite)
	for i := range z.secret.buf {
		z.secret.buf[i] = 0x55
	}
	q, err := NewQP(QPConfig{Num: 1, MaxSendWR: 8, MaxRecvWR: 4, MaxSGE: 2, Memory: z.mem, Window: 16, ACKDelay: 500 * time.Microsecond})
	if err != nil {
		t.Fatal(err)
	}
	z.q = q
	a := rdma.QPAttr{
		Access: allAccess, DestQPN: 2, MTU: rdma.MTU256, SQPSN: rdma.PSNMask - 3, RQPSN: rdma.PSNMask - 1,
		Timeout: 10, RetryCount: 2, RNRRetry: 7,
	}
	for _, s := range []rdma.QPState{rdma.QPInit, rdma.QPRTR, rdma.QPRTS} {
		a.State = s
		if err := q.Modify(z.now, a); err != nil {
			t.Fatal(err)
		}
	}
	return z
}

func (z *fuzzed) record(flags byte, raw []byte) {
	if flags&1 != 0 {
		z.post(flags)
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
	if z.pkt.Parse(raw) == nil {
		if flags&64 == 0 {
			base := z.q.rsp.psn
			if !z.pkt.BTH.OpCode.IsRequest() {
				base = z.q.req.win.una
			}
			z.pkt.BTH.PSN = wire(base).Add(int(int8(z.pkt.BTH.PSN)))
		}
		z.q.HandlePacket(z.now, &z.pkt)
	}
	if flags&16 == 0 {
		z.poll()
	}
	z.check()
}

func (z *fuzzed) post(flags byte) {
	ops := []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpWriteImm, rdma.OpRead}
	z.id++
	w := rdma.SendWR{ID: z.id, Op: ops[flags>>1&3], Flags: rdma.SendSignaled, SGL: []rdma.SGE{z.mr.sge(0, int(flags)*8)}}
	if n, err := z.q.PostSend(z.now, []rdma.SendWR{w}); err == nil && n == 1 {
		z.posted[w.ID]++
	}
	if flags&2 != 0 {
		z.id++
		r := rdma.RecvWR{ID: z.id, SGE: z.mr.sge(2048, int(flags)*4)}
		if n, err := z.q.PostRecv([]rdma.RecvWR{r}); err == nil && n == 1 {
			z.posted[r.ID]++
		}
	}
}

func (z *fuzzed) poll() {
	for {
		n := z.q.PollTx(z.now, z.tx[:])
		for i := range n {
			if _, err := ParsePacket(bytesOf(&z.tx[i], nil)); err != nil {
				z.t.Fatalf("our own packet: %v", err)
			}
		}
		if n < len(z.tx) {
			break
		}
	}
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
		if v != 0x55 {
			z.t.Fatalf("byte %d of a region without remote rights written", i)
		}
	}
	w := &z.q.req.win
	if z.q.State() == rdma.QPRTS && (w.una > w.nxt || w.nxt > w.max || w.max > w.post || w.nxt-w.una > 16) {
		z.t.Fatalf("una %d, nxt %d, max %d, post %d", w.una-psnBase, w.nxt-psnBase, w.max-psnBase, w.post-psnBase)
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
