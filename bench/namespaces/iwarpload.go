// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
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
	Op       rdma.Opcode `json:"op"`                 // of streams
	Changing bool        `json:"changing,omitempty"` // the server does not promise that what is read stays as it is
}

// ask is what the client tells the server: how long FPDUs may be, and the region's rights beside all others.
func (f *iwarpForm) ask() []byte {
	more := rdma.StableRead
	if f.Changing {
		more = 0
	}
	return append(binary.BigEndian.AppendUint16(nil, uint16(f.MaxULPDU)), byte(more))
}

// asked takes ask's bytes apart.
func asked(pd []byte) (maxULPDU int, more rdma.Access, err error) {
	if len(pd) != 3 {
		return 0, 0, fmt.Errorf("client asks by %d bytes, want 3", len(pd))
	}
	return int(binary.BigEndian.Uint16(pd)), rdma.Access(pd[2]), nil
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
	maxULPDU, more, err := asked(r.PrivateData())
	if err != nil {
		return err
	}
	e, err := iwarpload.NewEnd(w.iwarp, more)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	// The client says, too, whether there are CRCs.
	o := softiwarp.ConnectOptions{PrivateData: e.Region(), NoCRC: true, MaxULPDU: maxULPDU}
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	if err := r.Accept(ctx, e.QP, o); err != nil {
		return err
	}
	return e.Answer() // the client has ended, mostly
}

// loadIWARP makes a load on a connection of its own.
func (w *workload) loadIWARP(ctx context.Context, req request) (r load.Result, err error) {
	e, err := iwarpload.NewEnd(w.iwarp, rdma.StableRead)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	f := req.IWARP
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	region, err := w.iwarp.Dial(ctx, e.QP, req.Addr, softiwarp.ConnectOptions{
		NoCRC: f.NoCRC, MaxULPDU: f.MaxULPDU, PrivateData: f.ask(),
	})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, w.iwarp.Disconnect(e.QP)) }()
	return e.Load(req.Load, f.Op, region)
}
