// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// TestNoStack: a pod without a stack refuses and resets each rendezvous, has nothing to show, and takes what
// comes and goes of devices without a word.
func TestNoStack(t *testing.T) {
	var s stack = noStack{}
	tcp, peer := loopback(t)
	if c, err := s.client(t.Context(), tcp); c != nil || !errors.Is(err, errNoStack) {
		t.Errorf("client = %v, %v", c, err)
	}
	wantReset(t, peer)
	tcp, peer = loopback(t)
	if c, err := s.server(t.Context(), tcp, clc.ReasonNone); c != nil || !errors.Is(err, errNoStack) {
		t.Errorf("server = %v, %v", c, err)
	}
	wantReset(t, peer)
	s.RemoveDevice("rxe0")
	if err := errors.Join(s.AddDevice(fakeDevice{}), s.Close()); err != nil || len(s.LinkGroups()) > 0 || s.Stats() != (smcr.Stats{}) {
		t.Errorf("error %v, link groups %v, stats %+v", err, s.LinkGroups(), s.Stats())
	}
}

// TestSMCRStack_broken: a rendezvous on a connection that is broken gives a peerConn that equals nil,
// and not an interface with a nil *smcr.Conn in it.
func TestSMCRStack_broken(t *testing.T) {
	dev := softtest.NewFabric(t, 1).Open(t, soft.Config{Name: "soft0", Addr: netip.MustParseAddr("192.0.2.1"), MTU: rdma.MTU1024})
	inner := value(smcr.NewStack(smcr.Config{Option: smcr.BothSpeak{}, Devices: []rdma.Device{dev}}))(t)
	t.Cleanup(func() { must(t, inner.Close()) })
	s := smcrStack{inner}
	for name, try := range map[string]func(*net.TCPConn) (peerConn, error){
		"client": func(c *net.TCPConn) (peerConn, error) { return s.client(t.Context(), c) },
		"server": func(c *net.TCPConn) (peerConn, error) { return s.server(t.Context(), c, clc.ReasonNone) },
	} {
		near, far := loopback(t)
		reset(far)
		if c, err := try(near); c != nil || err == nil {
			t.Errorf("%s = %v, %v, want an error only", name, c, err)
		}
	}
}

// TestSMCRStack_declines: what the agent says of a connection reaches the client, whose connection is
// TCP with that reason.
func TestSMCRStack_declines(t *testing.T) {
	fabric := softtest.NewFabric(t, 1)
	var stacks [2]smcrStack
	for i, addr := range []string{"192.0.2.1", "192.0.2.2"} {
		dev := fabric.Open(t, soft.Config{Name: addr, Addr: netip.MustParseAddr(addr), MTU: rdma.MTU1024})
		inner := value(smcr.NewStack(smcr.Config{Option: smcr.BothSpeak{}, Devices: []rdma.Device{dev}}))(t)
		t.Cleanup(func() { must(t, inner.Close()) })
		stacks[i] = smcrStack{inner}
	}
	near, far := loopback(t)
	type result struct {
		c   peerConn
		err error
	}
	served := make(chan result, 1)
	go func() {
		c, err := stacks[1].server(t.Context(), near, clc.ReasonConfigErr)
		served <- result{c, err}
	}()
	client := value(stacks[0].client(t.Context(), far))(t)
	t.Cleanup(func() { _ = client.Abort() })
	server := <-served
	must(t, server.err)
	t.Cleanup(func() { _ = server.c.Abort() })
	if i := client.Info(); i.Mode != smcr.ModeTCP || i.Reason != clc.ReasonConfigErr || !i.PeerDeclined {
		t.Errorf("client: %v because of %v, declined by the peer: %t", i.Mode, i.Reason, i.PeerDeclined)
	}
	if i := server.c.Info(); i.Mode != smcr.ModeTCP || i.Reason != clc.ReasonConfigErr || i.PeerDeclined {
		t.Errorf("server: %v because of %v, declined by the peer: %t", i.Mode, i.Reason, i.PeerDeclined)
	}
}

// TestPlainTCP: the peerConn of a session on plain TCP copies in the direction that its methods name,
// waits for the end, and resets.
func TestPlainTCP(t *testing.T) {
	parker := value(smcr.NewParker(parkAfter, nil))(t)
	t.Cleanup(func() { must(t, parker.Close()) })
	type ends struct {
		p       plainTCP
		tcpFar  *net.TCPConn // the other end of the peerConn
		app     *net.TCPConn
		appFar  *net.TCPConn // the application
		started time.Time
	}
	begin := func(t *testing.T) ends {
		t.Helper()
		var e ends
		var tcp *net.TCPConn
		tcp, e.tcpFar = loopback(t)
		e.app, e.appFar = loopback(t)
		e.started = time.Unix(1000, 0)
		e.p = plainTCP{tcp, e.started}
		return e
	}
	// copies sends "hello" and the end from one side, and wants both on the other.
	copies := func(t *testing.T, from, to *net.TCPConn, start func(*smcr.Direction, *net.TCPConn, func(int64, error)), app *net.TCPConn, end func() error) {
		t.Helper()
		value(from.Write([]byte("hello")))(t)
		must(t, from.CloseWrite())
		copied := make(chan struct{})
		start(parker.NewDirection(), app, func(n int64, err error) {
			defer close(copied)
			if n != 5 || err != nil {
				t.Errorf("copied %d bytes, %v", n, err)
			}
		})
		<-copied
		must(t, end())
		if b, err := io.ReadAll(to); string(b) != "hello" || err != nil {
			t.Errorf("read %q, %v", b, err)
		}
	}
	t.Run("to the network", func(t *testing.T) {
		e := begin(t)
		copies(t, e.appFar, e.tcpFar, e.p.StartRelayFrom, e.app, e.p.CloseWrite)
	})
	t.Run("from the network", func(t *testing.T) {
		e := begin(t)
		copies(t, e.tcpFar, e.appFar, e.p.StartRelayTo, e.app, e.app.CloseWrite)
	})
	awaitEnd := func(p plainTCP) error {
		ended := make(chan error, 1)
		p.StartAwaitEnd(parker.NewDirection(), func(err error) { ended <- err })
		return <-ended
	}
	t.Run("orderly end", func(t *testing.T) {
		e := begin(t)
		must(t, errors.Join(e.p.CloseWrite(), e.tcpFar.Close()))
		value(io.ReadAll(e.p))(t)
		if err := awaitEnd(e.p); err != nil {
			t.Errorf("ended with %v", err)
		}
	})
	t.Run("reset by the peer", func(t *testing.T) {
		e := begin(t)
		reset(e.tcpFar)
		if err := awaitEnd(e.p); err == nil {
			t.Error("the reset was not told")
		}
	})
	t.Run("abort", func(t *testing.T) {
		e := begin(t)
		if err := e.p.Abort(); err != nil {
			t.Errorf("Abort = %v", err)
		}
		wantReset(t, e.tcpFar)
	})
	t.Run("info", func(t *testing.T) {
		e := begin(t)
		i := e.p.Info()
		if i.Mode != smcr.ModeTCP || i.Opened != e.started || i.Local.String() != e.tcpFar.RemoteAddr().String() || i.Peer.String() != e.tcpFar.LocalAddr().String() {
			t.Errorf("%+v", i)
		}
	})
}
