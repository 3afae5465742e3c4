// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// remoteFault posts a good send, w, which the peer refuses, and another one. It checks what both users learn.
func remoteFault(d *duo, name string, w rdma.SendWR, want rdma.Status, reason error, remote RemoteError) {
	d.t.Helper()
	before := bytes.Clone(d.y.mr.buf[4096:])
	d.x.send(d, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}})
	w.ID = 2
	d.x.send(d, w)
	d.x.send(d, rdma.SendWR{ID: 3, Op: rdma.OpSend, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}})
	d.run()
	got := d.x.take()
	var sends []rdma.WC
	for _, c := range got {
		if c.Op != rdma.OpRecv {
			sends = append(sends, c)
		}
	}
	if len(sends) != 3 || sends[0].Status != rdma.StatusSuccess || sends[1].Status != want || sends[2].Status != rdma.StatusFlushed {
		d.t.Fatalf("%s: completions %+v, want success, %v, flushed", name, sends, want)
	}
	remote.Message = 102
	var told *RemoteError
	if len(d.x.events) != 1 || !errors.As(d.x.events[0].Err, &told) || *told != remote {
		d.t.Errorf("%s: events %+v, want one with %+v", name, d.x.events, remote)
	}
	d.wantEvent(d.y, name, rdma.EventQPFatal, reason)
	d.wantOver(name)
	if !bytes.Equal(before, d.y.mr.buf[4096:]) {
		d.t.Errorf("%s: the peer's memory changed", name)
	}
	for _, s := range []*side{d.x, d.y} {
		s.mem.intact(d.t)
	}
}

