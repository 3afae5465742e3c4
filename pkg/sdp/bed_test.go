// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// Addresses of both hosts. They are not those of other packages' tests.
const (
	clientAddr = "127.93.0.1"
	serverAddr = "127.93.0.2"
)

// transport is a device that SDP runs on here.
type transport struct {
	name string
	open func(testing.TB, string) rdma.Device
}

var transports = []transport{{"iWARP", openIWARP}, {"adapter", openAdapter}, {"RoCE", openRoCE}}

// eachTransport runs a test on each.
func eachTransport(t *testing.T, f func(t *testing.T, open func(testing.TB, string) rdma.Device)) {
	each(t, transports, f)
}

// eachOnTCP runs a test on those whose connections begin as ours of TCP.
func eachOnTCP(t *testing.T, f func(t *testing.T, open func(testing.TB, string) rdma.Device)) {
	each(t, []transport{transports[0], transports[2]}, f)
}

func each(t *testing.T, all []transport, f func(t *testing.T, open func(testing.TB, string) rdma.Device)) {
	for _, tr := range all {
		t.Run(tr.name, func(t *testing.T) { f(t, tr.open) })
	}
}

func openIWARP(tb testing.TB, addr string) rdma.Device {
	tb.Helper()
	d, err := softiwarp.Open(softiwarp.Config{Name: "iw-" + addr, Addr: netip.MustParseAddr(addr)})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
	})
	return d
}

// openAdapter opens a device in software that is to be used as an adapter that opens its connections itself.
func openAdapter(tb testing.TB, addr string) rdma.Device {
	tb.Helper()
	return asAdapter{openIWARP(tb, addr).(*softiwarp.Device)}
}

// asAdapter says that Hello goes in the MPA Request.
type asAdapter struct{ *softiwarp.Device }

// rocePort is not RoCE's, so that the tests do not meet a device of the machine, and of no other run of them.
var rocePort = testenv.UDPPort()

func openRoCE(tb testing.TB, addr string) rdma.Device {
	tb.Helper()
	d, err := soft.Open(soft.Config{Name: "soft-" + addr, Addr: netip.MustParseAddr(addr), Port: rocePort, MTU: rdma.MTU4096})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
	})
	return d
}

// pair is two stacks, and a listener on the second.
type pair struct {
	client, server *sdp.Stack
	l              *sdp.Listener
	dialing        sync.Mutex // so that what is accepted is what was dialed
}

func newPair(tb testing.TB, open func(testing.TB, string) rdma.Device, edit ...func(*sdp.Config)) *pair {
	tb.Helper()
	p := &pair{client: newStack(tb, open(tb, clientAddr), edit...), server: newStack(tb, open(tb, serverAddr), edit...)}
	p.listenOn(tb)
	return p
}

// listenOn opens the listener of a pair.
func (p *pair) listenOn(tb testing.TB) {
	tb.Helper()
	l, err := sdp.Listen(tb.Context(), p.server, "tcp", net.JoinHostPort(serverAddr, "0"))
	if err != nil {
		tb.Fatal(err)
	}
	p.l = l
	tb.Cleanup(func() {
		if err := l.Close(); err != nil {
			tb.Error(err)
		}
	})
}

func newStack(tb testing.TB, d rdma.Device, edit ...func(*sdp.Config)) *sdp.Stack {
	tb.Helper()
	cfg := sdp.Config{Device: d, MaxULPDU: iwarp.MaxOwnULPDU, Hooks: sdp.Hooks{
		Refused: func(peer net.Addr, err error) { tb.Logf("refused %v: %v", peer, err) },
	}}
	if a, ok := d.(asAdapter); ok {
		cfg.Device, cfg.HelloInRequest = a.Device, true
	}
	for _, e := range edit {
		e(&cfg)
	}
	s, err := sdp.NewStack(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
		if n := len(s.Conns()); n != 0 {
			tb.Errorf("closed stack still has %d connections", n)
		}
	})
	return s
}

// dialer connects from the client's address.
func (p *pair) dialer() *sdp.Dialer {
	return &sdp.Dialer{Stack: p.client, Dialer: net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(clientAddr)}}}
}

// dial opens a connection and returns both ends.
func (p *pair) dial(tb testing.TB) (client, server *sdp.Conn) {
	tb.Helper()
	p.dialing.Lock()
	defer p.dialing.Unlock()
	ctx, cancel := context.WithTimeout(tb.Context(), 20*time.Second)
	defer cancel()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := p.l.Accept()
		if err != nil {
			tb.Error(err)
		}
		accepted <- c
	}()
	c, path, err := p.dialer().Dial(ctx, p.l.Addr().String())
	if err != nil {
		_ = p.l.Close() // else the one that waits to accept takes what somebody else dials
		tb.Fatal(err)
	}
	if !path.Mapped {
		tb.Fatalf("%v", path)
	}
	s := <-accepted
	if s == nil {
		tb.FailNow()
	}
	return c.(*sdp.Conn), s.(*sdp.Conn)
}
