// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// patience is how long a test waits for what must come.
const patience = 30 * time.Second

var loopA, loopB = netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.3")

func open(t testing.TB, name string, a netip.Addr) *softiwarp.Device {
	t.Helper()
	d, err := softiwarp.Open(softiwarp.Config{Name: name, Addr: a})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("close device %q: %v", name, err)
		}
	})
	return d
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// connector connects x, by Dial, with y, by Listen.
func connector(dial, accept softiwarp.ConnectOptions) rdmatest.Connector {
	return func(t testing.TB, x, y *rdmatest.End) {
		t.Helper()
		x.Init(t)
		y.Init(t)
		connect(t, x, y, dial, accept)
	}
}

func connect(t testing.TB, x, y *rdmatest.End, dial, accept softiwarp.ConnectOptions) {
	t.Helper()
	errDial, errAccept := tryConnect(t, within(t), x, y, dial, accept, func(addr string) string { return addr })
	if errDial != nil || errAccept != nil {
		t.Fatalf("dial: %v, accept: %v", errDial, errAccept)
	}
	for _, e := range []*rdmatest.End{x, y} {
		if s := e.QP.State(); s != rdma.QPRTS {
			t.Fatalf("queue pair of %s in %v", e.Dev.Name(), s)
		}
	}
}

// tryConnect has x dial what via makes of the address that y listens on.
func tryConnect(t testing.TB, ctx context.Context, x, y *rdmatest.End, dial, accept softiwarp.ConnectOptions, via func(addr string) string) (errDial, errAccept error) {
	t.Helper()
	dx, dy := x.Dev.(*softiwarp.Device), y.Dev.(*softiwarp.Device)
	l, err := dy.Listen(":0")
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept(ctx)
		if err == nil {
			err = r.Accept(ctx, y.QP, accept)
		}
		accepted <- err
	}()
	_, errDial = dx.Dial(ctx, x.QP, via(l.Addr().String()), dial)
	if errDial != nil {
		_ = l.Close() // ends Accept
	}
	errAccept = <-accepted
	_ = l.Close()
	return errDial, errAccept
}

func TestProvider(t *testing.T) {
	for _, c := range []struct {
		name         string
		dial, accept softiwarp.ConnectOptions
	}{
		{"CRC", softiwarp.ConnectOptions{}, softiwarp.ConnectOptions{}},
		{"NoCRC", softiwarp.ConnectOptions{NoCRC: true}, softiwarp.ConnectOptions{NoCRC: true}},
		{"SmallSegments", softiwarp.ConnectOptions{MaxULPDU: 512}, softiwarp.ConnectOptions{MaxULPDU: 1440}},
	} {
		t.Run(c.name, func(t *testing.T) {
			rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
				return rdmatest.Net{A: open(t, "a", loopA), B: open(t, "b", loopB), Connect: connector(c.dial, c.accept)}
			})
		})
	}
}

// TestProvider_loopback6 has one device at both ends: a machine has only one IPv6 loopback
// address.
func TestProvider_loopback6(t *testing.T) {
	rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
		d := open(t, "lo", netip.IPv6Loopback())
		return rdmatest.Net{A: d, B: d, Connect: connector(softiwarp.ConnectOptions{}, softiwarp.ConnectOptions{})}
	})
}
