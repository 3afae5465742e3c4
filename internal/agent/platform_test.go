// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// TestPlatform_setDefaults: fields that a test leaves out get their defaults, and the others stay.
func TestPlatform_setDefaults(t *testing.T) {
	var p platform
	p.setDefaults(slog.New(slog.DiscardHandler), t.TempDir())
	// A zero deviceEvery is package rnics' own default.
	eachField(p, func(name string, f reflect.Value) {
		if f.IsZero() != (name == "deviceEvery") {
			t.Errorf("%s is zero: %t", name, f.IsZero())
		}
	})
	before := newBench(t, "", preferAll).cfg.platform
	before.deviceEvery, before.ableEvery, before.untrackAfter = 1, 2, 3
	after := before
	after.setDefaults(slog.New(slog.DiscardHandler), t.TempDir())
	was := map[string]string{}
	identity := func(f reflect.Value) string {
		if f.Kind() == reflect.Func {
			return fmt.Sprint(f.Pointer())
		}
		return fmt.Sprint(f)
	}
	eachField(before, func(name string, f reflect.Value) {
		if !f.IsZero() {
			was[name] = identity(f)
		}
	})
	eachField(after, func(name string, f reflect.Value) {
		if want, ok := was[name]; ok && identity(f) != want {
			t.Errorf("%s was given, and is another now", name)
		}
	})
	if len(was) < 9 {
		t.Errorf("only %d fields were given", len(was))
	}
}

func eachField(p platform, f func(name string, v reflect.Value)) {
	v := reflect.ValueOf(p)
	for i := range v.NumField() {
		f(v.Type().Field(i).Name, v.Field(i))
	}
}

// TestPlatform_newStack: a stack that cannot be made is an error, and not an interface with a nil
// *smcr.Stack in it.
func TestPlatform_newStack(t *testing.T) {
	var p platform
	p.setDefaults(slog.New(slog.DiscardHandler), t.TempDir())
	if s, err := p.newStack(smcr.Config{RMBESizeBytes: 3}); s != nil || err == nil {
		t.Errorf("newStack = %v, %v, want an error only", s, err)
	}
}

// freeLoopback is an address of this machine that probably nobody uses.
func freeLoopback() netip.Addr {
	return netip.AddrFrom4([4]byte{127, byte(1 + rand.IntN(254)), byte(rand.IntN(256)), byte(1 + rand.IntN(254))})
}

// TestOpenDevice_soft: a software device has the MTU of the configuration, or what its interface
// allows.
func TestOpenDevice_soft(t *testing.T) {
	for _, tt := range []struct {
		bytes int
		want  rdma.MTU
	}{{0, rdma.MTU4096}, {256, rdma.MTU256}, {512, rdma.MTU512}, {1024, rdma.MTU1024}, {2048, rdma.MTU2048}, {4096, rdma.MTU4096}} {
		d, stop, err := openDevice(slog.New(slog.DiscardHandler), t.TempDir(), "soft0", config.Device{SoftAddress: freeLoopback(), SoftMTU: tt.bytes}, false)
		must(t, err)
		if got := d.Port().ActiveMTU; got != tt.want || d.Name() != "soft0" {
			t.Errorf("%d bytes: MTU %v of device %s, want %v", tt.bytes, got, d.Name(), tt.want)
		}
		must(t, stop())
	}
}

// TestOpenDevice_share: two agents of one data directory may have a software device open if both
// share it. An agent of another directory may not.
func TestOpenDevice_share(t *testing.T) {
	dir, dev := t.TempDir(), config.Device{SoftAddress: freeLoopback()}
	_, stop, err := openDevice(slog.New(slog.DiscardHandler), dir, "soft0", dev, true)
	must(t, err)
	for name, try := range map[string]struct {
		dir   string
		share bool
	}{"another directory": {t.TempDir(), true}, "without share": {dir, false}} {
		if _, stop, err := openDevice(slog.New(slog.DiscardHandler), try.dir, "soft0", dev, try.share); err == nil {
			t.Errorf("%s: the device is open a second time", name)
			must(t, stop())
		}
	}
	_, second, err := openDevice(slog.New(slog.DiscardHandler), dir, "soft0", dev, true)
	must(t, err)
	must(t, errors.Join(stop(), second()))
}

// TestSoftware_tooLarge: what the kernel refuses to send is in the log, with what to do.
func TestSoftware_tooLarge(t *testing.T) {
	var log logBuffer
	cfg := software(slog.New(slog.NewTextHandler(&log, nil)), t.TempDir(), "soft0", freeLoopback(), 0, false)
	cfg.TooLarge(soft.TooLarge{Peer: netip.MustParseAddr("192.0.2.7"), PacketBytes: 4156})
	for _, want := range []string{"level=WARN", "soft.mtu", "device=soft0", "peer=192.0.2.7", "packetBytes=4156"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("no %s in the log: %s", want, &log)
		}
	}
}

