// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// What Linux 6.12 does, as observed on the wire.
const (
	linuxSendSlots       = 16              // of a link
	linuxLinks           = 3               // the third one only while one is replaced
	linuxAnswerWait      = 2 * time.Second // for the answer to an LLC request
	linuxConfirmLinkWait = 4 * time.Second
	linuxNewLinkWait     = 5 * time.Second       // for CONFIRM LINK on a further link
	linuxAddAgain        = 50 * time.Millisecond // after the loss of a link
	linuxTestLinkIdle    = 30 * time.Second
	linuxMinUpdate       = 2304 // bytes read before an update that nobody asked for
	linuxRTokens         = 255
	linuxMaxConns        = 255
	linuxRKeysBack       = 9 // in an answer to DELETE RKEY of version 2
)

// linux is a model of the kernel's link group.
type linux struct {
	w      *World
	p      *path
	side   int
	role   linkgroup.Role
	first  linkgroup.Endpoint
	step   linuxStep
	timer  time.Time // of step
	slots  [linuxLinks]*linuxLink
	lastID llc.LinkID
	conns  map[string]*linuxConn
	order  []*linuxConn // to send, in turn
	rmbs   []*linuxRMB
	tokens linuxTokens
	size   uint32        // of RMBs and send buffers
	terms  clc.Selection // of the group
	queue  []*linuxFlow  // of ours, waiting
	lcl    *linuxFlow    // of ours, under way
	rmt    *linuxFlow    // the peer's
	parked func()        // one ADD LINK or DELETE LINK of the peer
	asked  *linuxLink    // server, version 2: that carried the REQUEST ADD LINK to be answered
	ending *linuxLink    // that carries DELETE LINK for all: nothing else matters
	misled bool          // a late answer about one RMB was taken for that about another
}

type linuxStep uint8

const (
	linuxNew linuxStep = iota
	linuxWaitConfirmLink
	linuxWaitAddLink
	linuxSecondLink // its set-up is under way
	linuxUp
	linuxDead
)

// linuxLink is one queue pair.
type linuxLink struct {
	slot        int
	id          llc.LinkID
	rnic        *rnic
	local, peer linkgroup.Endpoint
	active      bool
	asymmetric  bool // shares an RNIC of either side with the other link
	llcs        []llc.Message
	posted      int // SENDs that have not completed
	heard       time.Time
	tested      time.Time
}

// linuxRMB holds one RMBE; each link has its own protection domain and so its
// own RKey.
type linuxRMB struct {
	region
	confirmed bool
	refused   error
	asked     bool
}

func newLinux(w *World, p *path, side int, role linkgroup.Role, terms clc.Selection, r *rnic) *linux {
	l := &linux{
		w: w, p: p, side: side, role: role, terms: terms, conns: map[string]*linuxConn{},
		size: w.cfg.RMBESizes[w.rng.IntN(len(w.cfg.RMBESizes))],
	}
	lk := l.newLink(r)
	if role == linkgroup.Server {
		lk.id = l.nextID()
	}
	l.first = lk.local
	return l
}

func (l *linux) now() time.Time { return l.p.clock(l.side) }
func (l *linux) peer() int      { return l.p.peers[l.side] }

func (l *linux) String() string {
	return fmt.Sprintf("Linux peer %d, group %d, %v", l.peer(), l.p.id, l.role)
}

func (l *linux) firstEndpoint() linkgroup.Endpoint { return l.first }
func (l *linux) dialect() llc.Dialect              { return llc.DialectLinux }
func (l *linux) sendLimit() int                    { return linuxSendSlots }

func (l *linux) condition() condition {
	switch {
	case l.step == linuxDead || l.ending != nil:
		return dead
	case l.step == linuxUp:
		return active
	}
	return forming
}

func (l *linux) allLinks() []*linuxLink {
	var s []*linuxLink
	for _, lk := range l.slots {
		if lk != nil {
			s = append(s, lk)
		}
	}
	return s
}

