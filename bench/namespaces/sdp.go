// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/bench/sdpload"
)

// portSDP is where the server has SDP.
const portSDP = 7004

// Paths of group sdp. Bcopy is by Write and Read, Zcopy from Buffer to Buffer by the RDMA operation of that name.
const (
	pathBcopy           = "SDP, Bcopy"
	pathZcopyRead       = "SDP, Zcopy, READ"
	pathZcopyWrite      = "SDP, Zcopy, WRITE"
	pathBcopyNoCRC      = "SDP, Bcopy, no CRC"
	pathZcopyReadNoCRC  = "SDP, Zcopy, READ, no CRC"
	pathZcopyWriteNoCRC = "SDP, Zcopy, WRITE, no CRC"
)

// What Zcopy has to reach with messages of 1 MiB and CRCs.
const (
	ofBcopy  = 1.2 // of Bcopy's throughput
	sdpOfTCP = 0.9 // of TCP's
)

// sdpForm is how a connection of SDP is, and how its streams move.
type sdpForm struct {
	NoCRC bool        `json:"noCRC,omitempty"`
	Way   sdpload.Way `json:"way"`
}

// sdpPair is a bed: two namespaces joined by one veth pair, with SDP over software iWARP in each.
type sdpPair struct{ pair }

// SetUp implements engine.Bed.
func (p *sdpPair) SetUp(ctx context.Context) ([]engine.Path, error) {
	if _, err := p.pair.SetUp(ctx); err != nil {
		return nil, err
	}
	paths := p.paths(p.ways()...)
	for i := range paths {
		switch paths[i].Name {
		case pathZcopyRead, pathZcopyWrite, pathZcopyReadNoCRC, pathZcopyWriteNoCRC:
			paths[i].Can = func(l load.Load) bool { return l.Kind == load.Stream } // 64 bytes are copied
		}
	}
	return paths, errors.Join(
		p.client.ask(request{Op: opOpenIWARP, Addr: clientAddr.Addr().String()}),
		p.server.ask(request{Op: opOpenIWARP, Addr: serverAddr.Addr().String()}),
		p.client.ask(request{Op: opOpenSDP}),
		p.server.ask(request{Op: opOpenSDP}),
		p.server.ask(request{Op: opServeSDP, Addr: serverPort(portSDP)}))
}

// ways are plain TCP, smcr.Conn and the forms of SDP.
func (p *sdpPair) ways() []*way {
	ways := p.pair.ways()
	for _, f := range []struct {
		name string
		form sdpForm
	}{
		{pathBcopy, sdpForm{Way: sdpload.Bcopy}},
		{pathZcopyRead, sdpForm{Way: sdpload.Read}},
		{pathZcopyWrite, sdpForm{Way: sdpload.Write}},
		{pathBcopyNoCRC, sdpForm{Way: sdpload.Bcopy, NoCRC: true}},
		{pathZcopyReadNoCRC, sdpForm{Way: sdpload.Read, NoCRC: true}},
		{pathZcopyWriteNoCRC, sdpForm{Way: sdpload.Write, NoCRC: true}},
	} {
		ways = append(ways, &way{
			name: f.name, client: p.client, req: request{Addr: serverPort(portSDP), SDP: &f.form},
			pids: []int{p.client.pid(), p.server.pid()},
		})
	}
	return ways
}

// sdp measures SDP over software iWARP against TCP.
func (b *bench) sdp(ctx context.Context) error {
	const group = "SDP over software iWARP against TCP, one veth pair"
	for _, mtu := range []int{1500, 9000} {
		prefix := fmt.Sprintf("MTU %d: ", mtu)
		jobs := []engine.Job{
			b.RoundTrip(group, prefix, pathTCP),
			b.sdpStream(group, prefix, "64 KiB", 64<<10),
			b.sdpStream(group, prefix, "1 MiB", 1<<20, sdpTargets()...),
		}
		bed := &sdpPair{b.pair(mtu)}
		bed.profiles = b.profiles("sdp", mtu)
		if err := b.Compare(ctx, fmt.Sprintf("SDP, MTU %d", mtu), bed, jobs); err != nil {
			return fmt.Errorf("MTU %d: %w", mtu, err)
		}
	}
	return nil
}

// sdpTargets are the targets of messages of 1 MiB.
func sdpTargets() []report.Target {
	var all []report.Target
	for _, path := range []string{pathZcopyRead, pathZcopyWrite} {
		all = append(all, report.Target{Path: path, Against: pathBcopy, Limit: ofBcopy}, report.Target{Path: path, Against: pathTCP, Limit: sdpOfTCP})
	}
	return all
}

// sdpStream is the job of messages of a size, on one connection.
func (b *bench) sdpStream(group, prefix, name string, size int, targets ...report.Target) engine.Job {
	name = prefix + "stream of " + name + " messages"
	return engine.Job{
		Load: load.Load{Kind: load.Stream, SizeBytes: size, Conns: 1, Duration: b.Duration},
		Figures: []engine.Figure{
			{Case: &report.Case{Group: group, Name: name, Unit: "Gbit/s", Base: pathTCP, Targets: targets}, Of: gigabits},
			{Case: &report.Case{Group: group, Name: name + ", copied by both libraries", Unit: "MiB/GiB", Lower: true, Base: pathBcopy}, Of: copied},
		},
		Per: engine.PerMiB,
	}
}

// copied is what libraries copied, in MiB for each GiB of a stream.
func copied(r load.Result) float64 { return float64(r.Copied) * 1024 / float64(r.Bytes) }
