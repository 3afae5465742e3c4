// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// faultCases are about what must fail, and how.
var faultCases = []Case{
	{"WrongKeys", testWrongKeys},
	{"Permissions", testPermissions},
	{"DomainIsolation", testDomainIsolation},
	{"LocalProtection", testLocalProtection},
	{"ReceiveTooSmall", testReceiveTooSmall},
	{"ReceiverNotReady", testReceiverNotReady},
	{"ReceiverNeverReady", testReceiverNeverReady},
	{"RetryExceeded", testRetryExceeded},
	{"FlushOnError", testFlushOnError},
	{"RegionClosedUnderWrites", testRegionClosedUnderWrites},
	{"AddressesTellNothing", testAddressesTellNothing},
	{"SharedMemory", testSharedMemory},
	{"ClosedDuringTraffic", testClosedDuringTraffic},
	{"QPFatalEvent", testQPFatalEvent},
}

// memory is what regions have, to see whether it changes. A provider that places bytes before it
// refuses them is found only if all of the regions have something else.
type memory struct {
	regions []rdma.MR
	before  [][]byte
}

// fillAll gives each region bytes of its own.
func fillAll(regions ...rdma.MR) *memory {
	m := &memory{regions: regions}
	for i, r := range regions {
		fill(r.Bytes(), uint64(i+1))
	}
	for _, r := range regions { // a region may be a part of another one
		m.before = append(m.before, bytes.Clone(r.Bytes()))
	}
	return m
}

func (m *memory) changed() bool {
	for i, r := range m.regions {
		if !bytes.Equal(m.before[i], r.Bytes()) {
			return true
		}
	}
	return false
}

// remoteFault posts w, which the peer must refuse as access without right; both queue
// pairs end in ERR and the memory of both ends is as it was, but, where a WRITE that goes beyond the end
// of the region is sent in pieces, for its first bytes. m is the region that w names, or should have named.
func remoteFault(t *testing.T, name string, x, y *End, m rdma.MR, w rdma.SendWR) {
	t.Helper()
	all := fillAll(x.MR, y.MR, m)
	x.Send(t, w)
	c := Await(t, x.SendCQ, 1)[0]
	if want := x.told(w.Op, rdma.StatusRemoteAccess); c.Status != want || c.ID != w.ID {
		t.Errorf("%s: completion %+v (%v), want %v", name, c, c.Status, want)
	}
	x.awaitError(t)
	y.awaitFailed(t, true)
	size, off := uint64(len(m.Bytes())), w.RemoteAddr-m.Addr()
	if x.Dev.Attr().PartialWrites && w.Op == rdma.OpWrite && w.RKey == m.RKey() && off < size && off+uint64(w.SGL[0].Length) > size {
		sent, got, was := x.MR.Bytes()[w.SGL[0].Addr-x.MR.Addr():], m.Bytes()[off:], all.before[2][off:]
		for i := 0; i < len(got) && got[i] == sent[i]; i++ {
			got[i] = was[i] // as if it had not come
		}
	}
	if all.changed() {
		t.Errorf("%s: memory changed", name)
	}
}

// told is the status of a request that the peer refuses with s: where a SEND or WRITE
// completes before the peer has it, that is success, and then the queue pair fails.
func (e *End) told(op rdma.Opcode, s rdma.Status) rdma.Status {
	switch at := e.Dev.Attr(); {
	case op != rdma.OpRead && !at.PeerCompletes:
		return rdma.StatusSuccess
	case at.Stream && !at.RefusalsTold:
		return rdma.StatusFlushed
	}
	return s
}

// refused is the event of a queue pair whose peer refused a request.
func (e *End) refused() rdma.EventKind {
	if at := e.Dev.Attr(); at.Stream && !at.RefusalsTold {
		return rdma.EventDisconnected
	}
	return rdma.EventQPFatal
}

// awaitError waits until the queue pair of a requester is in ERR. The completion tells
// that, if it tells anything of the peer.
func (e *End) awaitError(t *testing.T) {
	t.Helper()
	if !e.Dev.Attr().PeerCompletes {
		AwaitEvent(t, e.Ctx, e.refused())
	}
	if st := e.QP.State(); st != rdma.QPError {
		t.Errorf("requester in %v, want ERR", st)
	}
}

