// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// open opens a device under the name of the device that newSoftPeer opened before.
func (p *softPeer) open(tb testing.TB, f *softtest.Fabric, addr string) *soft.Device {
	tb.Helper()
	return f.Open(tb, soft.Config{Name: "soft-" + addr, Addr: netip.MustParseAddr(addr), MTU: rdma.MTU4096})
}

// TestStack_AddDevice_again: one of two devices goes and comes back, twice at
// each side. The connection goes on, and its group is as redundant as before.
func TestStack_AddDevice_again(t *testing.T) { eachVersion(t, testAddDeviceAgain) }

func testAddDeviceAgain(t *testing.T, v smcr.VersionSet) {
	f := softtest.NewFabric(t, 1)
	c, s, p := multiPair(t, f, v, twoClients, twoServers)
	a, b := p.dial(t)
	waitGroup(t, p.client, "SYMMETRIC", 2)
	waitGroup(t, p.server, "SYMMETRIC", 2)
	for round := range 8 {
		peer, addrs := c, twoClients
		if round&1 != 0 {
			peer, addrs = s, twoServers
		}
		lost := round >> 1 & 1
		if err := peer.devices[lost].Close(); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the group noticed", func() bool {
			g := peer.LinkGroups()
			return len(g) == 1 && g[0].Redundancy != "SYMMETRIC"
		})
		exchange(t, a, b)
		exchange(t, b, a)
		again := peer.open(t, f, addrs[lost])
		for range 2 { // the second call does nothing
			if err := peer.AddDevice(again); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		peer.devices[lost] = again
		waitGroup(t, p.client, "SYMMETRIC", 2)
		waitGroup(t, p.server, "SYMMETRIC", 2)
		exchange(t, a, b)
		exchange(t, b, a)
		x, y := p.dial(t) // with memory that is registered with both
		if x.Mode() != smcr.ModeSMCR {
			t.Errorf("round %d: %v", round, x.Info().Reason)
		}
		exchange(t, x, y)
		_, _ = x.Close(), y.Close()
	}
	_, _ = a.Close(), b.Close()
}

// TestStack_AddDevice_only: the only device goes. Data that arrived before can still be read, and new
// connections are TCP until the device is back.
func TestStack_AddDevice_only(t *testing.T) { eachVersion(t, testAddDeviceOnly) }

func testAddDeviceOnly(t *testing.T, v smcr.VersionSet) {
	f := softtest.NewFabric(t, 1)
	_, s, p := multiPair(t, f, v, oneClient, oneServer)
	for range 2 {
		a, b := p.dial(t)
		exchange(t, a, b)
		if _, err := a.Write([]byte("late")); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "it arrived", func() bool { return b.Info().CDCRecv > 1 })
		if err := s.devices[0].Close(); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the server's group is over", func() bool { return len(p.server.LinkGroups()) == 0 })
		c, d := p.dial(t)
		if i := c.Info(); i.Mode != smcr.ModeTCP || i.Reason != clc.ReasonNoDevR {
			t.Errorf("%v because of %v, want TCP because of %v", i.Mode, i.Reason, clc.ReasonNoDevR)
		}
		s.devices[0] = s.open(t, f, oneServer[0])
		if err := s.AddDevice(s.devices[0]); err != nil {
			t.Fatal(err)
		}
		e, g := p.dial(t)
		if e.Mode() != smcr.ModeSMCR {
			t.Errorf("after it is back: %v", e.Info().Reason)
		}
		exchange(t, e, g)
		_, _ = b.Read(make([]byte, 8)) // whatever Read returns: the memory of the connection is still there
		for _, x := range []*smcr.Conn{a, b, c, d, e, g} {
			_ = x.Close()
		}
	}
	waitFor(t, "all memory is back", func() bool { return p.server.Stats().Conns == 0 })
}

// TestStack_AddDevice_more: a device that was not there at the start makes
// groups redundant.
func TestStack_AddDevice_more(t *testing.T) {
	f := softtest.NewFabric(t, 1)
	c, _, p := multiPair(t, f, smcr.VersionsBoth, oneClient, twoServers)
	a, b := p.dial(t)
	waitGroup(t, p.client, "ASYMMETRIC LOCAL", 2)
	other := c.open(t, f, twoClients[1])
	if err := c.AddDevice(other); err != nil {
		t.Fatal(err)
	}
	waitGroup(t, p.client, "SYMMETRIC", 2)
	exchange(t, a, b)
	if err := c.devices[0].Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the first device's links are gone", func() bool {
		g := p.client.LinkGroups()
		return len(g) == 1 && g[0].Redundancy != "SYMMETRIC"
	})
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}

