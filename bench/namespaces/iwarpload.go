// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/smcr-io/kube-smcr/bench/iwarpload"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// iwarpForm is how a connection of iWARP is framed, and what its streams are.
type iwarpForm struct {
	MaxULPDU int         `json:"maxULPDU,omitempty"` // 0: what fits TCP's segments
	NoCRC    bool        `json:"noCRC,omitempty"`
	Op       rdma.Opcode `json:"op"` // of streams
}

// openIWARP opens the device of this worker.
func (w *workload) openIWARP(addr string) error {
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return err
	}
	if w.iwarp, err = softiwarp.Open(softiwarp.Config{Name: "bench", Addr: a}); err != nil {
		return err
	}
	w.opened.Add(w.iwarp.Close)
	return nil
}

// serveIWARP answers MPA Requests until the worker ends.
func (w *workload) serveIWARP(addr string) error {
	l, err := w.iwarp.Listen(addr)
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
	return nil
}

// answerIWARP tells the client of a region that it may write and read, and sends every message back.
func (w *workload) answerIWARP(r *softiwarp.Request) (err error) {
	e, err := iwarpload.NewEnd(w.iwarp)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	// The client says whether there are CRCs, and how long FPDUs may be.
	o := softiwarp.ConnectOptions{PrivateData: e.Region(), NoCRC: true}
	if pd := r.PrivateData(); len(pd) == 2 {
		o.MaxULPDU = int(binary.BigEndian.Uint16(pd))
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	if err := r.Accept(ctx, e.QP, o); err != nil {
		return err
	}
	return e.Answer() // the client has ended, mostly
}

// loadIWARP makes a load on a connection of its own.
func (w *workload) loadIWARP(ctx context.Context, req request) (r load.Result, err error) {
	e, err := iwarpload.NewEnd(w.iwarp)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	f := req.IWARP
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	region, err := w.iwarp.Dial(ctx, e.QP, req.Addr, softiwarp.ConnectOptions{
		NoCRC: f.NoCRC, MaxULPDU: f.MaxULPDU, PrivateData: binary.BigEndian.AppendUint16(nil, uint16(f.MaxULPDU)),
	})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, w.iwarp.Disconnect(e.QP)) }()
	return e.Load(req.Load, f.Op, region)
}
