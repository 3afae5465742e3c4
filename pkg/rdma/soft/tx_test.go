// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

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
	p := rocev2.Packet{
		BTH:  rocev2.BTH{OpCode: rocev2.ReadRequest, PKey: rocev2.PKey, DestQP: q.Num()},
		RETH: rocev2.RETH{Addr: mr.Addr(), RKey: mr.RKey(), Length: uint32(len(mr.Bytes()))},
	}
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
