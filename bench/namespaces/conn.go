// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// The two ends of a pair, documentation addresses of RFC 5737.
var (
	clientAddr = netip.MustParsePrefix("192.0.2.1/24")
	serverAddr = netip.MustParsePrefix("192.0.2.2/24")
)

// Ports of the server: the same program behind plain TCP and behind SMC-R.
const (
	portTCP  = 7001
	portSMCR = 7002 // and those after it where the server has several stacks
)

// pathFirst is smcr.Conn with a new link group for each connection.
const pathFirst = "smcr.Conn, first contact"

// firstContacts bounds the link groups of one measurement and goroutine. A link group
// has registered memory of its own on both sides: what lives at once has to stay far
// below the stacks' limits.
const firstContacts = 10

// pair is a bed: two namespaces joined by one veth pair, with a client's and a
// server's worker, and a stack in each.
type pair struct {
	mtu          int
	congestion   string // TCP's congestion control
	maxConns     int    // 0, or how many connections with small buffers each stack will have
	stacks       int    // on the device of each side; 0: one
	firstContact bool   // with a path for it
	profiles     string // how the files of CPU profiles begin; none if empty

	client, server *worker
	spaces         []*space
}

// pair returns the bed of links with this MTU.
func (b *bench) pair(mtu int) pair { return pair{mtu: mtu, congestion: b.Report.Congestion} }

// SetUp implements engine.Bed.
func (p *pair) SetUp(context.Context) ([]engine.Path, error) {
	for _, name := range []string{"client", "server"} {
		s, err := newSpace(name, p.congestion)
		if err != nil {
			return nil, err
		}
		p.spaces = append(p.spaces, s)
		if err := s.manyConns(); err != nil {
			return nil, err
		}
	}
	err := join(p.mtu,
		end{in: p.spaces[0], name: "eth0", addr: clientAddr},
		end{in: p.spaces[1], name: "eth0", addr: serverAddr})
	if err != nil {
		return nil, err
	}
	if p.client, err = startWorker(p.spaces[0], "client"); err != nil {
		return nil, err
	}
	if p.server, err = startWorker(p.spaces[1], "server"); err != nil {
		return nil, err
	}
	return p.paths(p.ways()...), errors.Join(
		p.client.ask(request{Op: opOpenStack, Addr: clientAddr.Addr().String(), MaxConns: p.maxConns, Stacks: p.stacks}),
		p.server.ask(request{Op: opOpenStack, Addr: serverAddr.Addr().String(), MaxConns: p.maxConns, Stacks: p.stacks}),
		p.server.ask(request{Op: opServe, Addr: serverPort(portTCP)}),
		p.server.ask(request{Op: opServe, Addr: serverPort(portSMCR), SMCR: true}))
}

func serverPort(port uint16) string { return netip.AddrPortFrom(serverAddr.Addr(), port).String() }

// Close implements engine.Bed.
func (p *pair) Close() error {
	var errs []error
	stopWorkers(p.client, p.server)
	for _, s := range p.spaces {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}

// paths are ways of this pair, with profiles if there are to be any.
func (p *pair) paths(ways ...*way) []engine.Path {
	paths := pathsOf(ways)
	for i := range paths {
		if p.profiles != "" {
			paths[i].Profile = func(job int) (func() error, error) {
				file := fmt.Sprintf("%s-%d-%s", p.profiles, job, paths[i].Name)
				end := func() error { return p.profile("", "") }
				return end, p.profile(file+"-client.pprof", file+"-server.pprof")
			}
		}
	}
	return paths
}

// ways are plain TCP and smcr.Conn.
func (p *pair) ways() []*way {
	both := []int{p.client.pid(), p.server.pid()}
	ways := []*way{
		{name: pathTCP, client: p.client, req: request{Addr: serverPort(portTCP)}, pids: both},
		{name: pathConn, client: p.client, req: request{Addr: serverPort(portSMCR), SMCR: true}, pids: both},
	}
	if p.firstContact {
		ways = append(ways, &way{
			name: pathFirst, client: p.client, pids: both,
			req: request{Addr: serverPort(portSMCR), FirstContact: true}, most: firstContacts,
		})
	}
	return ways
}

// profile starts CPU profiles of both workers, or ends them.
func (p *pair) profile(client, server string) error {
	return errors.Join(
		p.client.ask(request{Op: opProfile, Addr: client}),
		p.server.ask(request{Op: opProfile, Addr: server}))
}

// conn measures smcr.Conn against TCP.
func (b *bench) conn(ctx context.Context) error {
	for _, mtu := range []int{1500, 9000} {
		if err := b.connMTU(ctx, mtu); err != nil {
			return fmt.Errorf("MTU %d: %w", mtu, err)
		}
	}
	return nil
}

func (b *bench) connMTU(ctx context.Context, mtu int) error {
	p := b.pair(mtu)
	p.profiles = b.profiles("conn", mtu)
	return b.Compare(ctx, fmt.Sprintf("smcr.Conn, MTU %d", mtu), &p, b.connJobs(mtu))
}

func (b *bench) connJobs(mtu int) []engine.Job {
	const group = "smcr.Conn over software RoCEv2 against TCP, one veth pair"
	prefix := fmt.Sprintf("MTU %d: ", mtu)
	return append([]engine.Job{b.RoundTrip(group, prefix, pathTCP)},
		b.streams(group, prefix, func(conns int) []report.Target { return connTargets(mtu, conns) })...)
}

// profiles is how files of profiles begin, if there are to be any.
func (b *bench) profiles(what string, n int) string {
	if b.Profile == "" {
		return ""
	}
	return filepath.Join(b.Profile, fmt.Sprintf("%s-%d", what, n))
}

// streams are told in Gbit/s, against TCP.
func (b *bench) streams(group, prefix string, targets func(conns int) []report.Target) []engine.Job {
	return b.Streams(group, prefix, pathTCP, []int{64 << 10, 1 << 20}, engine.Throughput{
		Unit: "Gbit/s", Of: gigabits, Per: engine.PerMiB,
	}, targets)
}

// gigabits is the speed of a stream in Gbit/s.
func gigabits(r load.Result) float64 { return float64(r.Bytes) * 8 / float64(r.Elapsed) }