func (l *linux) usable() bool {
	limit := linuxMaxConns
	if l.isV2() && l.terms.Release >= clc.Release1 {
		limit = int(l.terms.MaxConns)
	}
	return l.condition() == active && len(l.conns) < limit
}

func (l *linux) giveUp(now time.Time) { l.die(now) }

// terminate is what the end of the device or of the module does.
func (l *linux) terminate(now time.Time) {
	lk := l.any(nil)
	if l.step != linuxUp || l.ending != nil || lk == nil {
		l.die(now)
		return
	}
	l.send(lk, llc.DeleteLink{All: true, Orderly: true, Reason: llc.DeleteOperator})
	l.ending = lk
}

func (l *linux) connectPeer(now time.Time, peer linkgroup.Endpoint) {
	if l.step != linuxNew {
		return
	}
	lk := l.slots[0]
	if lk == nil {
		return // its device was removed
	}
	l.connect(lk, peer)
	l.step = linuxWaitConfirmLink
	l.timer = now.Add(linuxConfirmLinkWait)
	if l.role == linkgroup.Server {
		l.qp(lk).transmit()
		l.send(lk, l.confirmLink(lk, false))
	}
}

func (l *linux) open(_ time.Time, name string, via *linkgroup.Endpoint) error {
	lk := l.choose()
	if via != nil {
		lk = nil
		for _, o := range l.allLinks() {
			if o.active && o.peer.QPN == via.QPN && o.peer.GID == via.GID {
				lk = o
			}
		}
	}
	if l.step == linuxNew {
		lk = l.slots[0]
	}
	if lk == nil {
		return errLinkLost
	}
	var r *linuxRMB
	for _, o := range l.rmbs {
		if o.owners[0] == "" {
			r = o
		}
	}
	if r == nil {
		l.w.keys++
		r = &linuxRMB{region: region{
			addr: uint64(l.w.keys) << 32, mem: make([]byte, l.size), element: l.size, owners: make([]string, 1), keys: make([]uint32, linuxLinks),
		}}
		for _, o := range l.allLinks() {
			l.register(r, o)
		}
		l.rmbs = append(l.rmbs, r)
	}
	r.owners[0] = name
	r.confirmed = l.step == linuxNew // the first contact confirms the RMB
	r.refused, r.asked = nil, false
	l.w.tokens++
	c := newLinuxConn(l, name, cdc.AlertToken(l.w.tokens), r, lk)
	l.conns[name] = c
	l.order = append(l.order, c)
	return nil
}

// choose is the link of a new connection: both in turn when they are
// symmetric, else not the asymmetric one.
func (l *linux) choose() *linuxLink {
	var usable []*linuxLink
	for _, lk := range l.allLinks() {
		if lk.active && !lk.asymmetric {
			usable = append(usable, lk)
		}
	}
	if len(usable) == 0 {
		return l.any(nil)
	}
	return usable[len(l.conns)%len(usable)]
}

// any is an active link other than one.
func (l *linux) any(not *linuxLink) *linuxLink {
	for _, lk := range l.allLinks() {
		if lk.active && lk != not {
			return lk
		}
	}
	return nil
}

// register gives an RMB a key on a link.
func (l *linux) register(r *linuxRMB, lk *linuxLink) {
	r.keys[lk.slot] = lk.rnic.newKey()
}

func (l *linux) localEndpoint(name string) linkgroup.Endpoint {
	if c := l.conns[name]; c != nil && c.via != nil {
		return c.via.local
	}
	return linkgroup.Endpoint{}
}

func (l *linux) confirmed(name string) (bool, error) {
	c := l.conns[name]
	if c == nil {
		return false, errPathDead
	}
	r := c.rmb
	if !r.asked && !r.confirmed {
		r.asked = true
		l.confirmRKey(r)
		if l.role == linkgroup.Server && l.w.rng.IntN(4) == 0 && l.any(l.any(nil)) == nil {
			l.queue = append(l.queue, &linuxFlow{kind: linuxAdd, run: l.serverAdd}) // the group still wants a second link
		}
	}
	return r.confirmed, r.refused
}