// TestStack_RemoveDevice: a working device, which other stacks may go on to use, is taken away. The connection
// goes on without the device, and uses it again when it is back.
func TestStack_RemoveDevice(t *testing.T) {
	f := softtest.NewFabric(t, 1)
	c, _, p := multiPair(t, f, smcr.VersionsBoth, twoClients, twoServers)
	a, b := p.dial(t)
	waitGroup(t, p.client, "SYMMETRIC", 2)
	for range 2 {
		c.RemoveDevice(c.devices[0].Name())
		c.RemoveDevice("another")
		waitFor(t, "the device carries no link", func() bool {
			gs := p.client.LinkGroups()
			return len(gs) == 1 && !slices.ContainsFunc(gs[0].Links, func(l smcr.LinkInfo) bool { return l.Device == c.devices[0].Name() })
		})
		exchange(t, a, b)
		exchange(t, b, a)
		if err := c.AddDevice(c.devices[0]); err != nil {
			t.Fatal(err)
		}
		waitGroup(t, p.client, "SYMMETRIC", 2)
		waitGroup(t, p.server, "SYMMETRIC", 2)
		exchange(t, a, b)
	}
	_, _ = a.Close(), b.Close()
}

// A stack outlives more devices than it can have at a time, whatever their names.
func TestStack_AddDevice_names(t *testing.T) {
	f := newFakeFabric()
	p := &pair{fabric: f, client: newStack(t, f.device("c", 1)), server: newStack(t, f.device("s", 2))}
	p.listen(t)
	a, b := p.dial(t)
	for i := range 3 * linkgroup.MaxRNICs {
		name := fmt.Sprintf("c%d", i)
		if err := p.client.AddDevice(f.device(name, byte(20+i))); err != nil {
			t.Fatal(err)
		}
		waitGroup(t, p.client, "ASYMMETRIC PEER", 2)
		exchange(t, a, b)
		p.client.RemoveDevice(name)
		waitGroup(t, p.client, "SINGLE", 1)
	}
	_, _ = a.Close(), b.Close()
}

func TestStack_AddDevice_refused(t *testing.T) {
	f := softtest.NewFabric(t, 1)
	p := newSoftPeer(t, f, smcr.VersionsBoth, oneClient)
	twin := f.Open(t, soft.Config{Name: p.devices[0].Name(), Addr: netip.MustParseAddr("192.0.2.9")})
	if err := p.AddDevice(twin); !errors.Is(err, rdma.ErrBusy) {
		t.Errorf("a twin: %v, want %v", err, rdma.ErrBusy)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := p.AddDevice(p.devices[0]); err == nil {
		t.Error("a closed stack takes a device")
	}
}

// tableDevice is a device with the GID table of a test.
type tableDevice struct {
	rdma.Device
	ctx *fakeContext

	mu    sync.Mutex // guards table
	table []rdma.GIDEntry
}

func (d *tableDevice) GIDs() []rdma.GIDEntry {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.table
}

// earlyDevice completes its sends before the peer has them.
type earlyDevice struct{ rdma.Device }

func (earlyDevice) Attr() rdma.DeviceAttr { return rdma.DeviceAttr{Provider: "early", MaxCQE: 1 << 16} }

// A completed SEND counts as delivered: where it is not, there is no SMC-R.
func TestStack_needsPeerCompletes(t *testing.T) {
	_, err := smcr.NewStack(smcr.Config{Devices: []rdma.Device{earlyDevice{newFakeFabric().device("c", 1)}}})
	if err == nil || !strings.Contains(err.Error(), "before the peer has them") {
		t.Errorf("NewStack = %v", err)
	}
}

// TestStack_pickGIDs: each version takes the GID type that Linux takes.
func TestStack_pickGIDs(t *testing.T) {
	row := func(index int, addr string, typ rdma.GIDType) rdma.GIDEntry {
		return rdma.GIDEntry{Index: index, GID: rdma.GIDFromAddr(netip.MustParseAddr(addr)), Type: typ, MAC: rdma.MAC{2}}
	}
	for _, tc := range []struct {
		name   string
		table  []rdma.GIDEntry
		v1, v2 int // the index that the device's queue pair gets
		err    string
	}{
		{"as of a RoCE card", []rdma.GIDEntry{
			row(3, "192.0.2.1", rdma.GIDTypeRoCEv2), row(2, "192.0.2.1", rdma.GIDTypeRoCEv1),
			row(0, "fe80::1", rdma.GIDTypeRoCEv1), row(1, "fe80::1", rdma.GIDTypeRoCEv2),
		}, 2, 3, ""},
		{"RoCE v2 only", []rdma.GIDEntry{row(5, "192.0.2.1", rdma.GIDTypeRoCEv2)}, 5, 5, ""},
		{"RoCE v1 only", []rdma.GIDEntry{row(4, "192.0.2.1", rdma.GIDTypeRoCEv1)}, 4, -1, "no RoCE v2 GID"},
		{"iWARP", []rdma.GIDEntry{row(0, "192.0.2.1", rdma.GIDTypeIWARP)}, -1, -1, "iWARP"},
		{"empty", nil, -1, -1, "give its network interface an IP address"},
	} {
		for v, want := range map[smcr.VersionSet]int{smcr.VersionsV1: tc.v1, smcr.VersionsV2: tc.v2} {
			t.Run(fmt.Sprintf("%s version set %d", tc.name, v), func(t *testing.T) {
				f := newFakeFabric()
				if want < 0 {
					_, err := smcr.NewStack(smcr.Config{Devices: []rdma.Device{&tableDevice{Device: f.device("c", 1), table: tc.table}}, Versions: v})
					if err == nil || !strings.Contains(err.Error(), tc.err) {
						t.Errorf("NewStack = %v, want %q in it", err, tc.err)
					}
					return
				}
				p := &pair{fabric: f, client: newStack(t, &tableDevice{Device: f.device("c", 1), table: tc.table}, versions(v)), server: newStack(t, f.device("s", 2), versions(v))}
				p.listen(t)
				a, b := p.dial(t)
				qpn := p.client.LinkGroups()[0].Links[0].LocalQPN
				f.mu.Lock()
				got := f.qps[qpn].path.SGIDIndex
				f.mu.Unlock()
				if got != want {
					t.Errorf("queue pair has GID index %d, want %d", got, want)
				}
				_, _ = a.Close(), b.Close()
			})
		}
	}
}

// Open keeps the context, so that a test can put events into it.
func (d *tableDevice) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	d.ctx, _ = c.(*fakeContext)
	return c, err
}

