// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sort"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// engine is a peer that runs this project's link group, with what its shell
// does around it.
type engine struct {
	w       *World
	p       *path
	side    int
	g       *linkgroup.Group
	ep      linkgroup.Endpoint
	sendBuf uint32
	regions map[linkgroup.RMBID]*region
	byKey   map[keyOf]*region
	conns   map[string]*engineConn
	ending  map[*engineConn]bool // whose RMBEs are still to be given back
	shells  []*engineConn        // by the slot of the connection
	refused map[linkgroup.RMBID]bool
	revoked map[uint32]bool // RKeys of which the peer was told that they are gone
	outs    []linkgroup.Output

	groupConfig linkgroup.Config
	touched     int // how often since the last handover
}

// keyOf is an RKey of an RNIC.
type keyOf struct {
	rnic int
	key  uint32
}

const rmbeEyeCatcher = "\xd9\xd4\xc2\xc5"

func newEngine(w *World, p *path, side int, role linkgroup.Role, terms clc.Selection, r *rnic) *engine {
	e := &engine{
		w: w, p: p, side: side, regions: map[linkgroup.RMBID]*region{}, byKey: map[keyOf]*region{},
		conns: map[string]*engineConn{}, ending: map[*engineConn]bool{}, refused: map[linkgroup.RMBID]bool{}, revoked: map[uint32]bool{},
		sendBuf: w.cfg.SendBuffers[w.rng.IntN(len(w.cfg.SendBuffers))],
		ep:      w.newEndpoint(r),
	}
	e.ep.SubnetBits = w.subnetBits()
	e.groupConfig = linkgroup.Config{
		Role: role, Version: terms.Version, Release: terms.Release, MaxLinks: terms.MaxLinks, MaxConns: terms.MaxConns,
		AllowRFC: w.cfg.RFC, UserID: uint32(p.id), ReleaseTimeout: w.cfg.releaseTimeout(p.id),
		Rand: rand.New(rand.NewPCG(w.rng.Uint64(), w.rng.Uint64())),
	}
	e.g = linkgroup.New(e.groupConfig)
	p.newQP(side, int(e.g.AddFirstLink(e.ep)), r, e.ep)
	return e
}

// peer is our number.
func (e *engine) peer() int { return e.p.peers[e.side] }

func (e *engine) String() string {
	return fmt.Sprintf("peer %d, group %d, %v", e.peer(), e.p.id, e.g.Role())
}

func (e *engine) firstEndpoint() linkgroup.Endpoint { return e.ep }

func (e *engine) localEndpoint(name string) linkgroup.Endpoint {
	if c := e.conns[name]; c != nil {
		return c.lc.Endpoint()
	}
	return linkgroup.Endpoint{}
}
func (e *engine) dialect() llc.Dialect { return e.g.Dialect() }
func (e *engine) sendLimit() int       { return linkgroup.SendBudget }

func (e *engine) connectPeer(now time.Time, peer linkgroup.Endpoint) { e.g.ConnectPeer(now, peer) }

func (e *engine) condition() condition {
	switch e.g.State() {
	case linkgroup.Forming:
		return forming
	case linkgroup.Active:
		return active
	case linkgroup.Draining, linkgroup.Dead:
	}
	return dead
}

func (e *engine) usable() bool { return e.g.Usable() }

func (e *engine) giveUp(now time.Time)    { e.g.Terminate(now, llc.DeleteOperator) }
func (e *engine) terminate(now time.Time) { e.g.Terminate(now, llc.DeleteOperator) }

func (e *engine) open(_ time.Time, name string, via *linkgroup.Endpoint) error {
	var index linkgroup.LinkIndex
	if via != nil {
		var ok bool
		if index, ok = e.g.FindLink(via.QPN, via.GID, via.MAC); !ok {
			return errLinkLost
		}
	}
	size := e.w.cfg.RMBESizes[e.w.rng.IntN(len(e.w.cfg.RMBESizes))]
	lc, err := e.g.OpenConn(size, e.sendBuf)
	if errors.Is(err, linkgroup.ErrNeedRMB) {
		if err := e.addRMB(size); err != nil {
			return err
		}
		lc, err = e.g.OpenConn(size, e.sendBuf)
	}
	if err != nil {
		return err
	}
	c := &engineConn{
		e: e, name: name, lc: lc, key: streamKey(name, e.side), send: make([]byte, e.sendBuf), ring: cdc.Ring{Size: e.sendBuf},
	}
	e.setShell(c)
	e.conns[name] = c
	if via != nil {
		lc.UseLink(index)
	}
	l := lc.Local()
	r := e.regions[l.RMB]
	if r.owners[l.Index-1] != "" {
		return fmt.Errorf("RMBE %d of RMB %d still belongs to %s", l.Index, l.RMB, r.owners[l.Index-1])
	}
	r.owners[l.Index-1] = name
	mem := r.mem[uint32(l.Index-1)*r.element:][:r.element]
	if lc.Stale() {
		clear(mem)
	}
	if i := slices.IndexFunc(mem[e.origin():], func(b byte) bool { return b != 0 }); i >= 0 {
		e.w.fault("%v: byte %d of the RMBE that %s gets is of %s", e, i, name, r.last[l.Index-1])
	}
	copy(mem, rmbeEyeCatcher[:e.origin()])
	return nil
}

