// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// carrier is *smcr.Conn: the network's side of a relay.
type carrier interface {
	RelayFrom(r *net.TCPConn) (int64, error)
	RelayTo(w *net.TCPConn) (int64, error)
	AwaitEnd() error
	CloseWrite() error
	Close() error
	Abort() error
	Info() smcr.Info
}

// stack is *smcr.Stack, one for each pod.
type stack interface {
	rendezvous
	LinkGroups() []smcr.GroupInfo
	Stats() smcr.Stats
	AddDevice(d rdma.Device) error
	RemoveDevice(name string)
	Close() error
}

// rendezvous settles with the peer what carries a connection.
type rendezvous interface {
	client(ctx context.Context, tcp *net.TCPConn) (carrier, error)
	server(ctx context.Context, tcp *net.TCPConn, decline clc.Reason) (carrier, error)
}

// noStack is the stack of pods on a node that cannot use SMC-R. Connections
// that a policy requires to use it are diverted even so, to be refused.
type noStack struct{}

func (noStack) client(context.Context, *net.TCPConn) (carrier, error) {
	return nil, errNoStack
}

func (noStack) server(context.Context, *net.TCPConn, clc.Reason) (carrier, error) {
	return nil, errNoStack
}

func (noStack) LinkGroups() []smcr.GroupInfo { return nil }
func (noStack) Stats() smcr.Stats            { return smcr.Stats{} }
func (noStack) AddDevice(rdma.Device) error  { return nil }
func (noStack) RemoveDevice(string)          {}
func (noStack) Close() error                 { return nil }

var errNoStack = errors.New("this node cannot use SMC-R")

type smcrStack struct{ *smcr.Stack }

func (s smcrStack) client(ctx context.Context, tcp *net.TCPConn) (carrier, error) {
	c, err := s.Client(ctx, tcp)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (s smcrStack) server(ctx context.Context, tcp *net.TCPConn, decline clc.Reason) (carrier, error) {
	c, err := s.ServerDecline(ctx, tcp, decline)
	if err != nil {
		return nil, err
	}
	return c, nil
}
