// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"slices"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// sockets lists the sockets of SMC of a namespace.
func sockets(ns *linux.NetNS) (all []smcnl.Socket, err error) {
	err = ns.Do(func() error {
		all, err = smcnl.Sockets()
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

// ports are those of a connection, the local one first.
type ports [2]uint16

// tcpConns are the TCP connections of a namespace by their ports. The kernel does not tell which of them
// is under a socket of SMC, nor the addresses of that, but its ports.
type tcpConns map[ports][]linux.TCPConn

// findTCPConns lists those of a namespace. If there are too many, none is known.
func findTCPConns(ns *linux.NetNS) (tcpConns, error) {
	all, err := linux.TCPConns(ns)
	if errors.Is(err, linux.ErrTooMuch) {
		return nil, nil
	}
	return byPorts(all), err
}

func byPorts(all []linux.TCPConn) tcpConns {
	out := make(tcpConns, len(all))
	for _, c := range all {
		key := ports{c.Local.Port(), c.Peer.Port()}
		out[key] = append(out[key], c)
	}
	return out
}

// under are the connections that may be under a socket: more than one if several peers use the same port
// at once.
func (t tcpConns) under(s *smcnl.Socket) []linux.TCPConn {
	if !s.Peer.Addr().IsUnspecified() { // a socket of AF_SMC
		return []linux.TCPConn{{Local: s.Local, Peer: s.Peer}}
	}
	return t[ports{s.Local.Port(), s.Peer.Port()}]
}

// A Conn is a connection of a socket of SMC: on SMC-R, on TCP if it fell back, or with its rendezvous under
// way. Local and Peer have unspecified addresses where ports do not tell which connection it is.
type Conn struct {
	smcnl.Socket
	// Inbound says that the other side opened it.
	Inbound bool
}

// Conns lists the connections of the sockets of SMC of a namespace.
func Conns(ns *linux.NetNS) ([]Conn, error) {
	socks, err := sockets(ns)
	if err != nil {
		return nil, err
	}
	var conns tcpConns
	if slices.ContainsFunc(socks, func(s smcnl.Socket) bool { return isConn(&s) && s.Peer.Addr().IsUnspecified() }) {
		if conns, err = findTCPConns(ns); err != nil {
			return nil, err
		}
	}
	return joined(socks, conns), nil
}

// isConn tells whether a socket is a connection, or becomes one.
func isConn(s *smcnl.Socket) bool {
	return s.State != smcnl.StateListen && s.State != smcnl.StateClosed && s.Peer.Port() != 0
}

// joined gives the connections among sockets the addresses of what is under them.
func joined(socks []smcnl.Socket, conns tcpConns) (out []Conn) {
	listens := map[uint16]bool{}
	for i := range socks {
		if socks[i].State == smcnl.StateListen {
			listens[socks[i].Local.Port()] = true
		}
	}
	for i := range socks {
		s := &socks[i]
		if !isConn(s) {
			continue
		}
		c := Conn{Socket: *s, Inbound: s.Role == smcnl.Server}
		if s.Role == "" { // it is not on SMC-R: the ports of those that a listener accepted are that of the listener
			c.Inbound = listens[s.Local.Port()]
		}
		if under := conns.under(s); len(under) == 1 {
			c.Local, c.Peer = under[0].Local, under[0].Peer
		}
		out = append(out, c)
	}
	return out
}
