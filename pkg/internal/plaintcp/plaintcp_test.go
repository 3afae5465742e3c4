// SPDX-License-Identifier: Apache-2.0

package plaintcp_test

import (
	"context"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/plaintcp"
)

// control does as [net.Dialer.Control] wants it.
func control(_, _ string, c syscall.RawConn) error { return plaintcp.ShareAddress(c) }

// Both ends of a connection are plain TCP, and so is one of a dialer that wants Multipath TCP. Two connections share a port if both say so.
func TestDial(t *testing.T) {
	first, second := listen(t), listen(t)
	d := net.Dialer{Control: control}
	d.SetMultipathTCP(true)
	c := dial(t, d, first)
	if !d.MultipathTCP() {
		t.Error("Dial has changed the caller's Dialer")
	}
	accepted, err := first.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = accepted.Close() })
	for name, end := range map[string]*net.TCPConn{"dialed": c, "accepted": accepted} {
		if multi, err := end.MultipathTCP(); multi || err != nil {
			t.Errorf("the %s end is Multipath TCP: %v, error %v", name, multi, err)
		}
	}
	d.LocalAddr = c.LocalAddr()
	if other := dial(t, d, second); other.LocalAddr().String() != c.LocalAddr().String() {
		t.Errorf("the second connection is from %v, the first from %v", other.LocalAddr(), c.LocalAddr())
	}
	d.Control = nil
	if c, err := plaintcp.Dial(t.Context(), d, listen(t).Addr().String()); err == nil {
		_ = c.Close()
		t.Error("a connection that does not share its address has a port that others have")
	}
}

func TestDial_errors(t *testing.T) {
	over, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()
	if c, err := plaintcp.Dial(over, net.Dialer{}, "127.0.0.1:1"); err == nil || c != nil {
		t.Errorf("Dial after the deadline: %v, error %v", c, err)
	}
	if l, err := plaintcp.Listen(t.Context(), "192.0.2.1:no-such-service"); err == nil || l != nil {
		t.Errorf("Listen on no port: %v, error %v", l, err)
	}
}

func listen(t *testing.T) *net.TCPListener {
	t.Helper()
	l, err := plaintcp.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func dial(t *testing.T, d net.Dialer, to *net.TCPListener) *net.TCPConn {
	t.Helper()
	c, err := plaintcp.Dial(t.Context(), d, to.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}
