// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"container/list"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Why [Server.Map] did not take a mapping.
var (
	ErrAddress = errors.New("portmap: addresses of a mapping must be of one family, with ports")
	ErrFull    = errors.New("portmap: table is full")
)

// ServerConfig says how a server is. Zero values of limits are the defaults.
type ServerConfig struct {
	CacheTime         CacheTime      // what clients are told; they should connect within it (§7.3.1.4)
	Agents            []netip.Prefix // who may ask for connections of other hosts than itself
	MaxMappings       int
	MaxPending        int
	MaxPendingPerPeer int
	MaxPeers          int
	PeerRate          int // datagrams per second
	PeerBurst         int
	AckTimeout        time.Duration
}

func (c *ServerConfig) setDefaults() {
	for _, f := range []struct {
		value *int
		def   int
	}{
		{&c.MaxMappings, DefaultMaxMappings},
		{&c.MaxPending, DefaultMaxPending},
		{&c.MaxPendingPerPeer, DefaultMaxPendingPerPeer},
		{&c.MaxPeers, DefaultMaxPeers},
		{&c.PeerRate, DefaultPeerRate},
		{&c.PeerBurst, DefaultPeerBurst},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
	}
	if c.AckTimeout == 0 {
		c.AckTimeout = DefaultAckTimeout
	}
}

// Validate returns an error if a value is out of range.
func (c *ServerConfig) Validate() error {
	for name, v := range map[string]int{
		"MaxMappings": c.MaxMappings, "MaxPending": c.MaxPending, "MaxPendingPerPeer": c.MaxPendingPerPeer,
		"MaxPeers": c.MaxPeers, "PeerRate": c.PeerRate, "PeerBurst": c.PeerBurst, "AckTimeout": int(c.AckTimeout),
	} {
		if v < 0 {
			return fmt.Errorf("portmap: %s is %d: want none or more than 0", name, v)
		}
	}
	if c.PeerRate > int(time.Second) {
		return fmt.Errorf("portmap: PeerRate is %d: want at most %d", c.PeerRate, time.Second)
	}
	return nil
}

// ServerStats count what a server has seen and done.
type ServerStats struct {
	Datagrams uint64

	// Discarded without an answer.

	Throttled uint64 // of peers that send too many
	Malformed uint64 // no message
	NotForUs  uint64 // a PMAccept or PMDeny
	StrayAcks uint64 // a PMAck of no transaction (§7.5.2)

	// Answered.

	Requests      uint64 // PMReqs, and of these:
	Duplicates    uint64 // one more of a transaction (§7.5.2)
	Replaced      uint64 // the same, with another AssocHandle (§7.5.2)
	Accepted      uint64
	DeniedUnknown uint64 // no such service
	DeniedForeign uint64 // for a connection from another host, and not from an agent
	DeniedPeer    uint64 // too many transactions of the peer wait for a PMAck
	DeniedFull    uint64 // of all peers

	// How accepted transactions ended, but for those that were replaced or then denied.

	Acked     uint64
	Connected uint64 // see [Server.HandleConnect]
	Expired   uint64

	// Now.

	Mappings, Pending, Peers int
}

// Server answers clients (§7.5.2). A transaction is kept from its PMAccept to its PMAck:
//
//	         PMReq, there is a mapping            PMAck, HandleConnect, AckTimeout
//	(none) ----------------------------> ACCEPTED -----------------------------------> (none)
//	                                      |    ^  PMReq again
//	                                      +----+
//
// All other PMReqs are denied, and leave nothing behind.
type Server struct {
	cfg      ServerConfig
	mappings map[netip.AddrPort]netip.AddrPort // SDP addresses by conventional ones
	peers    peers
	byCP     map[netip.AddrPort][]*transaction // those of one connecting peer's port: nearly always one
	order    list.List                         // of *transaction, by deadline
	stats    ServerStats
}

// transaction is one that was accepted.
type transaction struct {
	cp       netip.AddrPort
	ap       netip.AddrPort // conventional address
	sdp      netip.AddrPort
	handle   uint64
	peer     *peer
	deadline time.Time
	at       *list.Element
}