// awaitArrival waits until the peer has what was sent before: a READ overtakes nothing.
func (e *End) awaitArrival(t testing.TB, peer *End) {
	t.Helper()
	if at := e.Dev.Attr(); at.PeerCompletes || !at.RDMARead {
		return
	}
	const id = 1<<63 - 1
	e.Send(t, rdma.SendWR{ID: id, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e.SGE(0, 0)}, RemoteAddr: peer.MR.Addr(), RKey: peer.MR.RKey()})
	AwaitOne(t, e.SendCQ, id, rdma.StatusSuccess)
}

// awaitFailed waits until the queue pair has failed as a responder. Where
// nothing tells that is seen by asking. The event says whether it was because the
// peer asked for memory without right.
func (e *End) awaitFailed(t *testing.T, access bool) {
	t.Helper()
	for e.Dev.Attr().ResponderEvents {
		ev := AwaitEvent(t, e.Ctx, rdma.EventQPFatal)
		if ev.QPN != e.QP.Num() {
			t.Errorf("event %+v names another queue pair", ev)
		}
		if got := errors.Is(ev.Err, rdma.ErrPeerAccess); got == access {
			break
		} else if got {
			t.Fatalf("event %v accuses the peer of access without right", ev.Err)
		} // it may be told again, with the reason
	}
	for end := time.Now().Add(patience); e.QP.State() != rdma.QPError; time.Sleep(time.Millisecond) { // polls the state
		if time.Now().After(end) {
			t.Fatalf("responder in %v, want ERR", e.QP.State())
		}
	}
}

// awaitLocal polls the completion of a request that fails for a local reason.
func (e *End) awaitLocal(t *testing.T, q rdma.CQ, id uint64, s rdma.Status) {
	t.Helper()
	want := []rdma.Status{s}
	if !e.Dev.Attr().LocalErrors {
		want = append(want, rdma.StatusLocalQP, rdma.StatusFlushed)
	}
	if w := Await(t, q, 1)[0]; w.ID != id || !slices.Contains(want, w.Status) {
		t.Fatalf("completion %+v (%v), want ID %d with %v", w, w.Status, id, want)
	}
}

// awaitRemote polls the completion of a send that fails because the request
// that it meets at the peer does, for a reason that is local there.
func (e *End) awaitRemote(t *testing.T, peer *End, id uint64, s rdma.Status) {
	t.Helper()
	want := []rdma.Status{e.told(rdma.OpSend, s)}
	if !peer.Dev.Attr().LocalErrors {
		want = append(want, rdma.StatusRemoteOp, rdma.StatusRemoteInvalid)
	}
	if at := e.Dev.Attr(); at.Stream && !at.RefusalsTold {
		want = append(want, rdma.StatusLocalQP, rdma.StatusFlushed) // the connection ended while it was sent
	}
	if w := Await(t, e.SendCQ, 1)[0]; w.ID != id || !slices.Contains(want, w.Status) {
		t.Fatalf("completion %+v (%v), want ID %d with %v", w, w.Status, id, want)
	}
}

