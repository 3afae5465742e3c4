// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bytes"
	"errors"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// rightCases are about what a device is asked for that it may not have, and about rights that
// are given for a part, or for a time.
var rightCases = []Case{
	{"Flags", testFlags},
	{"PartOfRegion", testPartOfRegion},
	{"PartOfRegionRights", testPartOfRegionRights},
	{"SendInvalidate", testSendInvalidate},
	{"SendImm", testSendImm},
}

// testFlags posts what is refused: nothing of it is taken, and what is posted later goes on.
func testFlags(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	at := net.A.Attr()
	unread := rdma.ErrInvalid // what is wrong with a READ, where there is one
	if !at.RDMARead {
		unread = rdma.ErrNotSupported
	}
	for _, c := range []struct {
		name string
		has  bool // the device takes it
		wr   rdma.SendWR
		want error
	}{
		{"unknown flag", false, rdma.SendWR{Op: rdma.OpSend, Flags: 1 << 7}, rdma.ErrInvalid},
		{"all unknown flags", false, rdma.SendWR{Op: rdma.OpSend, Flags: 7 << 5}, rdma.ErrInvalid},
		{"invalidate by WRITE", false, rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendInvalidate}, rdma.ErrInvalid},
		{"immediate of a READ", false, rdma.SendWR{Op: rdma.OpRead, Flags: rdma.SendImm}, unread},
		{"invalidate", at.SendWithInv, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendInvalidate}, rdma.ErrNotSupported},
		{"immediate", at.SendWithImm, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendImm}, rdma.ErrNotSupported},
		{"WRITE with immediate", at.WriteWithImm, rdma.SendWR{Op: rdma.OpWriteImm}, rdma.ErrNotSupported},
		{"READ", at.RDMARead, rdma.SendWR{Op: rdma.OpRead}, rdma.ErrNotSupported},
		{"inline with SGEs", false, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendInline, SGL: []rdma.SGE{x.SGE(0, 8)}}, rdma.ErrInvalid},
		{"inline bytes without the flag", false, rdma.SendWR{Op: rdma.OpSend, Inline: make([]byte, 8)}, rdma.ErrInvalid},
	} {
		if c.has {
			continue
		}
		if n, err := x.QP.PostSend([]rdma.SendWR{c.wr}); n != 0 || !errors.Is(err, c.want) {
			t.Errorf("%s: %d, %v, want %v", c.name, n, err, c.want)
		}
	}
	y.Recv(t, 1, 0, 8)
	x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 8)}})
	AwaitOne(t, y.RecvCQ, 1, rdma.StatusSuccess)
	AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
}

// part registers a part of an end's region.
func (e *End) part(t *testing.T, off, length int, a rdma.Access) rdma.MR {
	t.Helper()
	m, err := e.PD.RegMR(e.MR, off, length, a)
	if err != nil {
		t.Fatalf("register %d bytes at %d: %v", length, off, err)
	}
	return m
}

// testPartOfRegion: the keys of a part of a region open its bytes and none beside them.
func testPartOfRegion(t *testing.T, net Net) {
	const size, off, length = 16384, 5000, 3001
	all := rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	x, y := net.Pair(t, Options{MRBytes: size})
	m := y.part(t, off, length, all)
	if len(m.Bytes()) != length || &m.Bytes()[0] != &y.MR.Bytes()[off] {
		t.Fatalf("the part has %d bytes, or others", len(m.Bytes()))
	}
	inner, err := y.PD.RegMR(m, 1, 10, rdma.LocalWrite)
	if err != nil || len(inner.Bytes()) != 10 || &inner.Bytes()[0] != &m.Bytes()[1] {
		t.Errorf("part of a part: %v", err)
	}
	for _, bad := range [][2]int{{-1, 5}, {0, size + 1}, {size, 1}, {size - 4, 5}, {5, 0}, {5, -1}, {1, int(^uint(0) >> 1)}} {
		if _, err := y.PD.RegMR(y.MR, bad[0], bad[1], all); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%d bytes at %d of %d: %v, want ErrInvalid", bad[1], bad[0], size, err)
		}
	}
	fill(x.MR.Bytes(), 1)
	w := rdma.SendWR{ID: 1, Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, length)}, RemoteAddr: m.Addr(), RKey: m.RKey()}
	x.Send(t, w)
	AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
	x.awaitArrival(t, y)
	want := make([]byte, size)
	copy(want[off:], x.MR.Bytes()[:length])
	if !bytes.Equal(y.MR.Bytes(), want) {
		t.Error("the bytes are not those of the part, or others changed")
	}
	// As local memory, likewise.
	y.Send(t, rdma.SendWR{
		ID: 2, Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{{Addr: m.Addr(), Length: length, LKey: m.LKey()}},
		RemoteAddr: x.MR.Addr() + 8192, RKey: x.MR.RKey(),
	})
	AwaitOne(t, y.SendCQ, 2, rdma.StatusSuccess)
	y.awaitArrival(t, x)
	if !bytes.Equal(x.MR.Bytes()[8192:8192+length], m.Bytes()) {
		t.Error("the part as local memory has other bytes")
	}
	for name, at := range map[string]uint64{"one byte too far": m.Addr() + 1, "one byte before": m.Addr() - 1} {
		x, y := net.Pair(t, Options{MRBytes: size})
		part := y.part(t, off, length, all)
		w := w
		w.SGL, w.RKey, w.RemoteAddr = []rdma.SGE{x.SGE(0, length)}, part.RKey(), at-m.Addr()+part.Addr()
		remoteFault(t, name, x, y, part, w)
	}
}

