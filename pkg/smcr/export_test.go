// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// BreakTCP resets the TCP connection under an SMC-R connection, as the
// kernel does when the process dies.
func BreakTCP(c *Conn) {
	_ = c.tcp.SetLinger(0)
	_ = c.tcp.Close()
}

// KnownRMBs returns how many RMBs the peers of a stack know, and how many there
// are.
func KnownRMBs(s *Stack) (known, all int) {
	s.lock()
	defer s.unlock()
	for _, g := range s.groups.byID {
		for id := range g.rmbs {
			all++
			if g.lg.IsConfirmed(id) {
				known++
			}
		}
	}
	return known, all
}

// PeerIDFor returns the peer ID under which the peer with an address knows a stack.
func PeerIDFor(s *Stack, a netip.Addr) clc.PeerID { return s.peerIDFor(a) }

// PrefixesFor returns our addresses, with their prefixes, for a connection of an address.
func PrefixesFor(s *Stack, a netip.Addr) []netip.Prefix { return s.prefixes(a) }

// RMBToken returns what the peer needs to write into a connection's receive buffer.
func RMBToken(c *Conn) (rdma.RKey, uint64) {
	c.stack.lock()
	defer c.stack.unlock()
	e := c.lc.Local()
	return e.RKey, e.VAddr + uint64(e.Size)*uint64(e.Index-1)
}

// LookForAnswer looks once for something to read in RelayFrom's place.
func LookForAnswer(c *Conn) bool {
	in := c.send.intake.Load()
	if in == nil {
		return false
	}
	got, _ := in.answered()
	return got
}

// FailLinks has all queue pairs of a stack fail while nobody empties its completion queues, and says how many there were.
func FailLinks(s *Stack) (n int, err error) {
	s.lock()
	defer s.unlock()
	for _, r := range s.devices.list {
		for _, l := range r.links {
			n++
			err = errors.Join(err, l.qp.Modify(rdma.QPAttr{State: rdma.QPError}))
		}
	}
	return n, err
}

// Look has a parker look at its directions once, if it does not do so by itself.
func Look(p *Parker) { p.look() }

// StateOf returns the state of a direction.
func StateOf(d *Direction) string { return d.stateNow().String() }

// StackOf returns the stack of a connection.
func StackOf(c *Conn) *Stack { return c.stack }

// EndTCP ends our direction of the TCP connection in order.
func EndTCP(c *Conn) { _ = c.tcp.CloseWrite() }

// SpoilTCP sends data on the TCP connection.
func SpoilTCP(c *Conn) { _, _ = c.tcp.Write([]byte("no")) }

// InGrace reports whether SMC-R has time since the end of the TCP connection.
func InGrace(c *Conn) bool {
	c.stack.lock()
	defer c.stack.unlock()
	return c.watched.inGrace()
}

// EndGrace ends the time that SMC-R has after the end of the TCP connection;
// false if that has not come.
func EndGrace(c *Conn) bool {
	c.stack.lock()
	t := c.watched.grace
	c.stack.unlock()
	if t != nil && t.Stop() {
		c.tcpEnded()
	}
	return t != nil
}

// RMBE returns a connection's receive buffer.
func RMBE(c *Conn) []byte { return c.recv.rmbe }

// Delivered reports whether all that was written to a connection is known to have arrived.
func Delivered(c *Conn) bool {
	c.stack.lock()
	defer c.stack.unlock()
	c.stack.devices.drainSends(time.Now())
	return c.lc.Data().Completed() == c.streams.written()
}

// SendBuffer returns a connection's send buffer.
func SendBuffer(c *Conn) []byte { return c.send.buf.mem }

// LingerTime is how long a queue pair outlives its group.
const LingerTime = lingerTime

// RefuseDelay is how long a lost link's queue pair waits for the peer's word before
// it refuses what comes.
const RefuseDelay = refuseDelay

// Lingering returns how many queue pairs outlive their group, and whether Close
// would wait for the peer of one.
func Lingering(s *Stack) (n int, awaited bool) {
	awaited = s.awaitsPeer()
	s.lock()
	defer s.unlock()
	return len(s.lingering.links), awaited
}

// HoldTurn keeps a stack's turn until release, which does not look for work that came meanwhile.
func HoldTurn(s *Stack) (release func()) {
	s.turn.Lock()
	return s.turn.Unlock
}

// WriteUrgentLate writes an urgent byte as WriteUrgent does that CloseWrite overtakes, and has the machine look.
func WriteUrgentLate(c *Conn) (written bool, err error) {
	return c.commitUrgent(), c.withTurn(func() {})
}

// DeviceActive tells whether links may be made on a device.
func (s *Stack) DeviceActive(i int) bool {
	s.lock()
	defer s.unlock()
	return s.devices.list[i].active()
}

// LoseLink has the link with a queue pair fail.
func LoseLink(s *Stack, n rdma.QPN) {
	s.lock()
	defer s.unlock()
	for _, r := range s.devices.list {
		if l := r.links[n]; l != nil {
			l.fail(time.Now(), errors.New("lost by a test"))
			l.g.flush(time.Now())
		}
	}
}

// PlaceWait is how long a client waits for a place among those that owe their Confirm.
const PlaceWait = placeWait

// MaxIdleGroups is how many link groups without connections a stack keeps.
const MaxIdleGroups = maxIdleGroups

// MaxRendezvousWith is how many rendezvous a listener has with one address.
const MaxRendezvousWith = maxRendezvousWith

// Doubts returns how often the peer of a link group said that it does not have the
// group, and whether a link has answered since the last time.
func Doubts(s *Stack, group uint32) (n int, answered bool) {
	s.lock()
	defer s.unlock()
	g := s.groups.byID[group]
	return g.doubts, g.lg.ProvenSince(g.doubted)
}

// CoolBatch is how many connections are looked at in one turn.
const CoolBatch = coolBatch

// CoolDown has a stack look at its connections until nothing is left to look at that does not move.
func CoolDown(s *Stack) {
	s.lock()
	defer s.unlock()
	for range 3 {
		s.cooling.at = time.Now()
		for n := len(s.cooling.now) + len(s.cooling.later); n > 0; n -= coolBatch {
			s.coolDown(time.Now())
		}
	}
}

// WriteSilently writes into the memory of a connection's peer, and does not tell the peer.
func WriteSilently(c *Conn, rkey rdma.RKey, addr uint64, b []byte) {
	c.stack.lock()
	defer c.stack.unlock()
	for _, l := range c.group.links {
		if l != nil {
			copy(c.send.buf.mem, b)
			sge := c.send.buf.region.sge(l.rnic, c.send.buf.off)
			sge.Length = uint32(len(b))
			l.wrs = append(l.wrs, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{sge}, RemoteAddr: addr, RKey: rkey})
			l.post(time.Now())
			return
		}
	}
}

// Prefers is the number of the device that a stack proposes to a peer from now on, if it learned that.
func Prefers(s *Stack, peer netip.Addr) uint8 {
	s.lock()
	defer s.unlock()
	return s.preferred[peer]
}

// MaxLost is how many lost link groups a stack knows.
const MaxLost = maxLost

// AgeLost makes the lost link groups of a stack as old as they may become.
func AgeLost(s *Stack) {
	s.lock()
	defer s.unlock()
	for i := range s.groups.lost {
		s.groups.lost[i].at = s.groups.lost[i].at.Add(-lostFor)
	}
}

// AddLost makes a stack know another lost link group.
func AddLost(s *Stack, info GroupInfo) {
	s.lock()
	defer s.unlock()
	s.groups.lost.add(time.Now(), info)
}