func TestSection2_2_2_2_2_Handles(t *testing.T) {
	const size = 1 << 18
	for _, op := range []rdma.Opcode{rdma.OpWrite, rdma.OpWriteImm, rdma.OpRead} {
		for _, c := range []struct {
			name   string
			change func(d *duo, w *rdma.SendWR)
			cause  Cause
		}{
			{"handle", func(_ *duo, w *rdma.SendWR) { w.RKey ^= 1 << 20 }, CauseHandle},
			{"closed region", func(d *duo, _ *rdma.SendWR) { d.y.mr.gone = true }, CauseHandle},
			{"one byte too far", func(_ *duo, w *rdma.SendWR) { w.RemoteAddr += size - 70_000 + 1 }, CauseBounds},
			{"below the region", func(_ *duo, w *rdma.SendWR) { w.RemoteAddr-- }, CauseBounds},
			{"address wraps", func(_ *duo, w *rdma.SendWR) { w.RemoteAddr = ^uint64(0) - 100 }, CauseBounds},
			{"right of the region", func(d *duo, _ *rdma.SendWR) { d.y.mr.access = rdma.LocalWrite }, CauseRight},
			{"right of the queue pair", func(d *duo, _ *rdma.SendWR) { d.y.attr.Access = rdma.LocalWrite }, CauseRight},
			{"right of the connection", func(d *duo, _ *rdma.SendWR) { d.y.terms.RDMARead, d.y.terms.RDMAWrite = false, false }, CauseRight},
		} {
			d := newDuo(t, duoConfig{first: 100, bytes: size})
			small := d.y.mem.add(16, allAccess)
			for range 3 {
				if _, err := d.y.PostRecv([]rdma.RecvWR{{SGE: small.sge(0, 16)}}); err != nil {
					t.Fatal(err)
				}
			}
			w := rdma.SendWR{Op: op, SGL: []rdma.SGE{d.x.mr.sge(0, 70_000)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey}
			c.change(d, &w)
			name := fmt.Sprintf("%s, %v", c.name, op)
			remoteFault(d, name, w, rdma.StatusRemoteAccess, rdma.ErrPeerAccess, RemoteError{Type: ErrorMemory, Cause: c.cause})
		}
	}
}

func TestSection3_1_DescriptorErrors(t *testing.T) {
	noCredits := reliable()
	noCredits.FlowControl = false
	for _, c := range []struct {
		name   string
		attr   Attr
		recvs  []int // lengths
		op     rdma.Opcode
		n      int
		change func(d *duo)
		status rdma.Status
		cause  Cause
		recv   rdma.Status // of the second receive
	}{
		{
			name: "too small", recvs: []int{10, 99}, n: 100, status: rdma.StatusRemoteInvalid,
			cause: CauseTooSmall, recv: rdma.StatusLocalLength,
		}, {
			name: "too small, long", recvs: []int{10, 66_000}, n: 70_000, status: rdma.StatusRemoteInvalid,
			cause: CauseTooSmall, recv: rdma.StatusLocalLength,
		}, {
			name: "no receive", attr: noCredits, recvs: []int{10}, n: 100, status: rdma.StatusRNRRetryExceeded, cause: CauseNoReceive,
		}, {
			name: "no receive for immediate data", attr: noCredits, recvs: []int{10}, op: rdma.OpWriteImm, n: 100,
			status: rdma.StatusRNRRetryExceeded, cause: CauseNoReceive,
		}, {
			name: "memory of the receive", recvs: []int{10, 100}, n: 100, status: rdma.StatusRemoteOp, cause: CauseReceive,
			change: func(d *duo) { d.y.rsp.at(d.y.rsp.head + 1).sge.LKey ^= 1 << 20 }, recv: rdma.StatusLocalProtect,
		}, {
			name: "send too long", recvs: []int{10, 100}, n: 100, status: rdma.StatusRemoteInvalid, cause: CauseTooLong,
			change: func(d *duo) { d.y.terms.MaxTransfer = 99 }, recv: rdma.StatusFlushed,
		}, {
			name: "write too long", recvs: []int{10}, op: rdma.OpWrite, n: 100, status: rdma.StatusRemoteInvalid, cause: CauseTooLong,
			change: func(d *duo) { d.y.terms.MaxTransfer = 99 },
		}, {
			name: "read too long", recvs: []int{10}, op: rdma.OpRead, n: 100, status: rdma.StatusRemoteInvalid, cause: CauseTooLong,
			change: func(d *duo) { d.y.terms.MaxTransfer = 99 },
		}, {
			name: "READ window", recvs: []int{10}, op: rdma.OpRead, n: 100, status: rdma.StatusRemoteInvalid, cause: CauseReadWindow,
			change: func(d *duo) { d.y.terms.ReadWindow = 0 },
		},
	} {
		d := newDuo(t, duoConfig{attr: c.attr, first: 100})
		for i, n := range c.recvs {
			d.y.recv(d, uint64(10+i), 0, min(n, 4096))
			d.y.rsp.at(uint32(i)).spill = d.y.mr.sge(1<<17, max(0, n-4096))
		}
		if c.change != nil {
			c.change(d)
		}
		w := rdma.SendWR{Op: c.op, SGL: []rdma.SGE{d.x.mr.sge(0, c.n)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey}
		if n := c.recvs[len(c.recvs)-1]; n > 4096 {
			// What the first segment placed is not as it was, behind the receive it is.
			fillWith(d.x.mr.buf, 0)
			clear(d.x.mr.buf[:c.n])
		}
		remoteFault(d, c.name, w, c.status, nil, RemoteError{Type: ErrorDescriptor, Cause: c.cause})
		got := d.y.take()
		if len(c.recvs) == 2 && (len(got) != 2 || got[1].ID != 11 || got[1].Status != c.recv) {
			t.Errorf("%s: receives %+v, want the second with %v", c.name, got, c.recv)
		}
	}
}

// What fails here never gets to the peer, and completes after what was posted before.
func TestQP_localErrors(t *testing.T) {
	long := reliable()
	long.MaxTransfer = 1000
	noWrite := reliable()
	noWrite.RDMAWrite = false
	for _, c := range []struct {
		name   string
		attr   Attr
		change func(d *duo, w *rdma.SendWR)
		status rdma.Status
	}{
		{"LKey", Attr{}, func(_ *duo, w *rdma.SendWR) { w.SGL[0].LKey ^= 1 << 20 }, rdma.StatusLocalProtect},
		{"bounds", Attr{}, func(d *duo, w *rdma.SendWR) { w.SGL[0].Addr += uint64(len(d.x.mr.buf)) - 5 }, rdma.StatusLocalProtect},
		{"second piece", Attr{}, func(_ *duo, w *rdma.SendWR) { w.SGL = append(w.SGL, rdma.SGE{Length: 1}) }, rdma.StatusLocalProtect},
		{"sink of a READ", Attr{}, func(_ *duo, w *rdma.SendWR) { w.Op = rdma.OpRead; w.SGL[0].LKey = 0 }, rdma.StatusLocalProtect},
		{"longer than agreed", long, func(_ *duo, w *rdma.SendWR) { w.SGL[0].Length = 1001 }, rdma.StatusLocalLength},
		{"WRITE not agreed on", noWrite, func(_ *duo, w *rdma.SendWR) { w.Op = rdma.OpWrite }, rdma.StatusLocalQP},
	} {
		d := newDuo(t, duoConfig{attr: c.attr, recvs: 3})
		w := rdma.SendWR{ID: 2, Op: rdma.OpSend, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey}
		c.change(d, &w)
		d.x.send(d, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}})
		d.x.send(d, w)
		d.x.send(d, rdma.SendWR{ID: 3, Op: rdma.OpSend, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}})
		d.run()
		got := d.x.take()[:3]
		if got[0].Status != rdma.StatusSuccess || got[1].ID != 2 || got[1].Status != c.status || got[2].Status != rdma.StatusFlushed {
			t.Errorf("%s: %+v, want success, %v, flushed", c.name, got, c.status)
		}
		if got := d.y.take(); len(got) != 3 || got[0].Status != rdma.StatusSuccess || got[1].Status != rdma.StatusFlushed {
			t.Errorf("%s: peer's receives %+v", c.name, got)
		}
		d.wantEvent(d.x, c.name, rdma.EventQPFatal, errMemory)
		d.wantEvent(d.y, c.name, rdma.EventDisconnected, ErrPeerClosed)
		d.wantOver(c.name)
	}
}

