// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// A link group ends here before it ends at the peer: the peer's answer to DELETE LINK, or a
// DELETE LINK of the peer, may still come, and Linux waits until that message is
// acknowledged. On a software RNIC Linux waits for ever if our queue pair is gone.
// So queue pairs outlive their group for a moment, in which they acknowledge, and
// carry what package linkgroup calls the last words of the group. The group's RMBs do
// not: once the group has no connections, a write of the peer meets no memory.
//
// A link that a living group gave up goes another way. Its peer may not write
// through it any more, because it writes the same anew over another link, and
// then what comes after that. But it may have requests under way, and Linux deletes
// the link only when none is left: over soft RoCE never, with all of the link group
// waiting behind it, if nobody answers. So the queue pair goes to ERR, in which a
// provider that can refuses what comes. To Linux a refusal is an error of its device,
// and if all links that it has of the group are on that one, the end of the group: then
// nothing is refused before the peer knows that the link is gone.
const (
	// lingerTime allows for the peer's answer from a machine that is slow, and for some
	// losses of it with the ACK timeout that Linux and we use.
	lingerTime = 900 * time.Millisecond
	// refuseTime is how long a path may be cut after which the peer's requests
	// arrive: longer than a switch takes to start.
	refuseTime = 10 * time.Minute
	// refuseInterval is between two tries to have a device refuse what comes: a refusal
	// needs the path that was lost. While that path takes packets and does not deliver them,
	// a refusal gets lost: so the device tries again after a success, too, each time after
	// twice the interval, up to maxRefuseInterval.
	refuseInterval    = 300 * time.Millisecond
	maxRefuseInterval = 5 * time.Second
	// refuseDelay is how long what comes over a lost link is not refused then, unless
	// the peer has said that it knows: longer than a busy peer takes to take DELETE LINK.
	refuseDelay = 2 * time.Second
	// maxLingering bounds the queue pairs of which nobody has any use: some
	// go before their time (lingering.makePlace says which).
	maxLingering = 256
)

// endLink closes a link whose machine has no use for it any more: at once, or
// later if the peer may have something to say. Work requests that read the send
// buffers of connections must not outlive these, nor what the peer may get twice.
func (g *group) endLink(now time.Time, l *link) {
	stay := lingerTime
	l.rnic.drainSends(now) // l.complete counts the SENDs that have arrived
	dead := g.lg.State() == linkgroup.Dead
	if dead {
		g.refuseAll()
	}
	switch {
	case !g.ready || !l.transmits:
		l.drainAndClose(now)
		return
	case dead && !l.broken && l.complete >= l.wrote: // the queue pair acknowledges, and carries last words
		l.orderly = true
	default:
		if !l.refuse(now, dead || g.heardDelete || !g.lg.EndsOnlyAt(l.peer)) {
			l.drainAndClose(now)
			return
		}
		if !dead {
			stay = refuseTime
		}
	}
	s := g.s
	l.until = now.Add(stay)
	g.links[l.index] = nil
	s.lingering.add(l)
	l.awaitSends(l.sent > l.complete) // Close waits for the peer, or the end of the path to it
	s.alarm.wakeAt(l.until)
}

// refuse ends the queue pair's work, and handles what the queue pair has acknowledged. What
// comes then is refused at once if the peer knows of the end. False: the queue
// pair is gone.
func (l *link) refuse(now time.Time, known bool) bool {
	r, refuses := l.qp.(rdma.Refuser)
	if refuses && !known {
		r.Silence()
	}
	if l.qp.Modify(rdma.QPAttr{State: rdma.QPError}) != nil {
		return false
	}
	l.broken = true
	l.rnic.drain(now)
	l.forgetSends()
	if refuses {
		mayRefuse := make(chan struct{})
		if known {
			close(mayRefuse)
		} else {
			l.mayRefuse, l.unheard = mayRefuse, now.Add(refuseDelay)
		}
		l.g.s.wg.Go(func() { l.g.s.haveRefused(r, mayRefuse) })
	}
	return true
}

// heardOfLinks notes a DELETE LINK of the peer: the peer knows which links were given up.
func (g *group) heardOfLinks() {
	g.heardDelete = true
	g.refuseAll()
	for l := range g.s.lingering.of(g) {
		l.unheard = time.Time{}
	}
}

// refuseAll has what comes over links that were given up refused from now on.
func (g *group) refuseAll() {
	for l := range g.s.lingering.of(g) {
		if l.mayRefuse != nil {
			close(l.mayRefuse)
			l.mayRefuse = nil
		}
	}
}

