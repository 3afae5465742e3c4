// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// clientIdleExtra lets the server end an idle group first, so that a client
// does not name a group that its server is just giving up.
const clientIdleExtra = 10 * time.Second

// slotBytes is the room of one LLC or CDC message in registered memory: 44
// bytes, on a cache line of its own.
const slotBytes = 64

// group is a link group with what it needs of the device. It is guarded by
// the stack's turn.
type group struct {
	s      *Stack
	id     uint32
	role   linkgroup.Role
	peer   clc.PeerID
	lg     *linkgroup.Group
	opened time.Time

	qp       rdma.QP
	spare    rdma.QP // the server's offer of a second link; never used
	touched  bool    // on the stack's list
	slots    rdma.MR // receive slots, then send slots
	nextSend int
	local    linkgroup.Endpoint
	rmbs     map[linkgroup.RMBID]*rmbMemory

	// Work requests being gathered for one post.
	wrs  []rdma.SendWR
	sges []rdma.SGE
	recv []rdma.RecvWR // receive slots to give back

	// Who waits for set-up and RMB events. setup has room for all events of
	// one set-up.
	setup   chan setupEvent
	formed  chan struct{} // closed when the first contact ended, either way
	rmbWait map[linkgroup.RMBID][]chan bool
}

// rmbMemory is one of our RMBs.
type rmbMemory struct {
	mr   rdma.MR
	size int // bytes
}

// setupEvent is what a first contact's goroutine hears of its group.
type setupEvent struct {
	kind linkgroup.EventKind
	err  error
}

// newGroup makes a group with a queue pair in state INIT, ready for the CLC
// exchange.
func (s *Stack) newGroup(role linkgroup.Role, peer clc.PeerID) (_ *group, err error) {
	g := &group{
		s: s, id: lastGroupID.Add(1), role: role, peer: peer, opened: time.Now(),
		rmbs:    map[linkgroup.RMBID]*rmbMemory{},
		setup:   make(chan setupEvent, 4),
		formed:  make(chan struct{}),
		rmbWait: map[linkgroup.RMBID][]chan bool{},
		wrs:     make([]rdma.SendWR, 0, 2*linkgroup.SendDepth),
		sges:    make([]rdma.SGE, 0, 4*linkgroup.SendDepth),
		recv:    make([]rdma.RecvWR, 0, linkgroup.RecvDepth),
	}
	defer func() {
		if err != nil {
			g.free()
		}
	}()
	if g.slots, err = s.mem.register((linkgroup.RecvDepth+linkgroup.SendBudget)*slotBytes, rdma.LocalWrite); err != nil {
		return nil, err
	}
	if g.qp, err = g.newQP(); err != nil {
		return nil, err
	}
	if err = g.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: rdma.RemoteWrite}); err != nil {
		return nil, fmt.Errorf("queue pair to INIT: %w", err)
	}
	idle := s.cfg.IdleGroupTimeout
	if idle > 0 && role == linkgroup.Client {
		idle += clientIdleExtra
	}
	g.lg = linkgroup.New(linkgroup.Config{
		Role: role, AllowRFC: s.cfg.Dialects == DialectsBoth, UserID: g.id,
		SendBuffer:  uint32(s.cfg.SendBufferBytes),
		IdleTimeout: idle, CloseTimeout: s.cfg.CloseTimeout,
		Rand: rand.New(rand.NewPCG(s.rand.Uint64(), s.rand.Uint64())),
	})
	g.local = g.endpoint(g.qp)
	g.lg.AddFirstLink(g.local)
	if role == linkgroup.Server {
		// The offer of a second link needs a queue pair of its own, even if
		// the client must refuse it because both ends have one RNIC.
		if g.spare, err = g.newQP(); err != nil {
			return nil, err
		}
		g.lg.OfferSpare(g.endpoint(g.spare))
	}
	s.groups[g.id] = g
	s.byQPN[g.qp.Num()] = g
	return g, nil
}

func (g *group) newQP() (rdma.QP, error) {
	qp, err := g.s.mem.pd.CreateQP(rdma.QPConfig{
		SendCQ: g.s.cq, RecvCQ: g.s.cq,
		MaxSendWR: linkgroup.SendDepth + 8, MaxRecvWR: linkgroup.RecvDepth, MaxSGE: 2,
	})
	if err != nil {
		return nil, fmt.Errorf("create queue pair: %w", err)
	}
	return qp, nil
}

