// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

func TestSegmentable(t *testing.T) {
	pkt := func(sizes ...int) (p []rocev2.TxPacket) {
		for _, s := range sizes {
			p = append(p, rocev2.TxPacket{HdrLen: 12, PayloadLen: s - 12 - rocev2.ICRCLen})
		}
		return p
	}
	for _, c := range []struct {
		name  string
		sizes []int
		most  int
		want  int
	}{
		{"one", []int{100}, 64, 1},
		{"equal", []int{100, 100, 100}, 64, 3},
		{"last shorter", []int{100, 100, 60, 60}, 64, 3},
		{"next longer", []int{100, 116}, 64, 1},
		{"limit", []int{100, 100, 100}, 2, 2},
		{"no segmentation", []int{100, 100}, 1, 1},
		{"bytes", []int{4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112}, 64, 15},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := segmentable(pkt(c.sizes...), c.most); got != c.want {
				t.Errorf("of %v %d make one message, want %d", c.sizes, got, c.want)
			}
		})
	}
}

// A batch of a long WRITE fills its messages.
func TestBurst(t *testing.T) {
	for _, c := range []struct{ mtu, segments, want int }{
		{1024, 64, 2 * 61},
		{4096, 64, 8 * 15},
		{256, 64, 2 * 64},
		{4096, 1, txBatch},
		{1024, 0, txBatch}, // a wire that says nothing
	} {
		got := burst(c.mtu, c.segments)
		if got != c.want {
			t.Errorf("path MTU %d, %d segments: %d packets, want %d", c.mtu, c.segments, got, c.want)
		}
		pkts := make([]rocev2.TxPacket, got)
		for i := range pkts {
			pkts[i] = rocev2.TxPacket{HdrLen: 28, PayloadLen: c.mtu}
		}
		run := segmentable(pkts, c.segments)
		if got%run != 0 {
			t.Errorf("path MTU %d, %d segments: %d packets are not messages of %d", c.mtu, c.segments, got, run)
		}
	}
}

// An acknowledgement leaves with the first message beside it, whose packets the peer waits for, and at
// its end.
func TestBatch_answerFirst(t *testing.T) {
	const ack, data, last = 20, 100, 60 // lengths
	for _, c := range []struct {
		name        string
		sizes, want []int
	}{
		{"alone", []int{ack}, []int{ack}},
		{"an answer", []int{ack, data}, []int{data, ack}},
		{"no acknowledgement", []int{data, data}, []int{data, data}},
		{"a message", []int{ack, data, data, data, last}, []int{data, data, data, last, ack}},
		{"two messages", []int{ack, data, last, data, last}, []int{data, last, ack, data, last}},
		{"segments", []int{ack, data, data, data, data, data}, []int{data, data, data, data, ack, data}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := new(batch)
			for i, n := range c.sizes {
				b.pkts[i] = rocev2.TxPacket{HdrLen: 12, PayloadLen: n - 12 - rocev2.ICRCLen}
				b.pkts[i].Hdr[0] = byte(rocev2.SendOnly)
				if n == ack {
					b.pkts[i].Hdr[0] = byte(rocev2.Acknowledge)
				}
			}
			b.answerFirst(len(c.sizes), 4)
			for i, n := range c.want {
				if got := b.pkts[i].UDPLen(); got != n {
					t.Errorf("packet %d has %d bytes, want %d", i, got, n)
				}
			}
		})
	}
}

// Batches are used again, a few of them.
func TestDevice_batches(t *testing.T) {
	d := &Device{batches: make(chan *batch, 1)}
	a, b := d.getBatch(), d.getBatch()
	if a == b {
		t.Fatal("one batch for two")
	}
	d.putBatch(a)
	d.putBatch(b) // there is no room
	if d.getBatch() != a || d.getBatch() == b {
		t.Error("the batch that was given back is not used again, or one that there was no room for is")
	}
}

// turns counts the packets that leave for two peers, whose queue pairs have the numbers 0 and 1.
type turns struct {
	mu                 sync.Mutex
	sent               [2]int
	last, row, longest int // in a row to one
}

func (c *turns) see(m *Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	to := int(m.Bufs[0][7]) // the last byte of the number
	if to != c.last {
		c.last, c.row = to, 0
	}
	c.sent[to]++
	c.row++
	c.longest = max(c.longest, c.row)
}

func (c *turns) counted() (sent [2]int, longest int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sent, c.longest
}

