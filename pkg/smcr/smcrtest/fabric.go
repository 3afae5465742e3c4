// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// minRTO is how long a queue pair waits before it sends again for the first
// time; later it waits longer.
const minRTO = 4 * time.Millisecond

// rnic is a port of a peer.
type rnic struct {
	peer, index int
	present, up bool
	slowUntil   time.Time // what comes before has to wait
	life        int       // grows with each insertion
	keys        uint32
}

// newKey is the RKey of a registration. RNICs count apart, so that keys of
// different ones are often equal.
func (r *rnic) newKey() uint32 {
	r.keys++
	return 0x1000 + r.keys
}

// usable reports whether packets pass.
func (r *rnic) usable() bool { return r.present && r.up }

func (r *rnic) String() string { return fmt.Sprintf("RNIC %d of peer %d", r.index, r.peer) }

// wire is the way from one RNIC to another; all RNICs reach each other.
type wire struct{ from, to *rnic }

// passes reports whether a packet sent now arrives.
func (w *World) passes(from, to *rnic) bool {
	return from.usable() && to.usable() && !w.holes[wire{from, to}]
}

// work is a work request on its way.
type work struct {
	send   bool
	msg    [llc.Size]byte
	long   []byte // in place of msg, when it is longer
	id     uint64
	source func() []byte // RDMA write: the bytes, taken when they arrive
	addr   uint64
	rkey   uint32
	conn   string    // that writes, or that the message is about
	sent   time.Time // for the last time
	at     time.Time // when it arrives
}

// bytes are those of a SEND.
func (wr *work) bytes() []byte {
	if wr.long != nil {
		return wr.long
	}
	return wr.msg[:]
}

// stall says for how long one direction of a queue pair has made no progress.
type stall struct {
	since   time.Time
	retries int
}

type qpState uint8

const (
	qpInit qpState = iota
	qpReceive
	qpTransmit
	qpError
	qpGone
)

// qp is a reliable queue pair. It sends lost packets again, so that its user does not see the
// network's losses, until it gives up. Work requests that were on their way then have arrived or
// not: their sender does not know.
type qp struct {
	w     *World
	p     *path
	side  int
	index int // the link's index at the queue pair's node
	rnic  *rnic
	local linkgroup.Endpoint
	peer  linkgroup.Endpoint
	state qpState

	wire   []work // posted, not arrived
	acks   []work // SENDs that arrived, not completed
	posted int    // SENDs that have not completed
	armed  bool   // an event for the first of wire is made
	acking bool   // an event for the first of acks is made
	out    stall  // of wire
	back   stall  // of acks
	// tainted: something happened to the queue pair that may break it.
	tainted bool
	active  bool // its node has said that the link is active
	lingers bool // its group is over, and it carries the last words
}

// newQP makes a queue pair on an RNIC.
func (p *path) newQP(side, index int, r *rnic, local linkgroup.Endpoint) *qp {
	w := p.w
	q := &qp{w: w, p: p, side: side, index: index, rnic: r, local: local}
	for len(p.qps[side]) <= index {
		p.qps[side] = append(p.qps[side], nil)
	}
	if old := p.qps[side][index]; old != nil {
		w.fault("%v: link index %d is used again before its queue pair is destroyed", p.nodes[side], index)
	}
	p.qps[side][index] = q
	w.qps[local.QPN] = q
	if !r.present {
		q.state = qpError
	}
	return q
}

func (p *path) qp(side, index int) *qp {
	if index < len(p.qps[side]) {
		return p.qps[side][index]
	}
	return nil
}

// newEndpoint is the local half of a link that does not exist yet.
func (w *World) newEndpoint(r *rnic) linkgroup.Endpoint {
	w.keys++
	e := r.endpoint()
	e.QPN, e.PSN = rdma.QPN(w.keys), rdma.PSN(w.rng.Uint32())&rdma.PSNMask
	return e
}

// endpoint is what all endpoints of an RNIC share.
func (r *rnic) endpoint() linkgroup.Endpoint {
	return linkgroup.Endpoint{
		GID: rdma.GID{14: byte(r.index), 15: byte(r.peer + 1)}, MAC: rdma.MAC{4: byte(r.index), 5: byte(r.peer + 1)},
		MTU: rdma.MTU1024, RNIC: uint8(r.index),
	}
}

// subnetBits is the length of the prefix of an RNIC's subnet, in which the RNIC's number is.
func (w *World) subnetBits() uint8 {
	if w.cfg.Subnets {
		return 120
	}
	return 0
}

func (q *qp) String() string {
	return fmt.Sprintf("queue pair 0x%x on %v", uint32(q.local.QPN), q.rnic)
}

// router is the router between the peers, if there is one.
func (w *World) router() rdma.MAC {
	if w.cfg.Routed {
		return rdma.MAC{0: 2, 5: 0xee}
	}
	return rdma.MAC{}
}

