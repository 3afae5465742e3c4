// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// sizes are lengths around every bound: copied or not, one segment or several.
var sizes = []int{0, 1, shortBytes, shortBytes + 1, rxBytes, 65495, 65496, 65511, 65512, 200_000}

func TestSection2_2_2_2_3_Sends(t *testing.T) {
	for _, n := range append(sizes, 16<<20) {
		for _, piece := range []int{0, 100_000} {
			d := newDuo(t, duoConfig{bytes: max(n, 1), piece: piece})
			fillWith(d.x.mr.buf, 3)
			d.y.recv(d, 7, 0, n)
			d.x.send(d, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, n)}})
			d.run()
			name := fmt.Sprintf("%d bytes", n)
			d.want(d.y, name, rdma.WC{ID: 7, Op: rdma.OpRecv, Bytes: uint32(n)})
			d.want(d.x, name, rdma.WC{ID: 1, Op: rdma.OpSend})
			if !bytes.Equal(d.x.mr.buf[:n], d.y.mr.buf[:n]) {
				t.Fatalf("%s: contents differ", name)
			}
			segments := max(1, (n+65510)/65511)
			if got := len(d.x.tap.segments); got != segments {
				t.Errorf("%s: %d segments, want %d", name, got, segments)
			}
			for i, h := range d.x.tap.segments {
				if end := h.Flags&FlagEnd != 0; end != (i == segments-1) {
					t.Errorf("%s: segment %d has End of Message %v", name, i, end)
				}
			}
		}
	}
}

// TestQP_shortSegments: segments may be shorter, for whoever wants to fit them to something.
func TestQP_shortSegments(t *testing.T) {
	const n, segment = 5000, 600
	d := newDuo(t, duoConfig{segment: segment})
	fillWith(d.x.mr.buf, 3)
	d.y.recv(d, 7, 0, n)
	for _, w := range []rdma.SendWR{
		{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, n)}},
		{ID: 2, Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, n)}, RemoteAddr: d.y.mr.addr + n, RKey: d.y.mr.rkey},
		{ID: 3, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(n, n)}, RemoteAddr: d.y.mr.addr + n, RKey: d.y.mr.rkey},
	} {
		d.x.send(d, w)
	}
	d.run()
	d.want(d.y, "receive", rdma.WC{ID: 7, Op: rdma.OpRecv, Bytes: n})
	d.want(d.x, "sends", rdma.WC{ID: 1, Op: rdma.OpSend}, rdma.WC{ID: 2, Op: rdma.OpWrite}, rdma.WC{ID: 3, Op: rdma.OpRead, Bytes: n})
	for _, s := range []*side{d.x, d.y} {
		if b := d.x.mr.buf[:n]; !bytes.Equal(s.mr.buf[:n], b) || !bytes.Equal(s.mr.buf[n:2*n], b) {
			t.Fatal("contents differ")
		}
		for _, h := range s.tap.segments {
			if h.Length > segment {
				t.Errorf("%v of %d bytes", h.Type, h.Length)
			}
		}
	}
	if got := len(d.y.tap.segments); got < n/(segment-HeaderLen-RDMALen) {
		t.Errorf("the answer came in %d segments", got)
	}
}

