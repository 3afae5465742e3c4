// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// iwarpForm is how a connection of iWARP is framed, and what its streams are.
type iwarpForm struct {
	MaxULPDU int  `json:"maxULPDU,omitempty"` // 0: what fits TCP's segments
	NoCRC    bool `json:"noCRC,omitempty"`
	Read     bool `json:"read,omitempty"` // streams are READs
}

const (
	iwarpBytes    = 1 << 20 // of a region
	iwarpDepth    = 4       // messages of a stream under way
	iwarpQueue    = 32
	iwarpSignal   = 8 // one of so many SENDs has a completion
	iwarpPatience = 20 * time.Second
)

// regionLen is the length of what the server tells of its region: address and key.
const regionLen = 12

// iwarpEnd is one end of a connection.
type iwarpEnd struct {
	rdma.Context
	cq   rdma.CQ
	mr   rdma.MR
	qp   rdma.QP
	late *time.Timer // nil: it waits as long as the queue pair lives
	wcs  [16]rdma.WC
	recv [1]rdma.RecvWR
	send [1]rdma.SendWR
	sent int
}

func newIWARPEnd(d *softiwarp.Device) (e *iwarpEnd, err error) {
	e = &iwarpEnd{}
	if e.Context, err = d.Open(); err != nil {
		return nil, err
	}
	const access = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	pd, err := e.AllocPD()
	if err == nil {
		e.cq, err = e.CreateCQ(4 * iwarpQueue)
	}
	if err == nil {
		e.mr, err = pd.AllocMR(iwarpBytes, access)
	}
	if err == nil {
		e.qp, err = pd.CreateQP(rdma.QPConfig{SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: iwarpQueue, MaxRecvWR: iwarpQueue})
	}
	if err == nil {
		err = e.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: access})
	}
	for range iwarpQueue {
		if err == nil {
			err = e.postRecv()
		}
	}
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

func (e *iwarpEnd) postRecv() error {
	e.recv[0] = rdma.RecvWR{SGE: rdma.SGE{Addr: e.mr.Addr(), Length: 64, LKey: e.mr.LKey()}}
	_, err := e.qp.PostRecv(e.recv[:])
	return err
}

// postSend sends the first n bytes of the region inline.
func (e *iwarpEnd) postSend(n int) error {
	e.send[0] = rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendInline, Inline: e.mr.Bytes()[:n]}
	if e.sent%iwarpSignal == 0 {
		e.send[0].Flags |= rdma.SendSignaled
	}
	e.sent++
	_, err := e.qp.PostSend(e.send[:])
	return err
}

// wait returns completions, at least one, all of them good.
func (e *iwarpEnd) wait() ([]rdma.WC, error) {
	for armed := false; ; armed = !armed {
		n, err := e.cq.Poll(e.wcs[:])
		if err != nil {
			return nil, err
		}
		for i := range n {
			if w := &e.wcs[i]; w.Status != rdma.StatusSuccess {
				return nil, fmt.Errorf("%v: %v", w.Op, w.Status)
			}
		}
		switch {
		case n > 0:
			return e.wcs[:n], nil
		case !armed:
			err = e.cq.Arm(false)
		case e.late == nil:
			<-e.cq.Notify()
		default:
			select {
			case <-e.cq.Notify():
			case <-e.late.C:
				err = fmt.Errorf("no completion after %v", iwarpPatience)
			}
		}
		if err != nil {
			return nil, err
		}
	}
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
	e, err := newIWARPEnd(w.iwarp)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	region := binary.BigEndian.AppendUint64(nil, e.mr.Addr())
	region = binary.BigEndian.AppendUint32(region, uint32(e.mr.RKey()))
	// The client says whether there are CRCs, and how long FPDUs may be.
	o := softiwarp.ConnectOptions{PrivateData: region, NoCRC: true}
	if pd := r.PrivateData(); len(pd) == 2 {
		o.MaxULPDU = int(binary.BigEndian.Uint16(pd))
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	if err := r.Accept(ctx, e.qp, o); err != nil {
		return err
	}
	for {
		wcs, err := e.wait()
		if err != nil {
			return err // the client has ended, mostly
		}
		for _, wc := range wcs {
			if wc.Op != rdma.OpRecv {
				continue
			}
			if err := errors.Join(e.postRecv(), e.postSend(int(wc.Bytes))); err != nil {
				return err
			}
		}
	}
}

// loadIWARP makes a load on a connection of its own.
func (w *workload) loadIWARP(ctx context.Context, req request) (r load.Result, err error) {
	e, err := newIWARPEnd(w.iwarp)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	e.late = time.NewTimer(iwarpPatience)
	defer e.late.Stop()
	f := req.IWARP
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	region, err := w.iwarp.Dial(ctx, e.qp, req.Addr, softiwarp.ConnectOptions{
		NoCRC: f.NoCRC, MaxULPDU: f.MaxULPDU, PrivateData: binary.BigEndian.AppendUint16(nil, uint16(f.MaxULPDU)),
	})
	if err != nil {
		return r, err
	}
	if len(region) != regionLen {
		return r, fmt.Errorf("server tells of its region in %d bytes, want %d", len(region), regionLen)
	}
	defer func() { err = errors.Join(err, w.iwarp.Disconnect(e.qp)) }()
	if req.Load.Kind == load.Echo {
		return e.echo(req.Load)
	}
	addr, key := binary.BigEndian.Uint64(region), rdma.RKey(binary.BigEndian.Uint32(region[8:]))
	return e.stream(req.Load, f.Read, addr, key)
}

// echo sends messages and waits for each to come back.
func (e *iwarpEnd) echo(l load.Load) (r load.Result, err error) {
	turn := func() error {
		if err := e.postSend(l.SizeBytes); err != nil {
			return err
		}
		for {
			wcs, err := e.wait()
			if err != nil {
				return err
			}
			for _, wc := range wcs {
				if wc.Op == rdma.OpRecv {
					return e.postRecv() // there is one message at a time: nothing comes behind it but completions of SENDs
				}
			}
		}
	}
	return l.RoundTrips(turn)
}

// stream moves messages between the regions for the duration. It ends when all have arrived: a READ
// behind the last WRITE says so.
func (e *iwarpEnd) stream(l load.Load, read bool, addr uint64, key rdma.RKey) (r load.Result, err error) {
	piece := func(n int) []rdma.SGE {
		return []rdma.SGE{{Addr: e.mr.Addr(), Length: uint32(n), LKey: e.mr.LKey()}}
	}
	message := []rdma.SendWR{{Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: piece(l.SizeBytes), RemoteAddr: addr, RKey: key}}
	if read {
		message[0].Op = rdma.OpRead
	}
	last := []rdma.SendWR{{Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: piece(1), RemoteAddr: addr, RKey: key}}
	underway := 0
	post := func(wrs []rdma.SendWR, atMost int) error {
		for underway > atMost {
			wcs, err := e.wait()
			if err != nil {
				return err
			}
			underway -= len(wcs)
		}
		if len(wrs) == 0 {
			return nil
		}
		underway++
		_, err := e.qp.PostSend(wrs)
		return err
	}
	begin := time.Now()
	for time.Since(begin) < l.Duration {
		if err := post(message, iwarpDepth-1); err != nil {
			return r, err
		}
		r.Ops++
	}
	if err := errors.Join(post(last, 0), post(nil, 0)); err != nil {
		return r, err
	}
	r.Bytes, r.Elapsed = int64(r.Ops)*int64(l.SizeBytes), time.Since(begin)
	return r, nil
}