// A message whose memory went away ends where there is room for one more segment only. The response behind it waits: as much of
// it as its header promises has no room.
func TestTransmitError_withoutRoom(t *testing.T) {
	d := newDuo(t, duoConfig{bytes: 400_000})
	shown := d.x.mem.add(4096, allAccess)
	d.run()
	d.x.send(d, rdma.SendWR{ID: 1, Op: rdma.OpWrite, SGL: []rdma.SGE{d.x.mr.sge(0, 150_000)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey})
	for left := 65_535; left > 0; { // the first segment
		b := d.x.TxBuffers(d.now, nil)[0]
		b = b[:min(len(b), left)]
		left -= len(b)
		d.x.HandleTx(d.now, len(b))
	}
	d.y.send(d, rdma.SendWR{ID: 2, Op: rdma.OpRead, SGL: []rdma.SGE{d.y.mr.sge(0, shortBytes)}, RemoteAddr: shown.addr, RKey: shown.rkey})
	request := d.y.TxBuffers(d.now, nil)[0]
	if err := d.x.HandleRx(d.now, copy(d.x.RxBuffers(nil)[0], request)); err != nil {
		t.Fatal(err)
	}
	d.x.mr.gone = true
	d.x.ForgetMemory(time.Time{})
	tx := &d.x.tx
	begin := len(tx.stage) - (HeaderLen + RDMALen + shortBytes)
	tx.from, tx.to, tx.responseNext = begin-1, begin, false
	d.x.fill(d.now)
	segments := 0
	at := begin
	for ; at < tx.to; segments++ {
		h, err := ParseHeader(tx.stage[at : at+HeaderLen])
		if err != nil {
			t.Fatal(err)
		}
		at += int(h.Length)
	}
	if segments != 1 || at != tx.to || d.x.rsp.reads.isEmpty() {
		t.Errorf("%d segments of %d bytes, of which %d are there", segments, at-begin, tx.to-begin)
	}
}

// takes has TCP take n bytes of a side.
func (d *duo) takes(src *side, n int) {
	for n > 0 {
		b := src.TxBuffers(d.now, nil)[0]
		b = b[:min(len(b), n)]
		dst := d.other(src)
		dst.in = append(dst.in, b...)
		src.tap.see(b)
		src.HandleTx(d.now, len(b))
		n -= len(b)
	}
}

// Of a message of two regions the first goes away under the segment that it ends with. What is padding in that does not count as
// received, although all that is left to be sent is there.
func TestTransmitError_nextRegionIsThere(t *testing.T) {
	for op, segment := range map[rdma.Opcode]int{rdma.OpSend: MaxSegment - HeaderLen, rdma.OpWrite: MaxSegment - HeaderLen - RDMALen} {
		d := newDuo(t, duoConfig{bytes: 400_000})
		d.y.recv(d, 9, 200_000, 150_000)
		d.run() // the peer knows of it
		gone := d.x.mem.add(segment, allAccess)
		d.x.send(d, rdma.SendWR{
			ID: 2, Op: op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{gone.sge(0, segment), d.x.mr.sge(0, 50_000)},
			RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey,
		})
		d.takes(d.x, 30_000)
		gone.gone = true
		d.x.ForgetMemory(d.now)
		d.run()
		name := op.String()
		if h := d.x.tap.segments; len(h) != 2 || h[1].Flags != FlagTransmitError|FlagEnd || h[1].Offset != uint32(segment) {
			t.Errorf("%s: segments %+v, want the second one to say Transmit Error", name, h)
		}
		d.want(d.x, name, rdma.WC{ID: 2, Op: op, Status: rdma.StatusLocalProtect})
		d.want(d.y, name, rdma.WC{ID: 9, Op: rdma.OpRecv, Status: rdma.StatusFlushed})
		if len(d.x.events) != 1 || len(d.y.events) != 1 {
			t.Errorf("%s: events %+v and %+v", name, d.x.events, d.y.events)
		}
		d.wantOver(name)
	}
}

// §2.2.2.2.5: memory goes away when a part of the message has left. What can be padded is, and flagged;
// where the last header has left already, the connection is cut. Nothing of it counts as received.
func TestSection2_2_2_2_5_TransmitError(t *testing.T) {
	for _, op := range []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpRead} {
		for _, taken := range []int{24 + 40, 30_000, 65_535, 65_535 + 60, 2*65_535 + 60, 2*65_535 + 10_000} {
			d := newDuo(t, duoConfig{bytes: 400_000})
			d.y.recv(d, 9, 200_000, 150_000)
			d.run() // the peer knows of it
			fillWith(d.x.mr.buf, 1)
			fillWith(d.y.mr.buf, 1)
			w := rdma.SendWR{ID: 2, Op: op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 150_000)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey}
			src, dst := d.x, d.y
			if op == rdma.OpRead {
				src, dst = d.y, d.x
			}
			d.x.send(d, w)
			if op == rdma.OpRead { // the request alone
				b := d.x.TxBuffers(d.now, nil)
				d.y.in = append(d.y.in, b[0]...)
				d.x.HandleTx(d.now, len(b[0]))
				n := copy(d.y.RxBuffers(nil)[0], d.y.in)
				d.y.in = nil
				if err := d.y.HandleRx(d.now, n); err != nil {
					t.Fatal(err)
				}
			}
			d.takes(src, taken)
			src.mr.gone = true
			src.ForgetMemory(time.Time{})
			dst.mr.access = allAccess
			d.run()
			name := fmt.Sprintf("%v after %d bytes", op, taken)
			cut := taken > 2*65_535
			flagged := false
			for _, h := range src.tap.segments {
				flagged = flagged || h.Flags&(FlagTransmitError|FlagEnd) == FlagTransmitError|FlagEnd && h.Length < 100
			}
			if flagged == cut {
				t.Errorf("%s: Transmit Error said: %v, cut: %v", name, flagged, cut)
			}
			want := rdma.StatusLocalProtect
			if op == rdma.OpRead {
				want = rdma.StatusRemoteAccess
				if cut {
					want = rdma.StatusRetryExceeded
				}
			}
			if got := d.x.take(); len(got) != 1 || got[0].ID != 2 || got[0].Status != want {
				t.Errorf("%s: %+v, want %v", name, got, want)
			}
			if got := d.y.take(); len(got) != 1 || got[0].ID != 9 || got[0].Status != rdma.StatusFlushed {
				t.Errorf("%s: receive %+v, want it flushed", name, got)
			}
			if len(d.x.events) != 1 || len(d.y.events) != 1 {
				t.Errorf("%s: events %+v and %+v", name, d.x.events, d.y.events)
			}
			d.wantOver(name)
			dst.mem.intact(t)
		}
	}
}