// A region counts each Write of the peer once and as a whole, in however many segments and pieces it comes
// ([rdma.WriteCounter]).
func TestQP_countsWrites(t *testing.T) {
	for _, c := range []duoConfig{{}, {segment: 600}, {segment: 600, piece: 1}} {
		d := newDuo(t, c)
		want := 0
		for i, n := range []int{100, 5000, 0} {
			d.x.send(d, rdma.SendWR{
				ID: uint64(i), Op: rdma.OpWrite, SGL: []rdma.SGE{d.x.mr.sge(0, n)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey,
			})
			d.run()
			if want += n; d.y.mr.written != want {
				t.Errorf("%+v: of %d bytes %d are counted, want %d", c, n, d.y.mr.written, want)
			}
		}
	}
}

func TestSection3_2_1_Writes(t *testing.T) {
	for _, n := range sizes {
		d := newDuo(t, duoConfig{recvs: 1})
		fillWith(d.x.mr.buf, 5)
		d.x.send(d, rdma.SendWR{
			ID: 1, Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, n)}, RemoteAddr: d.y.mr.addr + 10, RKey: d.y.mr.rkey,
		})
		d.run()
		name := fmt.Sprintf("%d bytes", n)
		d.want(d.x, name, rdma.WC{ID: 1, Op: rdma.OpWrite})
		d.want(d.y, name) // no receive is taken
		if !bytes.Equal(d.x.mr.buf[:n], d.y.mr.buf[10:10+n]) {
			t.Fatalf("%s: contents differ", name)
		}
		if want := max(1, (n+65494)/65495); len(d.x.tap.segments) != want {
			t.Errorf("%s: %d segments, want %d", name, len(d.x.tap.segments), want)
		}
	}
}

func TestSection2_2_2_2_6_Reads(t *testing.T) {
	for _, n := range append(sizes, 16<<20) {
		d := newDuo(t, duoConfig{bytes: max(n, 1) + 20, piece: 50_000})
		fillWith(d.y.mr.buf, 9)
		for id := range uint64(3) { // more than one is under way
			w := rdma.SendWR{
				ID: id, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, n)}, RemoteAddr: d.y.mr.addr + 20, RKey: d.y.mr.rkey,
			}
			d.x.send(d, w)
		}
		d.run()
		name := fmt.Sprintf("%d bytes", n)
		var want []rdma.WC
		for id := range uint64(3) {
			want = append(want, rdma.WC{ID: id, Op: rdma.OpRead, Bytes: uint32(n)})
		}
		d.want(d.x, name, want...)
		if !bytes.Equal(d.x.mr.buf[:n], d.y.mr.buf[20:20+n]) {
			t.Fatalf("%s: contents differ", name)
		}
		requests := map[uint32]bool{}
		for _, h := range d.x.tap.segments {
			requests[h.Message] = h.Type == TypeReadRequest
		}
		for _, h := range d.y.tap.segments {
			if h.Type == TypeReadResponse && !requests[h.Message] {
				t.Errorf("%s: response %d answers no request", name, h.Message)
			}
		}
	}
}

// §2.2.2.2.3: a response may come between the segments of other messages; they do not hold it up.
func TestSection2_2_2_2_3_ResponsesInterleave(t *testing.T) {
	const n = 200_000
	d := newDuo(t, duoConfig{bytes: 3 * n, piece: 30_000})
	fillWith(d.y.mr.buf, 1)
	d.x.recv(d, 50, n, n)
	d.y.send(d, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.y.mr.sge(n, n)}})
	d.x.send(d, rdma.SendWR{
		ID: 1, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, n)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey,
	})
	d.run()
	if got := len(d.x.wcs); got != 2 {
		t.Fatalf("%d completions, want 2", got)
	}
	d.want(d.y, "send", rdma.WC{ID: 2, Op: rdma.OpSend})
	if !bytes.Equal(d.x.mr.buf[:2*n], d.y.mr.buf[:2*n]) {
		t.Fatal("contents differ")
	}
	between := false
	for i, h := range d.y.tap.segments {
		between = between || i > 0 && h.Type == TypeReadResponse && d.y.tap.segments[i-1].Type == TypeSend && d.y.tap.segments[i-1].Flags&FlagEnd == 0
	}
	if !between {
		t.Error("no response between segments of the Send")
	}
}

