// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// slotBytes is the room of one LLC or CDC message in registered memory: 44
// bytes, on a cache line of its own.
const slotBytes = 64

// Messages of version 2 that are longer than a slot go on in one of a few
// spaces, which the slots share in turn: peers have one long message under way
// at a time, and Linux has one such space. Should a peer send so many at once
// that one message overwrites another, the peer spoils its own messages only.
const (
	spills     = 2
	spillBytes = llc.MaxSizeV2 - llc.Size
)

// Behind the spills is the room of the long message that is on its way out: the machine has no more than one
// on a link. The link has that room from the start, so that no message is lost for want of memory: the link
// over which the message is to go may be the only one.
const (
	longOff   = linkSlots*slotBytes + spills*spillBytes
	longBytes = linkgroup.MaxMessage
)

// linkSlots is how many slots a link has: first those that receive.
const linkSlots = linkgroup.RecvDepth + linkgroup.SendBudget

// sendRequests is how many requests a link's send queue takes. All of them complete when the link is lost.
const sendRequests = linkgroup.SendDepth + 8

// link is a link of a link group on a device. A link owns the queue pair and the memory of
// messages, until close; its group owns all other memory that
// work requests name. The group has the link until it is given up, and then lingering has it,
// until its time is over. A link is guarded by the stack's turn.
type link struct {
	g     *group
	index linkgroup.LinkIndex
	rnic  *rnic
	qp    rdma.QP
	in    *domain // of the queue pair
	local linkgroup.Endpoint
	peer  linkgroup.Endpoint // from RTR on
	row   rdma.GIDEntry      // of the device's GID table

	slots    *region // on the link's device only
	nextSend int
	spill    bool // there is room for long messages
	// Counts of the messages sent and completed.
	sent, complete uint64
	wrote          uint64      // number of the message behind the last RDMA WRITE
	sizes          packetSizes // of the RDMA WRITEs
	awaited        bool        // somebody waits to hear that the messages have arrived

	resolving bool // the way to the peer is being found out
	transmits bool // the queue pair is in RTS
	charged   bool // the queue pair is charged, see Config.QueuePairs
	broken    bool // the queue pair, the device or the path is gone
	// trespassed: the link's end was the peer's fault, and was counted. orderly: its end was
	// nobody's fault, and what the peer may not write any more was right when it was sent.
	trespassed, orderly bool
	until               time.Time // when the link goes; zero unless it lingers
	// A link that was given up may have its queue pair refuse what the peer still sends:
	//
	//	given up, the peer may not know     mayRefuse open, unheard set
	//	the peer says DELETE LINK           mayRefuse closed and nil, unheard zero
	//	nobody says anything until unheard  refused nevertheless, mayRefuse open
	//
	// Both are nil and zero where the peer knew from the start, or nothing is refused.
	mayRefuse chan struct{}
	unheard   time.Time

	// Work requests being gathered for one post, and receive slots to give
	// back.
	wrs  []rdma.SendWR
	sges []rdma.SGE
	recv []rdma.RecvWR
}

// newLink makes a queue pair in state INIT for a link.
func (g *group) newLink(index linkgroup.LinkIndex, r *rnic) (_ *link, err error) {
	l := &link{
		g: g, index: index, rnic: r, row: r.gids.of(g.version),
		wrs:  make([]rdma.SendWR, 0, 2*linkgroup.SendDepth),
		sges: make([]rdma.SGE, 0, 4*linkgroup.SendDepth),
		recv: make([]rdma.RecvWR, 0, linkgroup.RecvDepth),
	}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	mtu, err := g.offeredMTU(time.Now(), r)
	if err != nil {
		return nil, err
	}
	size := linkSlots * slotBytes
	if l.spill = g.version >= clc.V2; l.spill {
		size = longOff + longBytes
	}
	if l.slots, err = g.mem.registerOn(size, rdma.LocalWrite, r); err != nil {
		return nil, errors.Join(err, l.share())
	}
	if err = l.charge(); err != nil {
		return nil, err
	}
	if l.in, err = g.mem.use(r); err != nil {
		return nil, err
	}
	if err = r.makeRoom(); err != nil {
		return nil, err
	}
	if l.qp, err = l.in.pd.CreateQP(rdma.QPConfig{
		SendCQ: r.sends.CQ, RecvCQ: r.recvs.CQ,
		MaxSendWR: sendRequests, MaxRecvWR: linkgroup.RecvDepth, MaxSGE: 2,
	}); err != nil {
		return nil, fmt.Errorf("create queue pair: %w", err)
	}
	if err = l.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: rdma.RemoteWrite}); err != nil {
		return nil, fmt.Errorf("queue pair to INIT: %w", err)
	}
	l.local = linkgroup.Endpoint{
		SubnetBits: uint8(l.row.PrefixBits),
		QPN:        l.qp.Num(), GID: l.row.GID, MAC: l.row.MAC, RNIC: r.index,
		PSN: rdma.PSN(g.s.rand.Uint32()) & rdma.PSNMask, MTU: mtu,
	}
	r.links[l.qp.Num()] = l
	g.links[index] = l
	return l, nil
}