func (g *group) endpoint(qp rdma.QP) linkgroup.Endpoint {
	return linkgroup.Endpoint{
		QPN: qp.Num(), GID: g.s.gid.GID, MAC: g.s.gid.MAC,
		PSN: rdma.PSN(g.s.rand.Uint32()) & rdma.PSNMask, MTU: g.s.cfg.Device.Port().ActiveMTU,
	}
}

// addRMB registers a new RMB of the configured element size.
func (g *group) addRMB() error {
	size := g.s.cfg.RMBESizeBytes * g.s.cfg.RMBEsPerRMB
	mr, err := g.s.mem.register(size, rdma.LocalWrite|rdma.RemoteWrite)
	if err != nil {
		return err
	}
	id, err := g.lg.AddRMB(uint32(g.s.cfg.RMBESizeBytes), g.s.cfg.RMBEsPerRMB, []linkgroup.RToken{{RKey: mr.RKey(), VAddr: mr.Addr()}})
	if err != nil {
		return errors.Join(err, g.s.mem.unregister(mr, size))
	}
	g.rmbs[id] = &rmbMemory{mr: mr, size: size}
	return nil
}

// openConn gives a connection its RMBE, with a new RMB if need be.
func (g *group) openConn() (*linkgroup.Conn, error) {
	size := uint32(g.s.cfg.RMBESizeBytes)
	lc, err := g.lg.OpenConn(size)
	if errors.Is(err, linkgroup.ErrNeedRMB) {
		if err := g.addRMB(); err != nil {
			return nil, err
		}
		lc, err = g.lg.OpenConn(size)
	}
	return lc, err
}

// handleCompletion takes one work completion.
func (g *group) handleCompletion(now time.Time, wc *rdma.WC) {
	if wc.Status != rdma.StatusSuccess {
		if wc.Status != rdma.StatusFlushed {
			g.lg.HandleLinkFailure(now, 0, fmt.Errorf("%v: %v", wc.Op, wc.Status))
		} else if g.lg.State() != linkgroup.Dead {
			g.lg.HandleLinkFailure(now, 0, errors.New("queue pair went to ERR"))
		}
		return
	}
	if wc.Op != rdma.OpRecv {
		g.lg.HandleSent(now, 0, wc.ID)
		return
	}
	slot := int(wc.ID)
	msg := g.slots.Bytes()[slot*slotBytes:][:wc.Bytes]
	if err := g.lg.HandleRecv(now, 0, msg); err != nil {
		g.s.stats.MessagesBad++
		if h := g.s.cfg.Hooks.Malformed; h != nil {
			h("link group", err)
		}
	}
	g.freeSlot(slot)
}

// freeSlot notes that a receive slot can go back to the device.
func (g *group) freeSlot(slot int) {
	g.recv = append(g.recv, rdma.RecvWR{ID: uint64(slot), SGE: rdma.SGE{
		Addr: g.slots.Addr() + uint64(slot*slotBytes), Length: llc.Size, LKey: g.slots.LKey(),
	}})
}

// postRecv gives the free receive slots back to the device. That can wait
// until the messages are dealt with: peers have fewer on their way than there
// are slots.
func (g *group) postRecv(now time.Time) {
	if g.qp != nil && len(g.recv) > 0 {
		if _, err := g.qp.PostRecv(g.recv); err != nil {
			g.lg.HandleLinkFailure(now, 0, fmt.Errorf("post receive: %w", err))
		}
	}
	g.recv = g.recv[:0]
}

// flush carries out what the machine wants, in order.
func (g *group) flush(now time.Time) {
	g.carryOut(now)
	if len(g.recv) > 0 {
		g.postRecv(now)
		g.carryOut(now) // if it failed
	}
	for _, id := range g.lg.TakeGoneRMBs() {
		g.freeRMB(id)
	}
}

func (g *group) carryOut(now time.Time) {
	for !g.lg.Idle() {
		g.s.outs = g.lg.Poll(now, g.s.outs[:0])
		outs := g.s.outs
		for i := range outs {
			g.do(now, &outs[i])
		}
		g.post(now)
		clear(outs)
	}
}

