// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// stepBytes is how much a queue pair receives before it may answer: often
// enough that the peer's window does not run dry, seldom enough that the
// messages of a busy stream share an acknowledgement.
const stepBytes = 128 << 10

// ackDelay is how long the acknowledgement of a few bytes waits for the
// program's answer. Bulk data is not held back, and a peer's ACK timeout is a
// hundred times longer. The runtime's timers are no finer when it is idle.
const ackDelay = time.Millisecond

// receiveRetry is the pause after a receive call that failed.
const receiveRetry = 10 * time.Millisecond

// receiver is the state of a receive goroutine.
type receiver struct {
	dev    *Device
	now    time.Time
	pkt    rocev2.Packet
	q      *qp // owned
	since  int // bytes since its last step
	poller softdev.Poller
	peer   netip.AddrPort
	icrc   *rocev2.ICRC // of peer
	peers  [peerCache]peerICRC
	counts [numRxCounters]uint64
}

// peerICRC is the ICRC state of packets from a peer.
type peerICRC struct {
	peer netip.AddrPort
	icrc rocev2.ICRC
}

func (d *Device) startReceiver(receive Receive) {
	d.wg.Go(func() { d.receiveLoop(receive) })
}

// receiveLoop receives until the device is closed, or only this receiver.
func (d *Device) receiveLoop(receive Receive) {
	r := &receiver{dev: d, poller: d.base.Poller()}
	take, idle := r.take, r.poller.Idle
	for {
		err := receive(take, idle)
		select {
		case <-d.done:
			return
		default:
		}
		if errors.Is(err, net.ErrClosed) {
			return // it is not needed any more, or the wire was closed by somebody else
		}
		d.stats.rxErrors.Add(1)
		select { // it may last, and must not cost a processor
		case <-d.done:
			return
		case <-time.After(receiveRetry):
		}
	}
}

// take handles what arrived.
func (r *receiver) take(msgs []Message) {
	r.now = time.Now()
	for i := range msgs {
		r.message(&msgs[i])
	}
	r.release()
	for i, v := range r.counts {
		if v != 0 {
			r.dev.stats.rx[i].Add(v)
			r.counts[i] = 0
		}
	}
}

// message takes one message apart.
func (r *receiver) message(m *Message) {
	if m.Peer != r.peer || r.icrc == nil {
		r.peer, r.icrc = m.Peer, r.icrcOf(m.Peer)
	}
	b, size := m.Data, m.SegmentBytes
	if size <= 0 {
		size = len(b)
	}
	for i := uint16(0); len(b) > 0; i++ {
		n := min(size, len(b))
		r.packet(b[:n], i)
		b = b[n:]
	}
}

// icrcOf returns the ICRC state of packets from a peer. Each peer has one place in the
// cache; whoever sends from many addresses throws others out, which costs them time.
func (r *receiver) icrcOf(peer netip.AddrPort) *rocev2.ICRC {
	a := peer.Addr().As16()
	i := binary.NativeEndian.Uint32(a[8:]) ^ binary.NativeEndian.Uint32(a[12:]) ^ uint32(peer.Port())
	i = i * 0x9e3779b1 >> (32 - peerBits) // Fibonacci hashing
	p := &r.peers[i]
	if p.peer == peer {
		return &p.icrc
	}
	p.peer = peer
	local := r.dev.Addr()
	if peer.Addr().Is4() != local.Addr().Is4() {
		peer = local // never fits; a wire of ours does not do that
	}
	p.icrc = rocev2.NewICRC(rocev2.Addresses{
		Src: peer.Addr(), SrcPort: peer.Port(), Dst: local.Addr(), DstPort: local.Port(),
	})
	return &p.icrc
}

// packet handles one UDP payload, the i-th of its message.
func (r *receiver) packet(b []byte, i uint16) {
	r.counts[rxPackets]++
	if !r.icrc.Check(b, i) {
		r.counts[rxBadICRC]++
		return
	}
	if err := r.pkt.Parse(b); err != nil {
		r.counts[rxMalformed]++
		return
	}
	n := r.pkt.BTH.DestQP
	if r.q == nil || r.q.Num() != n {
		r.release()
		q, ok := r.dev.base.Find(n).(*qp)
		if !ok {
			if r.dev.inGeneration(n) == n {
				r.counts[rxUnknownQP]++
			} else {
				r.counts[rxOtherDevice]++
			}
			return
		}
		q.Lock()
		r.q, r.since = q, 0
	}
	if r.q.Dead() {
		r.counts[rxUnknownQP]++
		return
	}
	if r.peer.Addr() != r.q.peer.Addr() {
		r.counts[rxWrongSource]++
		return
	}
	r.q.m.HandlePacket(r.now, &r.pkt)
	if r.since += len(b); r.since >= stepBytes {
		r.since = 0
		r.q.Step(r.now)
	}
}

// release lets the queue pair answer and gives it back.
func (r *receiver) release() {
	if q := r.q; q != nil {
		r.q = nil
		if !q.Dead() {
			q.Step(r.now)
		}
		q.Unlock()
	}
}

// QPStats returns the protocol counters of a queue pair of this device.
func (d *Device) QPStats(n rdma.QPN) (rocev2.Stats, bool) {
	q, ok := d.base.Find(n).(*qp)
	if !ok {
		return rocev2.Stats{}, false
	}
	q.Lock()
	defer q.Unlock()
	return q.m.Stats(), true
}
