// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

type linuxFlowKind uint8

const (
	linuxRKey linuxFlowKind = iota
	linuxAdd
	linuxDelete
)

// linuxFlow is an LLC exchange: it waits for one message at a time.
type linuxFlow struct {
	kind   linuxFlowKind
	run    func(*linuxFlow)
	expect func(lk *linuxLink, m llc.Message) bool
	then   func(m llc.Message) // nil: no answer came
	timer  time.Time
	// deleted is how the set-up of a link takes a DELETE LINK, about whatever link, that comes
	// before what it waits for; nil: such a message is not for it.
	deleted func(m llc.DeleteLink)
	ending  bool // because of one
}

// await makes the flow wait.
func (l *linux) await(f *linuxFlow, d time.Duration, expect func(*linuxLink, llc.Message) bool, then func(llc.Message)) {
	f.expect, f.then, f.timer, f.deleted = expect, then, l.now().Add(d), nil
}

func (f *linuxFlow) answer(m llc.Message) {
	then := f.then
	f.expect, f.then, f.timer, f.deleted = nil, nil, time.Time{}, nil
	if then != nil {
		then(m)
	}
}

// orDrop lets DELETE LINK end the set-up, too, while it waits, and drops that.
func (f *linuxFlow) orDrop(l *linux) {
	f.deleted = func(m llc.DeleteLink) {
		f.drop(l, m)
		f.answer(nil)
	}
}

func (f *linuxFlow) drop(l *linux, m llc.Message) { l.w.trace("%v %v drops %v", l.w.Elapsed(), l, m) }

// takes gives a message to the flow if it waits for it.
func (f *linuxFlow) takes(lk *linuxLink, m llc.Message) bool {
	if f == nil || f.expect == nil || !f.expect(lk, m) {
		return false
	}
	f.answer(m)
	return true
}

// end finishes a flow; what was parked or waits may run.
func (l *linux) endFlow(f *linuxFlow) {
	if l.lcl == f {
		l.lcl = nil
	}
	if l.rmt == f {
		l.rmt = nil
	}
	f.expect, f.then, f.timer, f.deleted = nil, nil, time.Time{}, nil
	if run := l.parked; run != nil && l.rmt == nil && l.step != linuxDead {
		l.parked = nil
		run()
	}
}

// runQueue begins the next flow of ours; flows of both sides run at a time
// only when both are about RKeys.
func (l *linux) runQueue() bool {
	if l.lcl != nil || len(l.queue) == 0 || l.step != linuxUp || l.ending != nil {
		return false
	}
	f := l.queue[0]
	if l.rmt != nil && (f.kind != linuxRKey || l.rmt.kind != linuxRKey) {
		return false
	}
	l.queue = l.queue[1:]
	l.lcl = f
	f.run(f)
	return true
}

// endSetUp gives DELETE LINK to the set-up of a link that waits for something else, and
// that is over then. What else comes before its worker runs may be lost.
func (l *linux) endSetUp(m llc.DeleteLink) bool {
	for _, f := range []*linuxFlow{l.lcl, l.rmt} {
		switch {
		case f == nil || l.step != linuxSecondLink && !l.w.cfg.Interrupts:
		case f.deleted != nil:
			deleted := f.deleted
			f.expect, f.timer, f.deleted, f.ending = nil, time.Time{}, nil, true
			l.w.after(l.workDelay(), func() {
				if l.lcl == f || l.rmt == f {
					deleted(m)
				}
			})
			return true
		case f.ending && l.w.rng.IntN(2) == 0:
			f.drop(l, m)
			return true
		}
	}
	return false
}

// remote begins a flow of the peer, or parks it, or drops it.
func (l *linux) remote(kind linuxFlowKind, m llc.Message, run func(*linuxFlow)) {
	begin := func() {
		f := &linuxFlow{kind: kind}
		l.rmt = f
		run(f)
	}
	busy := l.rmt
	if kind != linuxRKey && busy == nil && l.lcl != nil {
		busy = l.lcl
	}
	if kind == linuxRKey && busy == nil && l.lcl != nil && l.lcl.kind == linuxAdd && l.w.rng.IntN(2) == 0 {
		busy = l.lcl
	}
	switch {
	case busy == nil:
		begin()
	case kind != linuxRKey && busy.kind != kind && l.parked == nil:
		l.parked = begin
		if l.rmt == nil { // it waits for a flow of ours, which may end without another
			l.retryParked()
		}
	default:
		l.w.trace("%v %v drops %v", l.w.Elapsed(), l, m)
	}
}

// retryParked runs the parked request when nothing else runs.
func (l *linux) retryParked() {
	l.w.after(10*time.Millisecond, func() {
		run := l.parked
		switch {
		case run == nil || l.step == linuxDead:
		case l.lcl == nil && l.rmt == nil:
			l.parked = nil
			run()
		default:
			l.retryParked()
		}
	})
}

