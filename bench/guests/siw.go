// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && smcrsiw

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/smcr-io/kube-smcr/bench/iwarpload"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/test/vm/rdmacm"
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
	dev    *verbs.SIW
	addr   netip.Addr
	server *rdmacm.CM
}

func openSIW(addr netip.Addr) (siw, error) {
	d, err := verbs.OpenSIW(siwDevice, addr)
	if err != nil {
		return nil, err
	}
	return &kernel{dev: d, addr: addr}, nil
}

// Close implements siw. The listener ends with the process.
func (k *kernel) Close() error { return k.dev.Close() }

// serve answers clients one after the other.
func (k *kernel) serve(port uint16) error {
	cm, err := rdmacm.New()
	if err != nil {
		return err
	}
	k.server = cm
	if err := cm.Listen(netip.AddrPortFrom(k.addr, port)); err != nil {
		return err
	}
	go func() {
		for {
			_, err := cm.Await(time.Hour)
			if err == nil {
				err = k.answer(cm)
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, "siw:", err) // the client sees what counts
			}
		}
	}()
	return nil
}

// answer is the server of the client that was awaited.
func (k *kernel) answer(cm *rdmacm.CM) (err error) {
	e, err := iwarpload.NewEnd(k.dev)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	if err := cm.Accept(e.QP.Num(), e.Region()); err != nil {
		return err
	}
	verbs.Connected(e.QP)
	_ = e.Answer() // the client has ended
	return nil
}

// load makes a load on a connection of its own.
func (k *kernel) load(l load.Load, f iwarpForm, to netip.AddrPort) (r load.Result, err error) {
	crc := "0"
	if f.CRC {
		crc = "1"
	}
	if err := os.WriteFile("/sys/module/siw/parameters/"+crcParameter, []byte(crc), 0); err != nil {
		return r, fmt.Errorf("have siw ask for CRCs: %w", err)
	}
	cm, err := rdmacm.New()
	if err != nil {
		return r, err
	}
	e, err := iwarpload.NewEnd(k.dev)
	if err != nil {
		return r, errors.Join(err, cm.Close())
	}
	// The queue pair goes first, while rdma_cm knows of it.
	defer func() { err = errors.Join(err, e.Close(), cm.Close()) }()
	region, err := cm.Connect(e.QP.Num(), k.addr, to, nil)
	if err != nil {
		return r, err
	}
	verbs.Connected(e.QP)
	time.Sleep(replyTime)
	r, err = e.Load(l, f.Op, region[:min(len(region), len(e.Region()))])
	return r, errors.Join(err, cm.Disconnect())
}