func (e *engine) addRMB(size uint32) error {
	n := 1 + e.w.rng.IntN(3)
	e.w.keys++
	r := &region{addr: uint64(e.w.keys) << 32, mem: make([]byte, int(size)*n), element: size, owners: make([]string, n), last: make([]string, n)}
	var tokens []linkgroup.RToken
	for i, n := range e.w.peers[e.peer()].rnics {
		r.keys = append(r.keys, n.newKey())
		r.shift = append(r.shift, uint64(i)<<24)
		r.life = append(r.life, n.life)
		tokens = append(tokens, linkgroup.RToken{RKey: rdma.RKey(r.keys[i]), VAddr: r.addr + r.shift[i]})
	}
	id, err := e.g.AddRMB(size, n, tokens)
	if err != nil {
		return err
	}
	e.regions[id] = r
	for i, k := range r.keys {
		e.byKey[keyOf{i, k}] = r
	}
	return nil
}

func (e *engine) confirmed(name string) (bool, error) {
	c := e.conns[name]
	if c == nil || c.done {
		return false, errPathDead
	}
	id := c.lc.Local().RMB
	if e.refused[id] {
		delete(e.refused, id)
		return false, fmt.Errorf("RMB %d was refused", id)
	}
	if !e.g.IsConfirmed(id) {
		e.g.ConfirmRMB(id)
		return false, nil
	}
	return true, nil
}

func (e *engine) rmbe(name string) linkgroup.RMBE { return e.conns[name].lc.Local() }

func (e *engine) activate(_ time.Time, name string, peer linkgroup.RMBE, half linkgroup.Endpoint) error {
	c := e.conns[name]
	if c == nil || e.g.State() == linkgroup.Dead {
		return nil // reset before its rendezvous was complete
	}
	if i, ok := e.g.FindLink(half.QPN, half.GID, half.MAC); ok {
		c.lc.UseLink(i) // the RKey is the one for this link
	}
	err := c.lc.Activate(peer)
	if e.g.State() == linkgroup.Draining {
		return nil
	}
	return err
}

// abandon drops a connection whose rendezvous failed.
func (e *engine) abandon(now time.Time, name string, declined bool) {
	if c := e.conns[name]; c != nil {
		c.closed = true
		if !c.done {
			c.lc.Abandon(now, declined)
		}
		c.releaseIfOver(now)
	}
}

func (e *engine) recv(now time.Time, index int, b []byte) error {
	e.touch()
	return e.g.HandleRecv(now, linkgroup.LinkIndex(index), b)
}

func (e *engine) sent(now time.Time, index int, id uint64) {
	e.touch()
	e.g.HandleSent(now, linkgroup.LinkIndex(index), id)
}

func (e *engine) timeout(now time.Time) {
	e.touch()
	e.g.HandleTimeout(now)
}

func (e *engine) nextTimeout() (time.Time, bool) { return e.g.NextTimeout() }

func (e *engine) linkFailed(now time.Time, index int, err error) {
	e.touch()
	e.g.HandleLinkFailure(now, linkgroup.LinkIndex(index), err)
}

func (e *engine) port(now time.Time, rnic int, up bool) {
	e.touch()
	e.g.HandlePort(now, uint8(rnic), up)
}

// wantLink answers the group's wish for another queue pair, at once or soon.
func (e *engine) wantLink(o *linkgroup.Output) {
	index, fresh, to := o.Link, o.Fresh, o.Peer.GID
	if e.w.rng.IntN(2) == 0 {
		e.offer(index, fresh, to)
		return
	}
	e.w.after(time.Duration(e.w.rng.IntN(2000))*time.Microsecond, func() { e.offer(index, fresh, to) })
}