func (l *linux) rmbe(name string) linkgroup.RMBE {
	c := l.conns[name]
	if c == nil {
		return linkgroup.RMBE{}
	}
	return linkgroup.RMBE{
		Index: 1, Size: l.size, Token: c.token, RToken: linkgroup.RToken{RKey: rdma.RKey(c.rmb.keys[c.via.slot]), VAddr: c.rmb.addr},
	}
}

func (l *linux) activate(_ time.Time, name string, peer linkgroup.RMBE, _ linkgroup.Endpoint) error {
	c := l.conns[name]
	if c == nil || l.condition() == dead {
		return nil
	}
	if l.slots[c.via.slot] != c.via {
		return errLinkLost
	}
	t := l.tokens.find(c.via.slot, peer.RKey)
	if t == nil {
		// The kernel learns a key from CLC, too. The engine has told the key before, unless the
		// contact is the first; two kernels may cross a CONFIRM RKEY with a new link.
		if l.step != linuxNew && !l.w.cfg.Linux[l.p.peers[1-l.side]] {
			return fmt.Errorf("unknown RKey %d", peer.RKey)
		}
		if t = l.tokens.learn(c.via.slot, llc.RToken(peer.RToken)); t == nil {
			return fmt.Errorf("no room for RKey %d", peer.RKey)
		}
	}
	c.activate(peer, t)
	return nil
}

func (l *linux) abandon(_ time.Time, name string, _ bool) {
	if c := l.conns[name]; c != nil {
		c.closing.closed, c.closing.killed = true, true
		l.release(c)
	}
}

func (l *linux) recvCDC(now time.Time, b []byte) error {
	m, err := cdc.Parse(b)
	if err != nil {
		return err
	}
	for _, c := range l.order {
		if c.token == m.Token {
			return c.recv(now, m)
		}
	}
	return nil // late
}

func (l *linux) sent(now time.Time, index int, id uint64) {
	lk := l.slots[index]
	if lk == nil {
		return
	}
	lk.posted--
	for _, c := range l.order {
		if id != 0 && uint64(c.token) == id {
			c.delivered(lk)
			break
		}
	}
	if l.ending == lk && id == 0 && lk.posted == 0 && len(lk.llcs) == 0 {
		l.die(now)
	}
}

func (l *linux) place(index int, conn string, rkey uint32, addr uint64, b []byte) error {
	for _, r := range l.rmbs {
		if r.keys[index] == rkey {
			return r.place(conn, addr, b, 0, func() (window, bool) {
				c := l.conns[conn]
				if c == nil || c.closing.aborted() || c.closing.closed {
					return window{}, false
				}
				return c.window(), true
			})
		}
	}
	return fmt.Errorf("unknown RKey %d on link index %d", rkey, index)
}

// die ends the group and resets its connections.
func (l *linux) die(_ time.Time) {
	if l.step == linuxDead {
		return
	}
	l.step = linuxDead
	l.w.trace("%v %v: dead", l.w.Elapsed(), l)
	for i, lk := range l.slots {
		if lk != nil {
			l.slots[i] = nil
			if q := l.p.qp(l.side, i); q != nil {
				q.close()
			}
		}
	}
	l.lcl, l.rmt, l.queue, l.parked = nil, nil, nil, nil
	for _, c := range l.order {
		c.closing.killed = true
	}
	for _, name := range sortedKeys(l.conns) {
		l.release(l.conns[name])
	}
}

func sortedKeys[V any](m map[string]V) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