// readOf is the first packet that a peer sends to a queue pair: it asks for a whole region.
func readOf(q *qp, mr rdma.MR, from netip.Addr) Message {
	return fromPeer(q, from, &rocev2.Packet{
		BTH:  rocev2.BTH{OpCode: rocev2.ReadRequest},
		RETH: rocev2.RETH{Addr: mr.Addr(), RKey: mr.RKey(), Length: uint32(len(mr.Bytes()))},
	})
}

// ackOf is a packet of a peer: it has all packets of a queue pair up to a PSN.
func ackOf(q *qp, psn rdma.PSN, from netip.Addr) Message {
	const noCredits = 31
	return fromPeer(q, from, &rocev2.Packet{
		BTH:  rocev2.BTH{OpCode: rocev2.Acknowledge, PSN: psn},
		AETH: rocev2.AETH{Syndrome: rocev2.SyndromeACK(noCredits)},
	})
}

// fromPeer is a packet without payload on its way to a queue pair.
func fromPeer(q *qp, from netip.Addr, p *rocev2.Packet) Message {
	p.BTH.PKey, p.BTH.DestQP = rocev2.PKey, q.Num()
	b := p.AppendHeader(nil)
	c := rocev2.NewICRC(rocev2.Addresses{Src: from, SrcPort: rocev2.Port, Dst: q.dev.cfg.Addr, DstPort: rocev2.Port})
	return Message{Peer: netip.AddrPortFrom(from, rocev2.Port), Data: binary.LittleEndian.AppendUint32(b, c.Sum(0, b, nil, 0))}
}

// Peers that ask for much with few packets, and again, have it by turns, and not all of it before the receiver goes on.
func TestQP_longReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const packets, most = 8 << 10, (answerBytes>>10 + txBatch) // of responses: to a READ, and in a row
		var c turns
		pd, cq := silentPD(t, Config{}, c.see)
		mr, err := pd.AllocMR(packets<<10, rdma.LocalWrite|rdma.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		var r *receiver
		var msgs []Message
		for i := range c.sent {
			q := silentQP(t, pd, cq)
			a := rtr("192.0.2.2")
			a.DestQPN = rdma.QPN(i)
			if err := errors.Join(q.Modify(rdma.QPAttr{State: rdma.QPInit, Access: rdma.RemoteRead}), q.Modify(a)); err != nil {
				t.Fatal(err)
			}
			msgs = append(msgs, readOf(q, mr, a.Path.DGID.Addr()))
			r = &receiver{dev: q.dev}
		}
		for range 3 {
			msgs = append(msgs, msgs...)
		}
		r.take(msgs)
		sent, _ := c.counted()
		for i, n := range sent {
			if n == 0 || n > most {
				t.Errorf("peer %d has %d packets when the receiver goes on, want some, and at most %d", i, n, most)
			}
		}
		<-time.After(time.Second) // of the bubble's clock
		sent, longest := c.counted()
		for i, n := range sent {
			if n < packets || n > packets+most {
				t.Errorf("peer %d has %d packets in the end, want %d, and at most %d twice", i, n, packets, most)
			}
		}
		if longest > most {
			t.Errorf("%d packets in a row are for one peer, want at most %d", longest, most)
		}
	})
}

// narrowWire takes as many messages as it has room for.
type narrowWire struct {
	silentWire
	mu       sync.Mutex
	room     int
	taken    []message
	segments int // of a message; 0: 1
}

func (w *narrowWire) MaxSegments() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return max(1, w.segments)
}

// message is what the wire took.
type message struct {
	bytes  []byte
	pieces int
}

func (w *narrowWire) Send(msgs []Message) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range msgs {
		if w.room == 0 {
			return i, ErrWouldBlock
		}
		w.room--
		w.taken = append(w.taken, message{slices.Concat(msgs[i].Bufs...), len(msgs[i].Bufs)})
	}
	return len(msgs), nil
}

// widen makes room, and returns what was taken before.
func (w *narrowWire) widen(room int) (taken []message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	taken, w.taken, w.room = w.taken, nil, room
	return taken
}

