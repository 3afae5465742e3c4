// SPDX-License-Identifier: Apache-2.0

package softload

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// DialTimeout is far above what any rendezvous takes.
const DialTimeout = 10 * time.Second

// Config says how an end is to be.
type Config struct {
	Addr      string // of the device
	Receivers int    // as in [soft.Config]
	Stacks    int    // 0: one
	Stack     func(*smcr.Config)
}

// End is an end. Its stacks have one device and one option.
type End struct {
	cfg    Config
	device *soft.Device
	option *synopt.Option
	stacks []*smcr.Stack
	dials  atomic.Uint64
}

// Open opens an end, and tells opened how what it opened is closed, the first one last.
func Open(cfg Config, opened func(closing func() error)) (*End, error) {
	a, err := netip.ParseAddr(cfg.Addr)
	if err != nil {
		return nil, err
	}
	e := &End{cfg: cfg}
	if e.device, err = soft.Open(soft.Config{Name: "bench", Addr: a, Receivers: cfg.Receivers}); err != nil {
		return nil, err
	}
	opened(e.device.Close)
	// The option program sees all sockets of the cgroup: a mark per process
	// keeps the two sides apart.
	mark := uint32(0x5b000000 | os.Getpid()&0xffffff)
	if e.option, err = synopt.Open(synopt.Config{Mark: mark}); err != nil {
		return nil, err
	}
	opened(e.option.Close)
	for range max(cfg.Stacks, 1) {
		s, err := e.NewStack()
		if err != nil {
			return nil, err
		}
		opened(s.Close)
		e.stacks = append(e.stacks, s)
	}
	return e, nil
}

// NewStack opens one more stack, which is the caller's.
func (e *End) NewStack() (*smcr.Stack, error) {
	c := smcr.Config{Devices: []rdma.Device{e.device}, Option: e.option}
	if e.cfg.Stack != nil {
		e.cfg.Stack(&c)
	}
	return smcr.NewStack(c)
}

// Stacks are the stacks that Open opened.
func (e *End) Stacks() []*smcr.Stack { return e.stacks }

// Receivers is how many receiving sockets the device has.
func (e *End) Receivers() int { return e.device.Stats().Receivers }

// stackAddr is where the i-th stack of a server listens, whose first one has addr.
func stackAddr(addr string, i int) (string, error) {
	a, err := netip.ParseAddrPort(addr)
	return netip.AddrPortFrom(a.Addr(), a.Port()+uint16(i)).String(), err
}

// Listen listens with each stack: the first one at addr, each other one at the port behind.
func (e *End) Listen(ctx context.Context, addr string) (all []net.Listener, err error) {
	for i, s := range e.stacks {
		at, err := stackAddr(addr, i)
		if err != nil {
			return all, err
		}
		l, err := smcr.Listen(ctx, s, "tcp", at)
		if err != nil {
			return all, err
		}
		all = append(all, l)
	}
	return all, nil
}

// Dial connects the next stack to its counterpart at a server whose first one listens at addr.
func (e *End) Dial(ctx context.Context, addr string) (net.Conn, error) {
	i := int(e.dials.Add(1) % uint64(len(e.stacks)))
	to, err := stackAddr(addr, i)
	if err != nil {
		return nil, err
	}
	return dial(ctx, e.stacks[i], to)
}

// DialAlone connects a new stack, which ends by end.
func (e *End) DialAlone(ctx context.Context, addr string) (c net.Conn, end func() error, err error) {
	s, err := e.NewStack()
	if err != nil {
		return nil, nil, err
	}
	if c, err = dial(ctx, s, addr); err != nil {
		return nil, nil, errors.Join(err, s.Close())
	}
	return c, s.Close, nil
}

func dial(ctx context.Context, s *smcr.Stack, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, DialTimeout)
	defer cancel()
	return (&smcr.Dialer{Stack: s, Require: true}).DialContext(ctx, "tcp", addr)
}
