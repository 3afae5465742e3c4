// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"errors"
	"net"
	"net/netip"
	"runtime"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// stepBytes is how much a queue pair receives before it may answer: often
// enough that the peer's window does not run dry, seldom enough that the
// messages of a busy stream share an acknowledgement.
const stepBytes = 128 << 10

// holdBytes is how much a queue pair may have received for its acknowledgement
// to be held back: a few SMC-R messages, never a stream.
const holdBytes = 1024

// receiveRetry is the pause after a receive call that failed.
const receiveRetry = 10 * time.Millisecond

// receiver is the state of a device's receive goroutine.
type receiver struct {
	dev    *Device
	now    time.Time
	pkt    rocev2.Packet
	q      *qp // owned
	since  int // bytes since its last step
	peer   netip.AddrPort
	icrc   *rocev2.ICRC // of peer
	flows  map[netip.AddrPort]*rocev2.ICRC
	held   []*qp // whose acknowledgement waits for the program's answer
	counts [numRxCounters]uint64
}

func (d *Device) receiveLoop() {
	defer d.wg.Done()
	r := &receiver{dev: d, flows: make(map[netip.AddrPort]*rocev2.ICRC)}
	msgs := make([]Message, rxBatch)
	for {
		n, err := d.wire.Recv(msgs)
		if err != nil {
			select {
			case <-d.done:
				return
			default:
			}
			if errors.Is(err, net.ErrClosed) {
				return // the wire was closed by somebody else
			}
			d.stats.rxErrors.Add(1)
			select { // it may last, and must not cost a processor
			case <-d.done:
				return
			case <-time.After(receiveRetry):
			}
			continue
		}
		r.now = time.Now()
		for i := range n {
			r.message(&msgs[i])
		}
		r.release()
		r.answerHeld()
		for i, v := range r.counts {
			if v != 0 {
				d.stats.rx[i].Add(v)
				r.counts[i] = 0
			}
		}
	}
}

// message takes one message apart.
func (r *receiver) message(m *Message) {
	if m.Peer != r.peer || r.icrc == nil {
		r.peer, r.icrc = m.Peer, r.flow(m.Peer)
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

// flow returns the ICRC state of packets from a peer.
func (r *receiver) flow(peer netip.AddrPort) *rocev2.ICRC {
	if c := r.flows[peer]; c != nil {
		return c
	}
	if len(r.flows) >= flowCache {
		clear(r.flows)
	}
	local := r.dev.Addr()
	if peer.Addr().Is4() != local.Addr().Is4() {
		peer = local // never fits; a wire of ours does not do that
	}
	c := rocev2.NewICRC(rocev2.Flow{
		Src: peer.Addr(), SrcPort: peer.Port(), Dst: local.Addr(), DstPort: local.Port(),
	})
	r.flows[peer] = &c
	return &c
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
	if r.q == nil || r.q.num != n {
		r.release()
		q := r.dev.qps.get(int(n & (maxQP - 1)))
		if q == nil || q.num != n {
			r.counts[rxUnknownQP]++
			return
		}
		q.own.lock()
		q.woke = false
		r.q, r.since = q, 0
	}
	if r.q.dead {
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
		r.q.step(r.now)
	}
}

// release lets the queue pair answer and gives it back. After little data,
// if the program was woken and there is only an acknowledgement to send, it
// waits until answerHeld: most likely the program answers at once, and then
// one system call sends both, and one wakes the peer.
func (r *receiver) release() {
	q := r.q
	if q == nil {
		return
	}
	r.q = nil
	hold := false
	if !q.dead {
		q.drain(r.now)
		q.settle()
		if hold = q.woke && r.since <= holdBytes && q.unsent == nil && q.m.OnlyACK(); !hold {
			q.step(r.now)
		}
	}
	q.unlock()
	switch {
	case !hold:
	case q.recvCQ.call != nil:
		// The program has run already, in unlock.
		q.own.lock()
		if !q.dead {
			q.step(r.now)
		}
		q.unlock()
	default:
		r.held = append(r.held, q)
	}
}

// answerHeld lets the programs that were woken run, and then sends the
// acknowledgements that did not go with their answers.
func (r *receiver) answerHeld() {
	if len(r.held) == 0 {
		return
	}
	runtime.Gosched()
	for i, q := range r.held {
		q.own.lock()
		if !q.dead {
			q.step(r.now)
		}
		q.unlock()
		r.held[i] = nil
	}
	r.held = r.held[:0]
}

// QPStats returns the protocol counters of a queue pair of this device.
func (d *Device) QPStats(n rdma.QPN) (rocev2.Stats, bool) {
	q := d.qps.get(int(n & (maxQP - 1)))
	if q == nil || q.num != n {
		return rocev2.Stats{}, false
	}
	q.own.lock()
	defer q.unlock()
	return q.m.Stats(), true
}