// offer gives the group a queue pair on an RNIC that has none, or else, if
// that will do, on any.
func (e *engine) offer(index linkgroup.LinkIndex, fresh bool, to rdma.GID) {
	if e.p.nodes[e.side] != node(e) || e.p.qp(e.side, int(index)) != nil {
		return // a restart, or an earlier answer
	}
	e.touch()
	now, used := e.p.clock(e.side), e.g.RNICsInUse()
	r := e.w.anyRNIC(e.peer(), func(r *rnic) bool { return used&(1<<r.index) != 0 || e.shuns(r, to) })
	if r == nil && !fresh {
		r = e.w.anyRNIC(e.peer(), func(r *rnic) bool { return e.shuns(r, to) })
	}
	// Now and then there is no memory; but a server's first ADD LINK must go
	// out.
	failed := e.w.cfg.Delays && (e.g.State() == linkgroup.Active || e.g.Role() == linkgroup.Client) && e.w.rng.IntN(30) == 0
	if r == nil || failed {
		e.g.NoLink(now, index)
		return
	}
	for _, id := range sortedIDs(e.regions) {
		e.renew(id, r)
	}
	local := e.w.newEndpoint(r)
	local.Router, local.SubnetBits = e.w.router(), e.w.subnetBits()
	q := e.p.newQP(e.side, int(index), r, local)
	if !e.g.OfferLink(now, index, local) {
		q.close()
	}
}

// shuns reports whether a link between an RNIC of ours and one of the peer's would be across subnets though
// we have an RNIC in the subnet of the peer's.
func (e *engine) shuns(r *rnic, to rdma.GID) bool {
	n := int(to[14])
	return e.w.cfg.Subnets && !to.IsZero() && n < len(e.w.peers[e.peer()].rnics) && r.index != n
}

func sortedIDs(m map[linkgroup.RMBID]*region) []linkgroup.RMBID {
	return slices.Sorted(maps.Keys(m))
}

// renew registers an RMB anew with an RNIC that was removed meanwhile.
func (e *engine) renew(id linkgroup.RMBID, r *rnic) {
	g := e.regions[id]
	if g.life[r.index] == r.life {
		return
	}
	delete(e.byKey, keyOf{r.index, g.keys[r.index]})
	k := r.newKey()
	g.keys[r.index], g.life[r.index] = k, r.life
	e.byKey[keyOf{r.index, k}] = g
	e.g.SetRMBToken(id, uint8(r.index), linkgroup.RToken{RKey: rdma.RKey(k), VAddr: g.addr + g.shift[r.index]})
}

func (e *engine) links() []linkView {
	var v []linkView
	for _, l := range e.g.Links() {
		v = append(v, linkView{int(l.Index), l.ID, l.Local, l.Peer, l.State == "ACTIVE"})
	}
	return v
}

func (e *engine) place(index int, conn string, rkey uint32, addr uint64, b []byte) error {
	n := e.p.qp(e.side, index).rnic.index
	r := e.byKey[keyOf{n, rkey}]
	if r == nil {
		return fmt.Errorf("RKey 0x%x is unknown to RNIC %d", rkey, n)
	}
	return r.place(conn, addr-r.shift[n], b, e.origin(), func() (window, bool) {
		c := e.conns[conn]
		if c == nil || c.done || c.lc.Data().State() == cdc.Closed {
			return window{}, false
		}
		d, l := c.lc.Data(), c.lc.Local()
		return window{
			key: streamKey(conn, 1-e.side), ring: c.lc.Ring(), base: uint32(l.Index-1) * r.element,
			told: d.Announced(), prod: d.PeerProduced(),
		}, true
	})
}

func (e *engine) origin() uint32 {
	if e.g.Dialect() == llc.DialectRFC {
		return cdc.OriginRFC
	}
	return cdc.OriginLinux
}

func (e *engine) poll(now time.Time, post func(int, work)) bool {
	e.free()
	if e.g.Idle() {
		e.handOver(now)
		return false
	}
	e.touch()
	e.outs = e.g.Poll(now, e.outs[:0])
	for i := range e.outs {
		e.do(now, &e.outs[i], post)
	}
	return true
}

func (e *engine) do(now time.Time, o *linkgroup.Output, post func(int, work)) {
	index := int(o.Link)
	switch o.Kind {
	case linkgroup.OutReceive:
		if q := e.p.qp(e.side, index); q != nil {
			q.connect(*o.Peer)
		}
	case linkgroup.OutTransmit:
		if q := e.p.qp(e.side, index); q != nil {
			q.transmit()
		}
	case linkgroup.OutCloseLink:
		if q := e.p.qp(e.side, index); q != nil {
			e.endLink(q)
		}
	case linkgroup.OutSend:
		if q := e.p.qp(e.side, index); q == nil && e.g.State() == linkgroup.Dead {
			return // the link of the last words is gone
		}
		wr := work{send: true, msg: o.Msg, long: slices.Clone(o.Long), id: o.ID}
		if o.Conn != nil {
			if c := e.shellOf(o.Conn); c != nil {
				wr.conn = c.name
			}
		}
		e.noteRevoked(wr.bytes())
		post(index, wr)
	case linkgroup.OutWrite:
		c := e.shellOf(o.Conn)
		if c == nil {
			e.w.fault("%v writes for nobody", e)
			return
		}
		spans := o.Local
		post(index, work{conn: c.name, addr: o.RemoteAddr, rkey: uint32(o.RKey), source: func() []byte {
			b := append([]byte(nil), c.send[spans[0].Offset:][:spans[0].Len]...)
			return append(b, c.send[spans[1].Offset:][:spans[1].Len]...)
		}})
	case linkgroup.OutEvent:
		e.event(now, o)
	}
}

