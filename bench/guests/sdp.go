// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// Names of the paths of group sdp: SDP on siw by Write and Read, which copy, and by Buffers, which are not copied but by siw; and TCP.
const (
	pathSDP        = "SDP on siw"
	pathSDPBuffers = "SDP on siw, Buffers"
)

const (
	stackSDP        stack = "sdp"
	stackSDPBuffers stack = "sdp buffers"
)

// sdpPorts are the ports of the servers in the worker.
var sdpPorts = map[stack]uint16{stackTCP: 7001, stackSDP: 7006, stackSDPBuffers: 7007}

// sdpOfTCP is what SDP has to reach of TCP to be of use where a program could have TCP.
const sdpOfTCP = 1.0

// sdpJobs are the jobs of group sdp-siw.
func (s *settings) sdpJobs() []engine.Job {
	const group = "two guests, SDP on siw"
	streams := s.Streams(group, "", pathTCP, []int{64 << 10, 1 << 20}, engine.Throughput{
		Unit: "MiB/s",
		Of:   engine.MiBPerSecond,
		Per:  engine.PerMiB,
	}, engine.Always(
		report.Target{Path: pathSDP, Against: pathTCP, Limit: sdpOfTCP}, report.Target{Path: pathSDPBuffers, Against: pathTCP, Limit: sdpOfTCP}))
	return append([]engine.Job{
		s.RoundTrip(group, "", pathTCP, report.Target{Path: pathSDP, Against: pathTCP, Limit: 1 / sdpOfTCP}),
	}, streams...)
}

// sdpPair is a bed: two guests with siw, and a worker in each.
type sdpPair struct{ *pair }

// SetUp implements engine.Bed.
func (p *sdpPair) SetUp(ctx context.Context) ([]engine.Path, error) {
	if err := p.startOnSIW(ctx, opOpenSDP, nil); err != nil { // as Linux has it: no CRCs
		return nil, err
	}
	for st, port := range sdpPorts {
		if _, err := p.server.call(request{Op: opServe, Stack: st, Addr: p.addr(port)}); err != nil {
			return nil, err
		}
	}
	return p.wanted([]engine.Path{
		{Name: pathTCP, Peers: &way{pair: p.pair, stack: stackTCP}},
		{Name: pathSDP, Peers: &way{pair: p.pair, stack: stackSDP}},
		{Name: pathSDPBuffers, Peers: &way{pair: p.pair, stack: stackSDPBuffers}, Can: func(l load.Load) bool { return l.Kind == load.Stream }},
	}), nil
}

// openSDP opens siw, and SDP on it.
func (w *workload) openSDP(addr string) error {
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return err
	}
	if w.siw, err = openSIW(a); err != nil {
		return err
	}
	w.opened.Add(w.siw.Close)
	if w.sdp, err = sdp.NewStack(sdp.Config{Device: w.siw.dev, SetupTimeout: connectLimit}); err != nil {
		return err
	}
	w.opened.Add(w.sdp.Close)
	return nil
}

func (w *workload) dialSDP(ctx context.Context, req request) (net.Conn, error) {
	c, _, err := (&sdp.Dialer{Stack: w.sdp}).Dial(ctx, req.Addr)
	if err != nil || req.Stack == stackSDP {
		return c, err
	}
	return w.withBuffers(c)
}

// bufferListener has the connections of a listener move long messages by Buffers.
type bufferListener struct {
	net.Listener
	w *workload
}

func (l bufferListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.w.withBuffers(c)
}

// bufferConn moves long messages by Buffers: what is in these goes, and comes, instead of what the load has. It is the load of a
// program that has its data in Buffers.
type bufferConn struct {
	*sdp.Conn
	out, in *sdp.Buffer
}

// longest is the length of the Buffers.
const longest = 1 << 20

func (w *workload) withBuffers(c net.Conn) (net.Conn, error) {
	conn, ok := c.(*sdp.Conn)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("connection is %T", c)
	}
	b := &bufferConn{Conn: conn}
	var err error
	if b.out, err = w.sdp.AllocBuffer(longest); err == nil {
		b.in, err = w.sdp.AllocBuffer(longest)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return b, nil
}

func (b *bufferConn) Write(p []byte) (int, error) {
	if len(p) < bufferMessage || len(p) > longest {
		return b.Conn.Write(p)
	}
	return b.WriteBuffer(b.out, 0, len(p))
}

func (b *bufferConn) Read(p []byte) (int, error) {
	if len(p) < bufferMessage || len(p) > longest {
		return b.Conn.Read(p)
	}
	return b.ReadBuffer(b.in, 0, len(p), false)
}

// bufferMessage is the shortest message that goes by a Buffer: the header of a load is none.
const bufferMessage = 4 << 10

// Close gives the Buffers back, when the connection has no use of them any more.
func (b *bufferConn) Close() error {
	err := b.Conn.Close()
	_ = b.out.Close() // the stack's Close deals with one that is in use still
	_ = b.in.Close()
	return err
}