// haveRefused has a queue pair refuse what comes until the queue pair is closed, beginning when
// mayRefuse is closed, or after refuseDelay. haveRefused runs without the turn: the device may
// wait for the peer.
func (s *Stack) haveRefused(r rdma.Refuser, mayRefuse <-chan struct{}) {
	timer := time.NewTimer(refuseDelay)
	defer timer.Stop()
	select {
	case <-mayRefuse:
	case <-timer.C:
	case <-s.closing:
	}
	interval := refuseInterval
	for {
		err := r.Refuse()
		if errors.Is(err, rdma.ErrClosed) || errors.Is(err, rdma.ErrState) || errors.Is(err, rdma.ErrNotSupported) {
			return
		}
		timer.Reset(interval)
		if err == nil {
			interval = min(2*interval, maxRefuseInterval)
		}
		select {
		case <-timer.C:
		case <-s.closing:
			return
		}
	}
}

// lingers reports whether the link outlives its group, or its place in the group.
func (l *link) lingers() bool { return !l.until.IsZero() }

// lateCompletion takes a completion of a link that lingers.
func (l *link) lateCompletion(now time.Time, wc *rdma.WC) {
	switch {
	case wc.Status != rdma.StatusSuccess:
		l.forgetSends()
		l.breakOff()
	case wc.Op == rdma.OpRecv:
		l.handleLateRecv(now, l.message(int(wc.ID), int(wc.Bytes)))
		l.freeSlot(int(wc.ID))
		l.postRecv(now)
	default:
		l.completed()
		l.awaitSends(l.sent > l.complete)
		if !l.broken {
			l.g.lg.HandleSent(now, l.index, wc.ID)
		}
	}
}

// handleLateRecv has a group hear what comes over a link that it ended with, or gave up. The answer leaves with the next step.
//
// A device may be about to hand over what it has acknowledged when its queue pair goes to ERR. The machine knows what of that
// counts: what connections say (RFC 7609 §4.6.1), and DELETE LINK for the group (C.7.1), which Linux sends over one link only if
// that takes it. Where another link has the place, the machine would take the message for that one's.
func (l *link) handleLateRecv(now time.Time, msg []byte) {
	g := l.g
	if g.lg.State() != linkgroup.Dead && g.lg.AwaitsEarlier(l.index, msg) {
		g.s.devices.drain(now, l.rnic) // as in handleCompletion
	}
	if dead := g.lg.State() == linkgroup.Dead; dead && l.broken || !dead && g.links[l.index] != nil {
		return
	}
	if err := g.lg.HandleRecv(now, l.index, msg); err != nil { // a dead group has no errors any more
		g.s.counters.past.MessagesBad++
		g.s.malformed("link group", err)
	}
	if g.lg.PeerKnows() {
		g.s.lingering.tellClose()
	}
}

// sendLate sends a group's last words over a link that lingers, if the link still can.
func (g *group) sendLate(now time.Time, o *linkgroup.Output) {
	if g.lg.State() != linkgroup.Dead || o.Kind != linkgroup.OutSend {
		return
	}
	for l := range g.s.lingering.of(g) {
		if l.index == o.Link && !l.broken {
			l.send(o)
			l.post(now)
			l.awaitSends(true)
		}
	}
}

// breakOff notes that the link will not hear of the peer any more.
func (l *link) breakOff() {
	l.broken = true
	l.g.s.lingering.tellClose()
}

// awaitPeers waits until all peers have said that a group has ended, or know of the end
// of a link, but not long. Groups go on meanwhile, and their timers, which the stack's
// goroutine has left: a Linux peer that has asked something takes DELETE LINK after the
// answer, and may have to be told again.
func (s *Stack) awaitPeers() {
	end := time.Now().Add(lingerTime)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for s.awaitsPeer() {
		left := time.Until(end)
		if left <= 0 {
			return
		}
		timer.Reset(min(left, s.runTimers()))
		select {
		case <-s.lingering.heard:
		case <-s.alarm.wake:
		case <-timer.C:
		}
	}
}

func (s *Stack) awaitsPeer() bool {
	s.lock()
	defer s.unlock()
	for _, g := range s.groups.byID {
		if g.awaitsPeer() {
			return true
		}
	}
	return s.lingering.awaitsPeer(time.Now())
}

// awaitsPeer reports whether the peer can still say that it knows of the end.
func (g *group) awaitsPeer() bool {
	return !g.lg.PeerKnows() && slices.ContainsFunc(g.links[:], func(l *link) bool { return l != nil && l.transmits && !l.broken })
}
