// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"syscall"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// Names of the paths of group receivers.
const (
	pathOne         = "1 processor"
	pathTwoOneRecv  = "2 processors 1 receiver"
	pathTwoTwoRecvs = "2 processors 2 receivers"
)

// ofOneProcessor is how many times as much a node has to receive with two processors as with one.
const ofOneProcessor = 1.2

// ceilingPods is the number of pods of each node. Each has a queue pair to its own peer.
const ceilingPods = 8

// ceilingPort is the port of the first pod's server.
const ceilingPort = 7100

// ceilingJobs are the jobs of group receivers.
func (s *settings) ceilingJobs() []engine.Job {
	const group = "a guest that receives for 8 pods"
	figure := func(name, unit string, of engine.Metric) []engine.Figure {
		return []engine.Figure{{Case: &report.Case{
			Group: group, Name: name, Unit: unit, Base: pathOne,
			Targets: []report.Target{{Path: pathTwoTwoRecvs, Against: pathOne, Limit: ofOneProcessor}},
		}, Of: of}}
	}
	return []engine.Job{
		{
			Load:    load.Load{Kind: load.Stream, SizeBytes: 64 << 10, Conns: ceilingPods, Duration: s.Duration},
			Figures: figure("stream of 64 KiB writes to each", "MiB/s", engine.MiBPerSecond),
			Per:     engine.PerMiB,
		},
		{
			Load:    load.Load{Kind: load.Echo, SizeBytes: 64, Conns: 8 * ceilingPods, Duration: s.Duration},
			Figures: figure("round trips of 64 B on 8 connections to each", "1/s", engine.OpsPerSecond),
			Per:     engine.Amount{Name: "round trip", Of: engine.Ops},
		},
	}
}

// ceiling is a bed: nodes that receive are guests, and who sends is this machine, which is so much faster than
// an emulated processor that the guest is what limits.
type ceiling struct {
	only  string // the names of the paths that are asked for; "" for all
	log   io.Writer
	nodes []*receiving
}

// receiving is a guest that receives, and this machine as its peer.
type receiving struct {
	processors, receivers int

	lab            *lab.Lab
	host           *lab.Host
	server, client *worker
}

// SetUp implements engine.Bed.
func (c *ceiling) SetUp(ctx context.Context) ([]engine.Path, error) {
	var paths []engine.Path
	for _, f := range []struct {
		name                  string
		processors, receivers int
	}{{pathOne, 1, 1}, {pathTwoOneRecv, 2, 1}, {pathTwoTwoRecvs, 2, 2}} {
		if !isWanted(c.only, f.name) {
			continue
		}
		n := &receiving{processors: f.processors, receivers: f.receivers}
		c.nodes = append(c.nodes, n)
		if err := n.up(ctx, fmt.Sprintf("bench-%d-%d", os.Getpid(), len(c.nodes)), c.log); err != nil {
			return nil, err
		}
		paths = append(paths, engine.Path{Name: f.name, Peers: n})
	}
	return paths, nil
}

func (n *receiving) up(ctx context.Context, name string, log io.Writer) (err error) {
	if n.lab, err = lab.Up(ctx, lab.Config{Name: name, Guests: 1, NICs: 1, Processors: n.processors, Log: log}); err != nil {
		return err
	}
	if n.host, err = n.lab.Join(ctx); err != nil {
		return err
	}
	g := n.lab.Guest(0)
	// The NIC has one queue: the kernel spreads what comes by flow, as a NIC with more does.
	all := fmt.Sprintf("%x", 1<<n.processors-1)
	if _, err := g.Shell(ctx, "echo "+all+" > /sys/class/net/"+g.NetDev(0)+"/queues/rx-0/rps_cpus"); err != nil {
		return err
	}
	program, err := n.lab.Build(ctx, "github.com/smcr-io/kube-smcr/bench/guests", lab.BuildOptions{CGO: true})
	if err != nil {
		return err
	}
	if n.server, err = startWorker(ctx, g, nil, program); err != nil {
		return err
	}
	if n.client, err = startHere(n.host); err != nil {
		return err
	}
	for _, open := range []struct {
		w         *worker
		at        netip.Addr
		receivers int
	}{{n.server, g.Addr(0), n.receivers}, {n.client, n.host.Addr(), 1}} {
		if _, err := open.w.call(request{Op: opOpenSoft, Addr: open.at.String(), Receivers: open.receivers, Stacks: ceilingPods}); err != nil {
			return err
		}
	}
	_, err = n.server.call(request{Op: opServe, Stack: stackSoft, Addr: n.addr()})
	return err
}

func (n *receiving) addr() string {
	return netip.AddrPortFrom(n.lab.Guest(0).Addr(0), ceilingPort).String()
}

// startHere starts a worker in this machine's place among the guests.
func startHere(h *lab.Host) (*worker, error) {
	cmd := exec.Command("/proc/self/exe", engine.WorkerArg)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // it ends with its input
	stderr := new(bytes.Buffer)
	cmd.Stderr = stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := h.NetNS().Do(cmd.Start); err != nil {
		return nil, err
	}
	return &worker{where: "this machine", in: in, out: bufio.NewReader(out), wait: cmd.Wait, stderr: stderr}, nil
}

// Start implements engine.Peers: the first connections make the link groups.
func (n *receiving) Start(ctx context.Context, l load.Load) error {
	_, err := n.Run(ctx, l)
	return err
}

// Run implements engine.Peers.
func (n *receiving) Run(_ context.Context, l load.Load) (load.Result, error) {
	r, err := n.client.call(request{Op: opLoad, Stack: stackSoft, Addr: n.addr(), Load: l})
	return r.Result, err
}

// Used implements engine.Peers.
func (n *receiving) Used() (engine.Usage, error) {
	d, err := n.lab.Guest(0).CPU()
	return engine.Usage{CPU: d}, err
}

// Check implements engine.Peers.
func (n *receiving) Check(context.Context, load.Load, load.Result) error {
	r, err := n.server.call(request{Op: opState})
	if err == nil && r.State.Receivers != n.receivers {
		err = fmt.Errorf("the guest's device has %d receivers and not %d", r.State.Receivers, n.receivers)
	}
	return err
}

// Close implements engine.Bed.
func (c *ceiling) Close() error {
	var errs []error
	for _, n := range c.nodes {
		for _, w := range []*worker{n.client, n.server} {
			if w != nil {
				errs = append(errs, w.close())
			}
		}
		if n.host != nil {
			errs = append(errs, n.host.Close())
		}
		if n.lab != nil {
			errs = append(errs, n.lab.Close())
		}
	}
	return errors.Join(errs...)
}
