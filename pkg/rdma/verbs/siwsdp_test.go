// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/internal/conntest"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// TestSIW_sdp has connections of SDP on siw, at both ends and at one of them. They are to be what those of TCP are.
func TestSIW_sdp(t *testing.T) {
	testenv.Need(t, testenv.RDMADevice)
	siw := func(t *testing.T) rdma.Device { return openSIW(t) }
	soft := func(t *testing.T) rdma.Device { return openSoft(t) }
	for _, c := range []struct {
		name           string
		client, server func(*testing.T) rdma.Device
	}{{"siwToSIW", siw, siw}, {"softToSIW", soft, siw}, {"siwToSoft", siw, soft}} {
		t.Run(c.name, func(t *testing.T) {
			p := newSDP(t, c.client(t), c.server(t))
			if c.name == "siwToSIW" { // it takes its time, and tests of pkg/sdp have it over the other device
				t.Run("netTest", p.netTest)
			}
			for _, script := range conntest.Scripts() {
				t.Run(script, func(t *testing.T) {
					t.Parallel()
					p.closesLikeTCP(t, script)
				})
			}
			t.Run("buffers", p.buffers)
		})
	}
}

func (p *sdpPair) netTest(t *testing.T) {
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		a, b := p.dial(t)
		return a, b, func() { _, _ = a.Close(), b.Close() }, nil
	})
}

// sdpPair is two stacks, and a listener on the second.
type sdpPair struct {
	client, server *sdp.Stack
	l              *sdp.Listener
	dialing        sync.Mutex // so that what is accepted is what was dialed
}

func newSDP(t *testing.T, client, server rdma.Device) *sdpPair {
	t.Helper()
	p := &sdpPair{}
	for s, d := range map[**sdp.Stack]rdma.Device{&p.client: client, &p.server: server} {
		_, soft := d.(*softiwarp.Device)
		stack, err := sdp.NewStack(sdp.Config{Device: d, HelloInRequest: soft, SetupTimeout: patience, Hooks: sdp.Hooks{
			Refused: func(peer net.Addr, err error) { t.Logf("refused %v: %v", peer, err) },
		}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := stack.Close(); err != nil {
				t.Error(err)
			}
		})
		*s = stack
	}
	var err error
	if p.l, err = sdp.Listen(t.Context(), p.server, "tcp", ":0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.l.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *sdpPair) dial(t *testing.T) (client, server *sdp.Conn) {
	t.Helper()
	p.dialing.Lock()
	defer p.dialing.Unlock()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := p.l.Accept()
		if err != nil {
			t.Error(err)
		}
		accepted <- c
	}()
	c, _, err := (&sdp.Dialer{Stack: p.client}).Dial(within(t), p.l.Addr().String())
	if err != nil {
		_ = p.l.Close() // else the one that waits to accept takes what somebody else dials
		t.Fatal(err)
	}
	s := <-accepted
	if s == nil {
		t.FailNow()
	}
	return c.(*sdp.Conn), s.(*sdp.Conn)
}

// closesLikeTCP plays a script of pkg/internal/conntest over both.
func (p *sdpPair) closesLikeTCP(t *testing.T, script string) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	// In an emulated machine what was sent takes its time.
	conntest.Check(t, script, 300*time.Millisecond, func() (a, b conntest.Conn) {
		x, err := net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr))
		if err != nil {
			t.Fatal(err)
		}
		y, err := l.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		return x, y
	}, func() (a, b conntest.Conn) {
		x, y := p.dial(t)
		return x, y
	})
}

// buffers moves a Buffer by RDMA, in both directions.
func (p *sdpPair) buffers(t *testing.T) {
	const size = 1 << 20
	a, b := p.dial(t)
	for _, way := range []struct {
		from, to   *sdp.Conn
		out, in    *sdp.Stack
		what       string
		seed, next byte
	}{{a, b, p.client, p.server, "client to server", 3, 7}, {b, a, p.server, p.client, "server to client", 5, 11}} {
		out, err := way.out.AllocBuffer(size)
		if err != nil {
			t.Fatal(err)
		}
		in, err := way.in.AllocBuffer(size)
		if err != nil {
			t.Fatal(err)
		}
		for i := range out.Bytes() {
			out.Bytes()[i] = byte(i)*way.next + way.seed
		}
		sent := make(chan error, 1)
		go func() {
			_, err := way.from.WriteBuffer(out, 0, size)
			sent <- err
		}()
		n, err := way.to.ReadBuffer(in, 0, size, true)
		if e := <-sent; err != nil || e != nil || n != size || !bytes.Equal(in.Bytes()[:size], out.Bytes()[:size]) {
			t.Errorf("%s: %d bytes, or others: %v, %v", way.what, n, err, e)
		}
		if i := way.to.Info(); i.BytesRead == 0 {
			t.Errorf("%s: nothing went by RDMA READ: %v", way.what, i)
		}
		if err := errors.Join(out.Close(), in.Close()); err != nil {
			t.Error(err)
		}
	}
	if err := a.CloseWrite(); err != nil {
		t.Error(err)
	}
	if n, err := b.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("read %d bytes, %v, want the end of the stream", n, err)
	}
	_, _ = b.Close(), a.Close()
}
