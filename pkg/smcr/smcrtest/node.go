// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// node is one side of a path: a peer's link group. Links and their queue pairs
// have the index that the node gave them.
type node interface {
	// Set-up, in the order of a rendezvous (RFC 7609 §3.5).
	firstEndpoint() linkgroup.Endpoint
	connectPeer(now time.Time, peer linkgroup.Endpoint)
	// open makes a connection's half; via is the peer's half of the link that
	// the Accept named, nil at the server.
	open(now time.Time, name string, via *linkgroup.Endpoint) error
	localEndpoint(name string) linkgroup.Endpoint // our half of the connection's link
	confirmed(name string) (bool, error)          // the peer knows the connection's RMB
	rmbe(name string) linkgroup.RMBE
	// activate takes the peer's RMBE from its Accept or Confirm, and its half of
	// the link that this message named.
	activate(now time.Time, name string, peer linkgroup.RMBE, half linkgroup.Endpoint) error
	abandon(now time.Time, name string, declined bool)
	condition() condition
	usable() bool         // for another connection
	giveUp(now time.Time) // a first contact
	// terminate ends a group that stands, and tells the peer.
	terminate(now time.Time)

	// Input and output.
	recv(now time.Time, index int, b []byte) error
	sent(now time.Time, index int, id uint64)
	place(index int, conn string, rkey uint32, addr uint64, b []byte) error
	linkFailed(now time.Time, index int, err error)
	port(now time.Time, rnic int, up bool)
	timeout(now time.Time)
	nextTimeout() (time.Time, bool)
	poll(now time.Time, post func(index int, wr work)) bool // false when there was nothing

	// What it is.
	end(name string) end // nil after it was released
	links() []linkView
	dialect() llc.Dialect
	sendLimit() int // on each link
	// leaks is what is still held when nothing should be, but for connections
	// that are excused.
	leaks(excused func(conn string) bool) []string
	String() string
}

// linkView is a link as one side sees it.
type linkView struct {
	index       int
	id          llc.LinkID
	local, peer linkgroup.Endpoint
	active      bool
}

type condition uint8

const (
	forming condition = iota
	active
	dead
)

func (c condition) String() string {
	switch c {
	case forming:
		return "forming"
	case active:
		return "active"
	case dead:
	}
	return "dead"
}

// end is one end of a connection, as its application sees it.
type end interface {
	write(n int) int // how many fitted
	read(t reader, n int) int
	shutdown()
	close(now time.Time)
	abort(now time.Time)
	progress() progress
}

// reader takes complaints about bytes that are not the ones written.
type reader interface {
	fault(format string, args ...any)
}

// progress is how far an end of a connection has come.
type progress struct {
	produced, consumed uint64
	unread             uint64
	eof, aborted, over bool // over: the machine is done with it
	closed             bool // by the application
	state              string
}

// Errors of a rendezvous. Where the shell would fall back to TCP, the
// connection just fails.
var (
	errPathDead = errors.New("the link group died during the rendezvous")
	errPatience = errors.New("the rendezvous took too long")
	errNoDevice = errors.New("no RNIC")
	errLinkLost = errors.New("the link of the rendezvous is gone")

	errDeclined  = errors.New("declined")
	errOutOfSync = errors.New("no such link group")
	errWish      = errors.New("declined for no reason")
	errSetUp     = errors.New("the first contact failed")
	errRestarted = errors.New("a peer restarted")
)

// patience is how long a rendezvous may take, as CLC timers have it.
const patience = 6 * time.Second

// anyRNIC is the first RNIC that works and is not among those to avoid.
func (w *World) anyRNIC(peer int, avoid func(*rnic) bool) *rnic {
	for _, r := range w.peers[peer].rnics {
		if r.usable() && (avoid == nil || !avoid(r)) {
			return r
		}
	}
	return nil
}