func testWrongKeys(t *testing.T, net Net) {
	size := uint64(len(NewEnd(t, net.B, Options{MRBytes: 8192}).MR.Bytes()))
	for _, c := range []struct {
		name string
		edit func(w *rdma.SendWR, y *End)
	}{
		{"unknown RKey", func(w *rdma.SendWR, y *End) { w.RKey ^= 0x5a5a0000 }},
		{"RKey of no region", func(w *rdma.SendWR, y *End) { w.RKey = 0xfffffff0 }},
		{"one byte too far", func(w *rdma.SendWR, y *End) { w.RemoteAddr = y.MR.Addr() + size - 5000 + 1 }},
		{"below the region", func(w *rdma.SendWR, y *End) { w.RemoteAddr = y.MR.Addr() - 1 }},
		{"address wraps", func(w *rdma.SendWR, y *End) { w.RemoteAddr = ^uint64(0) - 100 }},
		{"zero address", func(w *rdma.SendWR, y *End) { w.RemoteAddr = 0 }},
		{"stale RKey", func(w *rdma.SendWR, y *End) {
			old, err := y.PD.AllocMR(8192, y.opt.Access)
			if err != nil {
				t.Fatal(err)
			}
			w.RKey, w.RemoteAddr = old.RKey(), old.Addr()
			if err := old.Close(); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		for _, op := range []rdma.Opcode{rdma.OpWrite, rdma.OpRead} {
			x, y := net.Pair(t, Options{MRBytes: 8192, MTU: rdma.MTU1024})
			w := x.Write(1, y, 0, 5000)
			w.Op = op
			c.edit(&w, y)
			remoteFault(t, c.name+" "+op.String(), x, y, y.MR, w)
		}
	}
}

func testPermissions(t *testing.T, net Net) {
	all := rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	for _, c := range []struct {
		name   string
		access rdma.Access // of the region and the queue pair
		op     rdma.Opcode
	}{
		{"write without right", rdma.LocalWrite | rdma.RemoteRead, rdma.OpWrite},
		{"read without right", rdma.LocalWrite | rdma.RemoteWrite, rdma.OpRead},
	} {
		// The region of a queue pair that may do all.
		x, y := NewEnd(t, net.A, Options{}), NewEnd(t, net.B, Options{})
		net.connect(t, x, y)
		m, err := y.PD.AllocMR(4096, c.access)
		if err != nil {
			t.Fatal(err)
		}
		w := x.Write(1, y, 0, 100)
		w.Op, w.RemoteAddr, w.RKey = c.op, m.Addr(), m.RKey()
		remoteFault(t, c.name+" on the region", x, y, m, w)

		// The queue pair, with a region that allows all.
		x, y = NewEnd(t, net.A, Options{}), NewEnd(t, net.B, Options{Access: c.access})
		net.connect(t, x, y)
		if m, err = y.PD.AllocMR(4096, all); err != nil {
			t.Fatal(err)
		}
		w = x.Write(1, y, 0, 100)
		w.Op, w.RemoteAddr, w.RKey = c.op, m.Addr(), m.RKey()
		want := []rdma.Status{x.told(c.op, rdma.StatusRemoteInvalid), x.told(c.op, rdma.StatusRemoteAccess)} // IBTA leaves room
		kept := fillAll(x.MR, y.MR, m)
		x.Send(t, w)
		if got := Await(t, x.SendCQ, 1)[0].Status; !slices.Contains(want, got) {
			t.Errorf("%s on the queue pair: %v", c.name, got)
		}
		x.awaitError(t)
		if kept.changed() {
			t.Errorf("%s on the queue pair: memory changed", c.name)
		}
	}
}

// shared is memory that two protection domains of an end's context have, filled with
// something: the end's own domain, and another one.
type shared struct{ own, other rdma.MR }

func newShared(t *testing.T, e *End) shared {
	t.Helper()
	domain, err := e.Ctx.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	var m shared
	if m.other, err = domain.AllocMR(4096, e.opt.Access); err != nil {
		t.Fatal(err)
	}
	if m.own, err = e.PD.RegMR(m.other, 0, 0, e.opt.Access); err != nil {
		t.Fatal(err)
	}
	fill(m.own.Bytes(), 3)
	return m
}

// domainCase is a way to name shared memory on a queue pair of the own domain.
type domainCase struct {
	name string
	key  func(m shared) rdma.MR
	addr func(m shared) rdma.MR
	good bool
}

// testDomainIsolation: keys of one protection domain open nothing on queue pairs of
// another one of the same context, neither to a peer nor to the program, also where both
// domains have the memory: then each has it by its own key only, and at its own address.
func testDomainIsolation(t *testing.T, net Net) {
	own := func(m shared) rdma.MR { return m.own }
	other := func(m shared) rdma.MR { return m.other }
	for _, c := range []domainCase{
		{"key and address of the other domain", other, other, false},
		{"key of the other domain", other, own, false},
		{"address of the other domain", own, other, false},
		{"own key and address", own, own, true},
	} {
		for _, op := range []rdma.Opcode{rdma.OpWrite, rdma.OpRead} {
			if op == rdma.OpWrite || net.A.Attr().RDMARead {
				c.remote(t, net, op)
				c.local(t, net, op)
			}
		}
		c.receive(t, net)
	}
}

func written(m rdma.MR) bool {
	return slices.ContainsFunc(m.Bytes(), func(c byte) bool { return c != 0 })
}

// remote has the peer name the memory.
func (c domainCase) remote(t *testing.T, net Net, op rdma.Opcode) {
	t.Helper()
	x, y := net.Pair(t, Options{MRBytes: 4096})
	m := newShared(t, y)
	w := x.Write(1, y, 0, 100)
	w.Op, w.RemoteAddr, w.RKey = op, c.addr(m).Addr(), c.key(m).RKey()
	if c.good {
		x.Send(t, w)
		AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
		x.awaitArrival(t, y)
		if !bytes.Equal(m.other.Bytes()[:100], x.MR.Bytes()[:100]) {
			t.Errorf("%s, %v by the peer: the memory was not reached", c.name, op)
		}
		return
	}
	remoteFault(t, c.name+", "+op.String()+" by the peer", x, y, m.own, w)
}

// local has the program send from the memory, or read into it.
func (c domainCase) local(t *testing.T, net Net, op rdma.Opcode) {
	t.Helper()
	x, y := net.Pair(t, Options{MRBytes: 4096})
	m := newShared(t, x)
	before := bytes.Clone(m.own.Bytes())
	w := x.Write(2, y, 0, 100)
	w.Op, w.SGL = op, []rdma.SGE{{Addr: c.addr(m).Addr(), Length: 100, LKey: c.key(m).LKey()}}
	x.Send(t, w)
	if c.good {
		AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
		x.awaitArrival(t, y)
	} else {
		x.awaitLocal(t, x.SendCQ, 2, rdma.StatusLocalProtect)
	}
	if got := written(y.MR); got != (c.good && op == rdma.OpWrite) {
		t.Errorf("%s, %v by the program: memory reached the peer: %v", c.name, op, got)
	}
	if got := !bytes.Equal(before, m.own.Bytes()); got != (c.good && op == rdma.OpRead) {
		t.Errorf("%s, %v by the program: memory was filled: %v", c.name, op, got)
	}
}

// receive has the program offer the memory as a receive buffer.
func (c domainCase) receive(t *testing.T, net Net) {
	t.Helper()
	x, y := net.Pair(t, Options{MRBytes: 4096})
	m := newShared(t, y)
	before := bytes.Clone(m.own.Bytes())
	buf := rdma.SGE{Addr: c.addr(m).Addr(), Length: 100, LKey: c.key(m).LKey()}
	if n, err := y.QP.PostRecv([]rdma.RecvWR{{ID: 3, SGE: buf}}); n != 1 || err != nil {
		if c.good {
			t.Fatalf("post receive: %d, %v", n, err)
		}
		return // refused at posting is as good
	}
	x.Send(t, rdma.SendWR{ID: 4, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 100)}})
	if c.good {
		AwaitOne(t, y.RecvCQ, 3, rdma.StatusSuccess)
		return
	}
	y.awaitLocal(t, y.RecvCQ, 3, rdma.StatusLocalProtect)
	x.awaitRemote(t, y, 4, rdma.StatusRemoteOp)
	if !bytes.Equal(before, m.own.Bytes()) {
		t.Errorf("%s, as a receive buffer: memory was written", c.name)
	}
}

