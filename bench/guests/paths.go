// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// Names of the paths.
const (
	pathVerbs    = "RDMA WRITE"
	pathConn     = "smcr.Conn"
	pathKernel   = "kernel SMC-R"
	pathRsockets = "rsockets"
	pathTCP      = "TCP"
)

// What smcr.Conn has to reach.
const (
	ofVerbs     = 0.95 // of the throughput of RDMA WRITE
	ofKernel    = 1.0  // of the kernel's throughput, and of its connections in a second
	ofRoundTrip = 1.1  // times the kernel's round trip
)

// jobs are all that is measured.
func (s *settings) jobs() []engine.Job {
	const group = "two guests"
	jobs := []engine.Job{
		s.RoundTrip(group, "", pathKernel, report.Target{Path: pathConn, Against: pathKernel, Limit: ofRoundTrip}),
	}
	kernel := report.Target{Path: pathConn, Against: pathKernel, Limit: ofKernel}
	jobs = append(jobs, s.Streams(group, "", pathVerbs, []int{4 << 10, 64 << 10, 1 << 20}, engine.Throughput{
		Unit: "MiB/s",
		Of:   engine.MiBPerSecond,
		Per:  engine.Amount{Name: "GiB", Of: func(r load.Result) float64 { return float64(r.Bytes) / (1 << 30) }},
	}, engine.Always(report.Target{Path: pathConn, Against: pathVerbs, Limit: ofVerbs}, kernel))...)
	opening := &report.Case{
		Group: group, Name: "opening connections", Unit: "connections/s", Base: pathKernel, Targets: []report.Target{kernel},
	}
	return append(jobs, s.Openings(1, engine.Figure{Case: opening, Of: engine.OpsPerSecond}))
}

// paths are all ways between the guests, or those that are asked for. seen is the
// state of the client.
func (p *pair) paths(seen state) []engine.Path {
	conn := &way{pair: p, stack: stackEngine, warm: true}
	all := []engine.Path{
		{Name: pathVerbs, Peers: p.tools(p.perftest), Tool: true},
		{Name: pathConn, Peers: conn, Profile: conn.profile},
		{Name: pathKernel, Peers: &way{pair: p, stack: stackKernel, warm: true, seen: seen}},
		p.rsockets(),
		{Name: pathTCP, Peers: &way{pair: p, stack: stackTCP}},
	}
	return p.wanted(all)
}

// rsockets is the path of librdmacm's rsockets.
func (p *pair) rsockets() engine.Path {
	return engine.Path{Name: pathRsockets, Peers: p.tools(p.rstream), Tool: true, Can: func(l load.Load) bool {
		return l.Kind != load.Setup && l.Conns*l.SizeBytes <= rstreamBytes
	}}
}

// wanted returns those of all paths that -paths asks for.
func (p *pair) wanted(all []engine.Path) []engine.Path {
	for i := range all {
		// On an emulated processor even a request to a worker has one.
		all[i].StartCost = func(load.Load) bool { return true }
	}
	return slices.DeleteFunc(all, func(path engine.Path) bool {
		return !isWanted(p.only, path.Name)
	})
}

// isWanted reports whether a path is among those that are asked for, separated by commas; "" is all.
func isWanted(only, name string) bool {
	return only == "" || slices.Contains(strings.Split(only, ","), name)
}

// way is the [engine.Peers] of the workers: the same load over one of their stacks.
type way struct {
	*pair
	stack stack
	warm  bool  // the first connections make what others use again
	seen  state // of the client, when the load before ended
}

// Start makes connections, if there is something that they make.
func (w *way) Start(ctx context.Context, l load.Load) error {
	if !w.warm {
		return nil
	}
	r, err := w.Run(ctx, l)
	if err != nil {
		return err
	}
	return w.Check(ctx, l, r)
}

// Run makes the load between the workers.
func (w *way) Run(_ context.Context, l load.Load) (load.Result, error) {
	r, err := w.client.call(request{Op: opLoad, Stack: w.stack, Addr: w.addr(w.port()), Load: l})
	return r.Result, err
}

// port returns the port of the stack's server.
func (w *way) port() uint16 {
	if p, ok := sdpPorts[w.stack]; ok {
		return p
	}
	return ports[w.stack]
}

// Check asks the kernel whether the connections of AF_SMC were SMC-R.
func (w *way) Check(_ context.Context, _ load.Load, r load.Result) error {
	if w.stack != stackKernel {
		return nil
	}
	before := w.seen
	resp, err := w.client.call(request{Op: opState})
	if err != nil {
		return err
	}
	w.seen = resp.State
	if n := w.seen.KernelTCP - before.KernelTCP; n > 0 {
		return fmt.Errorf("%d connections of AF_SMC were TCP", n)
	}
	if r.Ops > 0 && w.seen.KernelSMCR == before.KernelSMCR {
		return errors.New("the kernel counted no connection over SMC-R")
	}
	return nil
}

// profile starts CPU profiles of both workers. They write into a directory that the
// guests share with this machine.
func (w *way) profile(job int) (end func() error, err error) {
	workers := []*worker{w.client, w.server}
	name := func(peer *worker) string { return fmt.Sprintf("%d-%s.pprof", job, peer.where) }
	end = func() error {
		var errs []error
		for _, peer := range workers {
			_, err := peer.call(request{Op: opProfile})
			errs = append(errs, err, copyFile(filepath.Join(w.lab.Share(), name(peer)), filepath.Join(w.profiles, name(peer))))
		}
		return errors.Join(errs...)
	}
	for _, peer := range workers {
		if _, err := peer.call(request{Op: opProfile, Addr: "/host/" + name(peer)}); err != nil {
			return end, err
		}
	}
	return end, nil
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o644)
}
