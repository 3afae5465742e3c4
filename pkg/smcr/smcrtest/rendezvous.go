// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
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
	carrier(name string) linkgroup.Endpoint // our half of the connection's link
	confirmed(name string) (bool, error)    // the peer knows the connection's RMB
	rmbe(name string) linkgroup.RMBE
	// activate takes the peer's RMBE from its Accept or Confirm, and its half of
	// the link that this message named.
	activate(now time.Time, name string, peer linkgroup.RMBE, half linkgroup.Endpoint) error
	abandon(now time.Time, name string, declined bool)
	condition() condition
	giveUp(now time.Time) // a first contact

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
)

// patience is how long a rendezvous may take, as CLC timers have it.
const patience = 6 * time.Second

// Connect starts a connection from a peer to another one; Run completes it.
func (w *World) Connect(client, server int, name string) {
	if w.conns[name] != nil || client == server {
		return
	}
	c := &pair{name: name, peers: [2]int{client, server}}
	if client > server {
		c.peers, c.client = [2]int{server, client}, 1
	}
	w.conns[name] = c
	w.join(c)
	w.pump()
}

// join puts a connection on a path of its direction.
func (w *World) join(c *pair) {
	for _, p := range w.paths {
		if p.client != c.client || p.peers != c.peers {
			continue
		}
		server := p.nodes[1-c.client].condition()
		switch {
		case server == forming && p.nodes[c.client].condition() != dead:
			w.after(time.Millisecond, func() { w.join(c) }) // one first contact at a time
			return
		case server == active && p.nodes[c.client].condition() == active:
			c.path = p
			w.accept(c)
			return
		}
	}
	w.firstContact(c)
}

func (c *pair) fail(w *World, err error) {
	if c.failed != nil {
		return
	}
	w.trace("%v rendezvous of %s: %v", w.Elapsed(), c.name, err)
	c.failed = err
	if c.path != nil {
		for side, n := range c.path.nodes {
			// Before the client could write, each side hears the other's
			// Decline, or has not heard of the other's RMBE.
			n.abandon(c.path.clock(side), c.name, !c.opened)
			if n.condition() == forming {
				c.path.excused = "its first contact failed"
				n.giveUp(c.path.clock(side))
			}
		}
	}
}

// firstContact makes a path (§3.5.1).
func (w *World) firstContact(c *pair) {
	p := &path{w: w, id: len(w.paths), peers: c.peers, client: c.client}
	var rnics [2]*rnic
	for side, peer := range p.peers {
		if rnics[side] = w.anyRNIC(peer, nil); rnics[side] == nil {
			c.failed = errNoDevice
			w.trace("%v rendezvous of %s: %v", w.Elapsed(), c.name, c.failed)
			return
		}
	}
	c.path = p
	for side, peer := range p.peers {
		role := linkgroup.Server
		if side == c.client {
			role = linkgroup.Client
		}
		if w.cfg.Linux[peer] {
			p.nodes[side] = newLinux(w, p, side, role, rnics[side])
		} else {
			p.nodes[side] = newEngine(w, p, side, role, rnics[side])
		}
	}
	w.paths = append(w.paths, p)
	client, server := p.nodes[c.client], p.nodes[1-c.client]
	if err := server.open(w.now, c.name, nil); err != nil {
		w.fault("first RMBE: %w", err)
		return
	}
	w.message(c, func() { // Accept
		err := client.open(w.now, c.name, nil)
		if err == nil {
			err = client.activate(w.now, c.name, server.rmbe(c.name), server.firstEndpoint())
		}
		if err != nil {
			w.fault("first contact of %s at the client: %w", c.name, err)
			return
		}
		client.connectPeer(p.clock(c.client), server.firstEndpoint())
		w.message(c, func() { // Confirm
			if err := server.activate(w.now, c.name, client.rmbe(c.name), client.firstEndpoint()); err != nil {
				w.fault("first contact of %s at the server: %w", c.name, err)
				return
			}
			server.connectPeer(p.clock(1-c.client), client.firstEndpoint())
			w.await(c, func() (bool, error) {
				return client.condition() == active && server.condition() == active, nil
			}, func() { c.opened = true })
		})
	})
}

// anyRNIC is the first RNIC that works and is not among those to avoid.
func (w *World) anyRNIC(peer int, avoid func(*rnic) bool) *rnic {
	for _, r := range w.peers[peer].rnics {
		if r.usable() && (avoid == nil || !avoid(r)) {
			return r
		}
	}
	return nil
}

// accept is a subsequent contact (§3.5.2).
func (w *World) accept(c *pair) {
	p := c.path
	client, server := p.nodes[c.client], p.nodes[1-c.client]
	if err := server.open(p.clock(1-c.client), c.name, nil); err != nil {
		c.fail(w, err)
		return
	}
	w.await(c, func() (bool, error) { return server.confirmed(c.name) }, func() {
		via, offer := server.carrier(c.name), server.rmbe(c.name)
		w.message(c, func() { // Accept
			if err := client.open(p.clock(c.client), c.name, &via); err != nil {
				c.fail(w, err)
				return
			}
			w.await(c, func() (bool, error) { return client.confirmed(c.name) }, func() {
				if err := client.activate(p.clock(c.client), c.name, offer, via); err != nil {
					c.fail(w, err)
					return
				}
				c.opened = true // the client may write before its Confirm is read
				confirm, half := client.rmbe(c.name), client.carrier(c.name)
				w.after(w.delay(), func() {
					server := p.nodes[1-c.client] // it may have restarted
					if server.condition() == dead {
						return
					}
					err := server.activate(p.clock(1-c.client), c.name, confirm, half)
					switch {
					case err != nil && !p.carries(via):
						c.fail(w, fmt.Errorf("%w: %w", errLinkLost, err)) // the server resets the TCP connection
					case err != nil:
						w.fault("Confirm of %s: %w", c.name, err)
					}
				})
			})
		})
	})
}

// carries reports whether both sides have a link with this half of the server.
func (p *path) carries(via linkgroup.Endpoint) bool {
	sides := 0
	for side, n := range p.nodes {
		for _, l := range n.links() {
			half := l.local
			if side == p.client {
				half = l.peer
			}
			if l.active && half.QPN == via.QPN {
				sides++
			}
		}
	}
	return sides == 2
}

// message is a CLC message: what the other side does when it arrives.
func (w *World) message(c *pair, then func()) {
	w.after(w.delay(), func() {
		if c.path.nodes[0].condition() == dead || c.path.nodes[1].condition() == dead {
			c.fail(w, errPathDead)
			return
		}
		then()
	})
}

// await polls for a condition, as the goroutine of a rendezvous waits for it.
func (w *World) await(c *pair, cond func() (bool, error), then func()) {
	began := w.now
	var try func()
	try = func() {
		ok, err := cond()
		for _, n := range c.path.nodes {
			if n.condition() == dead {
				err = errPathDead
			}
		}
		switch {
		case err != nil:
			c.fail(w, err)
		case ok:
			then()
		case w.now.Sub(began) > patience:
			c.fail(w, errPatience)
		default:
			// The longer it takes, the less often it looks.
			w.after(min(20*time.Microsecond+w.now.Sub(began)/8, 10*time.Millisecond), try)
		}
	}
	try()
}
