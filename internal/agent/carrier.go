// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"net"

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
	Close() error
}

// rendezvous settles with the peer what carries a connection.
type rendezvous interface {
	client(ctx context.Context, tcp *net.TCPConn) (carrier, error)
	server(ctx context.Context, tcp *net.TCPConn, decline clc.Reason) (carrier, error)
}

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
