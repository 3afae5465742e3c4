// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && smcrsiw

package main

import (
	"context"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/test/vm/rdmacm"
)

const (
	siwDevice = "siw0"
	siwPort   = 7174
)

// kernel is Linux' siw: the kernel opens the TCP connection itself, when rdma_cm asks for it.
type kernel struct {
	*verbs.SIW
	cm   *rdmacm.CM
	addr netip.Addr
}

func openSIW(addr netip.Addr) (way, error) {
	d, err := verbs.OpenSIW(siwDevice, addr)
	if err != nil {
		return nil, err
	}
	cm, err := rdmacm.New()
	if err != nil {
		_ = d.Close()
		return nil, err
	}
	return &kernel{SIW: d, cm: cm, addr: addr}, nil
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

func (k *kernel) listen() (string, error) {
	at := netip.AddrPortFrom(k.addr, siwPort)
	return at.String(), k.cm.Listen(at)
}

func (k *kernel) meet() error {
	_, err := k.cm.Await(completionPatience)
	return err
}

func (k *kernel) accept(_ context.Context, e *end, offer []byte) error {
	if err := k.cm.Accept(e.qp.Num(), offer); err != nil {
		return err
	}
	verbs.Connected(e.qp)
	return nil
}

func (k *kernel) connect(_ context.Context, t *teller, e *end, addr string) ([]byte, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	offer, err := k.cm.Connect(e.qp.Num(), k.addr, to, nil)
	if err != nil {
		return nil, err
	}
	verbs.Connected(e.qp)
	return offer, t.check("siw is connected with softiwarp", e.qp.State() == rdma.QPRTS,
		"queue pair %v of %s, over a TCP connection of its kernel", e.qp.Num(), k.Name())
}

func (k *kernel) disconnect(*end) error { return k.cm.Disconnect() }

func (k *kernel) ended(*end) error { return k.cm.AwaitEnd(completionPatience) }

// Close implements way.
func (k *kernel) Close() error {
	err := k.cm.Close()
	if closed := k.SIW.Close(); err == nil {
		err = closed
	}
	return err
}
