// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"

	"github.com/smcr-io/kube-smcr/hack/bench/load"
	"github.com/smcr-io/kube-smcr/hack/bench/report"
)

// The two ends of a pair, documentation addresses of RFC 5737.
var (
	clientAddr = netip.MustParsePrefix("192.0.2.1/24")
	serverAddr = netip.MustParsePrefix("192.0.2.2/24")
)

// Ports of the server: the same program behind plain TCP and behind SMC-R.
const (
	portTCP  = 7001
	portSMCR = 7002
)

// pair is a client and a server worker, each in a namespace.
type pair struct {
	client, server *worker
	spaces         []*space
}

// newPair joins two namespaces by one veth pair, with a worker and a stack in
// each. maxConns is 0, or how many connections with small buffers there will
// be.
func newPair(mtu, maxConns int) (p *pair, err error) {
	p = &pair{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	for _, name := range []string{"client", "server"} {
		s, err := newSpace(name)
		if err != nil {
			return p, err
		}
		p.spaces = append(p.spaces, s)
		if err := s.manyConns(); err != nil {
			return p, err
		}
	}
	err = join(mtu,
		end{in: p.spaces[0], name: "eth0", addr: clientAddr},
		end{in: p.spaces[1], name: "eth0", addr: serverAddr})
	if err != nil {
		return p, err
	}
	if p.client, err = startWorker(p.spaces[0], "client"); err != nil {
		return p, err
	}
	if p.server, err = startWorker(p.spaces[1], "server"); err != nil {
		return p, err
	}
	return p, errors.Join(
		p.ask(p.client, request{Op: opOpenStack, Addr: clientAddr.Addr().String(), MaxConns: maxConns}),
		p.ask(p.server, request{Op: opOpenStack, Addr: serverAddr.Addr().String(), MaxConns: maxConns}),
		p.ask(p.server, request{Op: opServe, Addr: serverPort(portTCP)}),
		p.ask(p.server, request{Op: opServe, Addr: serverPort(portSMCR), SMCR: true}))
}

func serverPort(port uint16) string { return netip.AddrPortFrom(serverAddr.Addr(), port).String() }

func (*pair) ask(w *worker, r request) error {
	_, err := w.call(r)
	return err
}

func (p *pair) close() error {
	var errs []error
	stopWorkers(p.client, p.server)
	for _, s := range p.spaces {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}

// profile starts CPU profiles of both workers.
func (p *pair) profile(dir, name string) error {
	return errors.Join(
		p.ask(p.client, request{Op: opProfile, Addr: filepath.Join(dir, name+"-client.pprof")}),
		p.ask(p.server, request{Op: opProfile, Addr: filepath.Join(dir, name+"-server.pprof")}))
}

// paths are plain TCP and smcr.Conn.
func (p *pair) paths() []path {
	pids := []int{p.client.pid(), p.server.pid()}
	run := func(r request) func(load.Load) (load.Result, error) {
		return func(l load.Load) (load.Result, error) {
			r.Op, r.Load = opLoad, l
			resp, err := p.client.call(r)
			return resp.Result, err
		}
	}
	return []path{
		{name: pathTCP, run: run(request{Addr: serverPort(portTCP)}), pids: pids},
		{name: pathConn, run: run(request{Addr: serverPort(portSMCR), SMCR: true}), pids: pids},
	}
}

// half is the part of TCP's throughput that software RoCEv2 has to reach.
const half = 0.5

// conn measures smcr.Conn against TCP.
func (b *bench) conn(ctx context.Context) error {
	for _, mtu := range []int{1500, 9000} {
		if err := b.connMTU(ctx, mtu); err != nil {
			return fmt.Errorf("MTU %d: %w", mtu, err)
		}
	}
	return nil
}

func (b *bench) connMTU(ctx context.Context, mtu int) (err error) {
	p, err := newPair(mtu, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	const group = "smcr.Conn over software RoCEv2 against TCP, one veth pair"
	prefix := fmt.Sprintf("MTU %d: ", mtu)
	jobs := append([]job{b.echoJob(group, prefix, pathTCP)},
		b.streamJobs(group, prefix, pathTCP, report.Target{Path: pathConn, Against: pathTCP, Limit: half})...)
	paths := p.paths()
	if err := warmUp(paths); err != nil {
		return err
	}
	title := fmt.Sprintf("smcr.Conn, MTU %d", mtu)
	if err := b.rounds(ctx, title, jobs, paths); err != nil || b.profile == "" {
		return err
	}
	return b.profiles(fmt.Sprintf("conn-%d", mtu), p, jobs, paths)
}

// warmUp makes first contact, and everything else that happens only once.
func warmUp(paths []path) error {
	for _, p := range paths {
		if _, err := p.run(load.Load{Kind: load.Echo, SizeBytes: 64}); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// profiles runs each job once more, under the profiler, which costs time.
func (b *bench) profiles(name string, p *pair, jobs []job, paths []path) error {
	for i, j := range jobs {
		for _, path := range paths {
			file := fmt.Sprintf("%s-%d-%s", name, i, path.name)
			if err := p.profile(b.profile, file); err != nil {
				return err
			}
			j.load.Duration *= 3
			_, err := path.run(j.load)
			j.load.Duration /= 3
			if err := errors.Join(err, p.profile(b.profile, "")); err != nil {
				return err
			}
		}
	}
	return nil
}