// setTable changes the GID table as the kernel does when an address is added or removed.
func (d *tableDevice) setTable(table ...rdma.GIDEntry) {
	d.mu.Lock()
	d.table = table
	d.mu.Unlock()
	d.ctx.events <- rdma.AsyncEvent{Kind: rdma.EventGIDChange}
}

// TestStack_gidChange: links that are made after an address moved have the new address. The only link of a
// group stays. A device without an address is treated like a device whose port is down.
func TestStack_gidChange(t *testing.T) {
	row := func(index int, addr string) rdma.GIDEntry {
		return rdma.GIDEntry{Index: index, GID: rdma.GIDFromAddr(netip.MustParseAddr(addr)), Type: rdma.GIDTypeRoCEv2, PrefixBits: 24}
	}
	f := newFakeFabric()
	dev := &tableDevice{Device: f.device("c", 1), table: []rdma.GIDEntry{row(0, "192.0.2.1")}}
	p := &pair{fabric: f, client: newStack(t, dev, versions(smcr.VersionsV2)), server: newStack(t, f.device("s", 2))}
	p.listen(t)
	a, b := p.dial(t)
	dev.setTable(row(3, "192.0.2.77"))
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
	if err := p.server.Close(); err != nil { // its groups end
		t.Fatal(err)
	}
	waitFor(t, "the group is over", func() bool { return len(p.client.LinkGroups()) == 0 })
	p.server = newStack(t, f.device("s", 2))
	p.listen(t)
	a, b = p.dial(t)
	links := p.client.LinkGroups()[0].Links
	if got := links[0].LocalGID.Addr().String(); got != "192.0.2.77" {
		t.Errorf("link has the address %s, want 192.0.2.77", got)
	}
	dev.setTable()
	waitFor(t, "the device has no address", func() bool { return !p.client.DeviceActive(0) })
	exchange(t, a, b)
	dev.setTable(row(0, "192.0.2.1"))
	waitFor(t, "the device has an address", func() bool { return p.client.DeviceActive(0) })
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}

// TestStack_sameNumbersAgain: the server's device goes without a word to the client and comes back, and its
// new queue pairs have the numbers of the old ones. The client still has the old group, and must not take it
// for the new one.
func TestStack_sameNumbersAgain(t *testing.T) {
	eachVersion(t, func(t *testing.T, v smcr.VersionSet) {
		f := newFakeFabric()
		row := rdma.GIDEntry{GID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.2")), Type: rdma.GIDTypeRoCEv2}
		device := func() *tableDevice {
			return &tableDevice{Device: f.device("s", 2), table: []rdma.GIDEntry{row}}
		}
		dev := device()
		p := &pair{fabric: f, client: newStack(t, f.device("c", 1), versions(v)), server: newStack(t, dev, versions(v))}
		p.listen(t)
		first := f.nextQPN
		a, b := p.dial(t)
		dev.ctx.events <- rdma.AsyncEvent{Kind: rdma.EventDeviceFatal, Err: rdma.ErrClosed}
		waitFor(t, "the server's group is over", func() bool { return len(p.server.LinkGroups()) == 0 })
		if err := p.server.AddDevice(device()); err != nil {
			t.Fatal(err)
		}
		f.mu.Lock()
		for _, q := range f.qps { // the client's
			delete(f.qps, q.num)
			q.num += 1000
			f.qps[q.num] = q
		}
		f.nextQPN = first
		f.mu.Unlock()
		for range 2 { // first and subsequent contact
			c, d := p.dial(t)
			if i := c.Info(); i.Mode != smcr.ModeSMCR {
				t.Errorf("%v because of %v, want SMC-R", i.Mode, i.Reason)
			}
			exchange(t, c, d)
			defer func() { _, _ = c.Close(), d.Close() }()
		}
		_, _ = a.Close(), b.Close()
	})
}
