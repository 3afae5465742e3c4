// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// peerConn is the network's side of a session: *smcr.Conn, or plainTCP.
type peerConn interface {
	StartRelayFrom(d *smcr.Direction, r *net.TCPConn, then func(int64, error))
	StartRelayTo(d *smcr.Direction, w *net.TCPConn, then func(int64, error))
	StartAwaitEnd(d *smcr.Direction, then func(error))
	CloseWrite() error
	Close() error
	Abort() error
	Info() smcr.Info
}

// stack is the SMC-R stack of a pod: *smcr.Stack, one that pods share, or noStack.
type stack interface {
	rendezvous
	LinkGroups() []smcr.GroupInfo
	LostGroups() []smcr.GroupInfo
	Stats() smcr.Stats
	AddDevice(d rdma.Device) error
	RemoveDevice(name string)
	Close() error
}

// rendezvous finds out with the peer whether SMC-R or TCP carries a connection.
type rendezvous interface {
	client(ctx context.Context, tcp *net.TCPConn) (peerConn, error)
	server(ctx context.Context, tcp *net.TCPConn, decline clc.Reason) (peerConn, error)
}

// noStack is the stack of a pod that cannot use SMC-R. If a policy requires SMC-R, its connections
// are still diverted, so that the agent can reset them.
type noStack struct{}

func (noStack) client(_ context.Context, tcp *net.TCPConn) (peerConn, error) {
	reset(tcp)
	return nil, errNoStack
}

func (noStack) server(_ context.Context, tcp *net.TCPConn, _ clc.Reason) (peerConn, error) {
	reset(tcp)
	return nil, errNoStack
}

func (noStack) LinkGroups() []smcr.GroupInfo { return nil }
func (noStack) LostGroups() []smcr.GroupInfo { return nil }
func (noStack) Stats() smcr.Stats            { return smcr.Stats{} }
func (noStack) AddDevice(rdma.Device) error  { return nil }
func (noStack) RemoveDevice(string)          {}
func (noStack) Close() error                 { return nil }

var errNoStack = errors.New("this node cannot use SMC-R")

type smcrStack struct{ *smcr.Stack }

func (s smcrStack) client(ctx context.Context, tcp *net.TCPConn) (peerConn, error) {
	c, err := s.Client(ctx, tcp)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (s smcrStack) server(ctx context.Context, tcp *net.TCPConn, decline clc.Reason) (peerConn, error) {
	c, err := s.ServerDecline(ctx, tcp, decline)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// plainTCP is the peerConn of a session that stays TCP.
type plainTCP struct {
	*net.TCPConn
	opened time.Time
}

// Abort resets the connection.
func (p plainTCP) Abort() error {
	reset(p.TCPConn)
	return nil
}

// StartRelayTo copies what arrives on the connection to w.
func (p plainTCP) StartRelayTo(d *smcr.Direction, w *net.TCPConn, then func(int64, error)) {
	smcr.StartRelayTCP(d, w, p.TCPConn, then)
}

// StartRelayFrom copies what arrives on r to the connection.
func (p plainTCP) StartRelayFrom(d *smcr.Direction, r *net.TCPConn, then func(int64, error)) {
	smcr.StartRelayTCP(d, p.TCPConn, r, then)
}

// StartAwaitEnd waits for the end of both directions, or for a reset.
func (p plainTCP) StartAwaitEnd(d *smcr.Direction, then func(error)) {
	smcr.StartAwaitTCPEnd(d, p.TCPConn, then)
}

// Info describes the connection.
func (p plainTCP) Info() smcr.Info {
	return smcr.Info{Local: p.LocalAddr(), Peer: p.RemoteAddr(), Mode: smcr.ModeTCP, Opened: p.opened}
}
