// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// Names of the paths of group transparent that others do not have.
const (
	pathDatapath = "kernel datapath"
	pathAgents   = "2 agents"
	pathAFSMC    = "AF_SMC"
	pathRelay    = "1 relay"
	pathRelays   = "2 relays"
)

// What the kernel datapath has to reach.
const (
	datapathRoundTrip = 0.5 // times the agents' round trip
	datapathRequests  = 2.5 // of the agents' requests in a second
	datapathStream    = 1.0 // of the agents' throughput
	ofAFSMC           = 0.9 // of the speed of a program that opens AF_SMC itself
)

// redisGets is a load that redis-benchmark makes, and not package load.
const redisGets load.Kind = 'r'

// transparentJobs are the jobs of group transparent.
func (s *settings) transparentJobs() []engine.Job {
	const group = "two guests, unmodified programs in pods"
	ofAgents := func(limit float64) report.Target {
		return report.Target{Path: pathDatapath, Against: pathAgents, Limit: limit}
	}
	ofOpened := report.Target{Path: pathDatapath, Against: pathAFSMC, Limit: ofAFSMC}
	jobs := []engine.Job{s.RoundTrip(group, "", pathTCP, ofAgents(datapathRoundTrip), report.Target{Path: pathDatapath, Against: pathAFSMC, Limit: 1 / ofAFSMC})}
	for _, redis := range []struct {
		name  string
		conns int
	}{{"redis, 1 client", 1}, {"redis, 10 clients", 10}} {
		jobs = append(jobs, engine.Job{
			Load: load.Load{Kind: redisGets, Conns: redis.conns, Duration: s.Duration},
			Figures: []engine.Figure{{
				Case: &report.Case{Group: group, Name: redis.name, Unit: "requests/s", Base: pathTCP, Targets: []report.Target{ofAgents(datapathRequests)}},
				Of:   engine.OpsPerSecond,
			}},
			Per: engine.Amount{Name: "request", Of: engine.Ops},
		})
	}
	jobs = append(jobs, s.Streams(group, "", pathTCP, []int{64 << 10}, engine.Throughput{
		Unit: "MiB/s",
		Of:   engine.MiBPerSecond,
		Per:  engine.PerMiB,
	}, engine.Always(ofAgents(datapathStream), ofOpened))...)
	opening := &report.Case{Group: group, Name: "opening connections", Unit: "connections/s", Base: pathTCP, Targets: []report.Target{ofOpened}}
	return append(jobs, s.Openings(1, engine.Figure{Case: opening, Of: engine.OpsPerSecond}))
}

// podKind is which of a guest's pods.
type podKind int

const (
	plainPod  podKind = iota // nobody attached it
	kernelPod                // an agent attached it, with datapath Kernel
	agentPod                 // an agent carries its connections
)

// podKinds has all of them.
var podKinds = [...]podKind{plainPod, kernelPod, agentPod}

// String is the pod's name.
func (k podKind) String() string { return [...]string{"plain", "kernel", "agents"}[k] }

// addr is the address of the pod of a guest.
func (k podKind) addr(guest int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 0, 0, byte(50 + 10*int(k) + guest)})
}

// Ports in the pods. A relay leads to the port of the same service.
const (
	portLoad       = 7001
	portAFSMC      = 7003
	portRedis      = 6379
	portServerSide = 100 // added to that of a service: the relay in the server's pod
	portClientSide = 200 // likewise: that in the client's, which leads to the other one
)

// podPair is a bed: two guests with three pods and an agent each. The pair's workers are in the guests' own network.
type podPair struct {
	*pair
	program  string // of the workers, in the guests
	workers  [2][len(podKinds)]*worker
	programs []*lab.Process // of the pods besides: redis, relays
	agents   []*lab.Process
	attached [2][]podKind
	seen     map[counterOf]counts // what was counted until the load before
}

// guests are the pair's, and their workers.
func (p *podPair) guests() [2]*lab.Guest { return [2]*lab.Guest{p.lab.Guest(0), p.lab.Guest(1)} }

