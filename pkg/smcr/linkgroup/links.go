// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// link is one queue pair between the two peers.
type link struct {
	index       LinkIndex
	id          llc.LinkID
	local, peer Endpoint
	peerUserID  uint32
	state       linkState
	queue       [][llc.Size]byte // LLC messages that wait for the send budget
	ready       connQueue        // connections that write over this link and have something to send
	conns       int              // connections that write over this link
	inflight    int              // SENDs that have not completed
	heard       time.Time
	testSent    time.Time // zero: no TEST LINK is unanswered
	testData    [16]byte
	sent, recv  uint64 // stream bytes
}

type linkState uint8

const (
	linkDown linkState = iota
	linkForming
	linkActive
)

func (s linkState) String() string {
	switch s {
	case linkForming:
		return "FORMING"
	case linkActive:
		return "ACTIVE"
	case linkDown:
	}
	return "DOWN"
}

// LinkInfo describes a link.
type LinkInfo struct {
	Index       LinkIndex
	ID          llc.LinkID
	State       string
	Local, Peer Endpoint
	PeerUserID  uint32
	Conns       int    // that write over it
	Sent, Recv  uint64 // stream bytes
}

// Links returns the links of the group that are not down.
func (g *Group) Links() []LinkInfo {
	var infos []LinkInfo
	for i := range g.links {
		if l := &g.links[i]; l.state != linkDown {
			infos = append(infos, LinkInfo{l.index, l.id, l.state.String(), l.local, l.peer, l.peerUserID, l.conns, l.sent, l.recv})
		}
	}
	return infos
}

// firstLink is the link of the first contact while the group forms.
func (g *Group) firstLink() *link { return &g.links[0] }

// llcLink is the link that carries our next LLC request: any active one will
// do, since messages name the link they are about.
func (g *Group) llcLink() *link {
	for i := range g.links {
		if l := &g.links[i]; l.state == linkActive {
			return l
		}
	}
	return nil
}

// closeLink destroys the link's queue pair: afterwards the peer cannot write
// over it.
func (g *Group) closeLink(l *link) {
	if l.state == linkDown {
		return
	}
	l.state = linkDown
	l.queue = nil
	l.ready = connQueue{}
	l.inflight = 0
	l.testSent = time.Time{}
	g.out = append(g.out, Output{Kind: OutCloseLink, Link: l.index})
}

// testLink keeps the link proven (§4.5.3): it sends TEST LINK after silence
// and reports true when the link failed.
func (g *Group) testLink(now time.Time, l *link) bool {
	if l.state != linkActive {
		return false
	}
	if !l.testSent.IsZero() {
		return !now.Before(l.testSent.Add(TestLinkTimeout))
	}
	if !now.Before(l.heard.Add(g.cfg.TestLinkInterval)) {
		l.testSent = now
		for i := range l.testData {
			l.testData[i] = byte(g.cfg.Rand.Uint32())
		}
		l.send(llc.TestLink{UserData: l.testData})
	}
	return false
}

// testDue is when testLink wants to be called.
func (g *Group) testDue(l *link) time.Time {
	switch {
	case l.state != linkActive:
		return time.Time{}
	case l.testSent.IsZero():
		return l.heard.Add(g.cfg.TestLinkInterval)
	}
	return l.testSent.Add(TestLinkTimeout)
}

// send queues an LLC message on the link.
func (l *link) send(m llc.Message) {
	var b [llc.Size]byte
	m.Append(b[:0])
	l.queue = append(l.queue, b)
}

func (g *Group) pumpLLC(l *link) {
	for len(l.queue) > 0 && l.inflight < SendBudget {
		l.inflight++
		g.out = append(g.out, Output{Kind: OutSend, Link: l.index, Msg: l.queue[0]})
		l.queue = l.queue[1:]
	}
}

// isIdle reports whether the link has nothing that can go out now.
func (l *link) isIdle(g *Group) bool {
	return (len(l.queue) == 0 || l.inflight >= SendBudget) &&
		(l.ready.empty() || g.state != Active || l.inflight >= SendBudget-llcReserve)
}
