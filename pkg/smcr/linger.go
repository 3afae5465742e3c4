// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// Our end of a link group is not the peer's: its answer to DELETE LINK, or a
// DELETE LINK of its own, may still come, and Linux waits until it is
// acknowledged. On a software RNIC that is for ever if our queue pair is gone.
// So queue pairs outlive their group for a moment, in which they only
// acknowledge. The group's RMBs do not: once the group has no connections, a
// write of the peer meets no memory.
const (
	// lingerTime allows for the peer's answer, and for two losses of it with
	// the ACK timeout that Linux and we use.
	lingerTime = 300 * time.Millisecond
	// maxLingering bounds the queue pairs of which nobody has any use: the
	// oldest go before their time.
	maxLingering = 256
)

// endLink closes a link whose machine has no use for it any more: at once, or
// later if its group has ended and the peer may have something to say. Work
// requests that read the send buffers of connections must not outlive these.
func (g *group) endLink(now time.Time, l *link) {
	if g.lg.State() != linkgroup.Dead || !g.ready || !l.transmits || l.broken || l.complete < l.wrote {
		l.shut(now)
		return
	}
	s := g.s
	l.until = now.Add(lingerTime)
	g.links[l.index] = nil
	s.lingering = append(s.lingering, l)
	if len(s.lingering) > maxLingering {
		s.lingering[0].close()
		s.lingering = slices.Delete(s.lingering, 0, 1)
	}
	s.wakeAt(l.until)
}

// lingers reports whether the link only acknowledges.
func (l *link) lingers() bool { return !l.until.IsZero() }

// lateCompletion takes a completion of a link that lingers.
func (l *link) lateCompletion(now time.Time, wc *rdma.WC) {
	switch {
	case wc.Status != rdma.StatusSuccess:
		l.breakOff()
	case wc.Op == rdma.OpRecv:
		l.heed(l.message(int(wc.ID), int(wc.Bytes)))
		l.freeSlot(int(wc.ID))
		l.postRecv(now)
	default:
		l.complete++
		l.freeLong()
	}
}

// heed notes that the peer ends the group, or knows that we do.
func (l *link) heed(msg []byte) {
	const typeBits = 0x0f // the others tell the version
	if len(msg) > 0 && llc.Type(msg[0]&typeBits) == llc.TypeDeleteLink {
		l.g.peerEnded = true
		l.g.s.tellClose()
	}
}

// breakOff notes that the link will not hear of the peer any more.
func (l *link) breakOff() {
	l.broken = true
	l.g.s.tellClose()
}

// endLingering closes the links whose time is over.
func (s *Stack) endLingering(now time.Time) {
	n := 0
	for n < len(s.lingering) && !now.Before(s.lingering[n].until) {
		s.lingering[n].close()
		n++
	}
	s.lingering = slices.Delete(s.lingering, 0, n)
}

// tellClose lets Close look again whether it must wait.
func (s *Stack) tellClose() {
	select {
	case s.heard <- struct{}{}:
	default:
	}
}

// awaitPeers waits until all peers know of the end, but not long, and closes
// the links that linger.
func (s *Stack) awaitPeers() {
	timer := time.NewTimer(lingerTime)
	defer timer.Stop()
	for waiting := s.awaitsPeer(); waiting; {
		select {
		case <-s.heard:
			waiting = s.awaitsPeer()
		case <-timer.C:
			waiting = false
		}
	}
	s.lock()
	defer s.unlock()
	for _, l := range s.lingering {
		l.close()
	}
	s.lingering = nil
}

func (s *Stack) awaitsPeer() bool {
	s.lock()
	defer s.unlock()
	return slices.ContainsFunc(s.lingering, func(l *link) bool { return !l.broken && !l.g.peerEnded })
}
