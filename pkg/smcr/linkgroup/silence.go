// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// health is what a link's silence is judged by.
type health struct {
	waiting  time.Time     // when the SENDs in flight last made progress
	pace     pace          // of their acknowledgements
	heard    time.Time     // when the peer last sent something over it
	testSent time.Time     // zero: no TEST LINK is unanswered
	testData [16]byte      // of that TEST LINK
	proven   time.Time     // when the last TEST LINK that was answered was sent
	answer   time.Duration // how long its answer took
}

// pace measures how long a link's SENDs wait for their acknowledgement, one at
// a time. Behind bulk data on a busy machine that may be long, which is no
// reason to give the link up.
type pace struct {
	slowest time.Duration // of late
	done    uint64        // SENDs that have completed
	mark    uint64        // measured: the one with this number; 0: none
	since   time.Time
}

// sent notes that n SENDs are in flight, the last of them since now.
func (p *pace) sent(now time.Time, n int) {
	if p.mark == 0 {
		p.mark, p.since = p.done+uint64(n), now
	}
}

// sentSince notes the SENDs that joined the given number in flight.
func (l *link) sentSince(now time.Time, before int) {
	if l.inflight == before {
		return
	}
	if before == 0 {
		l.waiting = now
	}
	l.pace.sent(now, l.inflight)
}

// isStuck reports whether the SENDs in flight have made no progress for StallTimeout.
func (h *health) isStuck(now time.Time) bool { return !now.Before(h.waiting.Add(StallTimeout)) }

// areStuck reports whether any link is.
func (t *linkTable) areStuck(now time.Time) bool {
	for i := range t.at {
		if l := &t.at[i]; l.isUp() && l.inflight > 0 && l.isStuck(now) {
			return true
		}
	}
	return false
}

func (p *pace) completed(now time.Time) {
	if p.done++; p.done == p.mark {
		p.mark = 0
		p.slowest = max(p.slowest-p.slowest/8, now.Sub(p.since))
	}
}

// patience is how long a link of this pace may be silent.
func (p *pace) patience() time.Duration { return max(StallTimeout, 4*p.slowest) }

// tester asks the peer whether a link is alive.
type tester struct {
	now    time.Time
	rand   *rand.Rand
	header llc.Header
}

// test sends TEST LINK.
func (t tester) test(l *link) {
	l.testSent = t.now
	for i := range l.testData {
		l.testData[i] = byte(t.rand.Uint32())
	}
	l.send(llc.TestLink{Header: t.header, UserData: l.testData})
}

// testAnswered takes the answer to TEST LINK; false: we asked nothing.
func (h *health) testAnswered(now time.Time, data [16]byte) (bool, error) {
	if h.testSent.IsZero() {
		return false, nil
	}
	if data != h.testData {
		return true, fmt.Errorf("%w: user data differs", ErrTestLink)
	}
	h.testSent, h.proven, h.answer = time.Time{}, h.testSent, now.Sub(h.testSent)
	return true, nil
}

// reset forgets a link that is down.
func (h *health) reset() {
	h.pace = pace{}
	h.testSent, h.proven, h.answer = time.Time{}, time.Time{}, 0
}

// testFailed keeps the link proven (§4.5.3): it sends TEST LINK after silence
// and reports true when the link failed.
func (t *linkTable) testFailed(l *link, interval time.Duration, ask tester) bool {
	switch due := t.testDue(l, interval); {
	case due.IsZero() || ask.now.Before(due):
		return false
	case l.testSent.IsZero():
		ask.test(l)
		return false
	case !ask.now.Before(l.testSent.Add(LastLinkTimeout)):
		return true
	}
	return t.isToBlame(l, l.testSent, TestLinkTimeout, ask)
}

// testDue is when testFailed wants to be called.
func (t *linkTable) testDue(l *link, interval time.Duration) time.Time {
	switch {
	case !l.isUp():
		return time.Time{}
	case l.testSent.IsZero():
		return l.heard.Add(interval)
	}
	last := l.testSent.Add(LastLinkTimeout)
	if due := t.blameDue(l, l.testSent, TestLinkTimeout); !due.IsZero() && due.Before(last) {
		return due
	}
	return last
}

// blameDue is when something has to be done about a link that has been silent since a time
// and may be for as long as patience; zero while no other link can say anything against it.
//
// Whether a silent link is dead shows only when another one is alive: if the peer is just
// slow, both are silent. So half of the patience after the last sign of life TEST LINK asks
// over the other link, and the silent one is given up when that has been answered. With a
// patience of 2 s:
//
//	time  link 1 (silent)              link 2
//	 0.0  last acknowledgement
//	 1.0                               TEST LINK -->          half of the patience
//	 1.1                               <-- TEST LINK rsp      alive, in both directions
//	 2.0  given up                                            the patience is over
//
// On a busy machine we may find link 1 slow while the peer finds link 2 slow. If each side
// gave up its own one, the group would end. But we ask over link 2, the one that is slow for
// the peer, and our answer comes behind everything that was late on link 2: it clears link 2
// at the peer before it counts against link 1 here. If we ourselves are slow, the answer takes
// long as well, and link 1 gets twice that time.
func (t *linkTable) blameDue(l *link, since time.Time, patience time.Duration) (due time.Time) {
	for i := range t.at {
		if at, _ := t.witness(&t.at[i], l, since, patience); !at.IsZero() && (due.IsZero() || at.Before(due)) {
			due = at
		}
	}
	return due
}

// isToBlame reports whether a link is to be given up. If that does not show it asks
// the others whether they are alive, once that is due.
func (t *linkTable) isToBlame(l *link, since time.Time, patience time.Duration, ask tester) bool {
	for i := range t.at {
		due, answered := t.witness(&t.at[i], l, since, patience)
		switch {
		case due.IsZero() || ask.now.Before(due):
		case answered:
			return true
		default:
			ask.test(&t.at[i])
		}
	}
	return false
}

// witness is when another link counts against a silent one, because it has answered
// since, or is to be asked; zero while it owes its answer.
func (t *linkTable) witness(o, l *link, since time.Time, patience time.Duration) (due time.Time, answered bool) {
	ask := since.Add(patience / 2)
	switch {
	case o == l || o.state != linkActive:
		return time.Time{}, false
	case !o.proven.Before(ask):
		due = since.Add(patience)
		if again := o.proven.Add(2 * o.answer); again.After(due) {
			due = again
		}
		return due, true
	case o.testSent.IsZero():
		return ask, false
	}
	return time.Time{}, false
}

// stallDue is when something has to be done about a link that owes
// acknowledgements. Its queue pair would take seconds to find out. That is right
// for the last link, on which connections depend; with another one it only costs
// time.
func (t *linkTable) stallDue(l *link, carriesExchange bool) time.Time {
	if l.state != linkActive || l.inflight == 0 {
		return time.Time{}
	}
	return t.blameDue(l, l.waiting, l.patience(carriesExchange))
}

// patience is how long a link may be silent. Nobody waits for one that carries
// nothing but its own messages, and a port that has just come up may drop those.
func (l *link) patience(carriesExchange bool) time.Duration {
	p := l.pace.patience()
	if l.conns == 0 && !carriesExchange {
		p = max(p, QuietStallTimeout)
	}
	return p
}