// testAddressesTellNothing: what peers learn of a region, its address, is neither where
// its memory is in the process nor near the address of another region.
func testAddressesTellNothing(t *testing.T, net Net) {
	e := NewEnd(t, net.A, Options{})
	const near = 1 << 20
	apart := func(x, y uint64) bool { return max(x, y)-min(x, y) > near }
	var seen []uint64
	for i := range 8 {
		register := func() (rdma.MR, error) { return e.PD.AllocMR(8192, e.opt.Access) }
		if i%2 == 1 {
			register = func() (rdma.MR, error) { return e.PD.RegMR(e.MR, 0, 0, e.opt.Access) }
		}
		m, err := register()
		if err != nil {
			t.Fatal(err)
		}
		if m.Addr()%4096 != 0 {
			t.Errorf("address %#x is not that of a page", m.Addr())
		}
		for _, o := range append(seen, e.MR.Addr(), uint64(reflect.ValueOf(m.Bytes()).Pointer())) {
			if !apart(m.Addr(), o) {
				t.Errorf("address %#x is near %#x, of the memory or of another region", m.Addr(), o)
			}
		}
		seen = append(seen, m.Addr())
	}
}

// testSharedMemory: two domains have the same memory; each region has a life of
// its own, and the memory lives as long as one of them.
func testSharedMemory(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	u, v := net.Pair(t, Options{})
	first, err := y.PD.AllocMR(8192, y.opt.Access)
	if err != nil {
		t.Fatal(err)
	}
	second, err := v.PD.RegMR(first, 0, 0, v.opt.Access)
	if err != nil {
		t.Fatal(err)
	}
	if second.RKey() == first.RKey() || len(second.Bytes()) != len(first.Bytes()) {
		t.Errorf("keys %v and %v, %d and %d bytes", first.RKey(), second.RKey(), len(first.Bytes()), len(second.Bytes()))
	}
	write := func(id uint64, from, to *End, m rdma.MR, fill byte, want rdma.Status) {
		t.Helper()
		copy(from.MR.Bytes(), bytes.Repeat([]byte{fill}, 100))
		w := from.Write(id, to, 0, 100)
		w.RemoteAddr, w.RKey = m.Addr(), m.RKey()
		from.Send(t, w)
		AwaitOne(t, from.SendCQ, id, from.told(rdma.OpWrite, want))
		if want == rdma.StatusSuccess {
			from.awaitArrival(t, to)
		} else {
			from.awaitError(t)
		}
		if want == rdma.StatusSuccess && !bytes.Equal(second.Bytes()[:100], bytes.Repeat([]byte{fill}, 100)) {
			t.Errorf("write %d is not in the memory", id)
		}
	}
	write(1, x, y, first, 1, rdma.StatusSuccess)
	write(2, u, v, second, 2, rdma.StatusSuccess)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	write(3, u, v, second, 3, rdma.StatusSuccess)
	write(4, x, y, first, 4, rdma.StatusRemoteAccess)
	if second.Bytes()[0] != 3 {
		t.Error("a closed region was written")
	}
	if _, err := y.PD.RegMR(first, 0, 0, y.opt.Access); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("register a closed region: %v", err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
}

func testLocalProtection(t *testing.T, net Net) {
	for _, c := range []struct {
		name string
		sge  func(x *End) rdma.SGE
	}{
		{"LKey", func(x *End) rdma.SGE { s := x.SGE(0, 10); s.LKey ^= 0xffff0000; return s }},
		{"bounds", func(x *End) rdma.SGE { return x.SGE(len(x.MR.Bytes())-5, 10) }},
		{"wrap", func(x *End) rdma.SGE { s := x.SGE(0, 10); s.Addr = ^uint64(0) - 3; return s }},
	} {
		x, y := net.Pair(t, Options{})
		y.Recv(t, 1, 0, 64)                                                       // with flow control a SEND that has none to take waits
		x.Send(t, rdma.SendWR{ID: 4, Op: rdma.OpSend, SGL: []rdma.SGE{c.sge(x)}}) // errors always complete
		x.awaitLocal(t, x.SendCQ, 4, rdma.StatusLocalProtect)
		if s := x.QP.State(); s != rdma.QPError {
			t.Errorf("%s: state %v, want ERR", c.name, s)
		}
		if s := y.QP.State(); s != rdma.QPRTS && !net.stream() { // whose connection is gone
			t.Errorf("%s: the peer is in %v, want RTS", c.name, s)
		}
		// A receive buffer that the region does not hold.
		x, y = net.Pair(t, Options{})
		if n, err := y.QP.PostRecv([]rdma.RecvWR{{ID: 6, SGE: c.sge(y)}}); n != 1 || err != nil {
			continue // refused at posting is as good
		}
		x.Send(t, rdma.SendWR{ID: 5, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}})
		y.awaitLocal(t, y.RecvCQ, 6, rdma.StatusLocalProtect)
		x.awaitRemote(t, y, 5, rdma.StatusRemoteOp)
	}
}