// Memory that goes away under what comes in.
func TestQP_regionClosesUnderReceiver(t *testing.T) {
	for _, op := range []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpRead} {
		d := newDuo(t, duoConfig{bytes: 400_000, piece: 5000, seed: 4})
		d.y.recv(d, 9, 200_000, 150_000)
		d.x.send(d, rdma.SendWR{ID: 2, Op: op, SGL: []rdma.SGE{d.x.mr.sge(0, 150_000)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey})
		dst, src := d.y, d.x
		if op == rdma.OpRead {
			dst, src = src, dst
		}
		for range 20 {
			d.step(src)
			d.step(dst)
		}
		after := bytes.Clone(dst.mr.buf)
		dst.mr.gone = true
		dst.ForgetMemory(time.Time{})
		d.run()
		if !bytes.Equal(after, dst.mr.buf) {
			t.Errorf("%v: memory changed after its region was closed", op)
		}
		want := map[rdma.Opcode]rdma.Status{
			rdma.OpSend: rdma.StatusRemoteOp, rdma.OpWrite: rdma.StatusRemoteAccess, rdma.OpRead: rdma.StatusLocalProtect,
		}[op]
		if got := d.x.take(); len(got) != 1 || got[0].Status != want {
			t.Errorf("%v: %+v, want %v", op, got, want)
		}
		d.wantOver(op.String())
	}
}