// send sends a message in the group's version.
func (l *linux) send(lk *linuxLink, m llc.Message) {
	if l.isV2() {
		switch t := m.(type) {
		case llc.ConfirmLink:
			t.Version = llc.Version2
			m = t
		case llc.AddLink:
			t.Version = llc.Version2
			m = t
		case llc.DeleteLink:
			t.Version = llc.Version2
			m = t
		case llc.ConfirmRKey:
			t.Version = llc.Version2
			m = t
		case llc.DeleteRKeyV2:
			t.Version = llc.Version2
			m = t
		case llc.RequestAddLink:
			t.Version = llc.Version2
			m = t
		case llc.TestLink:
			t.Version = llc.Version2
			m = t
		default:
			l.w.fault("%v sends %v in a group of version 2", l, m)
		}
	}
	lk.llcs = append(lk.llcs, m)
}

func (l *linux) isV2() bool { return l.terms.Version == clc.V2 }

// mayAddLinks: CLC said, since release 1, how many links there may be.
func (l *linux) mayAddLinks() bool {
	return !l.isV2() || l.terms.Release < clc.Release1 || l.terms.MaxLinks > 1
}

func (l *linux) recv(now time.Time, index int, b []byte) error {
	lk := l.slots[index]
	if l.step == linuxDead || lk == nil {
		return nil
	}
	lk.heard = now
	if b[0] == cdc.Type {
		return l.recvCDC(now, b)
	}
	m, err := llc.Parse(llc.DialectLinux, max(l.terms.Version, 1), b)
	if err != nil {
		return err
	}
	if l.step == linuxWaitConfirmLink {
		return l.firstConfirmLink(lk, m)
	}
	switch m := m.(type) {
	case llc.TestLink:
		if m.Response {
			lk.tested = time.Time{}
			return nil
		}
		m.Response = true
		l.send(lk, m)
		return nil
	case llc.AddLink:
		if l.step == linuxWaitAddLink && l.role == linkgroup.Client && !m.Response {
			l.step = linuxSecondLink
			l.lcl = &linuxFlow{kind: linuxAdd}
			l.clientAdd(l.lcl, lk, m)
			return nil
		}
	case llc.DeleteLink:
		if !m.Response && l.endSetUp(m) {
			return nil
		}
	}
	if l.lcl.takes(lk, m) || l.rmt.takes(lk, m) {
		return nil
	}
	if m.IsResponse() {
		l.w.trace("%v %v drops %v", l.w.Elapsed(), l, m)
		return nil
	}
	return l.recvRequest(lk, m)
}

// firstConfirmLink is the CONFIRM LINK of the first contact.
func (l *linux) firstConfirmLink(lk *linuxLink, m llc.Message) error {
	c, ok := m.(llc.ConfirmLink)
	server := l.role == linkgroup.Server
	if !ok || c.Response != server || c.QPN != lk.peer.QPN || c.GID != lk.peer.GID || server && c.Link != lk.id {
		return fmt.Errorf("unexpected %v", m)
	}
	if !c.Flags.Has(llc.NoRMBEEyecatcher) {
		return errEyeCatchers
	}
	lk.active, lk.heard = true, l.now()
	if !server {
		lk.id = c.Link
		l.qp(lk).transmit()
		l.send(lk, l.confirmLink(lk, true))
		if !l.mayAddLinks() {
			l.becomeUp()
			return nil
		}
		l.step = linuxWaitAddLink
		l.timer = l.now().Add(linuxAnswerWait)
		return nil
	}
	if !l.mayAddLinks() {
		l.becomeUp()
		return nil
	}
	l.step = linuxSecondLink
	l.lcl = &linuxFlow{kind: linuxAdd}
	l.serverAdd(l.lcl)
	return nil
}

func (l *linux) becomeUp() {
	if l.step != linuxDead {
		l.step = linuxUp
	}
}

func (l *linux) confirmLink(lk *linuxLink, response bool) llc.ConfirmLink {
	m := llc.ConfirmLink{
		Header: llc.Header{Response: response}, Flags: llc.NoRMBEEyecatcher, MAC: lk.local.MAC, GID: lk.local.GID, QPN: lk.local.QPN,
		Link: lk.id, UserID: 0x100 + uint32(lk.id), MaxLinks: 2,
	}
	if l.isV2() && l.terms.Release >= clc.Release1 {
		m.MaxLinks, m.MaxConns = l.terms.MaxLinks, l.terms.MaxConns
	}
	return m
}

