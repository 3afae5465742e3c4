// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// mpaRequest is what an accepting peer answers a Hello with.
func mpaRequest() []byte {
	f := iwarp.Frame{CRC: true, Rev: iwarp.Rev2, IsEnhanced: true, Enhanced: iwarp.Enhanced{IRD: 4, ORD: 4}}
	return f.Append(nil)
}

// endsSoon waits for the end of a connection.
func endsSoon(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
	if b, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection is still there, and has said %q", b)
	}
}

// A stack is closed while a peer has the Hello: when that answers, nobody is there any more, and the connection of TCP ends.
func TestStack_closesBesideDial(t *testing.T) {
	l, err := net.Listen("tcp", net.JoinHostPort(serverAddr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	s := newStack(t, openIWARP(t, clientAddr))
	d := (&pair{client: s}).dialer()
	dialed := make(chan error, 1)
	go func() {
		_, _, err := d.Dial(limited(t), l.Addr().String())
		dialed <- err
	}()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := io.ReadFull(c, make([]byte, bsdh.HelloLen)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(mpaRequest()); err != nil {
		t.Fatal(err)
	}
	endsSoon(t, c)
	if err := <-dialed; err == nil {
		t.Error("connected")
	}
}

// Who gives up a connection whose request has come at that moment ends it, too.
func TestGiveUp(t *testing.T) {
	_, d := adapterEnd(t, clientAddr)
	l, err := net.Listen("tcp", net.JoinHostPort(serverAddr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	for _, asked := range []bool{true, false} {
		x, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(clientAddr)}}).DialContext(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		s, err := d.NewSSP(x.(*net.TCPConn), softiwarp.SSPOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if asked {
			if _, err := c.Write(mpaRequest()); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Request(limited(t)); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		sdp.GiveUp(ctx, s)
		endsSoon(t, c)
		_ = c.Close()
	}
}