// §2.2.2.2.2: VI and TCP end together. In order: what was queued first, and nobody loses a completion.
func TestSection2_2_2_2_2_Disconnect(t *testing.T) {
	for _, piece := range []int{0, 7000} {
		d := newDuo(t, duoConfig{recvs: 3, piece: piece})
		for id := range uint64(3) {
			d.x.send(d, rdma.SendWR{ID: id, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 3000)}})
		}
		d.x.send(d, rdma.SendWR{ID: 3, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 100_000)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey})
		d.y.send(d, rdma.SendWR{ID: 4, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.y.mr.sge(0, 100)}})
		if err := d.x.Disconnect(d.now); err != nil {
			t.Fatal(err)
		}
		if _, err := d.x.PostSend(d.now, []rdma.SendWR{{Op: rdma.OpSend}}); !errors.Is(err, rdma.ErrState) {
			t.Errorf("post after Disconnect: %v", err)
		}
		d.run()
		x, y := d.x.take(), d.y.take()
		success := func(wcs []rdma.WC) (n int) {
			for _, c := range wcs {
				if c.Status == rdma.StatusSuccess {
					n++
				}
			}
			return n
		}
		if success(x) != 5 || len(x) != 7 || success(y) != 4 || len(y) != 4 {
			t.Errorf("completions %+v and %+v", x, y)
		}
		if len(d.x.events) != 0 {
			t.Errorf("events of who disconnects: %+v", d.x.events)
		}
		d.wantEvent(d.y, "disconnect", rdma.EventDisconnected, ErrPeerClosed)
		d.wantOver("disconnect")
		if d.x.End() != EndClose || d.y.End() != EndClose {
			t.Errorf("TCP ends with %v and %v, want in order", d.x.End(), d.y.End())
		}
	}
}

func TestQP_bothDisconnect(t *testing.T) {
	d := newDuo(t, duoConfig{})
	for _, s := range []*side{d.x, d.y} {
		if err := s.Disconnect(d.now); err != nil {
			t.Fatal(err)
		}
	}
	d.run()
	d.wantOver("both")
	if len(d.x.events)+len(d.y.events) != 0 {
		t.Errorf("events %+v and %+v", d.x.events, d.y.events)
	}
}