func testReceiveTooSmall(t *testing.T, net Net) {
	for _, n := range []int{101, 70_000} {
		x, y := net.Pair(t, Options{})
		y.Recv(t, 1, 0, 100)
		fill(x.MR.Bytes()[:n], 1)
		x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, n)}})
		y.awaitLocal(t, y.RecvCQ, 1, rdma.StatusLocalLength)
		x.awaitRemote(t, y, 2, rdma.StatusRemoteInvalid)
		if slices.ContainsFunc(y.MR.Bytes()[100:], func(c byte) bool { return c != 0 }) {
			t.Error("bytes behind the buffer changed")
		}
	}
}

func testReceiverNotReady(t *testing.T, net Net) {
	if net.stream() {
		return
	}
	x, y := net.Pair(t, Options{MinRNRTimer: 10})
	fill(x.MR.Bytes()[:100], 1)
	for i := range uint64(5) {
		x.Send(t, rdma.SendWR{ID: i, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(int(i), 44)}})
	}
	for i := range uint64(5) {
		y.Recv(t, 10+i, int(i)*64, 64)
		AwaitOne(t, y.RecvCQ, 10+i, rdma.StatusSuccess)
		AwaitOne(t, x.SendCQ, i, rdma.StatusSuccess)
		if !bytes.Equal(x.MR.Bytes()[i:i+44], y.MR.Bytes()[i*64:i*64+44]) {
			t.Fatalf("message %d differs", i)
		}
	}
}

