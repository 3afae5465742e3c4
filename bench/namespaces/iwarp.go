// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// portIWARP is where the server answers MPA Requests.
const portIWARP = 7003

// Paths of group iwarp. Streams are WRITEs, or READs where the name says so, from region to
// region, or SENDs; round trips are SENDs. What is read stays as it is, as its owner promises, unless the name says otherwise.
// FPDUs are as long as they can be, or have TCP's segment each.
const (
	pathIWARP             = "iWARP"
	pathIWARPRead         = "iWARP, READ"
	pathIWARPReadChanging = "iWARP, READ of what may change"
	pathIWARPSend         = "iWARP, SEND"
	pathIWARPNoCRC        = "iWARP, no CRC"
	pathIWARPReadNoCRC    = "iWARP, READ, no CRC"
	pathIWARPSegment      = "iWARP, FPDU per segment"
)

// What software iWARP has to reach of TCP's throughput with messages of 1 MiB: CRCs read each
// byte twice, and an FPDU per segment costs the more, the shorter it is.
const (
	limitIWARP        = 0.9
	limitIWARPNoCRC   = 1.0
	limitIWARPSegment = 0.6
)

// iwarpPair is a bed: two namespaces joined by one veth pair, and a device that speaks iWARP in
// each.
type iwarpPair struct{ pair }

// SetUp implements engine.Bed.
func (p *iwarpPair) SetUp(ctx context.Context) ([]engine.Path, error) {
	if _, err := p.pair.SetUp(ctx); err != nil {
		return nil, err
	}
	paths := p.paths(p.ways()...)
	for i := range paths {
		switch paths[i].Name {
		case pathIWARPRead, pathIWARPReadChanging, pathIWARPSend, pathIWARPReadNoCRC, pathIWARPSegment:
			paths[i].Can = func(l load.Load) bool { return l.Kind == load.Stream } // round trips are as on the others
		}
	}
	return paths, errors.Join(
		p.client.ask(request{Op: opOpenIWARP, Addr: clientAddr.Addr().String()}),
		p.server.ask(request{Op: opOpenIWARP, Addr: serverAddr.Addr().String()}),
		p.server.ask(request{Op: opServeIWARP, Addr: serverPort(portIWARP)}))
}

// ways are plain TCP and the forms of iWARP.
func (p *iwarpPair) ways() []*way {
	ways := p.pair.ways()[:1]
	for _, f := range []struct {
		name string
		form iwarpForm
	}{
		{pathIWARP, iwarpForm{MaxULPDU: iwarp.MaxOwnULPDU, Op: rdma.OpWrite}},
		{pathIWARPRead, iwarpForm{MaxULPDU: iwarp.MaxOwnULPDU, Op: rdma.OpRead}},
		{pathIWARPReadChanging, iwarpForm{MaxULPDU: iwarp.MaxOwnULPDU, Op: rdma.OpRead, Changing: true}},
		{pathIWARPSend, iwarpForm{MaxULPDU: iwarp.MaxOwnULPDU, Op: rdma.OpSend}},
		{pathIWARPNoCRC, iwarpForm{MaxULPDU: iwarp.MaxOwnULPDU, Op: rdma.OpWrite, NoCRC: true}},
		{pathIWARPReadNoCRC, iwarpForm{MaxULPDU: iwarp.MaxOwnULPDU, Op: rdma.OpRead, NoCRC: true}},
		{pathIWARPSegment, iwarpForm{Op: rdma.OpWrite}},
	} {
		ways = append(ways, &way{
			name: f.name, client: p.client, req: request{Addr: serverPort(portIWARP), IWARP: &f.form},
			pids: []int{p.client.pid(), p.server.pid()},
		})
	}
	return ways
}

// iwarp measures software iWARP against TCP.
func (b *bench) iwarp(ctx context.Context) error {
	const group = "software iWARP against TCP, one veth pair"
	for _, mtu := range []int{1500, 9000} {
		prefix := fmt.Sprintf("MTU %d: ", mtu)
		jobs := []engine.Job{b.RoundTrip(group, prefix, pathTCP), b.iwarpStream(group, prefix)}
		bed := &iwarpPair{b.pair(mtu)}
		bed.profiles = b.profiles("iwarp", mtu)
		if err := b.Compare(ctx, fmt.Sprintf("iWARP, MTU %d", mtu), bed, jobs); err != nil {
			return fmt.Errorf("MTU %d: %w", mtu, err)
		}
	}
	return nil
}

// iwarpStream is the job of messages of 1 MiB, one connection.
func (b *bench) iwarpStream(group, prefix string) engine.Job {
	target := func(path string, limit float64) report.Target {
		return report.Target{Path: path, Against: pathTCP, Limit: limit}
	}
	return engine.Job{
		Load: load.Load{Kind: load.Stream, SizeBytes: 1 << 20, Conns: 1, Duration: b.Duration},
		Figures: []engine.Figure{{
			Case: &report.Case{
				Group: group, Name: prefix + "stream of 1 MiB messages", Unit: "Gbit/s", Base: pathTCP,
				Targets: []report.Target{
					target(pathIWARP, limitIWARP), target(pathIWARPRead, limitIWARP), target(pathIWARPSend, limitIWARP),
					target(pathIWARPNoCRC, limitIWARPNoCRC), target(pathIWARPReadNoCRC, limitIWARPNoCRC),
					target(pathIWARPSegment, limitIWARPSegment),
				},
			},
			Of: gigabits,
		}},
		Per: engine.PerMiB,
	}
}