func TestSection2_2_2_2_2_TCPBreaks(t *testing.T) {
	d := newDuo(t, duoConfig{recvs: 1})
	for id := range uint64(2) {
		d.x.send(d, rdma.SendWR{ID: id, Op: rdma.OpSend, SGL: []rdma.SGE{d.x.mr.sge(0, 3000)}})
	}
	d.x.broken, d.y.broken = true, true
	d.run()
	got := d.x.take()
	if len(got) != 3 || got[0].Status != rdma.StatusRetryExceeded || got[1].Status != rdma.StatusFlushed || got[2].Status != rdma.StatusFlushed {
		t.Errorf("completions %+v", got)
	}
	d.wantEvent(d.x, "x", rdma.EventPathDown, errTCP)
	d.wantEvent(d.y, "y", rdma.EventPathDown, errTCP)
	d.wantOver("broken")
}

func TestQP_modifyToError(t *testing.T) {
	for _, n := range []int{100, 100_000} {
		d := newDuo(t, duoConfig{recvs: 1})
		d.x.send(d, rdma.SendWR{ID: 1, Op: rdma.OpWrite, SGL: []rdma.SGE{d.x.mr.sge(0, n)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey})
		d.x.TxBuffers(d.now, nil)
		d.x.HandleTx(d.now, 30) // a part of the first segment
		if err := d.x.Modify(d.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
			t.Fatal(err)
		}
		d.x.tap, d.y.tap = nil, nil
		if got, want := d.x.End() == EndReset, n > shortBytes; got != want {
			t.Errorf("%d bytes: reset %v, want %v", n, got, want)
		}
		d.pollOf(d.x)
		if got := d.x.take(); len(got) != 2 || got[0].Status != rdma.StatusFlushed || got[1].Status != rdma.StatusFlushed {
			t.Errorf("completions %+v", got)
		}
		if _, err := d.x.PostSend(d.now, []rdma.SendWR{{ID: 5}}); err != nil {
			t.Errorf("post in ERR: %v", err)
		}
		d.pollOf(d.x)
		d.want(d.x, "posted in ERR", rdma.WC{ID: 5, Status: rdma.StatusFlushed})
	}
}

// TestQP_lastACK: what the program was told of is acknowledged although the program, or a request of its own, ends the
// connection before the acknowledgement is due; what it was not told of is not.
func TestQP_lastACK(t *testing.T) {
	end := func(d *duo) {
		if err := d.y.Modify(d.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
			t.Error(err)
		}
	}
	for name, c := range map[string]struct {
		end  func(d *duo)
		mute bool // the completion is not polled
		want rdma.Status
	}{
		"to ERR": {end: end},
		"unregistered memory": {end: func(d *duo) {
			d.y.send(d, rdma.SendWR{ID: 2, Op: rdma.OpSend, SGL: []rdma.SGE{{Length: 1}}})
		}},
		"not told": {end: end, mute: true, want: rdma.StatusFlushed},
	} {
		d := newDuo(t, duoConfig{recvs: 1})
		d.y.mute = c.mute
		d.x.send(d, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, 10)}})
		d.runFor(DefaultACKDelay / 2)
		if len(d.x.wcs) != 0 || d.y.State() != rdma.QPRTS || d.y.Stats().RxMessages != 1 {
			t.Fatalf("%s: completed %+v, peer in %v with %+v", name, d.x.wcs, d.y.State(), d.y.Stats())
		}
		c.end(d)
		d.y.mute = false
		d.run()
		if got := d.x.take(); len(got) == 0 || got[0].ID != 1 || got[0].Status != c.want {
			t.Errorf("%s: completions %+v, want %v", name, got, c.want)
		}
		d.wantEvent(d.x, name, rdma.EventDisconnected, ErrPeerClosed)
	}
}