func (g *group) do(now time.Time, o *linkgroup.Output) {
	switch o.Kind {
	case linkgroup.OutWrite:
		g.write(o)
	case linkgroup.OutSend:
		g.send(o)
	case linkgroup.OutReceive:
		g.check(now, "queue pair to RTR", g.toRTR(now, o.Peer))
	case linkgroup.OutTransmit:
		g.check(now, "queue pair to RTS", g.qp.Modify(rdma.QPAttr{
			State: rdma.QPRTS, SQPSN: g.local.PSN, Timeout: ackTimeoutCode, RetryCount: 7, RNRRetry: 7,
		}))
	case linkgroup.OutCloseLink:
		g.post(now)
		g.closeQP()
	case linkgroup.OutEvent:
		g.event(o)
	}
}

// Queue pair attributes, those that Linux uses for SMC-R.
const (
	ackTimeoutCode  = 15 // 134 ms
	minRNRTimerCode = 5  // 0.06 ms
	hopLimit        = 64
)

func (g *group) toRTR(now time.Time, peer linkgroup.Endpoint) error {
	err := g.qp.Modify(rdma.QPAttr{
		State: rdma.QPRTR, Path: rdma.Path{SGIDIndex: g.s.gid.Index, DGID: peer.GID, DMAC: peer.MAC, HopLimit: hopLimit},
		DestQPN: peer.QPN, RQPSN: peer.PSN, MTU: peer.MTU, MinRNRTimer: minRNRTimerCode,
	})
	if err != nil {
		return err
	}
	for slot := range linkgroup.RecvDepth {
		g.freeSlot(slot)
	}
	g.postRecv(now)
	return nil
}

func (g *group) check(now time.Time, what string, err error) {
	if err != nil {
		g.lg.HandleLinkFailure(now, 0, fmt.Errorf("%s: %w", what, err))
	}
}

// write gathers an RDMA WRITE out of the connection's send buffer.
func (g *group) write(o *linkgroup.Output) {
	c, ok := o.Conn.User.(*Conn)
	invariant.Must(ok, "RDMA write for a connection without a shell")
	start := len(g.sges)
	for _, s := range o.Local {
		if s.Len > 0 {
			g.sges = append(g.sges, rdma.SGE{Addr: c.buf.addr + uint64(s.Offset), Length: s.Len, LKey: c.buf.arena.mr.LKey()})
		}
	}
	g.wrs = append(g.wrs, rdma.SendWR{
		Op: rdma.OpWrite, SGL: g.sges[start:len(g.sges):len(g.sges)], RemoteAddr: o.RemoteAddr, RKey: o.RKey,
	})
}

// send copies a message to the next send slot. Slots are used in turn, and
// completions come in order, so a slot is free again when the machine's send
// budget allows the next message.
func (g *group) send(o *linkgroup.Output) {
	slot := linkgroup.RecvDepth + g.nextSend
	g.nextSend = (g.nextSend + 1) % linkgroup.SendBudget
	copy(g.slots.Bytes()[slot*slotBytes:], o.Msg[:])
	g.sges = append(g.sges, rdma.SGE{Addr: g.slots.Addr() + uint64(slot*slotBytes), Length: llc.Size, LKey: g.slots.LKey()})
	g.wrs = append(g.wrs, rdma.SendWR{
		ID: o.ID, Op: rdma.OpSend, Flags: rdma.SendSignaled | rdma.SendSolicited,
		SGL: g.sges[len(g.sges)-1 : len(g.sges) : len(g.sges)],
	})
	if o.Conn != nil {
		if c, ok := o.Conn.User.(*Conn); ok {
			c.announced.Store(o.Conn.Data().Announced())
		}
	}
}

// post hands the gathered work requests to the device at once.
func (g *group) post(now time.Time) {
	if len(g.wrs) == 0 {
		return
	}
	if g.qp != nil {
		if _, err := g.qp.PostSend(g.wrs); err != nil {
			g.lg.HandleLinkFailure(now, 0, fmt.Errorf("post send: %w", err))
		}
	}
	clear(g.wrs)
	g.wrs, g.sges = g.wrs[:0], g.sges[:0]
}

