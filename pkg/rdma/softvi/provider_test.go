// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softvi"
)

// patience is how long a test waits for what must come.
const patience = 30 * time.Second

var loopA, loopB = netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.3")

func open(t testing.TB, c softvi.Config) *softvi.Device {
	t.Helper()
	d, err := softvi.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("close device %q: %v", c.Name, err)
		}
	})
	return d
}

// devices are one of each address.
func devices(t testing.TB) (a, b *softvi.Device) {
	t.Helper()
	return open(t, softvi.Config{Name: "a", Addr: loopA}), open(t, softvi.Config{Name: "b", Addr: loopB})
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// at is the address of a program behind a device.
func at(d *softvi.Device, discriminator string) softvi.Addr {
	return softvi.Addr{IP: d.Addr().Addr(), Port: d.Addr().Port(), Discriminator: discriminator}
}

// device returns the end's device, whatever a test has put around it.
func device(e *rdmatest.End) *softvi.Device {
	if u, ok := e.Dev.(unreliable); ok {
		return u.Device
	}
	return e.Dev.(*softvi.Device)
}

// connector connects x, by Dial, with y, by Listen.
func connector(dial, accept softvi.Options) rdmatest.Connector {
	return func(t testing.TB, x, y *rdmatest.End) {
		t.Helper()
		x.Init(t)
		y.Init(t)
		connect(t, x, y, dial, accept)
	}
}

func connect(t testing.TB, x, y *rdmatest.End, dial, accept softvi.Options) {
	t.Helper()
	connectTo(t, x, y, at(device(y), "test"), dial, accept)
}

// connectTo is connect by way of an address that leads to y.
func connectTo(t testing.TB, x, y *rdmatest.End, to softvi.Addr, dial, accept softvi.Options) {
	t.Helper()
	ctx := within(t)
	l, err := device(y).Listen(to.Discriminator)
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept(ctx)
		if err == nil {
			_, err = r.Accept(y.QP, accept)
		}
		accepted <- err
	}()
	_, errDial := device(x).Dial(ctx, x.QP, to, dial)
	if errDial != nil {
		_ = l.Close() // ends Accept
	}
	errAccept := <-accepted
	_ = l.Close()
	if errDial != nil || errAccept != nil {
		t.Fatalf("dial: %v, accept: %v", errDial, errAccept)
	}
	connected(t, x, y)
}

func connected(t testing.TB, ends ...*rdmatest.End) {
	t.Helper()
	for _, e := range ends {
		if s := e.QP.State(); s != rdma.QPRTS {
			t.Fatalf("queue pair of %s in %v", e.Dev.Name(), s)
		}
	}
}

// connectPeers connects two ends that call each other.
func connectPeers(t testing.TB, x, y *rdmatest.End) {
	t.Helper()
	x.Init(t)
	y.Init(t)
	ctx := within(t)
	called := make(chan error, 1)
	go func() {
		_, err := device(y).DialPeer(ctx, y.QP, at(device(x), "x"), softvi.Options{Discriminator: "y"})
		called <- err
	}()
	_, errX := device(x).DialPeer(ctx, x.QP, at(device(y), "y"), softvi.Options{Discriminator: "x"})
	if errY := <-called; errX != nil || errY != nil {
		t.Fatalf("calls: %v, %v", errX, errY)
	}
	connected(t, x, y)
}

func TestProvider(t *testing.T) {
	for _, c := range []struct {
		name string
		by   rdmatest.Connector
	}{
		{"ClientServer", connector(softvi.Options{}, softvi.Options{})},
		{"PeerToPeer", connectPeers},
		{"SmallSegments", connector(softvi.Options{MaxSegment: 512}, softvi.Options{MaxSegment: 1460})},
	} {
		t.Run(c.name, func(t *testing.T) {
			rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
				a, b := devices(t)
				return rdmatest.Net{A: a, B: b, Connect: c.by}
			})
		})
	}
}

// TestProvider_loopback6 has one device at both ends: a machine has only one IPv6 loopback
// address.
func TestProvider_loopback6(t *testing.T) {
	for name, by := range map[string]rdmatest.Connector{"ClientServer": connector(softvi.Options{}, softvi.Options{}), "PeerToPeer": connectPeers} {
		t.Run(name, func(t *testing.T) {
			rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
				d := open(t, softvi.Config{Name: "lo", Addr: netip.IPv6Loopback()})
				return rdmatest.Net{A: d, B: d, Connect: by}
			})
		})
	}
}

// unreliable is a device whose connections are all unreliable, and which says so.
type unreliable struct{ *softvi.Device }

func (u unreliable) Attr() rdma.DeviceAttr {
	a := u.Device.Attr()
	a.PeerCompletes = false
	return a
}

// TestProvider_unreliable: the cases in which no message is refused. What a peer refuses ends an unreliable
// connection, and nobody says why.
func TestProvider_unreliable(t *testing.T) {
	o := softvi.Options{Unreliable: true}
	names := []string{
		"States", "ResetAndReconnect", "Destruction", "Operations1024", "Operations4096", "Gather", "Spill", "Inline",
		"Unsignaled", "SendMakesWritesVisible", "BothDirections", "ManyQueuePairs", "FlushOnError", "RegionClosedUnderWrites",
		"ClosedDuringTraffic", "QueueFull", "Notify", "NotifyNeverLost", "OnNotify", "SendImm",
	}
	ran := 0
	for _, c := range rdmatest.Cases() {
		if slices.Contains(names, c.Name) {
			ran++
			t.Run(c.Name, func(t *testing.T) {
				a, b := devices(t)
				c.Run(t, rdmatest.Net{A: unreliable{a}, B: unreliable{b}, Connect: connector(o, o)})
			})
		}
	}
	if ran != len(names) {
		t.Errorf("%d cases ran, want %d", ran, len(names))
	}
}
