// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"slices"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// sockets lists the sockets of SMC of a namespace that keep wants. The error is [linux.ErrTooMuch] if there are more than are returned:
// a program can make as many as it may have files.
func sockets(ns *linux.NetNS, keep func(*smcnl.Socket) bool) (all []smcnl.Socket, err error) {
	err = ns.Do(func() error {
		all, err = smcnl.Sockets(keep)
		return err
	})
	return all, err
}

// isLive tells whether a socket is a connection on SMC-R that this side has not ended.
func isLive(s *smcnl.Socket) bool {
	switch s.State {
	case smcnl.StateInit, smcnl.StateClosed, smcnl.StateListen:
		return false
	}
	return s.Mode == smcnl.ModeSMCR && s.Shutdown != smcnl.ShutBoth
}

// mayBecomeLive tells whether the rendezvous of a socket is under way.
func mayBecomeLive(s *smcnl.Socket) bool {
	return s.Mode == smcnl.ModeSMCR && s.State == smcnl.StateInit && s.Local.Port() != 0 && s.Peer.Port() != 0
}

// concernsRevocation tells whether a socket is a connection on SMC-R, or may become one.
func concernsRevocation(s *smcnl.Socket) bool { return isLive(s) || mayBecomeLive(s) }

// ports are those of a connection, the local one first.
type ports [2]uint16

// tcpSockets are the TCP sockets of a namespace by their ports. The kernel does not tell which of them
// is under a socket of SMC, nor the addresses of that, but its ports.
type tcpSockets struct {
	conns map[ports][]linux.TCPConn
	// In the node's network, ours are the pod's connections, and listens the ports on which programs listen: true if
	// one of the pod does.
	ours    map[linux.TCPConn]bool
	listens map[uint16]bool
}

// findTCP lists those of a place. If there are too many, none is known of a namespace; of a cgroup that is an error, as then
// nobody knows whose they are.
func findTCP(at linux.Place) (t tcpSockets, err error) {
	if at.Cgroup == nil {
		all, err := linux.TCPConns(at.NetNS)
		if errors.Is(err, linux.ErrTooMuch) {
			return t, nil
		}
		return byPorts(all), err
	}
	all, err := linux.TCPSockets(at.NetNS)
	if err != nil {
		return t, err
	}
	// After the sockets: a container that came meanwhile is known.
	ours, err := at.Cgroup.Family()
	if err != nil {
		return t, err
	}
	return ofCgroups(all, ours), nil
}

func byPorts(all []linux.TCPConn) tcpSockets {
	out := make(map[ports][]linux.TCPConn, len(all))
	for _, c := range all {
		key := ports{c.Local.Port(), c.Peer.Port()}
		out[key] = append(out[key], c)
	}
	return tcpSockets{conns: out}
}

// ofCgroups tells the sockets of some cgroups from those of others.
func ofCgroups(all []linux.TCPSocket, ours map[uint64]bool) tcpSockets {
	var conns []linux.TCPConn
	mine, listens := map[linux.TCPConn]bool{}, map[uint16]bool{}
	for _, s := range all {
		if s.Listens {
			listens[s.Local.Port()] = listens[s.Local.Port()] || ours[s.Cgroup]
			continue
		}
		conns = append(conns, s.TCPConn)
		if ours[s.Cgroup] {
			mine[s.TCPConn] = true
		}
	}
	t := byPorts(conns)
	t.ours, t.listens = mine, listens
	return t
}

// isOurs tells whether a connection is the pod's.
func (t *tcpSockets) isOurs(c linux.TCPConn) bool { return t.ours == nil || t.ours[c] }

// under are the connections that may be under a socket: more than one if several peers use the same port
// at once.
func (t *tcpSockets) under(s *smcnl.Socket) []linux.TCPConn {
	if !s.Peer.Addr().IsUnspecified() { // a socket of AF_SMC
		return []linux.TCPConn{{Local: s.Local, Peer: s.Peer}}
	}
	return t.conns[ports{s.Local.Port(), s.Peer.Port()}]
}

// isForeign tells whether a socket of SMC is certainly not the pod's.
func (t *tcpSockets) isForeign(s *smcnl.Socket) bool {
	if s.State == smcnl.StateListen {
		ours, known := t.listens[s.Local.Port()]
		return known && !ours
	}
	under := t.under(s)
	return len(under) > 0 && !slices.ContainsFunc(under, t.isOurs)
}

// A Conn is a connection of a socket of SMC: on SMC-R, on TCP if it fell back, or with its rendezvous under
// way. Local and Peer have unspecified addresses where ports do not tell which connection it is.
type Conn struct {
	smcnl.Socket
	// Inbound says that the other side opened it.
	Inbound bool
}

// Conns lists the connections of the sockets of SMC of a place. The error is [linux.ErrTooMuch] if there are more than are returned.
func Conns(at linux.Place) ([]Conn, error) {
	socks, tooMuch := sockets(at.NetNS, isListedConn)
	if tooMuch != nil && !errors.Is(tooMuch, linux.ErrTooMuch) {
		return nil, tooMuch
	}
	var tcp tcpSockets
	if slices.ContainsFunc(socks, func(s smcnl.Socket) bool {
		return isConn(&s) && (at.Cgroup != nil || s.Peer.Addr().IsUnspecified())
	}) {
		var err error
		if tcp, err = findTCP(at); err != nil {
			return nil, err
		}
	}
	return joined(socks, tcp), tooMuch
}

// isConn tells whether a socket is a connection, or becomes one.
func isConn(s *smcnl.Socket) bool {
	return s.State != smcnl.StateListen && s.State != smcnl.StateClosed && s.Peer.Port() != 0
}

// isListedConn tells whether a socket is a connection, or listens for some.
func isListedConn(s *smcnl.Socket) bool { return isConn(s) || s.State == smcnl.StateListen }

// joined gives the connections among sockets the addresses of what is under them.
func joined(socks []smcnl.Socket, tcp tcpSockets) (out []Conn) {
	listens := map[uint16]bool{}
	for i := range socks {
		if socks[i].State == smcnl.StateListen {
			listens[socks[i].Local.Port()] = true
		}
	}
	for i := range socks {
		s := &socks[i]
		if !isConn(s) || tcp.isForeign(s) {
			continue
		}
		c := Conn{Socket: *s, Inbound: s.Role == smcnl.Server}
		if s.Role == "" { // it is not on SMC-R: the ports of those that a listener accepted are that of the listener
			c.Inbound = listens[s.Local.Port()]
		}
		if under := tcp.under(s); len(under) == 1 {
			c.Local, c.Peer = under[0].Local, under[0].Peer
		}
		out = append(out, c)
	}
	return out
}