// narrow is a queue pair in RTS whose wire has room for some messages, and a region of a few packets full of A.
func narrow(t *testing.T, room int) (*qp, *narrowWire, rdma.MR, rdma.CQ) {
	t.Helper()
	w := &narrowWire{silentWire: silentWire{done: make(chan struct{})}, room: room}
	pd, cq := wiredPD(t, Config{}, w)
	mr, err := pd.AllocMR(4<<10, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	fill(mr, 'A')
	q := silentQP(t, pd, cq)
	rts := rdma.QPAttr{State: rdma.QPRTS, Timeout: 14, RetryCount: 7, RNRRetry: 7}
	for _, a := range []rdma.QPAttr{{State: rdma.QPInit}, rtr(narrowPeer.String()), rts} {
		if err := q.Modify(a); err != nil {
			t.Fatal(err)
		}
	}
	return q, w, mr, cq
}

var narrowPeer = netip.MustParseAddr("192.0.2.2")

func fill(mr rdma.MR, with byte) {
	for i := range mr.Bytes() {
		mr.Bytes()[i] = with
	}
}

// write posts WRITEs of so many packets each, of a region from its beginning on.
func write(t *testing.T, q *qp, mr rdma.MR, packets ...int) {
	t.Helper()
	var wrs []rdma.SendWR
	var at int
	for i, n := range packets {
		sge := rdma.SGE{Addr: mr.Addr() + uint64(at), Length: uint32(n << 10), LKey: mr.LKey()}
		wrs = append(wrs, rdma.SendWR{ID: uint64(i), Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{sge}})
		at += n << 10
	}
	if _, err := q.PostSend(wrs); err != nil {
		t.Fatal(err)
	}
}

// wantWC polls the one completion that is there, which is that of the work request with ID 0.
func wantWC(t *testing.T, cq rdma.CQ, status rdma.Status) {
	t.Helper()
	wcs := make([]rdma.WC, 4)
	if n, err := cq.Poll(wcs); err != nil || n != 1 || wcs[0].ID != 0 || wcs[0].Status != status {
		t.Fatalf("%d completions, the first %+v, error %v; want one of ID 0: %v", n, wcs[0], err, status)
	}
}

// What waited for the wire does not leave with bytes that the program has put into its memory after the
// work request had completed.
func TestQP_completedMemoryDoesNotLeave(t *testing.T) {
	for _, c := range []struct {
		name string
		room int // at first
		end  func(*testing.T, *qp, rdma.CQ)
	}{
		{"flushed", 0, func(t *testing.T, q *qp, cq rdma.CQ) {
			if err := q.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
				t.Fatal(err)
			}
			wantWC(t, cq, rdma.StatusFlushed)
		}},
		{"flushed behind a part", 2, func(t *testing.T, q *qp, cq rdma.CQ) {
			if err := q.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
				t.Fatal(err)
			}
			wantWC(t, cq, rdma.StatusFlushed)
		}},
		{"acknowledged while it is repeated", 4, func(t *testing.T, q *qp, cq rdma.CQ) {
			<-time.After(200 * time.Millisecond) // of the bubble's clock: the timer runs out, and the repetition waits
			if s, _ := q.dev.QPStats(q.Num()); s.Retransmits == 0 {
				t.Fatal("nothing is repeated")
			}
			(&receiver{dev: q.dev}).take([]Message{ackOf(q, 3, narrowPeer)})
			wantWC(t, cq, rdma.StatusSuccess)
		}},
		{"acknowledged before it left", 0, func(t *testing.T, q *qp, cq rdma.CQ) {
			(&receiver{dev: q.dev}).take([]Message{ackOf(q, 3, narrowPeer)})
			wantWC(t, cq, rdma.StatusSuccess)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q, w, mr, cq := narrow(t, c.room)
				write(t, q, mr, 4)
				c.end(t, q, cq)
				fill(mr, 'B')
				if n := len(w.widen(1000)); n != c.room {
					t.Errorf("%d messages left at first, want %d", n, c.room)
				}
				<-time.After(time.Second)
				for _, m := range w.widen(0) {
					if m.pieces > 1 || bytes.IndexByte(m.bytes, 'B') >= 0 {
						t.Errorf("a message of %d bytes in %d pieces leaves: % x...", len(m.bytes), m.pieces, m.bytes[:12])
					}
				}
			})
		})
	}
}

// What did not leave yet does when the wire has room, also if what left before was acknowledged.
func TestQP_restLeavesBehindAnAcknowledgement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, w, mr, cq := narrow(t, 2)
		write(t, q, mr, 1, 3)
		(&receiver{dev: q.dev}).take([]Message{ackOf(q, 1, narrowPeer)}) // in the midst of the second
		wantWC(t, cq, rdma.StatusSuccess)
		clear(mr.Bytes()[:1<<10])
		w.widen(1000)
		<-time.After(sendRetry)
		synctest.Wait()
		taken := w.widen(1000)
		for _, m := range taken {
			if bytes.Count(m.bytes, []byte("A")) < 1<<10 {
				t.Errorf("a message of %d bytes does not have what was posted", len(m.bytes))
			}
		}
		if s, _ := q.dev.QPStats(q.Num()); len(taken) != 2 || s.Retransmits != 0 {
			t.Errorf("%d messages leave, and %d packets are repeated; want 2, and none", len(taken), s.Retransmits)
		}
	})
}