// drainAndClose is close for a link that had a peer. What the queue pair has received it
// has acknowledged, and the peer counts it as delivered: so these messages are handled first.
func (l *link) drainAndClose(now time.Time) {
	if l.qp != nil {
		_ = l.qp.Close() // the queue pair is gone either way
		l.rnic.drain(now)
	}
	l.close()
}

// close destroys the queue pair; afterwards the peer cannot write through it.
func (l *link) close() {
	l.stopResolving()
	if l.qp != nil {
		l.forgetSends()
		delete(l.rnic.links, l.qp.Num())
		if (l.broken || !l.g.ready) && !l.trespassed && !l.orderly {
			l.rnic.ended.add(l.qp.Num(), l.g.addr)
		}
		_ = l.qp.Close() // the queue pair is gone either way
		l.qp = nil
	}
	l.discharge()
	if l.slots != nil {
		_ = l.slots.close() // nothing uses it any more
		l.slots = nil
	}
	if l.in != nil {
		l.in.unref()
		l.in = nil
	}
	if l.g.links[l.index] == l {
		l.g.links[l.index] = nil
	}
}

func (l *link) fail(now time.Time, err error) {
	l.breakOff()
	l.rnic.drainSends(now) // what was acknowledged before

	if !l.lingers() { // else the link's place in the group may be another link's
		l.g.lg.HandleLinkFailure(now, l.index, err)
	}
}

// handleCompletion takes one work completion.
func (l *link) handleCompletion(now time.Time, wc *rdma.WC) {
	g := l.g
	if l.lingers() {
		l.lateCompletion(now, wc)
		return
	}
	if wc.Status != rdma.StatusSuccess {
		if wc.Status == rdma.StatusRetryExceeded && wc.ID == writeID {
			l.outOfRetries(now)
		}
		if wc.Status != rdma.StatusFlushed {
			l.fail(now, fmt.Errorf("%v: %v", wc.Op, wc.Status))
		} else if g.lg.State() != linkgroup.Dead {
			l.fail(now, errors.New("queue pair went to ERR"))
		}
		return
	}
	if wc.Op != rdma.OpRecv {
		l.completed()
		g.lg.HandleSent(now, l.index, wc.ID)
		return
	}
	slot := int(wc.ID)
	msg := l.message(slot, int(wc.Bytes))
	if g.lg.AwaitsEarlier(l.index, msg) {
		// The message says, or takes for granted, what came over another link. Maybe the same has come
		// here, and only that link's completion queue was not looked at yet.
		g.s.devices.drain(now, l.rnic)
	}
	if linkgroup.TellsOfLinks(msg) {
		g.heardOfLinks()
	}
	if err := g.lg.HandleRecv(now, l.index, msg); err != nil {
		g.s.counters.past.MessagesBad++
		g.s.malformed("link group", err)
	}
	if g.lg.PeerKnows() {
		g.s.lingering.tellClose()
	}
	l.freeSlot(slot)
}

// forgetSends gives up hope of the SENDs in flight.
func (l *link) forgetSends() {
	l.rnic.inflight -= int(l.sent - l.complete)
	l.sent = l.complete
	l.awaitSends(false)
}

// awaitSends says whether the device shall call when SENDs complete.
func (l *link) awaitSends(yes bool) {
	switch {
	case yes == l.awaited:
		return
	case yes:
		l.rnic.awaiting++
		l.g.s.marks.ready.Store(true) // the next step arms the queue
	default:
		l.rnic.awaiting--
	}
	l.awaited = yes
}

// completed counts a SEND that has arrived.
func (l *link) completed() {
	if l.complete == l.sent {
		return // the SEND was given up, see forgetSends
	}
	l.complete++
	l.rnic.inflight--
}

// sending counts a SEND that is about to leave.
func (l *link) sending() {
	l.sent++
	l.rnic.inflight++
}

// slot is the scatter-gather element of a message slot.
func (l *link) slot(i int) rdma.SGE {
	sge := l.slots.sge(l.rnic, i*slotBytes)
	sge.Length = llc.Size
	return sge
}

// spillOff is where the space begins that a receive slot spills into.
func spillOff(slot int) int { return linkSlots*slotBytes + slot%spills*spillBytes }

// message returns what a receive slot got. Of a long message that is a copy:
// the peer may overwrite the end of the long message any time.
func (l *link) message(slot, n int) []byte {
	head := l.slots.mem[slot*slotBytes:][:min(n, llc.Size)]
	if n <= llc.Size {
		return head
	}
	return append(bytes.Clone(head), l.slots.mem[spillOff(slot):][:n-llc.Size]...)
}