func (l *linux) nextTimeout() (time.Time, bool) {
	if l.step == linuxDead || l.step == linuxNew {
		return time.Time{}, false
	}
	var next time.Time
	earliest := func(t time.Time) {
		if !t.IsZero() && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	for _, lk := range l.slots {
		switch {
		case lk == nil || !lk.active:
		case lk.tested.IsZero():
			earliest(lk.heard.Add(linuxTestLinkIdle))
		default:
			earliest(lk.tested.Add(linuxAnswerWait))
		}
	}
	if l.step != linuxUp && l.step != linuxSecondLink {
		earliest(l.timer)
	}
	for _, f := range []*linuxFlow{l.lcl, l.rmt} {
		if f != nil {
			earliest(f.timer)
		}
	}
	return next, !next.IsZero()
}

func (l *linux) timeout(now time.Time) {
	due := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	switch {
	case l.step == linuxWaitConfirmLink && due(l.timer):
		l.die(now)
		return
	case l.step == linuxWaitAddLink && due(l.timer):
		l.becomeUp() // with one link
	}
	for _, f := range []*linuxFlow{l.lcl, l.rmt} {
		if f != nil && due(f.timer) {
			f.answer(nil)
		}
	}
	for _, lk := range l.allLinks() {
		switch {
		case l.step == linuxDead || !lk.active || l.slots[lk.slot] != lk:
		case !lk.tested.IsZero():
			if due(lk.tested.Add(linuxAnswerWait)) {
				l.linkDown(lk)
			}
		case due(lk.heard.Add(linuxTestLinkIdle)):
			lk.tested = now
			l.send(lk, llc.TestLink{})
		}
	}
}

func (l *linux) poll(_ time.Time, post func(int, work)) bool {
	if l.step == linuxDead {
		return false
	}
	did := l.runQueue()
	for _, lk := range l.slots {
		for lk != nil && len(lk.llcs) > 0 && lk.posted < linuxSendSlots {
			wr := work{send: true}
			b := lk.llcs[0].Append(wr.msg[:0])
			if len(b) > len(wr.msg) {
				wr.long = b
			}
			lk.llcs = lk.llcs[1:]
			lk.posted++
			post(lk.slot, wr)
			did = true
		}
	}
	if l.step == linuxUp && l.ending == nil {
		for _, c := range slices.Clone(l.order) {
			lk := c.link
			if lk != nil && lk.active && lk.posted < linuxSendSlots && c.transmit(post) {
				lk.posted++
				did = true
			}
			l.release(c)
		}
	}
	return did
}

// release takes a connection apart that is over for both sides, or that died
// with its group: the peer forgets the RMB before another connection gets the RMB.
func (l *linux) release(c *linuxConn) {
	if l.conns[c.name] != c || !c.over() {
		return
	}
	delete(l.conns, c.name)
	for i, o := range l.order {
		if o == c {
			l.order = append(l.order[:i:i], l.order[i+1:]...)
		}
	}
	free := func() {
		clear(c.rmb.mem)
		c.rmb.confirmed = false
		c.rmb.owners[0] = ""
	}
	if l.condition() == dead || !c.rmb.confirmed {
		free()
		return
	}
	l.deleteRKey(c.rmb, free)
}

func (l *linux) end(name string) end {
	if c := l.conns[name]; c != nil {
		return c
	}
	return nil
}

func (l *linux) links() []linkView {
	var v []linkView
	for _, lk := range l.allLinks() {
		v = append(v, linkView{lk.slot, lk.id, lk.local, lk.peer, lk.active})
	}
	return v
}

func (l *linux) leaks(excused func(conn string) bool) []string {
	var s []string
	for _, name := range sortedKeys(l.conns) {
		if excused(name) {
			continue
		}
		s = append(s, fmt.Sprintf("%v holds %s: %+v", l, name, l.conns[name].progress()))
	}
	if l.step != linuxDead {
		for _, r := range l.rmbs {
			if r.owners[0] != "" && !excused(r.owners[0]) {
				s = append(s, fmt.Sprintf("%v: RMB %v belongs to %s", l, r.keys, r.owners[0]))
			}
		}
	}
	return s
}

var errEyeCatchers = errors.New("peer insists on eye catchers")
