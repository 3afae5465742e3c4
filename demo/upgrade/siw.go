// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

const siwDevice = "siw0"

// kernel is Linux' siw: the kernel opens the TCP connection itself, when rdma_cm asks for it.
type kernel struct {
	*verbs.IWARP
	addr    netip.Addr
	l       cm.Listener
	request cm.Request
}

func openSIW(addr netip.Addr) (way, error) {
	d, err := verbs.OpenIWARP(verbs.IWARPConfig{Name: siwDevice, Addr: addr})
	if err != nil {
		return nil, err
	}
	return &kernel{IWARP: d, addr: addr}, nil
}

// unlockMemory has the kernel lock as much memory for siw as it likes: who may set limits does that for
// programs of RDMA.
func unlockMemory() error {
	all := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &all); err != nil {
		return fmt.Errorf("raise the limit of locked memory: %w", err)
	}
	return nil
}

func (k *kernel) listen() (_ string, err error) {
	if k.l, err = k.Listen(netip.AddrPortFrom(k.addr, 0)); err != nil {
		return "", err
	}
	return k.l.Addr().String(), nil
}

func (k *kernel) meet() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), completionPatience)
	defer cancel()
	k.request, err = k.l.Accept(ctx)
	return err
}

func (k *kernel) accept(ctx context.Context, e *end, offer []byte) error {
	return k.request.Accept(ctx, e.qp, cm.Options{PrivateData: offer})
}

func (k *kernel) connect(ctx context.Context, t *teller, e *end, addr string) ([]byte, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	c, err := k.Dial(ctx, e.qp, to, cm.Options{})
	if err != nil {
		return nil, err
	}
	return c.PrivateData, t.check("siw is connected with softiwarp", e.qp.State() == rdma.QPRTS,
		"queue pair %v of %s, over a TCP connection of its kernel", e.qp.Num(), k.Name())
}

func (k *kernel) disconnect(e *end) error { return k.Disconnect(e.qp) }

func (k *kernel) ended(e *end) error {
	ctx, cancel := context.WithTimeout(context.Background(), completionPatience)
	defer cancel()
	return k.AwaitEnd(ctx, e.qp)
}