// freeSlot notes that a receive slot can go back to the device.
func (l *link) freeSlot(slot int) {
	wr := rdma.RecvWR{ID: uint64(slot), SGE: l.slot(slot)}
	if l.spill {
		wr.Spill = l.slots.sge(l.rnic, spillOff(slot))
		wr.Spill.Length = spillBytes
	}
	l.recv = append(l.recv, wr)
}

// recvBatch is how many receive slots are given back to the device at once. Peers
// have linkgroup.SendBudget messages on their way, Linux fewer: as many slots are
// left meanwhile.
const recvBatch = (linkgroup.RecvDepth - linkgroup.SendBudget) / 2

// postRecv gives the free receive slots back to the device. That can wait
// until the messages are dealt with: peers have fewer on their way than there
// are slots.
func (l *link) postRecv(now time.Time) {
	if l.qp != nil && len(l.recv) > 0 {
		if _, err := l.qp.PostRecv(l.recv); err != nil {
			l.fail(now, fmt.Errorf("post receive: %w", err))
		}
	}
	l.recv = l.recv[:0]
}

// Queue pair attributes, those that Linux uses for SMC-R.
const (
	ackTimeoutCode  = 15 // 134 ms
	minRNRTimerCode = 5  // 0.06 ms
	hopLimitDirect  = 1  // in our subnet: no router may let it out
	hopLimitRouted  = 64
)

func (l *link) toRTR(now time.Time, peer linkgroup.Endpoint) error {
	l.peer = peer
	err := l.qp.Modify(rdma.QPAttr{
		State: rdma.QPRTR, Path: l.path(peer),
		DestQPN: peer.QPN, RQPSN: peer.PSN, MTU: peer.MTU, MinRNRTimer: minRNRTimerCode,
	})
	if err != nil {
		return err
	}
	for slot := range linkgroup.RecvDepth {
		l.freeSlot(slot)
	}
	l.postRecv(now)
	return nil
}

func (l *link) toRTS() error {
	err := l.qp.Modify(rdma.QPAttr{
		State: rdma.QPRTS, SQPSN: l.local.PSN, Timeout: ackTimeoutCode, RetryCount: 7, RNRRetry: 7,
	})
	l.transmits = err == nil
	return err
}

func (l *link) check(now time.Time, what string, err error) {
	if err != nil {
		l.fail(now, fmt.Errorf("%s: %w", what, err))
	}
}

// write gathers an RDMA WRITE out of the connection's send buffer.
func (l *link) write(o *linkgroup.Output) {
	c := l.g.shellOf(o.Conn)
	invariant.Must(c != nil, "RDMA write for a connection without a shell")
	l.wrote = l.sent + 1
	start, n := len(l.sges), uint32(0)
	for _, s := range o.Local {
		if s.Len > 0 {
			n += s.Len
			sge := c.send.buf.region.sge(l.rnic, c.send.buf.off+int(s.Offset))
			sge.Length = s.Len
			l.sges = append(l.sges, sge)
		}
	}
	l.wrs = append(l.wrs, rdma.SendWR{
		ID: writeID, Op: rdma.OpWrite, SGL: l.sges[start:len(l.sges):len(l.sges)], RemoteAddr: o.RemoteAddr, RKey: o.RKey,
	})
	l.sizes.note(n, l.peer.MTU, l.wrote)
}

// send copies a message to the next send slot, or to the room of the long one. Slots are used in turn, and
// completions come in order, so a slot is free again when the machine's send
// budget allows the next message.
func (l *link) send(o *linkgroup.Output) {
	l.sending()
	var sge rdma.SGE
	if o.Long != nil {
		invariant.Must(l.spill && len(o.Long) <= longBytes, "LLC message without room")
		sge = l.slots.sge(l.rnic, longOff)
		sge.Length = uint32(copy(l.slots.mem[longOff:], o.Long))
	} else {
		slot := linkgroup.RecvDepth + l.nextSend
		l.nextSend = (l.nextSend + 1) % linkgroup.SendBudget
		copy(l.slots.mem[slot*slotBytes:], o.Msg[:])
		sge = l.slot(slot)
	}
	l.sges = append(l.sges, sge)
	l.wrs = append(l.wrs, rdma.SendWR{
		ID: o.ID, Op: rdma.OpSend, Flags: rdma.SendSignaled | rdma.SendSolicited,
		SGL: l.sges[len(l.sges)-1 : len(l.sges) : len(l.sges)],
	})
	if o.Conn != nil {
		if c := l.g.shellOf(o.Conn); c != nil {
			c.streams.announced.Store(o.Conn.Data().Announced())
		}
	}
}

// post hands the gathered work requests to the device at once.
func (l *link) post(now time.Time) {
	if len(l.wrs) == 0 {
		return
	}
	if l.qp != nil {
		if _, err := l.qp.PostSend(l.wrs); err != nil {
			l.fail(now, fmt.Errorf("post send: %w", err))
		}
		l.g.s.sweepLater(now)
	}
	clear(l.wrs)
	l.wrs, l.sges = l.wrs[:0], l.sges[:0]
}
