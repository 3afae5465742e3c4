// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/bench/iwarpload"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

const (
	// crcParameter is the module parameter by which siw asks for CRCs.
	crcParameter = "mpa_crc_required"
	// connectLimit bounds start-up.
	connectLimit = 10 * time.Second
)

func (w *workload) openIWARP(addr string) error {
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return err
	}
	if w.softiwarp, err = softiwarp.Open(softiwarp.Config{Name: "bench", Addr: a}); err != nil {
		return err
	}
	w.opened.Add(w.softiwarp.Close)
	if w.siw, err = openSIW(a); err != nil {
		return err
	}
	w.opened.Add(w.siw.Close)
	return nil
}

func (w *workload) serveIWARP(addr string) error {
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return err
	}
	l, err := w.softiwarp.Listen(netip.AddrPortFrom(a, portSoft).String())
	if err != nil {
		return err
	}
	w.opened.Add(l.Close)
	go func() {
		for {
			r, err := l.Accept(context.Background())
			if err != nil {
				return
			}
			go func() { _ = w.answerIWARP(r) }() // the client sees what counts
		}
	}()
	return w.siw.serve(portSIW)
}

// answerIWARP is the server of a connection of softiwarp. The client says whether there are CRCs, and how
// long FPDUs may be.
func (w *workload) answerIWARP(r *softiwarp.Request) (err error) {
	e, err := iwarpload.NewEnd(w.softiwarp, rdma.StableRead)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	o := softiwarp.ConnectOptions{PrivateData: e.Region(), NoCRC: true}
	if pd := r.PrivateData(); len(pd) == 2 {
		o.MaxULPDU = int(binary.BigEndian.Uint16(pd))
	}
	ctx, cancel := context.WithTimeout(context.Background(), connectLimit)
	defer cancel()
	if err := r.Accept(ctx, e.QP, o); err != nil {
		return err
	}
	return e.Answer() // the client has ended, mostly
}

// loadIWARP makes a load on a connection of its own.
func (w *workload) loadIWARP(ctx context.Context, req request) (r load.Result, err error) {
	f := req.IWARP
	if f.SIW {
		to, err := netip.ParseAddrPort(req.Addr)
		if err != nil {
			return r, err
		}
		return w.siw.load(ctx, req.Load, f, to)
	}
	e, err := iwarpload.NewEnd(w.softiwarp, rdma.StableRead)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	region, err := w.softiwarp.Dial(ctx, e.QP, req.Addr, softiwarp.ConnectOptions{
		NoCRC: !f.CRC, MaxULPDU: f.MaxULPDU, PrivateData: binary.BigEndian.AppendUint16(nil, uint16(f.MaxULPDU)),
	})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, w.softiwarp.Disconnect(e.QP)) }()
	return e.Load(req.Load, f.Op, region)
}
