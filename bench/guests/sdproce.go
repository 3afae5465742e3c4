// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/bench/sdpload"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// Names of the paths of group sdp-roce that others do not have. Bcopy is by Write and Read, Zcopy from Buffer to Buffer.
const (
	pathRead       = "RDMA READ"
	pathBcopy      = "SDP Bcopy"
	pathZcopyRead  = "SDP Zcopy READ"
	pathZcopyWrite = "SDP Zcopy WRITE"
)

// ofRead is what Zcopy has to reach of the throughput of raw READs of the same size.
const ofRead = 0.9

// portRoCE is the port of the SDP server in the worker.
const portRoCE = 7008

// roceJobs are the jobs of group sdp-roce.
func (s *settings) roceJobs() []engine.Job {
	const group = "two guests, SDP over RoCE"
	jobs := []engine.Job{s.RoundTrip(group, "", pathRsockets)}
	for _, size := range []struct {
		name    string
		bytes   int
		targets []report.Target
	}{
		{"64 KiB", 64 << 10, nil},
		{"1 MiB", 1 << 20, []report.Target{{Path: pathZcopyRead, Against: pathRead, Limit: ofRead}}},
	} {
		jobs = append(jobs, engine.Job{
			Load: load.Load{Kind: load.Stream, SizeBytes: size.bytes, Conns: 1, Duration: s.Duration},
			Figures: []engine.Figure{{
				Case: &report.Case{Group: group, Name: "stream of " + size.name + " messages", Unit: "MiB/s", Base: pathRead, Targets: size.targets},
				Of:   engine.MiBPerSecond,
			}},
			Per: engine.PerMiB,
		})
	}
	return jobs
}

// rocePair is a bed: two guests with soft RoCE, and a worker in each with SDP on it.
type rocePair struct{ *pair }

// SetUp implements engine.Bed.
func (p *rocePair) SetUp(ctx context.Context) ([]engine.Path, error) {
	if _, err := p.pair.SetUp(ctx); err != nil {
		return nil, err
	}
	for _, w := range []*worker{p.server, p.client} {
		if _, err := w.call(request{Op: opOpenRoCE}); err != nil {
			return nil, err
		}
	}
	if _, err := p.server.call(request{Op: opServeRoCE, Addr: p.addr(portRoCE)}); err != nil {
		return nil, err
	}
	streams := func(l load.Load) bool { return l.Kind == load.Stream }
	return p.wanted([]engine.Path{
		{Name: pathRead, Peers: p.tools(p.perftestRead), Tool: true, Can: streams},
		{Name: pathBcopy, Peers: &roceWay{p.pair, sdpload.Bcopy}},
		{Name: pathZcopyRead, Peers: &roceWay{p.pair, sdpload.Read}, Can: streams},
		{Name: pathZcopyWrite, Peers: &roceWay{p.pair, sdpload.Write}, Can: streams},
		p.rsockets(),
		{Name: pathTCP, Peers: &way{pair: p.pair, stack: stackTCP}},
	}), nil
}

// roceWay is the [engine.Peers] of connections of SDP.
type roceWay struct {
	*pair
	way sdpload.Way
}

// Start does nothing: each load has a connection of its own.
func (*roceWay) Start(context.Context, load.Load) error { return nil }

// Run makes the load between the workers.
func (w *roceWay) Run(_ context.Context, l load.Load) (load.Result, error) {
	r, err := w.client.call(request{Op: opLoadRoCE, Addr: w.addr(portRoCE), Load: l, Way: w.way})
	return r.Result, err
}

// Check does nothing: the load itself says whether it went that way.
func (*roceWay) Check(context.Context, load.Load, load.Result) error { return nil }

// openRoCE opens SDP on the device that the engine has.
func (w *workload) openRoCE() error {
	var err error
	if w.roce, err = sdp.NewStack(sdpload.Config(w.device, false)); err != nil {
		return err
	}
	w.opened.Add(w.roce.Close)
	return nil
}

// serveRoCE answers until the worker ends.
func (w *workload) serveRoCE(ctx context.Context, addr string) error {
	l, err := sdp.Listen(ctx, w.roce, "tcp", addr)
	if err != nil {
		return err
	}
	w.opened.Add(l.Close)
	go sdpload.Serve(w.roce, l)
	return nil
}

// loadRoCE makes a load on a connection of its own.
func (w *workload) loadRoCE(ctx context.Context, req request) (load.Result, error) {
	c, _, err := (&sdp.Dialer{Stack: w.roce}).Dial(ctx, req.Addr)
	if err != nil {
		return load.Result{}, err
	}
	return sdpload.Load(w.roce, c.(*sdp.Conn), req.Load, req.Way)
}
