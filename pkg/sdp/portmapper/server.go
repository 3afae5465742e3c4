// SPDX-License-Identifier: Apache-2.0

package portmapper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/sdp/portmap"
)

// ServerConfig says how a server is. Zero values of limits are portmap's defaults.
type ServerConfig struct {
	// CacheTime is how long clients may keep an answer, as exactly as the protocol can say it;
	// 0: it is good for one connection, made at once.
	CacheTime time.Duration
	// Agents are hosts that may ask for connections of others.
	Agents []netip.Prefix
	// MaxMappings bounds the table, MaxPending the accepted transactions that wait for their
	// confirmation, MaxPendingPerPeer those of one peer, MaxPeers the peers that are told apart.
	MaxMappings, MaxPending, MaxPendingPerPeer, MaxPeers int
	// PeerRate is how many datagrams of a peer are heard per second, PeerBurst how many at once.
	PeerRate, PeerBurst int
	// AckTimeout is how long a transaction waits for its confirmation.
	AckTimeout time.Duration
	// Control is called for the socket before it is bound, as in [net.ListenConfig].
	Control func(network, address string, c syscall.RawConn) error
}

func (c *ServerConfig) machine() portmap.ServerConfig {
	return portmap.ServerConfig{
		CacheTime: portmap.NewCacheTime(c.CacheTime), Agents: c.Agents,
		MaxMappings: c.MaxMappings, MaxPending: c.MaxPending, MaxPendingPerPeer: c.MaxPendingPerPeer, MaxPeers: c.MaxPeers,
		PeerRate: c.PeerRate, PeerBurst: c.PeerBurst, AckTimeout: c.AckTimeout,
	}
}

// Validate returns an error if a value is out of range.
func (c *ServerConfig) Validate() error {
	m := c.machine()
	return m.Validate()
}

// ServerStats count what a server has seen and done.
type ServerStats struct {
	portmap.ServerStats
	ToMany      uint64 // datagrams to an address that many hosts have: nobody answers those
	WriteErrors uint64 // answers that the kernel did not take
	ReadErrors  uint64
}

// Server answers clients at one address. It is safe for concurrent use.
type Server struct {
	conn *net.UDPConn
	addr netip.AddrPort
	done chan struct{}  // closed by Close
	once sync.Once      // of Close
	wg   sync.WaitGroup // of the loop

	mu     sync.Mutex
	m      *portmap.Server
	toMany uint64
	errs   struct{ read, write uint64 }
}

// Listen begins to answer clients at an address, with an empty table: all are denied. The port of
// port mappers is [Port]; 0 is any. An unspecified address is all of this host, of its family:
// an answer leaves from the one that was asked. The caller closes the server.
func Listen(at netip.AddrPort, c ServerConfig) (*Server, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	at = unmap(at)
	if !at.Addr().IsValid() {
		return nil, fmt.Errorf("listen for port mapper clients on %v: %w", at, ErrAddress)
	}
	conn, err := listenUDP(at, c.Control)
	if err != nil {
		return nil, fmt.Errorf("listen for port mapper clients on %v: %w", at, err)
	}
	bound, ok := conn.LocalAddr().(*net.UDPAddr)
	if !ok {
		return nil, errors.Join(fmt.Errorf("listen for port mapper clients: address is %T", conn.LocalAddr()), conn.Close())
	}
	s := &Server{
		conn: conn, addr: netip.AddrPortFrom(at.Addr(), uint16(bound.Port)), done: make(chan struct{}), m: portmap.NewServer(c.machine()),
	}
	s.wg.Go(s.loop)
	return s, nil
}

func listenUDP(at netip.AddrPort, control func(network, address string, c syscall.RawConn) error) (*net.UDPConn, error) {
	network, level, option := "udp6", unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	if at.Addr().Is4() {
		network, level, option = "udp4", unix.IPPROTO_IP, unix.IP_PKTINFO
	}
	lc := net.ListenConfig{Control: func(network, address string, r syscall.RawConn) error {
		var err error
		if e := r.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) }); e != nil || err != nil {
			return errors.Join(e, err)
		}
		if control != nil {
			return control(network, address, r)
		}
		return nil
	}}
	n, err := lc.ListenPacket(context.Background(), network, at.String())
	if err != nil {
		return nil, err
	}
	conn, ok := n.(*net.UDPConn)
	if !ok {
		_ = n.Close()
		return nil, fmt.Errorf("socket is %T", n)
	}
	return conn, nil
}

// Addr is where the server listens.
func (s *Server) Addr() netip.AddrPort { return s.addr }

// Map says that a service has an SDP address, in the place of one that it had. An unspecified service address
// is the one at which the client asks, and an unspecified SDP address the one that it asks for. Both
// have ports and are of one family.
func (s *Server) Map(service, sdp netip.AddrPort) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.m.Map(unmap(service), unmap(sdp))
}

// Unmap says that a service has no SDP address any more, and reports whether it had one. Clients
// that know it may come for as long as they were told.
func (s *Server) Unmap(service netip.AddrPort) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.m.Unmap(unmap(service))
}

// HandleConnect is for who listens at an SDP address: somebody has connected, and so confirmed the
// transaction that led there, whose own confirmation may be lost. Without it such a transaction
// ends after AckTimeout.
func (s *Server) HandleConnect(c net.Conn) {
	cp, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return // no connection that a port mapper could lead to
	}
	sdp, err := netip.ParseAddrPort(c.LocalAddr().String())
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.m.HandleConnect(unmap(cp), unmap(sdp))
}

// Stats returns the counts.
func (s *Server) Stats() ServerStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return ServerStats{ServerStats: s.m.Stats(), ToMany: s.toMany, WriteErrors: s.errs.write, ReadErrors: s.errs.read}
}

// Close ends the server.
func (s *Server) Close() error {
	var err error
	s.once.Do(func() {
		close(s.done)
		err = s.conn.Close()
	})
	s.wg.Wait()
	return err
}

// loop answers datagrams one by one. What comes faster the kernel drops.
func (s *Server) loop() {
	var in, oob, out [readBytes]byte
	for {
		n, oobn, _, from, err := s.conn.ReadMsgUDPAddrPort(in[:], oob[:])
		switch {
		case err == nil:
			s.handle(unmap(from), in[:n], oob[:oobn], out[:0])
		case errors.Is(err, os.ErrDeadlineExceeded):
		case errors.Is(err, net.ErrClosed):
			return
		default:
			s.count(&s.errs.read)
			select {
			case <-s.done:
				return
			case <-time.After(pauseAfterError):
			}
		}
		s.mu.Lock()
		s.m.HandleTimeout(time.Now())
		next, _ := s.m.NextTimeout()
		s.mu.Unlock()
		_ = s.conn.SetReadDeadline(next) // the zero time is none
	}
}

// handle answers a datagram. Its answer leaves from the address that was asked (§7.4).
func (s *Server) handle(from netip.AddrPort, b, oob, out []byte) {
	to, ok := destination(oob)
	if !ok {
		s.count(&s.toMany)
		return
	}
	s.mu.Lock()
	out = s.m.HandleDatagram(time.Now(), from.Addr(), to, b, out)
	s.mu.Unlock()
	if len(out) == 0 {
		return
	}
	if _, _, err := s.conn.WriteMsgUDPAddrPort(out, source(to), from); err != nil {
		s.count(&s.errs.write)
	}
}

func (s *Server) count(n *uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*n++
}
