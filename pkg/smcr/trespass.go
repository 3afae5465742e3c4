// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// A peer whose request names a key, an address or a right that it does not have loses
// its link. It may try again with another link group, and so find out the key of
// somebody else if it has enough time. So an address from where that comes repeatedly
// gets no first contact for a while: its connections are TCP.
const (
	// trespassLimit is how often it may happen within trespassWindow: a peer may have
	// a bug, or write late what we gave up.
	trespassLimit  = 3
	trespassWindow = time.Minute
	// barTime is how long the address gets no first contact then: 3 guesses in 2
	// minutes find a key of 32 bits in some thousand years.
	barTime = time.Minute
	// maxTrespassers bounds the addresses that are remembered. More make place for
	// each other: somebody who has so many could try from each just once anyway.
	maxTrespassers = 1024
)

// errBarred: the peer has trespassed too often.
var errBarred = errors.New("smcr: the peer's address has used keys that are not its own; no first contact with it for a minute")

// trespasser is what is remembered of an address.
type trespasser struct {
	count int
	since time.Time // of the count
	until time.Time // barred; zero: it is not
}

// trespassers are the addresses from where memory was asked for that is not the peer's.
// They are guarded by the stack's turn.
type trespassers map[netip.Addr]*trespasser

// note counts one trespass.
func (ts trespassers) note(now time.Time, addr netip.Addr) {
	t := ts[addr]
	if t == nil {
		if len(ts) >= maxTrespassers {
			ts.makeRoom(now)
		}
		t = &trespasser{since: now}
		ts[addr] = t
	}
	if now.Sub(t.since) > trespassWindow {
		t.count, t.since = 0, now
	}
	if t.count++; t.count >= trespassLimit {
		t.until = now.Add(barTime)
	}
}

// makeRoom forgets all whose time is over or, if there is none, one.
func (ts trespassers) makeRoom(now time.Time) {
	var oldest netip.Addr
	for a, t := range ts {
		if now.Sub(t.since) > trespassWindow && !now.Before(t.until) {
			delete(ts, a)
		} else if o := ts[oldest]; o == nil || t.since.Before(o.since) {
			oldest = a
		}
	}
	if len(ts) >= maxTrespassers {
		delete(ts, oldest)
	}
}

func (ts trespassers) isBarred(now time.Time, addr netip.Addr) bool {
	t := ts[addr]
	return t != nil && now.Before(t.until)
}

// handleTrespass is told that a queue pair has refused what its peer asked for.
func (r *rnic) handleTrespass(now time.Time, n rdma.QPN, err error) {
	addr, ok := r.ended.take(n)
	if l := r.links[n]; l != nil && !l.trespassed && !l.orderly {
		l.trespassed = true
		addr, ok = l.g.addr, true
	}
	if !ok {
		return
	}
	r.s.trespassers.note(now, addr)
	r.s.counters.past.Trespasses++
	if h := r.s.cfg.Hooks.Trespass; h != nil {
		h(addr, err)
	}
}

// endedLinks remembers whose the last queue pairs were that ended by an error: what
// was wrong may be told later than that something was.
type endedLinks struct {
	list [32]endedLink
	next int
}

type endedLink struct {
	qpn  rdma.QPN
	addr netip.Addr
}

func (e *endedLinks) add(n rdma.QPN, addr netip.Addr) {
	e.list[e.next] = endedLink{n, addr}
	e.next = (e.next + 1) % len(e.list)
}

func (e *endedLinks) take(n rdma.QPN) (netip.Addr, bool) {
	for i := range e.list {
		if l := e.list[i]; l.addr.IsValid() && l.qpn == n {
			e.list[i] = endedLink{}
			return l.addr, true
		}
	}
	return netip.Addr{}, false
}