func TestSection3_1_ImmediateData(t *testing.T) {
	d := newDuo(t, duoConfig{recvs: 4})
	send := func(w rdma.SendWR) {
		w.RemoteAddr, w.RKey, w.SGL = d.y.mr.addr+5000, d.y.mr.rkey, []rdma.SGE{d.x.mr.sge(0, 100_000)}
		if w.Op == rdma.OpSend {
			w.SGL[0].Length = 10
		}
		d.x.send(d, w)
	}
	send(rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendImm, Imm: 11})
	send(rdma.SendWR{ID: 2, Op: rdma.OpSend, Imm: 12})
	send(rdma.SendWR{ID: 3, Op: rdma.OpWriteImm, Imm: 13})
	send(rdma.SendWR{ID: 4, Op: rdma.OpWrite, Imm: 14})
	send(rdma.SendWR{ID: 5, Op: rdma.OpSend, Flags: rdma.SendImm, Imm: 0})
	d.run()
	d.want(d.y, "receives",
		rdma.WC{ID: 1000, Op: rdma.OpRecv, Bytes: 10, Imm: 11, HasImm: true},
		rdma.WC{ID: 1001, Op: rdma.OpRecv, Bytes: 10},
		rdma.WC{ID: 1002, Op: rdma.OpRecvWriteImm, Bytes: 100_000, Imm: 13, HasImm: true},
		rdma.WC{ID: 1003, Op: rdma.OpRecv, Bytes: 10, HasImm: true})
	d.want(d.x, "unsignaled sends")
	for _, h := range d.x.tap.segments {
		if h.Type == TypeWrite && h.Flags&FlagImmediate != 0 && h.Immediate != 13 {
			t.Errorf("immediate data %d in a segment, want 13", h.Immediate)
		}
	}
}

// Gathered from pieces, inline, and into a receive with a spill.
func TestQP_gathersAndSpills(t *testing.T) {
	d := newDuo(t, duoConfig{inline: 64})
	fillWith(d.x.mr.buf, 1)
	small, spill := d.y.mem.add(100, allAccess), d.y.mem.add(100_000, allAccess)
	for range 2 {
		if _, err := d.y.PostRecv([]rdma.RecvWR{{ID: 9, SGE: small.sge(0, 100), Spill: spill.sge(0, 100_000)}}); err != nil {
			t.Fatal(err)
		}
	}
	d.x.send(d, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{
		d.x.mr.sge(0, 40), d.x.mr.sge(500, 0), d.x.mr.sge(40, 30), d.x.mr.sge(70, 90_000),
	}})
	d.run()
	d.want(d.y, "gathered", rdma.WC{ID: 9, Op: rdma.OpRecv, Bytes: 90_070})
	if !bytes.Equal(small.buf, d.x.mr.buf[:100]) || !bytes.Equal(spill.buf[:89_970], d.x.mr.buf[100:90_070]) {
		t.Error("contents differ")
	}
	d.x.send(d, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendInline, Inline: []byte("inline")})
	d.run()
	d.want(d.y, "inline", rdma.WC{ID: 9, Op: rdma.OpRecv, Bytes: 6})
	if string(small.buf[:6]) != "inline" {
		t.Errorf("got %q", small.buf[:6])
	}
	d.y.mem.intact(t)
}

// §2.2.1, §3.1: sends may be posted before the receives, and wait. NOPs let them go.
func TestSection2_2_1_FlowControl(t *testing.T) {
	d := newDuo(t, duoConfig{depth: 64})
	for id := range uint64(5) {
		d.x.send(d, rdma.SendWR{ID: id, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}})
	}
	d.x.send(d, rdma.SendWR{ID: 5, Op: rdma.OpWriteImm, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey})
	d.run()
	if len(d.x.tap.segments) != 0 || len(d.x.wcs) != 0 {
		t.Fatalf("%d segments left, %+v completed without a receive at the peer", len(d.x.tap.segments), d.x.wcs)
	}
	for id := range uint64(6) {
		d.y.recv(d, 100+id, 0, 10)
		d.run()
		if got := d.y.take(); len(got) != 1 || got[0].ID != 100+id {
			t.Fatalf("receive %d: %+v", id, got)
		}
	}
	// A write without immediate data takes none and does not wait.
	d.x.send(d, rdma.SendWR{ID: 6, Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey})
	d.run()
	if got := d.x.take(); len(got) != 6 || got[5].ID != 6 {
		t.Fatalf("completions %+v", got)
	}
}

