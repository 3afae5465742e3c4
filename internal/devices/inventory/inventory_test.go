// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a machine whose devices the test changes.
type fake struct {
	mu      sync.Mutex // guards what is below
	devices []vf.Device
	pfs     []vf.PF
	ifs     []iface
	err     error
	looks   int

	changes chan struct{}
}

func (f *fake) machine() machine {
	return machine{
		devices: func() ([]vf.Device, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.looks++
			return f.devices, f.err
		},
		glance: func() string {
			f.mu.Lock()
			defer f.mu.Unlock()
			var b strings.Builder
			for _, d := range f.devices {
				b.WriteString(string(d.State))
			}
			return b.String()
		},
		pfs: func() ([]vf.PF, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.pfs, nil
		},
		interfaces: func() ([]iface, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.ifs, nil
		},
		changes: func(context.Context) (<-chan struct{}, error) { return f.changes, nil },
	}
}

// set changes the machine.
func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

const pfPCI = "0000:01:00.0"

func newFake() *fake {
	addr := netip.MustParseAddr("192.0.2.1")
	return &fake{
		devices: []vf.Device{
			{ID: "0000:01:10.0", PCI: "0000:01:10.0", PF: "eth1", PFPCI: pfPCI, VF: 0, RDMA: []string{"mlx5_2"}, NUMANode: 1, Rail: 0, State: vf.StateDown},
			{ID: "0000:01:10.2", PCI: "0000:01:10.2", PF: "eth1", PFPCI: pfPCI, VF: 1, NUMANode: 1, Rail: 0, State: vf.StateVFIO},
			{ID: "0000:01:10.4", PCI: "0000:01:10.4", PF: "eth1", PFPCI: pfPCI, VF: 2, NUMANode: 1, Rail: 0, State: vf.StatePod},
			{ID: "eth5", NetDev: "eth5", VF: -1, RDMA: []string{"rxe5"}, SoftRDMA: "rxe", NUMANode: -1, Rail: -1, State: vf.StateDown},
		},
		pfs:     []vf.PF{{PCI: pfPCI, NetDev: "eth1", State: vf.StateUp}},
		ifs:     []iface{{name: "eth0", up: true, mac: "02:00:00:00:00:01", addrs: []netip.Addr{addr}, numaNode: 1}},
		changes: make(chan struct{}, 1),
	}
}

func (f *fake) inventory(log *slog.Logger) *Inventory {
	return New(Config{
		Configured: func() []config.Device {
			return []config.Device{
				{SoftAddress: netip.MustParseAddr("192.0.2.1")},
				{RDMA: "rxe5"},
				{Interface: "eth9"}, // without an address
			}
		},
		Log: log, machine: f.machine(),
	})
}

// brief is what the tests compare of a device.
type brief struct {
	ID, NetDev string
	Kind       Kind
	Up, Shared bool
	NUMA, Rail int
}

func briefly(ds []Device) []brief {
	var out []brief
	for _, d := range ds {
		out = append(out, brief{d.ID, d.NetDev, d.Kind, d.Up, d.Shared(), d.NUMANode, d.Rail})
	}
	return out
}

func TestInventory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		inv := f.inventory(slog.New(slog.DiscardHandler))
		changed, stop := inv.Subscribe()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			inv.Run(ctx)
		}()
		began := time.Now()
		<-changed
		want := []brief{
			{"eth5", "eth5", KindRDMA, false, true, -1, -1},
			{"soft0", "eth0", KindSoftware, true, true, 1, 0},
			{"soft2", "eth9", KindSoftware, false, true, -1, 2},
			{"0000:01:10.0", "", KindVF, true, false, 1, 0},
			{"0000:01:10.2", "", KindVF, false, false, 1, 0}, // a virtual machine has it
			{"0000:01:10.4", "", KindVF, true, false, 1, 0},
		}
		if diff := cmp.Diff(want, briefly(inv.Devices())); diff != "" {
			t.Errorf("at first (-want +got)\n%s", diff)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("the first look came after %v", took)
		}

		// A port goes down, and the kernel tells.
		began = time.Now()
		f.set(func() { f.pfs = []vf.PF{{PCI: pfPCI, NetDev: "eth1", State: vf.StateDown}} })
		f.changes <- struct{}{}
		<-changed
		if took := time.Since(began); took > 2*debounce {
			t.Errorf("told after %v", took)
		}
		for _, i := range []int{3, 4, 5} {
			want[i].Up = false
		}
		if diff := cmp.Diff(want, briefly(inv.Devices())); diff != "" {
			t.Errorf("with the port down (-want +got)\n%s", diff)
		}

		// An RDMA port comes up, and nothing tells.
		began = time.Now()
		f.set(func() {
			f.devices = append([]vf.Device(nil), f.devices...)
			f.devices[3].State = vf.StateUp
		})
		<-changed
		if took := time.Since(began); took > every {
			t.Errorf("found after %v", took)
		}
		want[0].Up = true
		if diff := cmp.Diff(want, briefly(inv.Devices())); diff != "" {
			t.Errorf("with rxe up (-want +got)\n%s", diff)
		}

		// A driver is bound, which a glance does not see.
		f.set(func() {
			f.devices = append([]vf.Device(nil), f.devices...)
			f.devices[0].RDMA, f.looks = []string{"mlx5_7"}, 0
		})
		began = time.Now()
		<-changed
		looks := func() (n int) {
			f.set(func() { n = f.looks })
			return n
		}
		if took := time.Since(began); took > lookEvery || looks() != 1 {
			t.Errorf("found after %v, by %d looks", took, looks())
		}
		<-time.After(6*lookEvery + every/2)
		if n := looks(); n != 7 {
			t.Errorf("%d looks in a minute in which nothing happens, want 6 more", n)
		}

		// The kernel does not answer: what was known stays. It ends the
		// subscription: looking goes on.
		f.set(func() { f.err = errors.New("no answer"); f.devices = nil })
		close(f.changes)
		<-time.After(3 * every) // of virtual time
		if diff := cmp.Diff(want, briefly(inv.Devices())); diff != "" {
			t.Errorf("without an answer (-want +got)\n%s", diff)
		}
		select {
		case <-changed:
			t.Error("told of no change")
		default:
		}
		stop()
		cancel()
		<-done
	})
}

// TestSubscribe_late: who comes late is told that there is something.
func TestSubscribe_late(t *testing.T) {
	inv := newFake().inventory(slog.New(slog.DiscardHandler))
	if inv.Looked() {
		t.Error("looked before Run")
	}
	if err := inv.look(); err != nil {
		t.Fatal(err)
	}
	changed, stop := inv.Subscribe()
	defer stop()
	select {
	case <-changed:
	default:
		t.Error("a late subscriber was not told")
	}
}

func TestNUMANode(t *testing.T) {
	tests := []struct {
		name, text string
		want       int
	}{
		{"second node", "1\n", 1},
		{"no nodes", "-1\n", -1},
		{"junk", "x", -1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "numa_node")
			if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := numaNode(file); got != tt.want {
				t.Errorf("got %d, want %d", got, tt.want)
			}
		})
	}
	if got := numaNode("/nowhere"); got != -1 {
		t.Errorf("no file: %d", got)
	}
}

// The interfaces of this machine: loopback is there and up.
func TestInterfaces(t *testing.T) {
	ifs, err := interfaces("/sys")
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range ifs {
		if i.name == "lo" && i.up && len(i.addrs) > 0 {
			return
		}
	}
	t.Errorf("no loopback in %+v", ifs)
}
