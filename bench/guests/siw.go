// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/smcr-io/kube-smcr/bench/iwarpload"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

const (
	// siwDevice is the device of both guests.
	siwDevice = "siw0"
	// replyTime is what siw's server has between its Reply and our first message: what comes right behind the
	// Reply it sees when more comes, and where it is to answer first, that is never.
	replyTime = 200 * time.Millisecond
)

// kernel is siw in this guest.
type kernel struct {
	dev  *verbs.IWARP
	addr netip.Addr
}

func openSIW(addr netip.Addr) (*kernel, error) {
	d, err := verbs.OpenIWARP(verbs.IWARPConfig{Name: siwDevice, Addr: addr})
	if err != nil {
		return nil, err
	}
	return &kernel{dev: d, addr: addr}, nil
}

// Close ends the device, with its listener.
func (k *kernel) Close() error { return k.dev.Close() }

// serve answers clients.
func (k *kernel) serve(port uint16) error {
	l, err := k.dev.Listen(netip.AddrPortFrom(k.addr, port))
	if err != nil {
		return err
	}
	go func() {
		for {
			r, err := l.Accept(context.Background())
			if err != nil {
				return
			}
			go func() {
				if err := k.answer(r); err != nil {
					fmt.Fprintln(os.Stderr, "siw:", err) // the client sees what counts
				}
			}()
		}
	}()
	return nil
}

// answer is the server of a client.
func (k *kernel) answer(r cm.Request) (err error) {
	e, err := iwarpload.NewEnd(k.dev, rdma.StableRead)
	if err != nil {
		return errors.Join(err, r.Reject(nil))
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	ctx, cancel := context.WithTimeout(context.Background(), connectLimit)
	defer cancel()
	if err := r.Accept(ctx, e.QP, cm.Options{PrivateData: e.Region()}); err != nil {
		return err
	}
	_ = e.Answer() // the client has ended
	return nil
}

// load makes a load on a connection of its own.
func (k *kernel) load(ctx context.Context, l load.Load, f iwarpForm, to netip.AddrPort) (r load.Result, err error) {
	crc := "0"
	if f.CRC {
		crc = "1"
	}
	if err := os.WriteFile("/sys/module/siw/parameters/"+crcParameter, []byte(crc), 0); err != nil {
		return r, fmt.Errorf("have siw ask for CRCs: %w", err)
	}
	e, err := iwarpload.NewEnd(k.dev, rdma.StableRead)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	c, err := k.dev.Dial(ctx, e.QP, to, cm.Options{})
	if err != nil {
		return r, err
	}
	time.Sleep(replyTime)
	r, err = e.Load(l, f.Op, c.PrivateData[:min(len(c.PrivateData), len(e.Region()))])
	return r, errors.Join(err, k.dev.Disconnect(e.QP))
}