// A peer that takes nothing more must not keep the connection.
func TestQP_lastWordsAreBounded(t *testing.T) {
	d := newDuo(t, duoConfig{})
	d.y.send(d, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{d.y.mr.sge(0, 60_000)}, RemoteAddr: d.x.mr.addr, RKey: d.x.mr.rkey})
	d.y.TxBuffers(d.now, nil)
	d.y.HandleTx(d.now, 1000) // the rest is stuck
	bad := Header{Type: TypeSend, Flags: FlagEnd, Length: HeaderLen, Message: 1, Ack: 5}
	n := copy(d.y.RxBuffers(nil)[0], bad.Append(nil))
	if err := d.y.HandleRx(d.now, n); err == nil {
		t.Fatal("send without a receive taken")
	}
	if d.y.State() != rdma.QPRTS {
		t.Fatalf("state %v while a segment is half sent, want RTS", d.y.State())
	}
	at, ok := d.y.NextTimeout()
	if !ok || at.Sub(d.now) != lastWords {
		t.Fatalf("timer %v, %v", at.Sub(d.now), ok)
	}
	d.y.HandleTimeout(at)
	if d.y.State() != rdma.QPError || d.y.End() != EndReset {
		t.Errorf("state %v, TCP %v, want ERR and reset", d.y.State(), d.y.End())
	}
	d.pollOf(d.y)
	d.wantEvent(d.y, "stuck", rdma.EventQPFatal, nil)
}

func TestQP_states(t *testing.T) {
	d := newDuo(t, duoConfig{})
	q, err := NewQP(QPConfig{MaxSendWR: 1, MaxRecvWR: 2, Memory: d.x.mem})
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, got, want error) {
		t.Helper()
		if !errors.Is(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	post := func() error { _, err := q.PostSend(d.now, []rdma.SendWR{{Op: rdma.OpSend}}); return err }
	recv := func() error { _, err := q.PostRecv([]rdma.RecvWR{{}}); return err }
	modify := func(s rdma.QPState) error { return q.Modify(d.now, rdma.QPAttr{State: s}) }
	terms := Terms{Attr: reliable()}
	check("receive in RESET", recv(), rdma.ErrState)
	check("ERR from RESET", modify(rdma.QPError), rdma.ErrState)
	check("start in RESET", q.Start(d.now, terms), rdma.ErrState)
	check("INIT", modify(rdma.QPInit), nil)
	check("RTR", modify(rdma.QPRTR), rdma.ErrNotSupported)
	check("RTS", modify(rdma.QPRTS), rdma.ErrNotSupported)
	check("send in INIT", post(), rdma.ErrState)
	check("receive in INIT", recv(), nil)
	check("receive in INIT", recv(), nil)
	check("too many receives", recv(), rdma.ErrQueueFull)
	if q.Posted() != 2 || len(q.RxBuffers(nil)) != 0 || len(q.TxBuffers(d.now, nil)) != 0 {
		t.Errorf("%d posted, buffers %v before Start", q.Posted(), q.RxBuffers(nil))
	}
	check("start without a transfer size", q.Start(d.now, Terms{}), rdma.ErrInvalid)
	check("disconnect in INIT", q.Disconnect(d.now), rdma.ErrState)
	for _, n := range []int{-1, MinSegment - 1, MaxSegment + 1} {
		short := terms
		short.MaxSegment = n
		check("start with wrong segments", q.Start(d.now, short), rdma.ErrInvalid)
	}
	check("start", q.Start(d.now, terms), nil)
	check("start twice", q.Start(d.now, terms), rdma.ErrState)
	check("INIT from RTS", modify(rdma.QPInit), rdma.ErrState)
	check("send", post(), nil)
	check("too many sends", post(), rdma.ErrQueueFull)
	check("RESET", modify(rdma.QPReset), nil)
	if _, ok := q.NextTimeout(); ok || q.Posted() != 0 || q.End() != EndNone {
		t.Error("something is left after RESET")
	}
	for name, f := range map[string]func(*QPConfig){
		"number": func(c *QPConfig) { c.Num = rdma.MaxQPN + 1 }, "sends": func(c *QPConfig) { c.MaxSendWR = 0 },
		"receives": func(c *QPConfig) { c.MaxRecvWR = MaxRecvWR + 1 }, "SGEs": func(c *QPConfig) { c.MaxSGE = MaxSGE + 1 },
		"inline": func(c *QPConfig) { c.MaxInline = MaxInlineLimit + 1 }, "delay": func(c *QPConfig) { c.ACKDelay = -1 },
		"memory": func(c *QPConfig) { c.Memory = nil },
	} {
		c := QPConfig{MaxSendWR: 1, MaxRecvWR: 1, Memory: d.x.mem}
		f(&c)
		_, err := NewQP(c)
		check(name, err, rdma.ErrInvalid)
	}
}
