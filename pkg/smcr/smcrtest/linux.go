// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
	"sort"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// What Linux 6.12 does, as observed on the wire.
const (
	linuxSendSlots       = 16
	linuxAnswerWait      = 2 * time.Second // for the answer to an LLC request
	linuxConfirmLinkWait = 4 * time.Second
	linuxTestLinkIdle    = 30 * time.Second
	linuxMinUpdate       = 2304 // bytes read before an update that nobody asked for
	linuxRTokens         = 255
)

// linux is a model of the kernel's link group.
type linux struct {
	w      *World
	p      *path
	side   int
	role   linkgroup.Role
	ep     linkgroup.Endpoint
	peer   linkgroup.Endpoint
	step   linuxStep
	timer  time.Time // of step
	conns  map[string]*linuxConn
	order  []*linuxConn // to send, in turn
	rmbs   []*linuxRMB
	tokens map[rdma.RKey]bool // of the peer's RMBs
	size   uint32             // of RMBs and send buffers
	flow   *linuxFlow         // of ours, under way
	queue  []*linuxFlow
	busy   bool // with a request of the peer
	llcs   []llc.Message
	posted int // SENDs that have not completed
	heard  time.Time
	tested time.Time
	ending bool // DELETE LINK was sent, nothing else matters
}

type linuxStep uint8

const (
	linuxNew linuxStep = iota
	linuxWaitConfirmLink
	linuxWaitAddLink
	linuxWaitContinuation
	linuxUp
	linuxDead
)

// linuxRMB holds one RMBE.
type linuxRMB struct {
	region
	key       uint32
	confirmed bool
	refused   error
	asked     bool
}

// linuxFlow is an LLC exchange that we start.
type linuxFlow struct {
	request llc.Message
	answer  llc.Type
	timer   time.Time
	end     func(m llc.Message) // nil: no answer came
}

func newLinux(w *World, p *path, side int, role linkgroup.Role) *linux {
	return &linux{
		w: w, p: p, side: side, role: role, ep: newEndpoint(w, side), conns: map[string]*linuxConn{}, tokens: map[rdma.RKey]bool{},
		size: w.cfg.RMBESizes[w.rng.IntN(len(w.cfg.RMBESizes))], heard: w.now,
	}
}

func (l *linux) String() string {
	return fmt.Sprintf("Linux peer %d, group %d, %v", l.side, l.p.id, l.role)
}

func (l *linux) endpoint() linkgroup.Endpoint { return l.ep }
func (l *linux) dialect() llc.Dialect         { return llc.DialectLinux }
func (l *linux) sendLimit() int               { return linuxSendSlots }

func (l *linux) condition() condition {
	switch {
	case l.step == linuxDead || l.ending:
		return dead
	case l.step == linuxUp:
		return active
	}
	return forming
}

func (l *linux) giveUp(now time.Time) { l.die(now) }

func (l *linux) connectPeer(now time.Time, peer linkgroup.Endpoint) {
	if l.step != linuxNew {
		return
	}
	l.peer = peer
	l.step = linuxWaitConfirmLink
	l.timer = now.Add(linuxConfirmLinkWait)
	if l.role == linkgroup.Server {
		l.llcs = append(l.llcs, l.confirmLink(false))
	}
}

func (l *linux) confirmLink(response bool) llc.Message {
	return llc.ConfirmLink{
		Header: llc.Header{Response: response}, Flags: llc.NoRMBEEyecatcher, MAC: l.ep.MAC, GID: l.ep.GID, QPN: l.ep.QPN,
		Link: 1, UserID: 0x101, MaxLinks: 2,
	}
}

// addLink is the offer of a second link, with the first one's GID and MAC if
// there is no other device.
func (l *linux) addLink() llc.AddLink {
	m := llc.AddLink{
		Dialect: llc.DialectLinux, MAC: l.ep.MAC, GID: l.ep.GID, QPN: l.ep.QPN + 1<<16, Link: 2, MTU: rdma.MTU1024, PSN: 1,
	}
	if l.w.cfg.LinuxTwoDevices {
		m.GID[14]++
		m.MAC[4]++
	}
	return m
}