// The count of receives and the message numbers wrap, and nothing stalls, also with one receive.
func TestSection3_1_CountersWrap(t *testing.T) {
	for _, depth := range []int{1, 8} {
		d := newDuo(t, duoConfig{depth: depth, first: 0xffff_ff00})
		d.x.quiet, d.y.quiet, d.x.tap, d.y.tap = true, true, nil, nil
		messages := 200_000
		if testing.Short() || depth == 1 {
			messages = 70_000
		}
		for i := range messages {
			d.y.recv(d, 1, 0, 16)
			d.x.send(d, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 8)}})
			if d.run(); d.y.stats.RxMessages != uint64(i+1) {
				t.Fatalf("message %d stalls", i)
			}
		}
		if d.x.State() != rdma.QPRTS || d.y.State() != rdma.QPRTS {
			t.Errorf("states %v and %v", d.x.State(), d.y.State())
		}
	}
}

// §3.1: no acknowledgement before the program was told; and a NOP is not answered.
func TestSection3_1_Acknowledgement(t *testing.T) {
	d := newDuo(t, duoConfig{recvs: 4})
	d.y.mute = true
	for id := range uint64(3) {
		d.x.send(d, rdma.SendWR{ID: id, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}})
	}
	d.run()
	if len(d.x.wcs) != 0 {
		t.Fatalf("%+v completed before the peer's completions were polled", d.x.wcs)
	}
	d.y.mute = false
	d.run()
	d.want(d.x, "after polling", rdma.WC{ID: 0, Op: rdma.OpSend}, rdma.WC{ID: 1, Op: rdma.OpSend}, rdma.WC{ID: 2, Op: rdma.OpSend})
	x, y := d.x.Stats().NOPs, d.y.Stats().NOPs
	d.runFor(1000 * DefaultACKDelay)
	if d.x.Stats().NOPs != x || d.y.Stats().NOPs != y || x > 0 || y > 2 {
		t.Errorf("NOPs: %d and %d, later %d and %d", x, y, d.x.Stats().NOPs, d.y.Stats().NOPs)
	}
	// One message: acknowledged after a moment.
	d.x.send(d, rdma.SendWR{ID: 9, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}})
	before := d.now
	d.run()
	d.want(d.x, "one", rdma.WC{ID: 9, Op: rdma.OpSend})
	if waited := d.now.Sub(before); waited != DefaultACKDelay {
		t.Errorf("acknowledged after %v, want %v", waited, DefaultACKDelay)
	}
}

// §2.2.2.2.6: our own READs wait for the window.
func TestSection2_2_2_2_6_Window(t *testing.T) {
	for _, window := range []uint16{0, 1, 3} {
		a := reliable()
		a.ReadWindow = window
		d := newDuo(t, duoConfig{attr: a})
		d.y.deaf = true
		for id := range uint64(6) {
			d.x.send(d, rdma.SendWR{ID: id, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey})
		}
		d.run()
		if window == 0 {
			if got := d.x.take(); len(got) != 6 || got[0].Status != rdma.StatusLocalQP || got[1].Status != rdma.StatusFlushed {
				t.Errorf("without a window: %+v", got)
			}
			continue
		}
		if got := len(d.x.tap.segments); got != int(window) {
			t.Errorf("%d requests under way, want %d", got, window)
		}
		d.y.deaf = false
		d.run()
		if got := d.x.take(); len(got) != 6 || got[5].Status != rdma.StatusSuccess {
			t.Errorf("window %d: %+v", window, got)
		}
	}
}

