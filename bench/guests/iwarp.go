// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// Names of the paths of group iwarp. One with READ has READs for streams, one with SEND SENDs, others WRITEs; the one with
// segment has an FPDU in each of TCP's segments, as siw, and other ones of softiwarp FPDUs of 64 KiB.
const (
	pathSIW         = "siw"
	pathSIWRead     = "siw READ"
	pathSIWSend     = "siw SEND"
	pathSIWCRC      = "siw CRC"
	pathSIWCRCRead  = "siw CRC READ"
	pathSoft        = "softiwarp"
	pathSoftRead    = "softiwarp READ"
	pathSoftSend    = "softiwarp SEND"
	pathSoftCRC     = "softiwarp CRC"
	pathSoftCRCRead = "softiwarp CRC READ"
	pathSoftSegment = "softiwarp CRC segment"
)

// ofSIW is what softiwarp has to reach of siw, with the same checks.
const ofSIW = 1.0

// tableCRCs has a worker compute CRCs by tables, as the guests' kernel does: the processor's instruction for
// them, which both use where it is real, takes an emulated one many times as long.
const tableCRCs = "GODEBUG=cpu.sse42=off"

// Ports of the servers of iWARP in the worker.
const (
	portSoft = 7004
	portSIW  = 7005
)

// iwarpForm is how a connection is to be.
type iwarpForm struct {
	SIW      bool        `json:"siw,omitempty"` // the kernel's
	CRC      bool        `json:"crc,omitempty"`
	Op       rdma.Opcode `json:"op"`                 // of streams
	MaxULPDU int         `json:"maxULPDU,omitempty"` // of softiwarp; 0: what fits TCP's segments, as of siw
}

// iwarpJobs are the jobs of group iwarp.
func (s *settings) iwarpJobs() []engine.Job {
	const group = "two guests, software iWARP"
	pairs := [][2]string{
		{pathSoft, pathSIW}, {pathSoftRead, pathSIWRead}, {pathSoftSend, pathSIWSend}, {pathSoftCRC, pathSIWCRC}, {pathSoftCRCRead, pathSIWCRCRead}, {pathSoftSegment, pathSIWCRC},
	}
	var targets []report.Target
	for _, p := range pairs {
		targets = append(targets, report.Target{Path: p[0], Against: p[1], Limit: ofSIW})
	}
	return []engine.Job{
		s.RoundTrip(group, "", pathSIW, report.Target{Path: pathSoft, Against: pathSIW, Limit: 1 / ofSIW}),
		{
			Load: load.Load{Kind: load.Stream, SizeBytes: 1 << 20, Conns: 1, Duration: s.Duration},
			Figures: []engine.Figure{{
				Case: &report.Case{Group: group, Name: "stream of 1 MiB messages", Unit: "MiB/s", Base: pathSIW, Targets: targets},
				Of:   engine.MiBPerSecond,
			}},
			Per: engine.PerMiB,
		},
	}
}

// iwarpPair is a bed: two guests with siw, and a worker in each with both devices.
type iwarpPair struct{ *pair }

// SetUp implements engine.Bed.
func (p *iwarpPair) SetUp(ctx context.Context) ([]engine.Path, error) {
	// The parameter is there to be set, for CRCs.
	if err := p.startOnSIW(ctx, opOpenIWARP, []string{crcParameter + "=0"}, tableCRCs); err != nil {
		return nil, err
	}
	if _, err := p.server.call(request{Op: opServeIWARP, Addr: p.lab.Guest(0).Addr(0).String()}); err != nil {
		return nil, err
	}
	if _, err := p.server.call(request{Op: opServe, Stack: stackTCP, Addr: p.addr(ports[stackTCP])}); err != nil {
		return nil, err
	}
	return p.iwarpPaths(), nil
}

func (p *iwarpPair) iwarpPaths() []engine.Path {
	own := iwarp.MaxOwnULPDU
	var all []engine.Path
	for _, f := range []struct {
		name string
		form iwarpForm
	}{
		{pathSIW, iwarpForm{SIW: true, Op: rdma.OpWrite}},
		{pathSIWRead, iwarpForm{SIW: true, Op: rdma.OpRead}},
		{pathSIWCRC, iwarpForm{SIW: true, CRC: true, Op: rdma.OpWrite}},
		{pathSIWSend, iwarpForm{SIW: true, Op: rdma.OpSend}},
		{pathSIWCRCRead, iwarpForm{SIW: true, CRC: true, Op: rdma.OpRead}},
		{pathSoft, iwarpForm{MaxULPDU: own, Op: rdma.OpWrite}},
		{pathSoftRead, iwarpForm{MaxULPDU: own, Op: rdma.OpRead}},
		{pathSoftCRC, iwarpForm{MaxULPDU: own, CRC: true, Op: rdma.OpWrite}},
		{pathSoftSend, iwarpForm{MaxULPDU: own, Op: rdma.OpSend}},
		{pathSoftCRCRead, iwarpForm{MaxULPDU: own, CRC: true, Op: rdma.OpRead}},
		{pathSoftSegment, iwarpForm{CRC: true, Op: rdma.OpWrite}},
	} {
		path := engine.Path{Name: f.name, Peers: &iwarpWay{p.pair, f.form}}
		if f.name != pathSIW && f.name != pathSoft {
			path.Can = func(l load.Load) bool { return l.Kind == load.Stream }
		}
		all = append(all, path)
	}
	all = append(all, engine.Path{Name: pathTCP, Peers: &way{pair: p.pair, stack: stackTCP}})
	return p.wanted(all)
}

// iwarpWay is the [engine.Peers] of one form of connection.
type iwarpWay struct {
	*pair
	form iwarpForm
}

// Start does nothing: each load has a connection of its own.
func (*iwarpWay) Start(context.Context, load.Load) error { return nil }

// Run makes the load between the workers.
func (w *iwarpWay) Run(_ context.Context, l load.Load) (load.Result, error) {
	port := uint16(portSoft)
	if w.form.SIW {
		port = portSIW
	}
	to := netip.AddrPortFrom(w.lab.Guest(0).Addr(0), port)
	r, err := w.client.call(request{Op: opLoadIWARP, Addr: to.String(), Load: l, IWARP: w.form})
	if err != nil {
		err = fmt.Errorf("%+v: %w", w.form, err)
	}
	return r.Result, err
}

// Check does nothing: a worker knows no other way than that of the form.
func (*iwarpWay) Check(context.Context, load.Load, load.Result) error { return nil }