func (l *linux) open(_ time.Time, name string) error {
	var r *linuxRMB
	for _, o := range l.rmbs {
		if o.owners[0] == "" {
			r = o
		}
	}
	if r == nil {
		l.w.keys++
		r = &linuxRMB{key: l.w.keys, region: region{
			addr: uint64(l.w.keys) << 32, mem: make([]byte, l.size), element: l.size, owners: make([]string, 1),
		}}
		l.rmbs = append(l.rmbs, r)
	}
	r.owners[0] = name
	r.confirmed = l.step == linuxNew // the first contact confirms it
	r.refused, r.asked = nil, false
	l.w.tokens++
	c := newLinuxConn(l, name, cdc.AlertToken(l.w.tokens), r)
	l.conns[name] = c
	l.order = append(l.order, c)
	return nil
}

func (l *linux) confirmed(name string) (bool, error) {
	c := l.conns[name]
	if c == nil {
		return false, errPathDead
	}
	r := c.rmb
	if !r.asked && !r.confirmed {
		r.asked = true
		l.start(&linuxFlow{
			request: llc.ConfirmRKey{This: llc.RToken{RKey: rdma.RKey(r.key), VAddr: r.addr}}, answer: llc.TypeConfirmRKey,
			end: func(m llc.Message) {
				a, ok := m.(llc.ConfirmRKey)
				if r.confirmed = ok && !a.Negative; !r.confirmed {
					r.refused = errors.New("CONFIRM RKEY failed")
				}
			},
		})
		if l.role == linkgroup.Server && l.w.rng.IntN(4) == 0 {
			// It still wants a second link; meanwhile it drops requests.
			l.start(&linuxFlow{request: l.addLink(), answer: llc.TypeAddLink, end: func(llc.Message) {}})
		}
	}
	return r.confirmed, r.refused
}

func (l *linux) rmbe(name string) linkgroup.RMBE {
	c := l.conns[name]
	return linkgroup.RMBE{
		Index: 1, Size: l.size, Token: c.token, RToken: linkgroup.RToken{RKey: rdma.RKey(c.rmb.key), VAddr: c.rmb.addr},
	}
}

func (l *linux) activate(_ time.Time, name string, peer linkgroup.RMBE) error {
	c := l.conns[name]
	if c == nil || l.condition() == dead {
		return nil
	}
	if l.step == linuxNew {
		l.tokens[peer.RKey] = true
	}
	if !l.tokens[peer.RKey] {
		return fmt.Errorf("unknown RKey %d", peer.RKey)
	}
	c.activate(peer)
	return nil
}

func (l *linux) abandon(_ time.Time, name string) {
	if c := l.conns[name]; c != nil {
		c.closed, c.killed = true, true
		l.release(c)
	}
}

// start begins an exchange, or queues it: one at a time.
func (l *linux) start(f *linuxFlow) { l.queue = append(l.queue, f) }