// nextHop is where packets to an RNIC must go first.
func (w *World) nextHop(to linkgroup.Endpoint) rdma.MAC {
	if w.cfg.Routed {
		return w.router()
	}
	return to.MAC
}

// connect moves the queue pair to RTR.
func (q *qp) connect(peer linkgroup.Endpoint) {
	q.peer = peer
	if want := q.w.nextHop(peer); peer.NextHop() != want {
		q.w.fault("%v sends to %v, want %v", q, peer.NextHop(), want)
	}
	if q.state == qpInit {
		q.state = qpReceive
	}
}

// transmit moves the queue pair to RTS.
func (q *qp) transmit() {
	switch q.state {
	case qpReceive:
		q.state = qpTransmit
	case qpInit:
		q.w.fault("%v: RTS before RTR", q)
	default: // the queue pair is gone, or in RTS already
	}
}

// close destroys the queue pair.
func (q *qp) close() {
	if q.state == qpGone {
		return
	}
	if q.isSound() && q.p.isUsed() {
		q.p.lostSound[q.side] = q.w.now
	}
	q.state = qpGone
	q.lose()
	delete(q.w.qps, q.local.QPN)
	q.p.qps[q.side][q.index] = nil
}

// lose ends the work requests that are under way. Some of them, from the first one on, arrive
// although their acknowledgements do not.
func (q *qp) lose() {
	w := q.w
	if t := q.target(); t != nil && w.passes(q.rnic, t.rnic) && q.out.since.IsZero() {
		for _, wr := range q.wire[:w.rng.IntN(len(q.wire)+1)] {
			if wr.sent.After(w.now) {
				break // this one was lost, and nobody sends it again: those behind it are out of order
			}
			// Nothing orders this work request and those that go over another link.
			q.capture(&wr)
			at := wr.at
			if slow := t.rnic.slowUntil; slow.After(at) {
				at = slow
			}
			w.at(at, func() { q.arrive(wr) })
		}
	}
	q.wire, q.acks = nil, nil
}

// capture takes the bytes of a write now.
func (q *qp) capture(wr *work) {
	if wr.source != nil {
		b := wr.source()
		wr.source = func() []byte { return b }
	}
}

// fail puts it into state ERR and tells its node.
func (q *qp) fail(why error) {
	if q.state == qpError || q.state == qpGone {
		return
	}
	q.w.trace("%v %v! %v: %v", q.w.Elapsed(), q.side, q, why)
	q.state = qpError
	q.lose()
	q.p.nodes[q.side].linkFailed(q.p.clock(q.side), q.index, why)
}

// target is the queue pair at the other end, if it listens.
func (q *qp) target() *qp {
	t := q.w.qps[q.peer.QPN]
	if t == nil || t.state == qpInit || t.state == qpError || t.local.GID != q.peer.GID || t.peer.QPN != q.local.QPN {
		return nil
	}
	return t
}

// post puts a work request on the wire, behind those before it.
func (p *path) post(side, index int, wr work) {
	w, q := p.w, p.qp(side, index)
	if q == nil || q.state == qpInit || q.state == qpReceive {
		w.fault("%v posts to link index %d, which cannot send", p.nodes[side], index)
		return
	}
	if q.state == qpError {
		return // flushed
	}
	if wr.send {
		q.posted++
		if limit := p.nodes[side].sendLimit(); q.posted > limit {
			w.fault("%v has %d SENDs under way on link index %d, limit %d", p.nodes[side], q.posted, index, limit)
		}
		if w.tracing {
			on := ""
			if index > 0 {
				on = fmt.Sprintf("/%d", index)
			}
			w.trace("%v %d%s> %s", w.Elapsed(), side, on, describe(p.nodes[side].dialect(), wr.bytes()))
		}
	}
	if v := p.voiceOf(side, wr.conn); v != nil {
		if m, err := cdc.Parse(wr.msg[:]); !wr.send {
			v.wrote = true
		} else if err == nil {
			if err := v.speak(q, m); err != nil {
				w.fault("%v, %s: %w", p.nodes[side], wr.conn, err)
			}
		}
	}
	wait, way := w.transit()
	wr.sent = w.now.Add(wait)
	wr.at = wr.sent.Add(way)
	if n := len(q.wire); n > 0 && wr.at.Before(q.wire[n-1].at) {
		wr.at = q.wire[n-1].at
	}
	q.wire = append(q.wire, wr)
	q.arm(wr.at)
}

func describe(d llc.Dialect, b []byte) string {
	if b[0] == cdc.Type {
		if m, err := cdc.Parse(b); err == nil {
			return m.String()
		}
	}
	if m, err := llc.Parse(d, llc.Version2, b); err == nil {
		return m.String()
	}
	return fmt.Sprintf("%x", b)
}

// arm makes the event that carries the first work request.
func (q *qp) arm(t time.Time) {
	if !q.armed {
		q.armed = true
		q.w.at(t, q.carry)
	}
}