// Without Reliable nothing is acknowledged: a request completes when TCP has it.
func TestSection3_2_Unreliable(t *testing.T) {
	a := reliable()
	a.Reliable = false
	d := newDuo(t, duoConfig{attr: a, recvs: 3})
	d.y.deaf = true
	d.x.send(d, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 1000)}})
	d.run()
	d.want(d.x, "deaf peer", rdma.WC{ID: 1, Op: rdma.OpSend})
	d.y.deaf = false
	d.run()
	d.want(d.y, "send", rdma.WC{ID: 1000, Op: rdma.OpRecv, Bytes: 1000})
	d.x.send(d, rdma.SendWR{ID: 2, Op: rdma.OpWrite, SGL: []rdma.SGE{d.x.mr.sge(0, 1000)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey + 1})
	d.run()
	for _, wc := range d.x.take() { // the write itself has completed
		if wc.Op != rdma.OpRecv || wc.Status != rdma.StatusFlushed {
			t.Errorf("completion %+v", wc)
		}
	}
	d.wantEvent(d.y, "wrong key", rdma.EventQPFatal, rdma.ErrPeerAccess)
	d.wantEvent(d.x, "wrong key", rdma.EventDisconnected, ErrPeerClosed)
	d.wantOver("wrong key")
	for _, h := range d.y.tap.segments {
		if h.Error != ErrorNone || h.Ack != 0 {
			t.Errorf("%+v", h)
		}
	}
}

func TestQP_allocatesNothing(t *testing.T) {
	d := newDuo(t, duoConfig{inline: 64, depth: 32})
	d.x.quiet, d.y.quiet, d.x.tap, d.y.tap = true, true, nil, nil
	d.x.in, d.y.in = make([]byte, 0, 1<<20), make([]byte, 0, 1<<20)
	sends := []rdma.SendWR{
		{Op: rdma.OpSend, Flags: rdma.SendSignaled | rdma.SendInline, Inline: make([]byte, 44)},
		{Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 100_000)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey},
		{Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 70_000)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey},
		{Op: rdma.OpWriteImm, SGL: []rdma.SGE{d.x.mr.sge(0, 300)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey},
	}
	recvs := []rdma.RecvWR{{SGE: d.y.mr.sge(0, 100)}, {SGE: d.y.mr.sge(0, 100)}}
	got := testing.AllocsPerRun(100, func() {
		d.x.in, d.y.in = d.x.in[:0:cap(d.x.in)], d.y.in[:0:cap(d.y.in)]
		if n, err := d.y.PostRecv(recvs); n != len(recvs) || err != nil {
			t.Fatal(n, err)
		}
		if n, err := d.x.PostSend(d.now, sends); n != len(sends) || err != nil {
			t.Fatal(n, err)
		}
		d.allocRun()
	})
	if got != 0 {
		t.Errorf("%v allocations for each round, want 0", got)
	}
	if d.x.Stats().TxMessages < 400 || d.y.Stats().RxMessages < 400 {
		t.Errorf("%+v", d.y.Stats())
	}
}

// allocRun is run with streams that keep their memory.
func (d *duo) allocRun() {
	base := [2][]byte{d.x.in[:0], d.y.in[:0]}
	for {
		for d.step(d.x) || d.step(d.y) {
			if len(d.x.in) == 0 {
				d.x.in = base[0]
			}
			if len(d.y.in) == 0 {
				d.y.in = base[1]
			}
		}
		at, ok := d.x.NextTimeout()
		if b, k := d.y.NextTimeout(); k && (!ok || b.Before(at)) {
			at, ok = b, true
		}
		if !ok {
			return
		}
		d.now = at
		d.x.HandleTimeout(at)
		d.y.HandleTimeout(at)
	}
}

// A READ is answered and its place in the queue has another request when the next answer comes.
func TestQP_readsKeepTheirOrder(t *testing.T) {
	d := newDuo(t, duoConfig{depth: 2})
	fillWith(d.y.mr.buf, 2)
	read := func(id uint64) {
		d.x.send(d, rdma.SendWR{
			ID: id, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(int(id)*1000, 1000)},
			RemoteAddr: d.y.mr.addr + id*1000, RKey: d.y.mr.rkey,
		})
	}
	read(0)
	read(1)
	for id := uint64(2); id < 20; {
		d.step(d.y)
		d.piece = 1040 // one answer at a time
		d.step(d.x)
		for range d.x.take() {
			read(id)
			id++
		}
	}
	d.piece = 0
	d.run()
	if !bytes.Equal(d.x.mr.buf[:20_000], d.y.mr.buf[:20_000]) || d.x.State() != rdma.QPRTS {
		t.Errorf("contents differ, or %v", d.x.events)
	}
}