// lingerTime is how long a queue pair outlives its group.
const lingerTime = 900 * time.Millisecond

// endLink destroys a queue pair, later if the group has last words for the peer and
// nothing reads the buffers of connections any more.
func (e *engine) endLink(q *qp) {
	writes := slices.ContainsFunc(q.wire, func(wr work) bool { return !wr.send })
	if e.g.State() != linkgroup.Dead || q.state != qpTransmit || writes {
		q.close()
		return
	}
	q.lingers = true
	e.w.after(lingerTime, q.close)
}

func eventText(o *linkgroup.Output) string {
	s := o.Event.String()
	if o.Event == linkgroup.EventLink || o.Event == linkgroup.EventWantLink {
		s += fmt.Sprintf(" %d", o.Link)
	}
	if o.Events != 0 {
		s += " " + o.Events.String()
	}
	if o.Err != nil {
		s += ": " + o.Err.Error()
	}
	return s
}

func (e *engine) event(now time.Time, o *linkgroup.Output) {
	if e.w.tracing {
		e.w.trace("%v %v: %s", e.w.Elapsed(), e, eventText(o))
	}
	if o.Event == linkgroup.EventReady || o.Event == linkgroup.EventLink {
		for _, l := range e.links() {
			if q := e.p.qp(e.side, l.index); q != nil && l.active {
				q.active = true
			}
		}
	}
	if t := e.p.first; t != nil {
		t.setUpEvent(e.side, o.Event, o.Err)
	}
	c := (*engineConn)(nil)
	if o.Conn != nil {
		c = e.shellOf(o.Conn)
	}
	switch o.Event {
	case linkgroup.EventConn:
		if c != nil && o.Events&cdc.Aborted != 0 {
			c.aborted = true
		}
	case linkgroup.EventConnDone:
		c.done = true
		c.releaseIfOver(now)
	case linkgroup.EventRMBRefused:
		e.refused[o.RMB] = true
	case linkgroup.EventReady:
		if e.origin() != 0 {
			for _, r := range e.regions {
				for off := 0; off < len(r.mem); off += int(r.element) {
					copy(r.mem[off:], rmbeEyeCatcher)
				}
			}
		}
	case linkgroup.EventWantLink:
		e.wantLink(o)
	case linkgroup.EventLink, linkgroup.EventPointOfNoReturn, linkgroup.EventSetupFailed, linkgroup.EventRMBConfirmed, linkgroup.EventDead:
	}
}

// noteRevoked remembers the keys of DELETE RKEY.
func (e *engine) noteRevoked(b []byte) {
	if llc.Type(b[0]&0x0f) != llc.TypeDeleteRKey {
		return
	}
	var keys []rdma.RKey
	switch m, _ := llc.Parse(e.g.Dialect(), llc.Version2, b); m := m.(type) {
	case llc.DeleteRKey:
		keys = m.RKeys[:m.N()]
	case llc.DeleteRKeyV2:
		keys = m.RKeys
	}
	for _, k := range keys {
		e.revoked[uint32(k)] = true
	}
}

// free deregisters RMBs that the peer has forgotten.
func (e *engine) free() {
	for _, id := range e.g.TakeGoneRMBs() {
		r := e.regions[id]
		if e.g.State() == linkgroup.Active && !slices.ContainsFunc(r.keys, func(k uint32) bool { return e.revoked[k] }) {
			e.w.fault("%v gives up RMB %d, of which the peer does not know", e, id)
		}
		r.released = true
		for i, k := range r.keys {
			delete(e.byKey, keyOf{i, k})
		}
		delete(e.regions, id)
	}
}

func (e *engine) end(name string) end {
	if c := e.conns[name]; c != nil {
		return c
	}
	return nil
}

func (e *engine) leaks(excused func(conn string) bool) []string {
	var l []string
	known := 0
	for name, c := range e.conns {
		if excused(name) {
			known++
			continue
		}
		l = append(l, fmt.Sprintf("%v, %v, holds %s: %+v", e, e.g.State(), name, c.progress()))
	}
	for id, r := range e.regions {
		for i, o := range r.owners {
			if o != "" && !excused(o) {
				l = append(l, fmt.Sprintf("%v: RMBE %d of RMB %d belongs to %s", e, i+1, id, o))
			}
		}
	}
	if n := e.g.Conns(); n != known {
		l = append(l, fmt.Sprintf("%v has %d connections", e, n))
	}
	sort.Strings(l)
	return l
}