// carry delivers what is due, as far as the other end takes it.
func (q *qp) carry() {
	q.armed = false
	w := q.w
	for len(q.wire) > 0 && !q.wire[0].at.After(w.now) && q.state == qpTransmit {
		t := q.target()
		if t == nil || !w.passes(q.rnic, t.rnic) {
			q.arm(w.now.Add(q.retry(&q.out)))
			return
		}
		if t.rnic.slowUntil.After(w.now) {
			q.arm(t.rnic.slowUntil)
			return
		}
		q.out = stall{}
		wr := q.wire[0]
		q.wire = q.wire[1:]
		if !q.arrive(wr) {
			return
		}
		if wr.send {
			wr.at = w.now.Add(w.delay())
			if n := len(q.acks); n > 0 && wr.at.Before(q.acks[n-1].at) {
				wr.at = q.acks[n-1].at
			}
			q.acks = append(q.acks, wr)
			if !q.acking {
				q.acking = true
				w.at(wr.at, q.complete)
			}
		}
	}
	if len(q.wire) > 0 && q.state == qpTransmit {
		q.arm(q.wire[0].at)
	}
}

// complete tells the node of SENDs whose acknowledgements have come.
func (q *qp) complete() {
	q.acking = false
	w := q.w
	for len(q.acks) > 0 && q.state == qpTransmit {
		if q.acks[0].at.After(w.now) {
			q.acking = true
			w.at(q.acks[0].at, q.complete)
			return
		}
		// A destroyed peer has acknowledged what it took, or not: it did.
		if t := q.w.qps[q.peer.QPN]; t != nil && !w.passes(t.rnic, q.rnic) {
			q.acking = true
			w.after(q.retry(&q.back), q.complete)
			return
		}
		q.back = stall{}
		if q.rnic.slowUntil.After(w.now) {
			q.acking = true
			w.at(q.rnic.slowUntil, q.complete)
			return
		}
		wr := q.acks[0]
		q.acks = q.acks[1:]
		q.posted--
		if v := q.p.voiceOf(q.side, wr.conn); v != nil {
			if m, err := cdc.Parse(wr.msg[:]); err == nil {
				v.heard(q, m)
			}
		}
		q.p.nodes[q.side].sent(q.p.clock(q.side), q.index, wr.id)
	}
}

// retry is how long to wait before sending again. When sending again has not helped for
// Config.Retry, the queue pair fails.
func (q *qp) retry(s *stall) time.Duration {
	w := q.w
	if s.since.IsZero() {
		s.since = w.now
		limit := w.cfg.Retry
		if limit == 0 {
			limit = time.Second + time.Duration(w.rng.IntN(3000))*time.Millisecond
		}
		began := w.now
		w.after(limit, func() {
			if s.since.Equal(began) {
				q.fail(errRetries)
			}
		})
	}
	d := minRTO << min(s.retries, 4)
	s.retries++
	return d
}

// arrive is the arrival of a work request at the other end; false when it
// broke both queue pairs.
func (q *qp) arrive(wr work) bool {
	w, p, to := q.w, q.p, 1-q.side
	t := q.target()
	if t == nil {
		return true
	}
	if !wr.send && t.lingers {
		q.fail(errAccess) // the memory is gone
		t.fail(errAccess)
		return false
	}
	if !wr.send {
		w.writes++
		err := p.nodes[to].place(t.index, wr.conn, wr.rkey, wr.addr, wr.source())
		if errors.Is(err, errLate) && (q.state != qpTransmit || w.cfg.Linux[p.peers[q.side]]) {
			return true
		}
		if err != nil {
			// A kernel whose clock jumps gives up a DELETE RKEY. A write of another kernel that is
			// on its way then hits an RMB without a connection.
			kernels := w.cfg.Linux[p.peers[0]] && w.cfg.Linux[p.peers[1]]
			// A kernel that ends its groups gives its RMBs back at once.
			ends := w.cfg.Linux[p.peers[to]] && p.nodes[to].condition() == dead
			if !ends && (!kernels || p.excused == "") {
				w.fault("RDMA write of %s, peer %d, link index %d: %w", wr.conn, p.peers[q.side], q.index, err)
			}
			q.fail(errAccess)
			t.fail(errAccess)
			return false
		}
		return true
	}
	if w.cfg.RFC && wr.msg[0] == byte(llc.TypeConfirmLink) {
		wr.msg[3] &^= byte(llc.NoRMBEEyecatcher)
	}
	if err := p.nodes[to].recv(p.clock(to), t.index, wr.bytes()); err != nil && (!errors.Is(err, cdc.ErrLostData) || !p.hasLost()) {
		w.fault("peer %d refuses %s: %w", p.peers[to], describe(p.nodes[q.side].dialect(), wr.bytes()), err)
	}
	return true
}