func testReceiverNeverReady(t *testing.T, net Net) {
	if net.stream() {
		return
	}
	x, y := net.Pair(t, Options{RNRRetry: 2})
	x.Send(t, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 44)}})
	x.Send(t, x.Write(2, y, 0, 10))
	AwaitOne(t, x.SendCQ, 1, rdma.StatusRNRRetryExceeded)
	AwaitOne(t, x.SendCQ, 2, rdma.StatusFlushed)
}

// testPeerGone closes the queue pair at the other end of a connection.
func testPeerGone(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	y.Recv(t, 9, 0, 10)
	x.Recv(t, 3, 0, 10)
	if err := y.QP.Close(); err != nil {
		t.Fatal(err)
	}
	AwaitOne(t, x.RecvCQ, 3, rdma.StatusFlushed)
	if s := x.QP.State(); s != rdma.QPError {
		t.Errorf("state %v, want ERR", s)
	}
	AwaitEvent(t, x.Ctx, rdma.EventDisconnected)
	if n, err := y.RecvCQ.Poll(make([]rdma.WC, 1)); n != 0 || err != nil {
		t.Errorf("a closed queue pair completed %d receives, %v", n, err)
	}
}

func testRetryExceeded(t *testing.T, net Net) {
	if net.stream() {
		testPeerGone(t, net)
		return
	}
	x, y := net.Pair(t, Options{Timeout: 10, RetryCount: 2})
	y.Recv(t, 9, 0, 10)
	if err := y.QP.Close(); err != nil {
		t.Fatal(err)
	}
	x.Recv(t, 3, 0, 10)
	x.Send(t, x.Write(1, y, 0, 5000))
	x.Send(t, x.Write(2, y, 0, 10))
	AwaitOne(t, x.SendCQ, 1, rdma.StatusRetryExceeded)
	AwaitOne(t, x.SendCQ, 2, rdma.StatusFlushed)
	AwaitOne(t, x.RecvCQ, 3, rdma.StatusFlushed)
	if s := x.QP.State(); s != rdma.QPError {
		t.Errorf("state %v, want ERR", s)
	}
	AwaitEvent(t, x.Ctx, rdma.EventPathDown)
	if n, err := y.RecvCQ.Poll(make([]rdma.WC, 1)); n != 0 || err != nil {
		t.Errorf("a closed queue pair completed %d receives, %v", n, err)
	}
}

func testFlushOnError(t *testing.T, net Net) {
	x, y := NewEnd(t, net.A, Options{}), NewEnd(t, net.B, Options{})
	if net.stream() {
		net.connect(t, x, y)
	} else {
		x.Connect(t, y) // one side only: the sends stay outstanding
	}
	for i := range uint64(10) {
		x.Recv(t, 100+i, 0, 8)
		w := x.Write(i, y, 0, 2000)
		if i%2 == 0 {
			w.Flags = 0 // flushed requests complete whether signaled or not
		}
		x.Send(t, w)
	}
	if err := x.QP.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	if !net.stream() { // else some have gone before
		for i, w := range Await(t, x.SendCQ, 10) {
			if w.ID != uint64(i) || w.Status != rdma.StatusFlushed {
				t.Errorf("send %d: %+v (%v)", i, w, w.Status)
			}
		}
	}
	for i, w := range Await(t, x.RecvCQ, 10) {
		if w.ID != uint64(100+i) || w.Status != rdma.StatusFlushed {
			t.Errorf("receive %d: %+v (%v)", i, w, w.Status)
		}
	}
}