// event tells whoever waits.
func (g *group) event(o *linkgroup.Output) {
	switch o.Event {
	case linkgroup.EventConn:
		if c, ok := o.Conn.User.(*Conn); ok {
			c.handle(o.Events)
		}
	case linkgroup.EventConnDone:
		if c, ok := o.Conn.User.(*Conn); ok {
			c.groupDone()
		} else {
			o.Conn.Release(time.Now()) // its rendezvous failed before it had a shell
			g.freeIfUnused()
		}
	case linkgroup.EventPointOfNoReturn:
		g.setup <- setupEvent{kind: o.Event}
	case linkgroup.EventReady:
		g.changed()
		g.setup <- setupEvent{kind: o.Event}
		close(g.formed)
	case linkgroup.EventSetupFailed:
		g.setup <- setupEvent{kind: o.Event, err: o.Err}
		g.remove()
		close(g.formed)
	case linkgroup.EventRMBConfirmed, linkgroup.EventRMBRefused:
		for _, w := range g.rmbWait[o.RMB] {
			w <- o.Event == linkgroup.EventRMBConfirmed
		}
		delete(g.rmbWait, o.RMB)
	case linkgroup.EventDead:
		g.remove()
	}
}

func (g *group) changed() {
	if h := g.s.cfg.Hooks.GroupChanged; h != nil {
		h(g.info())
	}
}

// abandon ends a first contact that its rendezvous gave up.
func (g *group) abandon() {
	forming := g.lg.State() == linkgroup.Forming
	g.lg.Terminate(time.Now(), llc.DeleteOperator)
	g.flush(time.Now())
	if forming { // no event says it; every other group is removed by one
		g.remove()
		close(g.formed)
	}
}

// remove takes a dead group off the stack. Its memory goes with its last
// connection.
func (g *group) remove() {
	g.changed()
	delete(g.s.groups, g.id)
	for id, ws := range g.rmbWait {
		for _, w := range ws {
			w <- false
		}
		delete(g.rmbWait, id)
	}
	g.freeIfUnused()
}

// kill ends the group because the device or the stack does.
func (g *group) kill(err error) {
	g.lg.HandleLinkFailure(time.Now(), 0, err)
	g.flush(time.Now())
}

// closeQP destroys the queue pairs; afterwards the peer cannot write.
func (g *group) closeQP() {
	for _, qp := range []rdma.QP{g.qp, g.spare} {
		if qp != nil {
			delete(g.s.byQPN, qp.Num())
			_ = qp.Close() // it is gone either way
		}
	}
	g.qp, g.spare = nil, nil
}

// freeIfUnused frees a dead group once no connection uses its memory.
func (g *group) freeIfUnused() {
	if g.lg.State() == linkgroup.Dead && g.lg.Conns() == 0 {
		g.free()
	}
}

func (g *group) free() {
	g.closeQP()
	for id := range g.rmbs {
		g.freeRMB(id)
	}
	if g.slots != nil {
		_ = g.s.mem.unregister(g.slots, (linkgroup.RecvDepth+linkgroup.SendBudget)*slotBytes) // nothing uses it any more
		g.slots = nil
	}
}

func (g *group) freeRMB(id linkgroup.RMBID) {
	if m := g.rmbs[id]; m != nil {
		_ = g.s.mem.unregister(m.mr, m.size) // nothing uses it any more
		delete(g.rmbs, id)
	}
}

// rmbe returns the memory of an RMBE.
func (g *group) rmbe(e linkgroup.RMBE) []byte {
	off := int(e.Size) * int(e.Index-1)
	return g.rmbs[e.RMB].mr.Bytes()[off : off+int(e.Size) : off+int(e.Size)]
}

func (g *group) info() GroupInfo {
	info := GroupInfo{
		ID: g.id, Role: Role(g.role), PeerID: g.peer, State: g.lg.State().String(), Dialect: g.lg.Dialect().String(),
		Version: 1, Conns: g.lg.Conns(), Opened: g.opened, Err: g.lg.Err(),
	}
	for _, m := range g.rmbs {
		info.RMBBytes += m.size
	}
	for _, l := range g.lg.Links() {
		info.Links = append(info.Links, LinkInfo{
			ID: uint8(l.ID), State: l.State, Device: g.s.cfg.Device.Name(),
			LocalGID: l.Local.GID, PeerGID: l.Peer.GID, LocalQPN: l.Local.QPN, PeerQPN: l.Peer.QPN,
			MTU: l.Peer.MTU, UserID: g.id, Conns: info.Conns, BytesSent: l.Sent, BytesRecv: l.Recv,
		})
	}
	return info
}