// NewServer makes a server without mappings. The configuration is valid.
func NewServer(c ServerConfig) *Server {
	c.setDefaults()
	c.Agents = slices.Clone(c.Agents)
	return &Server{
		cfg: c, mappings: make(map[netip.AddrPort]netip.AddrPort), byCP: make(map[netip.AddrPort][]*transaction),
		peers: newPeers(c.MaxPeers, c.PeerRate, c.PeerBurst),
	}
}

// Map says that a service has an SDP address, in the place of one that it had. An unspecified service address
// is all addresses of this host that have no mapping of their own, and an unspecified SDP address the
// one that the client asked for.
func (s *Server) Map(service, sdp netip.AddrPort) error {
	service, sdp = withoutZone(service), withoutZone(sdp)
	a, b := service.Addr(), sdp.Addr()
	if !a.IsValid() || !b.IsValid() || a.Is4() != b.Is4() || service.Port() == 0 || sdp.Port() == 0 {
		return fmt.Errorf("map %v to %v: %w", service, sdp, ErrAddress)
	}
	if _, ok := s.mappings[service]; !ok && len(s.mappings) >= s.cfg.MaxMappings {
		return fmt.Errorf("map %v to %v: %w: it has %d mappings", service, sdp, ErrFull, len(s.mappings))
	}
	s.mappings[service] = sdp
	return nil
}

// Unmap says that a service has no SDP address any more, and reports whether it had one.
// Connections that there are are not its business.
func (s *Server) Unmap(service netip.AddrPort) bool {
	service = withoutZone(service)
	_, ok := s.mappings[service]
	delete(s.mappings, service)
	return ok
}

// Stats returns the counts.
func (s *Server) Stats() ServerStats {
	st := s.stats
	st.Mappings, st.Pending, st.Peers = len(s.mappings), s.order.Len(), s.peers.len()
	return st
}

// HandleDatagram takes a datagram of a peer that was sent to an address of this host, and
// appends the answer, if there is one, which goes back to where the datagram came from (§7.4).
func (s *Server) HandleDatagram(now time.Time, from, to netip.Addr, datagram, answer []byte) []byte {
	s.HandleTimeout(now)
	s.stats.Datagrams++
	from = from.WithZone("")
	p := s.peers.find(now, from)
	if !s.peers.take(now, p) {
		s.stats.Throttled++
		return answer
	}
	m, err := ParseMessage(datagram)
	if err != nil {
		s.stats.Malformed++
		return answer
	}
	switch m.Type {
	case Request:
		reply := s.handleRequest(now, p, from, to.WithZone(""), m)
		return reply.Append(answer)
	case Ack:
		s.handleAck(p, m)
	case Accept, Deny:
		s.stats.NotForUs++
	}
	return answer
}

// handleRequest answers a PMReq with what is true now, whether it is new or not (§7.5.2).
func (s *Server) handleRequest(now time.Time, p *peer, from, to netip.Addr, m Message) Message {
	s.stats.Requests++
	if m.CP.Addr() != from && !s.isAgent(from) { // it has no say in what another host has asked
		s.stats.DeniedForeign++
		m.Type = Deny
		return m
	}
	t := s.find(m.CP, func(t *transaction) bool { return t.ap == m.AP })
	switch {
	case t == nil:
	case t.handle == m.Handle:
		s.stats.Duplicates++
	default:
		s.stats.Replaced++
		s.remove(t)
		t = nil
	}
	sdp, denied := s.decide(p, to, m, t)
	if denied != nil {
		*denied++
		if t != nil {
			s.remove(t)
		}
		m.Type = Deny
		return m
	}
	s.stats.Accepted++
	if t == nil {
		t = &transaction{cp: m.CP, ap: m.AP, handle: m.Handle, peer: p}
		p.pending++
		s.byCP[t.cp] = append(s.byCP[t.cp], t)
		t.at = s.order.PushBack(t)
	}
	t.sdp, t.deadline = sdp, now.Add(s.cfg.AckTimeout)
	s.order.MoveToBack(t.at)
	m.Type, m.CacheTime, m.AP = Accept, s.cfg.CacheTime, sdp
	return m
}