// testRegionClosedUnderWrites closes a region while the peer writes to it:
// the writes end in an access error and never in unmapped memory.
func testRegionClosedUnderWrites(t *testing.T, net Net) {
	for range 10 {
		x, y := net.Pair(t, Options{MRBytes: 512 << 10})
		for i := range uint64(8) {
			x.Send(t, x.Write(i, y, 0, 300_000))
		}
		AwaitOne(t, x.SendCQ, 0, rdma.StatusSuccess)
		if err := y.MR.Close(); err != nil {
			t.Fatalf("close region: %v", err)
		}
		x.drain(t, 7, rdma.StatusRemoteAccess)

		// And at the sender's side.
		x, y = net.Pair(t, Options{MRBytes: 512 << 10})
		for i := range uint64(8) {
			x.Send(t, x.Write(i, y, 0, 300_000))
		}
		AwaitOne(t, x.SendCQ, 0, rdma.StatusSuccess)
		if err := x.MR.Close(); err != nil {
			t.Fatalf("close region: %v", err)
		}
		x.drain(t, 7, rdma.StatusLocalProtect)
	}
}

// drain awaits n completions: successes, then perhaps one with status s and
// flushed ones behind it. If s is for a local reason, and the device does not
// tell it, or for one of the peer's, and nothing waits for the peer, there are only the
// flushed ones.
func (e *End) drain(t *testing.T, n int, s rdma.Status) {
	t.Helper()
	failed := false
	vague := s == rdma.StatusLocalProtect && !e.Dev.Attr().LocalErrors || e.told(rdma.OpWrite, s) == rdma.StatusSuccess
	for _, w := range Await(t, e.SendCQ, n) {
		switch {
		case !failed && w.Status == rdma.StatusSuccess:
		case !failed && w.Status == s:
			failed = true
		case vague && (w.Status == rdma.StatusFlushed || w.Status == rdma.StatusLocalQP):
			failed = true
		case failed && w.Status == rdma.StatusFlushed:
		default:
			t.Errorf("completion %+v (%v), failed before: %v", w, w.Status, failed)
		}
	}
}

func testClosedDuringTraffic(t *testing.T, net Net) {
	for round := range 12 {
		// Acknowledgements queue behind the writes, on a slow machine for long.
		x, y := net.Pair(t, Options{Timeout: 17, CQDepth: 4096})
		stop, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			wcs := make([]rdma.WC, 64)
			for i := uint64(0); ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := x.QP.PostSend([]rdma.SendWR{x.Write(i, y, 0, 100_000)}); err != nil {
					if err := x.SendCQ.Arm(false); err != nil {
						return
					}
					if n, err := x.SendCQ.Poll(wcs); err != nil || n > 0 {
						continue
					}
					select {
					case <-x.SendCQ.Notify():
					case <-stop:
						return
					}
				}
				_, _ = x.SendCQ.Poll(wcs)
			}
		}()
		stream(t, y, x, 512<<10, 1000, 3, uint64(round))
		var err error
		switch round % 4 {
		case 0:
			err = x.QP.Close()
		case 1:
			err = y.QP.Close()
		case 2:
			err = y.Ctx.Close()
		case 3:
			err = x.QP.Modify(rdma.QPAttr{State: rdma.QPReset})
		}
		if err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		close(stop)
		<-done
	}
}

func testQPFatalEvent(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	w := x.Write(1, y, 0, 100)
	w.RKey ^= 0x10000
	x.Send(t, w)
	y.awaitFailed(t, true)
	AwaitOne(t, x.SendCQ, 1, x.told(rdma.OpWrite, rdma.StatusRemoteAccess)) // a provider may learn of it here
	if e := AwaitEvent(t, x.Ctx, x.refused()); e.QPN != x.QP.Num() {
		t.Errorf("event %+v names another queue pair", e)
	}
}
