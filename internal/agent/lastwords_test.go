// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// TestRelay_lastWords: an end writes an answer and resets its connection, while the other one still sends to it. As on
// plain TCP the other one gets the answer, and then the reset, also where the relay's write met the reset before the
// answer was read.
func TestRelay_lastWords(t *testing.T) {
	fabric := softtest.NewFabric(t, 1)
	var stacks [2]smcrStack
	for i, addr := range []string{"192.0.2.1", "192.0.2.2"} {
		dev := fabric.Open(t, soft.Config{Name: addr, Addr: netip.MustParseAddr(addr), MTU: rdma.MTU1024})
		inner := value(smcr.NewStack(smcr.Config{Option: smcr.BothSpeak{}, Devices: []rdma.Device{dev}}))(t)
		t.Cleanup(func() { must(t, inner.Close()) })
		stacks[i] = smcrStack{inner}
	}
	overTCP := func(t *testing.T) (peerConn, *net.TCPConn, net.Conn) {
		tcp, far := loopback(t)
		return plainTCP{tcp, time.Now()}, tcp, far
	}
	overSMCR := func(t *testing.T) (peerConn, *net.TCPConn, net.Conn) {
		tcp, far := loopback(t)
		peer := make(chan peerConn, 1)
		go func() {
			c, _ := stacks[1].server(t.Context(), far, clc.ReasonNone) // nil with an error
			peer <- c
		}()
		c := value(stacks[0].client(t.Context(), tcp))(t)
		p, ok := (<-peer).(*smcr.Conn)
		if !ok || p.Mode() != smcr.ModeSMCR {
			t.Fatal("not on SMC-R")
		}
		must(t, p.SetDeadline(time.Now().Add(waitLimit)))
		t.Cleanup(func() { _ = p.Abort() })
		return c, tcp, p
	}
	for _, tt := range []struct {
		name   string
		dial   func(t *testing.T) (peerConn, *net.TCPConn, net.Conn)
		rounds int
	}{{"TCP", overTCP, 50}, {"SMC-R", overSMCR, 10}} {
		for _, side := range []string{"application", "peer"} {
			t.Run(tt.name+" "+side, func(t *testing.T) {
				for range tt.rounds {
					c, tcp, peer := tt.dial(t)
					app, appFar := loopback(t)
					var far, other net.Conn = appFar, peer
					if side == "peer" {
						far, other = peer, appFar
					}
					lastWords(t, app, c, tcp, far, other)
					if t.Failed() {
						return
					}
				}
			})
		}
	}
}

// lastWords has one end of a relay write an answer and reset its connection while the other end writes to it.
func lastWords(t *testing.T, app *net.TCPConn, c peerConn, tcp *net.TCPConn, far, other net.Conn) {
	t.Helper()
	const answerBytes = 20 << 10
	parker := value(smcr.NewParker(time.Millisecond, nil))(t)
	ended := make(chan error, 1)
	must(t, errors.Join(resetOnClose(app), resetOnClose(tcp)))
	newRelay(parker, app, c, tcp, func(_, _ int64, err error) { ended <- err }).start()
	wrote := make(chan error, 1)
	go func() {
		b := make([]byte, 64<<10)
		for {
			if _, err := other.Write(b); err != nil {
				wrote <- err
				return
			}
		}
	}()
	value(io.ReadFull(far, make([]byte, 256<<10)))(t) // and no more
	value(far.Write(make([]byte, answerBytes)))(t)
	if f, ok := far.(*smcr.Conn); ok {
		must(t, f.Abort())
	} else {
		reset(far.(*net.TCPConn))
	}
	n, err := io.ReadFull(other, make([]byte, answerBytes))
	if err != nil {
		t.Errorf("read %d bytes of %d, %v", n, answerBytes, err)
	}
	m, err := other.Read(make([]byte, 1))
	werr := <-wrote
	// The kernel tells one of the two of the reset.
	if m != 0 || !errors.Is(err, unix.ECONNRESET) && (!errors.Is(err, io.EOF) || !errors.Is(werr, unix.ECONNRESET)) {
		t.Errorf("read %d bytes, %v, wrote until %v", m, err, werr)
	}
	_ = other.Close()
	if err := <-ended; !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("the relay ended with %v", err)
	}
	must(t, parker.Close())
}
