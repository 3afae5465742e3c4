// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sort"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// region is a registered RMB.
type region struct {
	addr     uint64
	mem      []byte
	element  uint32   // bytes
	owners   []string // connection of each element, "" when free
	released bool     // deregistered: nothing may arrive any more
}

// place is an RDMA write into the region on behalf of a connection.
func (r *region) place(conn string, addr uint64, b []byte, origin uint32) error {
	if r.released {
		return errors.New("the RMB is deregistered")
	}
	if addr < r.addr || addr+uint64(len(b)) > r.addr+uint64(len(r.mem)) {
		return fmt.Errorf("0x%x+%d is outside the RMB at 0x%x", addr, len(b), r.addr)
	}
	off := uint32(addr - r.addr)
	i := off / r.element
	switch {
	case len(b) == 0:
		return errors.New("nothing to write")
	case (off+uint32(len(b))-1)/r.element != i:
		return errors.New("more than one RMBE")
	case off%r.element < origin:
		return errors.New("into the eye catcher")
	case r.owners[i] != conn:
		return fmt.Errorf("into the RMBE of %q", r.owners[i])
	}
	copy(r.mem[off:], b)
	return nil
}

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
	byKey   map[uint32]*region
	conns   map[string]*engineConn
	refused map[linkgroup.RMBID]bool
	outs    []linkgroup.Output
}

// engineConn is one end of a connection.
type engineConn struct {
	e        *engine
	name     string
	lc       *linkgroup.Conn
	key      byte // of the stream that this end writes
	send     []byte
	ring     cdc.Ring // of send
	produced uint64
	consumed uint64
	shut     bool
	closed   bool // by the application
	done     bool // EventConnDone
	aborted  bool
	eof      bool
}

const rmbeEyeCatcher = "\xd9\xd4\xc2\xc5"

func newEngine(w *World, p *path, side int, role linkgroup.Role) *engine {
	e := &engine{
		w: w, p: p, side: side, regions: map[linkgroup.RMBID]*region{}, byKey: map[uint32]*region{},
		conns: map[string]*engineConn{}, refused: map[linkgroup.RMBID]bool{},
		sendBuf: w.cfg.SendBuffers[w.rng.IntN(len(w.cfg.SendBuffers))],
		ep:      newEndpoint(w, side),
	}
	e.g = linkgroup.New(linkgroup.Config{
		Role: role, AllowRFC: w.cfg.RFC, UserID: uint32(p.id), SendBuffer: e.sendBuf,
		Rand: rand.New(rand.NewPCG(w.rng.Uint64(), w.rng.Uint64())),
	})
	e.g.AddFirstLink(e.ep)
	if role == linkgroup.Server {
		e.g.OfferSpare(newEndpoint(w, side))
	}
	return e
}

func newEndpoint(w *World, side int) linkgroup.Endpoint {
	w.keys++
	return linkgroup.Endpoint{
		QPN: rdma.QPN(w.keys), GID: rdma.GID{15: byte(side + 1)}, MAC: rdma.MAC{5: byte(side + 1)},
		PSN: rdma.PSN(w.rng.Uint32()) & rdma.PSNMask, MTU: rdma.MTU1024,
	}
}

func (e *engine) String() string {
	return fmt.Sprintf("peer %d, group %d, %v", e.side, e.p.id, e.g.Role())
}

func (e *engine) endpoint() linkgroup.Endpoint { return e.ep }
func (e *engine) dialect() llc.Dialect         { return e.g.Dialect() }
func (e *engine) sendLimit() int               { return linkgroup.SendBudget }

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

func (e *engine) giveUp(now time.Time) { e.g.Terminate(now, llc.DeleteOperator) }

func (e *engine) open(_ time.Time, name string) error {
	size := e.w.cfg.RMBESizes[e.w.rng.IntN(len(e.w.cfg.RMBESizes))]
	lc, err := e.g.OpenConn(size)
	if errors.Is(err, linkgroup.ErrNeedRMB) {
		if err := e.addRMB(size); err != nil {
			return err
		}
		lc, err = e.g.OpenConn(size)
	}
	if err != nil {
		return err
	}
	c := &engineConn{
		e: e, name: name, lc: lc, key: streamKey(name, e.side), send: make([]byte, e.sendBuf), ring: cdc.Ring{Size: e.sendBuf},
	}
	lc.User = c
	e.conns[name] = c
	l := lc.Local()
	r := e.regions[l.RMB]
	if r.owners[l.Index-1] != "" {
		return fmt.Errorf("RMBE %d of RMB %d still belongs to %s", l.Index, l.RMB, r.owners[l.Index-1])
	}
	r.owners[l.Index-1] = name
	copy(r.mem[uint32(l.Index-1)*r.element:], rmbeEyeCatcher[:e.origin()])
	return nil
}