func (l *linux) recvRequest(lk *linuxLink, m llc.Message) error {
	switch m := m.(type) {
	case llc.AddLink:
		if l.role == linkgroup.Server { // an invitation
			l.remote(linuxAdd, m, l.serverAdd)
			return nil
		}
		l.remote(linuxAdd, m, func(f *linuxFlow) { l.clientAdd(f, lk, m) })
	case llc.RequestAddLink:
		l.remote(linuxAdd, m, func(f *linuxFlow) {
			l.asked = lk
			l.serverAdd(f)
		})
	case llc.DeleteLink:
		l.remote(linuxDelete, m, func(f *linuxFlow) { l.recvDeleteLink(f, lk, m) })
	case llc.ConfirmRKey, llc.DeleteRKey, llc.DeleteRKeyV2:
		l.remote(linuxRKey, m, func(f *linuxFlow) {
			l.w.after(l.workDelay(), func() {
				if l.rmt != f {
					return
				}
				// Its worker looks at the link when it runs. The keys of a link
				// that is gone would be taken for those of the next in its slot.
				if l.slots[lk.slot] == lk && lk.active {
					l.answerRKey(lk, m)
				} else {
					l.w.trace("%v %v drops %v, whose link is gone", l.w.Elapsed(), l, m)
				}
				l.endFlow(f)
			})
		})
	case llc.AddLinkContinuation, llc.ConfirmLink: // of a set-up that is over here
		l.w.trace("%v %v drops %v", l.w.Elapsed(), l, m)
	default:
		return fmt.Errorf("unexpected %v", m)
	}
	return nil
}

// workDelay is how long a request waits for its worker. On a busy machine that is long
// now and then.
func (l *linux) workDelay() time.Duration {
	d := time.Duration(l.w.rng.IntN(100)) * time.Microsecond
	if l.w.cfg.Delays && l.w.rng.IntN(100) == 0 {
		d += time.Duration(l.w.rng.IntN(500)) * time.Millisecond
	}
	return d
}

// confirmRKey tells the peer about an RMB, on all active links.
func (l *linux) confirmRKey(r *linuxRMB) {
	l.queue = append(l.queue, &linuxFlow{kind: linuxRKey, run: func(f *linuxFlow) {
		lk := l.any(nil)
		if lk == nil {
			l.endFlow(f)
			return
		}
		m := llc.ConfirmRKey{This: llc.RToken{RKey: rdma.RKey(r.keys[lk.slot]), VAddr: r.addr}}
		for _, o := range l.allLinks() {
			if o.active && o != lk && int(m.Others) < len(m.Other) {
				m.Other[m.Others] = llc.LinkRToken{Link: o.id, RToken: llc.RToken{RKey: rdma.RKey(r.keys[o.slot]), VAddr: r.addr}}
				m.Others++
			}
		}
		l.send(lk, m)
		l.await(f, linuxAnswerWait, isResponse(llc.TypeConfirmRKey), func(m llc.Message) {
			a, ok := m.(llc.ConfirmRKey)
			// It does not look which RMB the answer is about.
			l.misled = l.misled || ok && slices.ContainsFunc(l.rmbs, func(o *linuxRMB) bool {
				return o != r && slices.Contains(o.keys, uint32(a.This.RKey))
			})
			if r.confirmed = ok && !a.Negative; !r.confirmed {
				r.refused = errors.New("CONFIRM RKEY failed")
			}
			l.endFlow(f)
		})
	}})
}

// deleteRKey makes the peer forget an RMB.
func (l *linux) deleteRKey(r *linuxRMB, then func()) {
	l.queue = append(l.queue, &linuxFlow{kind: linuxRKey, run: func(f *linuxFlow) {
		lk := l.any(nil)
		if lk == nil {
			l.endFlow(f)
			return
		}
		if k := rdma.RKey(r.keys[lk.slot]); l.isV2() {
			l.send(lk, llc.DeleteRKeyV2{RKeys: []rdma.RKey{k}})
		} else {
			m := llc.DeleteRKey{Count: 1}
			m.RKeys[0] = k
			l.send(lk, m)
		}
		l.await(f, linuxAnswerWait, isResponse(llc.TypeDeleteRKey), func(llc.Message) {
			then()
			l.endFlow(f)
		})
	}})
}

func isResponse(t llc.Type) func(*linuxLink, llc.Message) bool {
	return func(_ *linuxLink, m llc.Message) bool { return m.IsResponse() && m.Type() == t }
}

// answerRKey remembers or forgets RMBs of the peer.
func (l *linux) answerRKey(lk *linuxLink, m llc.Message) {
	switch m := m.(type) {
	case llc.ConfirmRKey:
		m.Response = true
		t := l.tokens.learn(lk.slot, m.This)
		m.Negative = t == nil
		for _, o := range m.Other[:m.N()] {
			for _, other := range l.allLinks() {
				if t != nil && other.id == o.Link {
					t.on[other.slot], t.known[other.slot] = o.RToken, true
				}
			}
		}
		l.send(lk, m)
	case llc.DeleteRKey:
		m.Response = true
		for i := range m.N() {
			if !l.tokens.forget(lk.slot, m.RKeys[i]) {
				m.Negative = true
				m.ErrorMask |= 0x80 >> i
			}
		}
		l.send(lk, m)
	case llc.DeleteRKeyV2:
		m.Response = true
		for _, k := range m.RKeys {
			if !l.tokens.forget(lk.slot, k) {
				m.Negative = true
				m.Invalid++
			}
		}
		// It answers with 44 bytes, and leaves the keys out.
		m.RKeys = make([]rdma.RKey, min(len(m.RKeys), linuxRKeysBack))
		l.send(lk, m)
	}
}