// An acknowledgement that leaves at the end of a WRITE leaves by itself when the WRITE does not any more: the peer
// hears of no NAK again.
func TestQP_acknowledgementOutlivesItsMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, w, mr, _ := narrow(t, 0)
		w.mu.Lock()
		w.segments = 4
		w.mu.Unlock()
		write(t, q, mr, 1) // waits for the wire
		write(t, q, mr, 3)
		outOfTurn := &rocev2.Packet{BTH: rocev2.BTH{OpCode: rocev2.WriteOnly, PSN: 77, AckReq: true}}
		(&receiver{dev: q.dev}).take([]Message{fromPeer(q, narrowPeer, outOfTurn)})
		w.widen(1) // the first WRITE leaves, and the second one waits, with a NAK
		<-time.After(sendRetry)
		synctest.Wait()
		if s, _ := q.dev.QPStats(q.Num()); s.NAKSeqSent != 1 {
			t.Fatalf("%d NAKs are made, want 1", s.NAKSeqSent)
		}
		if err := q.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
			t.Fatal(err)
		}
		fill(mr, 'B')
		w.widen(1000)
		<-time.After(time.Second)
		taken := w.widen(0)
		if len(taken) != 1 || rocev2.OpCode(taken[0].bytes[0]) != rocev2.Acknowledge {
			t.Fatalf("%d messages leave, want a NAK: %x", len(taken), taken)
		}
		b := taken[0].bytes
		nak := rocev2.TxPacket{HdrLen: len(b) - rocev2.ICRCLen}
		copy(nak.Hdr[:], b[:nak.HdrLen])
		if got, want := binary.LittleEndian.Uint32(b[nak.HdrLen:]), q.txICRC.SumTx(0, &nak); got != want {
			t.Errorf("the NAK has ICRC %#x, want %#x", got, want)
		}
	})
}

// refusingWire refuses every message with an error.
type refusingWire struct {
	silentWire
	err error
}

func (w *refusingWire) Send([]Message) (int, error) { return 0, w.err }

// A packet that does not fit the interface is told of once in a minute, with its peer and size, and other errors are not.
func TestDevice_tooLarge(t *testing.T) {
	v4, v6 := netip.MustParseAddrPort("192.0.2.2:4791"), netip.MustParseAddrPort("[2001:db8::2]:4791")
	pieces := [][]byte{make([]byte, 100), make([]byte, 28)}
	for _, c := range []struct {
		name string
		msg  Message
		err  error
		want TooLarge // zero: nothing
	}{
		{"packet", Message{Peer: v4, Bufs: pieces}, unix.EMSGSIZE, TooLarge{v4.Addr(), 156}},
		{"segments", Message{Peer: v4, Bufs: pieces, SegmentBytes: 64}, unix.EINVAL, TooLarge{v4.Addr(), 92}},
		{"segments, newer kernel", Message{Peer: v6, Bufs: pieces, SegmentBytes: 64}, unix.EMSGSIZE, TooLarge{v6.Addr(), 112}},
		{"invalid for another reason", Message{Peer: v4, Bufs: pieces}, unix.EINVAL, TooLarge{}},
		{"no route", Message{Peer: v4, Bufs: pieces}, unix.ENETUNREACH, TooLarge{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var told []TooLarge
				d, err := Open(Config{
					Name: "refused", Addr: netip.MustParseAddr("192.0.2.1"), TooLarge: func(p TooLarge) { told = append(told, p) },
					Wire: &refusingWire{silentWire{done: make(chan struct{})}, c.err},
				})
				if err != nil {
					t.Fatal(err)
				}
				send := func() {
					b := batch{made: 1}
					b.msgs[0] = c.msg
					if !d.send(&b) {
						t.Error("what was refused waits")
					}
					synctest.Wait()
				}
				for range 3 {
					send()
				}
				<-time.After(tellEvery)
				send()
				want := []TooLarge{c.want, c.want}
				if c.want == (TooLarge{}) {
					want = nil
				}
				if err := d.Close(); err != nil || !slices.Equal(told, want) {
					t.Errorf("told %v, want %v; close: %v", told, want, err)
				}
			})
		})
	}
}