// testPartOfRegionRights: a part has rights of its own, and is gone when it is closed, while
// the region that it is of goes on.
func testPartOfRegionRights(t *testing.T, net Net) {
	for _, c := range []struct {
		name   string
		access rdma.Access
		op     rdma.Opcode
		closed bool
	}{
		{"write of a part to be read", rdma.RemoteRead, rdma.OpWrite, false},
		{"read of a part to be written", rdma.LocalWrite | rdma.RemoteWrite, rdma.OpRead, false},
		{"write of a part that was closed", rdma.LocalWrite | rdma.RemoteWrite, rdma.OpWrite, true},
	} {
		if c.op == rdma.OpRead && !net.A.Attr().RDMARead {
			continue
		}
		x, y := net.Pair(t, Options{MRBytes: 8192})
		m := y.part(t, 100, 100, c.access)
		addr, key, named := m.Addr(), m.RKey(), m
		if c.closed {
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			named = y.MR // which has its bytes
		}
		good := x.Write(1, y, 100, 100)
		x.Send(t, good)
		AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
		x.awaitArrival(t, y)
		w := x.Write(2, y, 0, 50)
		w.Op, w.RemoteAddr, w.RKey = c.op, addr, key
		remoteFault(t, c.name, x, y, named, w)
	}
}

// testSendInvalidate: the receiver learns which key is dead, and it is.
func testSendInvalidate(t *testing.T, net Net) {
	if !net.A.Attr().SendWithInv || !net.B.Attr().SendWithInv {
		t.Log("the device has no Send with Invalidate")
		return
	}
	x, y := net.Pair(t, Options{MRBytes: 8192})
	m := y.part(t, 0, 4096, rdma.LocalWrite|rdma.RemoteWrite)
	w := x.Write(1, y, 0, 100)
	w.RemoteAddr, w.RKey = m.Addr(), m.RKey()
	x.Send(t, w)
	AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
	y.Recv(t, 3, 4096, 100)
	x.Send(t, rdma.SendWR{
		ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled | x.solicited() | rdma.SendInvalidate, SGL: []rdma.SGE{x.SGE(0, 7)}, InvKey: m.RKey(),
	})
	if c := AwaitOne(t, y.RecvCQ, 3, rdma.StatusSuccess); !c.Invalidated || c.InvKey != m.RKey() || c.Bytes != 7 {
		t.Errorf("receive completion %+v, want key %#x invalidated", c, m.RKey())
	}
	AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
	m.Bytes()[0]++ // the memory is there, and ours
	remoteFault(t, "invalidated key", x, y, m, w)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// testSendImm: immediate data comes with a SEND, also with one of no bytes.
func testSendImm(t *testing.T, net Net) {
	if !net.A.Attr().SendWithImm {
		t.Log("the device has no SEND with immediate data")
		return
	}
	x, y := net.Pair(t, Options{})
	for i, n := range []int{0, 44, 10_000} {
		y.Recv(t, 3, 0, 10_000)
		x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled | rdma.SendImm, SGL: []rdma.SGE{x.SGE(0, n)}, Imm: 0xdead0000 + uint32(i)})
		if c := AwaitOne(t, y.RecvCQ, 3, rdma.StatusSuccess); !c.HasImm || c.Imm != 0xdead0000+uint32(i) || int(c.Bytes) != n || c.Op != rdma.OpRecv {
			t.Errorf("%d bytes: receive completion %+v", n, c)
		}
		AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
	}
}