// TestHardware: all that the configuration says of a device of the kernel comes to it.
func TestHardware(t *testing.T) {
	addr := netip.MustParseAddr("192.0.2.1")
	got := hardware(config.Device{RDMA: "mlx5_0", Port: 2, GIDType: rdma.GIDTypeRoCEv1, TrafficClass: 106}, addr)
	want := verbs.Config{Name: "mlx5_0", Port: 2, Addr: addr, GIDType: rdma.GIDTypeRoCEv1, TrafficClass: 106}
	if got.Name != want.Name || got.Port != want.Port || got.Addr != want.Addr || got.GIDType != want.GIDType || got.TrafficClass != want.TrafficClass {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestOpenDevice_fails: an error says what to look at, and no device comes with it.
func TestOpenDevice_fails(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  config.Device
		want string
	}{
		{"no address", config.Device{Interface: "eth9"}, "interface eth9 is not there or has no address: ip address shows them"},
		{"foreign address", config.Device{SoftAddress: netip.MustParseAddr("192.0.2.1")}, "192.0.2.1"},
		{"kernel", config.Device{RDMA: "nowhere0"}, "nowhere0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d, stop, err := openDevice(slog.New(slog.DiscardHandler), t.TempDir(), "soft0", tt.cfg, false)
			if d != nil || stop != nil || err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("openDevice = %v, %v, want %q", d, err, tt.want)
			}
		})
	}
}

// TestOpenDevice_interface: a software device by its interface is there when the interface has an address.
func TestOpenDevice_interface(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	ns := value(linux.ScratchNetNS())(t)
	defer func() { must(t, ns.Close()) }()
	must(t, ns.Do(func() error {
		l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth1"}, PeerName: "eth1-"}
		must(t, netlink.LinkAdd(l))
		open := func() (string, error) {
			d, stop, err := openDevice(slog.New(slog.DiscardHandler), t.TempDir(), "soft0", config.Device{Interface: "eth1"}, false)
			if err != nil {
				return "", err
			}
			defer func() { must(t, stop()) }()
			return d.GIDs()[0].GID.Addr().String(), nil
		}
		if a, err := open(); err == nil {
			t.Errorf("without an address it is open at %s", a)
		}
		must(t, netlink.AddrAdd(l, value(netlink.ParseAddr("192.0.2.1/24"))(t)))
		if a, err := open(); err != nil || a != "192.0.2.1" {
			t.Errorf("open at %q, %v, want 192.0.2.1", a, err)
		}
		return nil
	}))
}

// TestDeviceAddress: an interface counts with the addresses that it has now, and without one the device
// must not get just any address.
func TestDeviceAddress(t *testing.T) {
	lo, known := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.1")
	for _, tt := range []struct {
		name string
		cfg  config.Device
		want netip.Addr
		err  string
	}{
		{"software", config.Device{SoftAddress: known}, known, ""},
		{"of the kernel", config.Device{RDMA: "mlx5_0", GIDAddress: known}, known, ""},
		{"of the kernel, the best one", config.Device{RDMA: "mlx5_0"}, netip.Addr{}, ""},
		{"interface", config.Device{RDMA: "mlx5_0", Interface: "lo"}, lo, ""},
		{"interface with another address", config.Device{RDMA: "mlx5_0", Interface: "lo", GIDAddress: known}, lo, ""},
		{"software, by its interface", config.Device{Interface: "lo", SoftAddress: known}, lo, ""},
		{"no such interface", config.Device{RDMA: "mlx5_0", Interface: "nowhere0", GIDAddress: known}, netip.Addr{}, "interface nowhere0 is not there or has no address"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := deviceAddress(tt.cfg)
			if got != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%v, %v, want %v, %q", got, err, tt.want, tt.err)
			}
		})
	}
}

// TestSoftDir: the directory of software devices is none of those that the agent cleans.
func TestSoftDir(t *testing.T) {
	if got, want := softDir("/var/lib/x"), filepath.Join("/var/lib/x", "devices.soft"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestRoute: this machine reaches itself without a router, and reaches nothing from an address that
// it does not have. Into the subnet of one device the way of another one leads elsewhere.
func TestRoute(t *testing.T) {
	lo := netip.MustParseAddr("127.0.0.1")
	if r, err := route(lo, lo); err != nil || !r.Found || r.Gateway {
		t.Errorf("to itself: %+v, %v", r, err)
	}
	l := newLab(t)
	must(t, l.a.host.ns.Do(func() error {
		for src, elsewhere := range map[string]bool{l.a.roce[0]: false, l.a.roce[1]: true} {
			r, err := route(netip.MustParseAddr(src), netip.MustParseAddr(l.b.roce[0]))
			if err != nil || !r.Found || r.Gateway || r.Elsewhere != elsewhere {
				t.Errorf("from %s into the subnet of %s: %+v, %v", src, l.a.roce[0], r, err)
			}
		}
		return nil
	}))
	if r, err := route(netip.MustParseAddr("192.0.2.77"), netip.MustParseAddr("192.0.2.1")); r.Found {
		t.Errorf("from a foreign address: %+v, %v", r, err)
	}
}