func (e *engine) addRMB(size uint32) error {
	n := 1 + e.w.rng.IntN(3)
	e.w.keys++
	key := e.w.keys
	r := &region{addr: uint64(key) << 32, mem: make([]byte, int(size)*n), element: size, owners: make([]string, n)}
	id, err := e.g.AddRMB(size, n, []linkgroup.RToken{{RKey: rdma.RKey(key), VAddr: r.addr}})
	if err != nil {
		return err
	}
	e.regions[id], e.byKey[key] = r, r
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

func (e *engine) activate(_ time.Time, name string, peer linkgroup.RMBE) error {
	c := e.conns[name]
	if c == nil || e.g.State() == linkgroup.Dead {
		return nil // reset before its rendezvous was complete
	}
	err := c.lc.Activate(peer)
	if e.g.State() == linkgroup.Draining {
		return nil
	}
	return err
}

// abandon drops a connection whose rendezvous failed; the peer cannot say
// that it knows.
func (e *engine) abandon(now time.Time, name string) {
	if c := e.conns[name]; c != nil {
		c.closed = true
		if !c.done {
			c.lc.Abandon(false)
		}
		c.releaseIfOver(now)
	}
}

func (e *engine) recv(now time.Time, b []byte) error { return e.g.HandleRecv(now, 0, b) }
func (e *engine) sent(now time.Time, id uint64)      { e.g.HandleSent(now, 0, id) }
func (e *engine) timeout(now time.Time)              { e.g.HandleTimeout(now) }
func (e *engine) nextTimeout() (time.Time, bool)     { return e.g.NextTimeout() }

func (e *engine) linkFailed(now time.Time, err error) { e.g.HandleLinkFailure(now, 0, err) }

func (e *engine) place(conn string, rkey uint32, addr uint64, b []byte) error {
	r := e.byKey[rkey]
	if r == nil {
		return fmt.Errorf("unknown RKey %d", rkey)
	}
	return r.place(conn, addr, b, e.origin())
}

func (e *engine) origin() uint32 {
	if e.g.Dialect() == llc.DialectRFC {
		return cdc.OriginRFC
	}
	return cdc.OriginLinux
}

func (e *engine) poll(now time.Time, post func(work)) bool {
	e.free()
	if e.g.Idle() {
		return false
	}
	e.outs = e.g.Poll(now, e.outs[:0])
	for i := range e.outs {
		e.do(now, &e.outs[i], post)
	}
	return true
}

func (e *engine) do(now time.Time, o *linkgroup.Output, post func(work)) {
	switch o.Kind {
	case linkgroup.OutReceive, linkgroup.OutTransmit:
	case linkgroup.OutCloseLink:
		e.p.alive[e.side] = false
	case linkgroup.OutSend:
		post(work{send: true, msg: o.Msg, id: o.ID})
	case linkgroup.OutWrite:
		c, ok := o.Conn.User.(*engineConn)
		if !ok {
			e.w.fault("%v writes for nobody", e)
			return
		}
		spans := o.Local
		post(work{conn: c.name, addr: o.RemoteAddr, rkey: uint32(o.RKey), source: func() []byte {
			b := append([]byte(nil), c.send[spans[0].Offset:][:spans[0].Len]...)
			return append(b, c.send[spans[1].Offset:][:spans[1].Len]...)
		}})
	case linkgroup.OutEvent:
		e.event(now, o)
	}
}

func eventText(o *linkgroup.Output) string {
	s := o.Event.String()
	if o.Events != 0 {
		s += " " + o.Events.String()
	}
	if o.Err != nil {
		s += ": " + o.Err.Error()
	}
	return s
}

func (e *engine) event(now time.Time, o *linkgroup.Output) {
	e.w.trace("%v %v: %s", e.w.Elapsed(), e, eventText(o))
	c := (*engineConn)(nil)
	if o.Conn != nil {
		c, _ = o.Conn.User.(*engineConn)
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
	case linkgroup.EventPointOfNoReturn, linkgroup.EventSetupFailed, linkgroup.EventRMBConfirmed, linkgroup.EventDead:
	}
}

// free deregisters RMBs that the peer has forgotten.
func (e *engine) free() {
	for _, id := range e.g.TakeGoneRMBs() {
		e.regions[id].released = true
		delete(e.regions, id)
	}
}

func (e *engine) end(name string) end {
	if c := e.conns[name]; c != nil {
		return c
	}
	return nil
}

func (e *engine) leaks() []string {
	var l []string
	for name, c := range e.conns {
		l = append(l, fmt.Sprintf("%v, %v, holds %s: %+v", e, e.g.State(), name, c.progress()))
	}
	for id, r := range e.regions {
		for i, o := range r.owners {
			if o != "" {
				l = append(l, fmt.Sprintf("%v: RMBE %d of RMB %d belongs to %s", e, i+1, id, o))
			}
		}
	}
	if n := e.g.Conns(); n != 0 {
		l = append(l, fmt.Sprintf("%v has %d connections", e, n))
	}
	sort.Strings(l)
	return l
}

// releaseIfOver gives the RMBE back when both the application and the machine
// are done, as the shell does.
func (c *engineConn) releaseIfOver(now time.Time) {
	if !c.done || !c.closed || c.e.conns[c.name] != c {
		return
	}
	l := c.lc.Local()
	r := c.e.regions[l.RMB]
	mem := r.mem[uint32(l.Index-1)*r.element:][:r.element]
	if origin := c.e.origin(); origin > 0 && string(mem[:origin]) != rmbeEyeCatcher && c.e.g.State() == linkgroup.Active {
		c.e.w.fault("eye catcher of %s is %x", c.name, mem[:origin])
	}
	clear(mem[c.e.origin():])
	r.owners[l.Index-1] = ""
	delete(c.e.conns, c.name)
	c.lc.Release(now)
}

// streamKey makes the streams of a connection differ from all others.
func streamKey(name string, side int) byte {
	k := byte(side)
	for i := range len(name) {
		k = k*31 + name[i]
	}
	return k
}

// streamByte is the byte of a stream at a position.
func streamByte(key byte, pos uint64) byte { return byte((pos*0x9e3779b97f4a7c15)>>56) ^ key }

func (c *engineConn) write(n int) int {
	room := int(c.e.sendBuf) - int(c.produced-c.lc.Data().Completed())
	if c.shut || c.closed || c.aborted || c.done {
		return 0
	}
	n = min(n, room)
	for range n {
		c.send[c.ring.Offset(c.produced)] = streamByte(c.key, c.produced)
		c.produced++
	}
	c.lc.Produce(c.produced)
	return n
}

func (c *engineConn) read(t reader, n int) int {
	if c.closed || c.aborted || c.done {
		return 0
	}
	d := c.lc.Data()
	n = min(n, int(d.PeerProduced()-c.consumed))
	l, ring := c.lc.Local(), c.lc.Ring()
	mem := c.e.regions[l.RMB].mem[uint32(l.Index-1)*l.Size:][:l.Size]
	key := streamKey(c.name, 1-c.e.side)
	for range n {
		if got, want := mem[ring.Offset(c.consumed)], streamByte(key, c.consumed); got != want {
			t.fault("%s at peer %d: byte %d is 0x%02x, want 0x%02x", c.name, c.e.side, c.consumed, got, want)
			break
		}
		c.consumed++
	}
	c.lc.Consume(c.consumed)
	if c.consumed == d.PeerProduced() && d.PeerIsDone() {
		c.eof = true
	}
	return n
}

func (c *engineConn) shutdown() {
	if !c.closed {
		c.shut = true
		c.lc.Shutdown()
	}
}

func (c *engineConn) close(now time.Time) { c.finish(now, c.lc.Close) }

func (c *engineConn) abort(now time.Time) { c.finish(now, c.lc.Abort) }

func (c *engineConn) finish(now time.Time, f func(time.Time)) {
	if c.closed {
		return
	}
	c.closed = true
	if !c.done {
		f(now)
	}
	c.releaseIfOver(now)
}

func (c *engineConn) progress() progress {
	d := c.lc.Data()
	return progress{
		produced: c.produced, consumed: c.consumed, unread: d.PeerProduced() - c.consumed, eof: c.eof,
		aborted: c.aborted || d.WasAborted(), over: c.done, closed: c.closed, state: d.State().String(),
	}
}