func (l *linux) recv(now time.Time, b []byte) error {
	if l.step == linuxDead {
		return nil
	}
	l.heard = now
	if b[0] == cdc.Type {
		return l.recvCDC(now, b)
	}
	m, err := llc.Parse(llc.DialectLinux, 1, b)
	if err != nil {
		return err
	}
	if m.IsResponse() {
		return l.recvAnswer(now, m)
	}
	return l.recvRequest(now, m)
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

func (l *linux) recvAnswer(now time.Time, m llc.Message) error {
	switch m := m.(type) {
	case llc.ConfirmLink:
		if l.role != linkgroup.Server || l.step != linuxWaitConfirmLink || m.QPN != l.peer.QPN || m.GID != l.peer.GID || m.Link != 1 {
			return fmt.Errorf("unexpected %v", m)
		}
		if !m.Flags.Has(llc.NoRMBEEyecatcher) {
			return errors.New("peer insists on eye catchers")
		}
		l.step = linuxWaitAddLink
		l.timer = now.Add(linuxAnswerWait)
		l.llcs = append(l.llcs, l.addLink())
		return nil
	case llc.AddLink:
		if l.step == linuxWaitAddLink {
			if !m.Reject || m.Reason != llc.RejectNoAlternatePath {
				return fmt.Errorf("unexpected %v", m)
			}
			l.step = linuxUp
			return nil
		}
	case llc.TestLink:
		l.tested = time.Time{}
		return nil
	}
	if f := l.flow; f != nil && m.Type() == f.answer {
		l.flow = nil
		f.end(m)
	}
	return nil
}

func (l *linux) recvRequest(now time.Time, m llc.Message) error {
	switch m := m.(type) {
	case llc.ConfirmLink:
		if l.role != linkgroup.Client || l.step != linuxWaitConfirmLink || m.QPN != l.peer.QPN || m.GID != l.peer.GID {
			return fmt.Errorf("unexpected %v", m)
		}
		if !m.Flags.Has(llc.NoRMBEEyecatcher) {
			return errors.New("peer insists on eye catchers")
		}
		l.step = linuxWaitAddLink
		l.timer = now.Add(linuxAnswerWait)
		l.llcs = append(l.llcs, l.confirmLink(true))
	case llc.AddLink:
		l.answerAddLink(now, m)
	case llc.TestLink:
		m.Response = true
		l.llcs = append(l.llcs, m)
	case llc.DeleteLink:
		l.recvDeleteLink(now, m)
	case llc.ConfirmRKey, llc.DeleteRKey:
		if l.busy || l.flow != nil && l.flow.answer == llc.TypeAddLink {
			l.w.trace("%v %v drops %v", l.w.Elapsed(), l, m)
			return nil
		}
		l.busy = true
		l.w.after(time.Duration(l.w.rng.IntN(100))*time.Microsecond, func() {
			l.busy = false
			l.answerRKey(m)
		})
	default:
		return fmt.Errorf("unexpected %v", m)
	}
	return nil
}

func (l *linux) answerAddLink(now time.Time, m llc.AddLink) {
	first := l.step == linuxWaitAddLink
	m.Response = true
	if l.w.cfg.LinuxTwoDevices && first {
		// A second link, even to the same device of the server: it waits for
		// ADD LINK CONTINUATION now.
		l.step = linuxWaitContinuation
		l.timer = now.Add(linuxAnswerWait)
		m.QPN, m.GID[14] = l.ep.QPN+1<<16, 1
	} else {
		m.Reject, m.Reason = true, llc.RejectNoAlternatePath
		if first {
			l.step = linuxUp
		}
	}
	l.llcs = append(l.llcs, m)
}

func (l *linux) recvDeleteLink(now time.Time, m llc.DeleteLink) {
	switch {
	case l.step == linuxWaitContinuation:
		if l.side == 0 { // it comes in place of a continuation: dropped, or heard
			m.Response = true
			l.llcs = append(l.llcs, m)
			l.step = linuxUp
		}
	case !m.All && m.Link != 1:
		m.Response, m.Reason = true, llc.DeleteUnknownLink
		l.llcs = append(l.llcs, m)
	case l.role == linkgroup.Client:
		l.die(now)
	default:
		m.All, m.Orderly = true, true
		l.llcs = append(l.llcs, m)
		l.ending = true
	}
}

func (l *linux) answerRKey(m llc.Message) {
	switch m := m.(type) {
	case llc.ConfirmRKey:
		m.Response = true
		if len(l.tokens) >= linuxRTokens {
			m.Negative = true
		} else {
			l.tokens[m.This.RKey] = true
		}
		l.llcs = append(l.llcs, m)
	case llc.DeleteRKey:
		m.Response = true
		for i := range m.N() {
			if !l.tokens[m.RKeys[i]] {
				m.Negative = true
				m.ErrorMask |= 0x80 >> i
			}
			delete(l.tokens, m.RKeys[i])
		}
		l.llcs = append(l.llcs, m)
	}
}

func (l *linux) sent(now time.Time, id uint64) {
	l.posted--
	for _, c := range l.order {
		if uint64(c.token) == id {
			c.delivered()
		}
	}
	if l.ending && id == 0 && l.posted == 0 && len(l.llcs) == 0 {
		l.die(now)
	}
}

func (l *linux) place(conn string, rkey uint32, addr uint64, b []byte) error {
	for _, r := range l.rmbs {
		if r.key == rkey {
			return r.place(conn, addr, b, 0)
		}
	}
	return fmt.Errorf("unknown RKey %d", rkey)
}

func (l *linux) linkFailed(now time.Time, _ error) { l.die(now) }

// die ends the group and resets its connections.
func (l *linux) die(_ time.Time) {
	if l.step == linuxDead {
		return
	}
	l.step = linuxDead
	l.p.alive[l.side] = false
	l.w.trace("%v %v: dead", l.w.Elapsed(), l)
	l.llcs, l.flow, l.queue = nil, nil, nil
	for _, c := range l.order {
		c.killed = true
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
	next := l.heard.Add(linuxTestLinkIdle)
	if !l.tested.IsZero() {
		next = l.tested.Add(linuxAnswerWait)
	}
	if l.step != linuxUp && l.timer.Before(next) {
		next = l.timer
	}
	if l.flow != nil && l.flow.timer.Before(next) {
		next = l.flow.timer
	}
	return next, true
}

func (l *linux) timeout(now time.Time) {
	due := func(t time.Time) bool { return !now.Before(t) }
	switch {
	case l.step == linuxWaitConfirmLink && due(l.timer):
		l.die(now)
		return
	case l.step != linuxUp && l.step != linuxDead && due(l.timer):
		l.step = linuxUp // with one link
	}
	if f := l.flow; f != nil && due(f.timer) {
		l.flow = nil
		f.end(nil)
	}
	switch {
	case !l.tested.IsZero():
		if due(l.tested.Add(linuxAnswerWait)) {
			l.die(now)
		}
	case due(l.heard.Add(linuxTestLinkIdle)):
		l.tested = now
		l.llcs = append(l.llcs, llc.TestLink{})
	}
}

func (l *linux) poll(now time.Time, post func(work)) bool {
	did := false
	if l.step == linuxDead {
		return false
	}
	if l.flow == nil && len(l.queue) > 0 && l.step == linuxUp {
		l.flow, l.queue = l.queue[0], l.queue[1:]
		l.flow.timer = now.Add(linuxAnswerWait)
		l.llcs = append(l.llcs, l.flow.request)
		did = true
	}
	for len(l.llcs) > 0 && l.posted < linuxSendSlots {
		wr := work{send: true}
		l.llcs[0].Append(wr.msg[:0])
		l.llcs = l.llcs[1:]
		l.posted++
		post(wr)
		did = true
	}
	if l.step == linuxUp && !l.ending {
		for _, c := range append([]*linuxConn(nil), l.order...) {
			if l.posted < linuxSendSlots && c.transmit(post) {
				l.posted++
				did = true
			}
			l.release(c)
		}
	}
	return did
}

// release takes a connection apart that is over for both sides, or that died
// with its group: the peer forgets the RMB before another connection gets it.
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
	free := func(llc.Message) {
		clear(c.rmb.mem)
		c.rmb.confirmed = false
		c.rmb.owners[0] = ""
	}
	if l.condition() == dead || !c.rmb.confirmed {
		free(nil)
		return
	}
	m := llc.DeleteRKey{Count: 1}
	m.RKeys[0] = rdma.RKey(c.rmb.key)
	l.start(&linuxFlow{request: m, answer: llc.TypeDeleteRKey, end: free})
}

func (l *linux) end(name string) end {
	if c := l.conns[name]; c != nil {
		return c
	}
	return nil
}

func (l *linux) leaks() []string {
	var s []string
	for _, name := range sortedKeys(l.conns) {
		s = append(s, fmt.Sprintf("%v holds %s: %+v", l, name, l.conns[name].progress()))
	}
	if l.step != linuxDead {
		for _, r := range l.rmbs {
			if r.owners[0] != "" {
				s = append(s, fmt.Sprintf("%v: RMB %d belongs to %s", l, r.key, r.owners[0]))
			}
		}
	}
	return s
}