// SetUp implements engine.Bed.
func (p *podPair) SetUp(ctx context.Context) ([]engine.Path, error) {
	if err := p.up(ctx); err != nil {
		return nil, err
	}
	if err := p.build(ctx); err != nil {
		return nil, err
	}
	for i, w := range []**worker{&p.server, &p.client} {
		g := p.lab.Guest(i)
		if err := addDevice(ctx, g); err != nil {
			return nil, err
		}
		var err error
		if *w, err = startWorker(ctx, g, nil, p.program); err != nil {
			return nil, err
		}
		if err := p.addPods(ctx, i); err != nil {
			return nil, err
		}
	}
	for _, w := range []*worker{p.server, p.client} {
		if err := p.awaitAgent(ctx, w); err != nil {
			return nil, err
		}
	}
	if err := p.firstContact(ctx); err != nil {
		return nil, err
	}
	if err := p.startPrograms(ctx); err != nil {
		return nil, err
	}
	p.seen = map[counterOf]counts{}
	return p.wanted(p.podPaths()), nil
}

// build builds what runs in the guests.
func (p *podPair) build(ctx context.Context) error {
	const module = "github.com/smcr-io/kube-smcr"
	for _, b := range []struct {
		pkg string
		opt lab.BuildOptions
	}{
		{"/cmd/node-agent", lab.BuildOptions{CGO: true}},
		{"/cmd/cni-plugin", lab.BuildOptions{Name: "smcr-cni"}},
		{"/bench/guests", lab.BuildOptions{CGO: true, Name: workerName}},
	} {
		if _, err := p.lab.Build(ctx, module+b.pkg, b.opt); err != nil {
			return err
		}
	}
	p.program = lab.GuestBin + "/" + workerName
	return nil
}

// workerName is the name of this program in the guests.
const workerName = "bench-guests"

// podPaths are the paths of group transparent.
func (p *podPair) podPaths() []engine.Path {
	noRedis := func(l load.Load) bool { return l.Kind != redisGets }
	server := plainPod.addr(0)
	return []engine.Path{
		{Name: pathTCP, Peers: &podWay{podPair: p, pod: plainPod, to: server}},
		{Name: pathDatapath, Peers: &podWay{podPair: p, pod: kernelPod, to: kernelPod.addr(0), by: byKernel}},
		{Name: pathAgents, Peers: &podWay{podPair: p, pod: agentPod, to: agentPod.addr(0), by: byAgents}},
		{Name: pathAFSMC, Peers: &podWay{podPair: p, pod: plainPod, to: server, by: byKernel, opens: true}, Can: noRedis},
		{Name: pathRelay, Peers: &podWay{podPair: p, pod: plainPod, to: server, offset: portServerSide}},
		{Name: pathRelays, Peers: &podWay{podPair: p, pod: plainPod, to: netip.AddrFrom4([4]byte{127, 0, 0, 1}), offset: portClientSide}},
	}
}

// Close implements engine.Bed.
func (p *podPair) Close() error {
	if p.lab == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	var errs []error
	for _, ws := range p.workers {
		for _, w := range ws {
			if w != nil {
				errs = append(errs, w.close())
			}
		}
	}
	end(p.programs) // a pod that has sockets of SMC is not detached
	for i, kinds := range p.attached {
		errs = append(errs, p.detach(ctx, i, kinds))
	}
	end(p.agents)
	if p.name != "" {
		for _, g := range p.guests() {
			errs = append(errs, removePods(ctx, g))
		}
	}
	return errors.Join(append(errs, p.pair.Close())...)
}

// end ends processes.
func end(all []*lab.Process) {
	for _, proc := range all {
		_ = proc.Signal(unix.SIGTERM) // it may have ended
		_ = proc.Wait()               // the signal may be what ended it
	}
}

// firstContact makes a link group between the guests that stays: a connection between the guests' own networks. For a server in a
// pod the kernel would choose a GID of the pod's address, from which soft RoCE of Linux 6.12 cannot send; but a link group that is there is
// used.
func (p *podPair) firstContact(ctx context.Context) error {
	at := p.addr(portAFSMC)
	if _, err := p.server.call(request{Op: opServe, Stack: stackKernel, Addr: at}); err != nil {
		return err
	}
	before, err := p.client.call(request{Op: opState})
	if err != nil {
		return err
	}
	for range startTries {
		if _, err := p.client.call(request{Op: opHold, Stack: stackKernel, Addr: at, Load: load.Load{Kind: load.Idle, Conns: 1}}); err != nil {
			return err
		}
		now, err := p.client.call(request{Op: opState})
		if err != nil || now.State.KernelSMCR > before.State.KernelSMCR {
			return err
		}
		if err := pause(ctx, startPause); err != nil {
			return err
		}
	}
	return fmt.Errorf("the kernels made %d connections, and none over SMC-R", startTries)
}

// pause waits.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