// decide returns the SDP address that a client is told, or the count of the reason why it
// is denied. t is the transaction of a duplicate.
func (s *Server) decide(p *peer, to netip.Addr, m Message, t *transaction) (sdp netip.AddrPort, denied *uint64) {
	sdp, ok := s.mapping(m.AP, to)
	switch {
	case !ok:
		return sdp, &s.stats.DeniedUnknown
	case t == nil && p.pending >= s.cfg.MaxPendingPerPeer:
		return sdp, &s.stats.DeniedPeer
	case t == nil && s.order.Len() >= s.cfg.MaxPending:
		return sdp, &s.stats.DeniedFull
	}
	return sdp, nil
}

func (s *Server) isAgent(a netip.Addr) bool {
	return slices.ContainsFunc(s.cfg.Agents, func(p netip.Prefix) bool { return p.Contains(a) })
}

// mapping finds the SDP address of a service. That of all addresses of this host is of the one that
// the client talks to, lest it is told of hosts that are not ours.
func (s *Server) mapping(service netip.AddrPort, to netip.Addr) (netip.AddrPort, bool) {
	sdp, ok := s.mappings[service]
	if !ok && service.Addr() == to {
		all := netip.IPv6Unspecified()
		if to.Is4() {
			all = netip.IPv4Unspecified()
		}
		sdp, ok = s.mappings[netip.AddrPortFrom(all, service.Port())]
	}
	if ok && sdp.Addr().IsUnspecified() {
		sdp = netip.AddrPortFrom(service.Addr(), sdp.Port())
	}
	return sdp, ok
}

// handleAck ends a transaction of the peer. The PMAck has the SDP address of the PMAccept that the client
// had first, which may be an older one than the last.
func (s *Server) handleAck(p *peer, m Message) {
	t := s.find(m.CP, func(t *transaction) bool { return t.handle == m.Handle && t.peer == p })
	if t == nil {
		s.stats.StrayAcks++
		return
	}
	s.stats.Acked++
	s.remove(t)
}

// HandleConnect is for the owner of an SDP address to which somebody has connected: that says as much as a
// PMAck, which may be lost (§7.5.2).
func (s *Server) HandleConnect(cp, sdp netip.AddrPort) {
	cp, sdp = withoutZone(cp), withoutZone(sdp)
	if t := s.find(cp, func(t *transaction) bool { return t.sdp == sdp }); t != nil {
		s.stats.Connected++
		s.remove(t)
	}
}

// NextTimeout returns when HandleTimeout is due.
func (s *Server) NextTimeout() (time.Time, bool) {
	if e := s.order.Front(); e != nil {
		return e.Value.(*transaction).deadline, true
	}
	return time.Time{}, false
}

// HandleTimeout forgets transactions for which no PMAck came (§7.5.2).
func (s *Server) HandleTimeout(now time.Time) {
	for {
		e := s.order.Front()
		if e == nil || now.Before(e.Value.(*transaction).deadline) {
			return
		}
		s.stats.Expired++
		s.remove(e.Value.(*transaction))
	}
}

// find returns the first transaction of a connecting peer that is so. One address has no more of them than
// its peer may have, so that is a short list.
func (s *Server) find(cp netip.AddrPort, is func(*transaction) bool) *transaction {
	all := s.byCP[cp]
	if i := slices.IndexFunc(all, is); i >= 0 {
		return all[i]
	}
	return nil
}

func (s *Server) remove(t *transaction) {
	t.peer.pending--
	s.order.Remove(t.at)
	rest := slices.DeleteFunc(s.byCP[t.cp], func(o *transaction) bool { return o == t })
	if len(rest) == 0 {
		delete(s.byCP, t.cp)
		return
	}
	s.byCP[t.cp] = rest
}

func withoutZone(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().WithZone(""), a.Port())
}
