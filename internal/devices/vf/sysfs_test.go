// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"bufio"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// tree makes a directory of a recorded one: lines "path: content", "path -> target"
// and "path/".
func tree(t *testing.T, file string) string {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", file))
	must(t, err)
	defer func() { _ = f.Close() }()
	dir := t.TempDir()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		line := sc.Text()
		name, target, isLink := strings.Cut(line, " -> ")
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case isLink:
			must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
			must(t, os.Symlink(target, filepath.Join(dir, name)))
		case strings.HasSuffix(line, "/"):
			must(t, os.MkdirAll(filepath.Join(dir, line), 0o755))
		default:
			name, text, ok := strings.Cut(line, ": ")
			if !ok {
				t.Fatalf("%s: line %q", file, line)
			}
			write(t, filepath.Join(dir, name), text)
		}
	}
	return dir
}

func TestHost_Devices(t *testing.T) {
	igbVF := func(n int, netdev, mac string) Device {
		pci := "0000:41:10." + []string{"0", "2"}[n]
		return Device{
			ID: pci, PCI: pci, Driver: "igbvf", NetDev: netdev, PF: "pf0", PFPCI: "0000:41:00.0", VF: n,
			NUMANode: 0, PCIeRoot: "pci0000:40", MAC: mac, State: StateDown,
		}
	}
	withRXE := igbVF(1, "pf0v1", "8e:72:28:f3:14:e9")
	withRXE.RDMA, withRXE.SoftRDMA, withRXE.State = []string{"rxe0"}, kindRXE, StateUp
	for _, tt := range []struct {
		tree string
		pfs  []PF
		want []Device
	}{
		{
			// Of a guest with two PFs; one has VFs, of which one has soft RoCE. A
			// virtio NIC and the PF without VFs have some too.
			tree: "igb.txt",
			pfs: []PF{
				{PCI: "0000:41:00.0", NetDev: "pf0", Driver: "igb", VFs: 2, TotalVFs: 7, NUMANode: 0, PCIeRoot: "pci0000:40", Rail: 0, State: StateUp},
				{PCI: "0000:81:00.0", NetDev: "pf1", Driver: "igb", VFs: 0, TotalVFs: 7, NUMANode: 1, PCIeRoot: "pci0000:80", Rail: 1, State: StateDown},
			},
			want: []Device{
				igbVF(0, "pf0v0", "b6:3c:a2:0e:56:44"), withRXE,
				{
					ID: "eth0", NetDev: "eth0", RDMA: []string{"rxe1"}, SoftRDMA: kindRXE, Driver: "virtio_net", VF: -1, NUMANode: -1,
					PCIeRoot: "pci0000:00", Rail: -1, MAC: "52:54:00:00:00:01", State: StateUp,
				},
				{
					ID: "pf1", NetDev: "pf1", RDMA: []string{"siw1"}, SoftRDMA: kindSIW, Driver: "igb", VF: -1, NUMANode: 1,
					PCIeRoot: "pci0000:80", Rail: -1, MAC: "52:54:00:01:01:01", State: StateDown,
				},
			},
		},
		{
			// As a RoCE NIC with two ports shows itself: the first with VFs, of which
			// one is in a pod and one bound to vfio; and one in a virtual machine,
			// where a VF has no PF.
			tree: "mlx5.txt",
			pfs: []PF{
				{PCI: "0000:3b:00.0", NetDev: "ens1f0np0", Driver: "mlx5_core", RDMA: []string{"mlx5_0"}, VFs: 3, TotalVFs: 16, NUMANode: 0, PCIeRoot: "pci0000:3a", Rail: 0, State: StateUp},
				{PCI: "0000:3b:00.1", NetDev: "ens1f1np1", Driver: "mlx5_core", RDMA: []string{"mlx5_1"}, VFs: 0, TotalVFs: 16, NUMANode: 0, PCIeRoot: "pci0000:3a", Rail: 1, State: StateUp},
			},
			want: []Device{
				{ID: "0000:3b:00.2", PCI: "0000:3b:00.2", Driver: "mlx5_core", NetDev: "ens1f0v0", PF: "ens1f0np0", PFPCI: "0000:3b:00.0", VF: 0, RDMA: []string{"mlx5_2"}, NUMANode: 0, PCIeRoot: "pci0000:3a", MAC: "0a:00:00:00:00:01", State: StateUp},
				{ID: "0000:3b:00.3", PCI: "0000:3b:00.3", Driver: "mlx5_core", PF: "ens1f0np0", PFPCI: "0000:3b:00.0", VF: 1, RDMA: []string{"mlx5_3"}, NUMANode: 0, PCIeRoot: "pci0000:3a", State: StateUnbound},
				{ID: "0000:3b:00.4", PCI: "0000:3b:00.4", Driver: "vfio-pci", PF: "ens1f0np0", PFPCI: "0000:3b:00.0", VF: 2, NUMANode: 0, PCIeRoot: "pci0000:3a", State: StateVFIO},
				{ID: "0001:00:02.0", PCI: "0001:00:02.0", Driver: "mlx5_core", NetDev: "eth9", VF: -1, RDMA: []string{"mlx5_9"}, NUMANode: -1, PCIeRoot: "pci0001:00", Rail: -1, MAC: "0a:00:00:00:09:09", State: StateUp},
			},
		},
		{tree: "nothing.txt"},
	} {
		t.Run(tt.tree, func(t *testing.T) {
			h := Host{Sys: tree(t, tt.tree), DataDir: t.TempDir()}
			pfs, err := h.PFs()
			must(t, err)
			if diff := cmp.Diff(tt.pfs, pfs); diff != "" {
				t.Errorf("PFs (-want +got):\n%s", diff)
			}
			got, err := h.Devices()
			must(t, err)
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(Host{})); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
			for _, d := range tt.want { // each is found by its ID
				one, err := h.Device(d.ID)
				must(t, err)
				if diff := cmp.Diff(d, one); diff != "" {
					t.Errorf("device %s (-want +got):\n%s", d.ID, diff)
				}
			}
		})
	}
}

func TestHost_Device_refuses(t *testing.T) {
	for _, tt := range []struct {
		name, tree, id string
		want           error
		text           string
	}{
		{"PF", "igb.txt", "0000:41:00.0", ErrIsPF, "sriov_numvfs"},
		{"interface of a PF with VFs", "igb.txt", "pf0", ErrIsPF, "name one of them"},
		{"interface of a VF", "igb.txt", "pf0v1", ErrNotFound, "0000:41:10.2"},
		{"interface without RDMA", "igb.txt", "eth1", ErrNotFound, "rdma link add"},
		{"no interface", "igb.txt", "eth7", ErrNotFound, "neither"},
		{"not a NIC", "igb.txt", "0000:00:01.0", ErrNotFound, "not a network controller"},
		{"no function", "mlx5.txt", "0000:3b:00.7", ErrNotFound, "no PCI function"},
		{"upper case", "igb.txt", "0000:41:10.F", ErrNotFound, "neither"},
		{"path", "igb.txt", "../net/eth0", ErrNotFound, "PCI address"},
		{"empty", "igb.txt", "", ErrNotFound, "PCI address"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Host{Sys: tree(t, tt.tree), DataDir: t.TempDir()}.Device(tt.id)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
}

// TestSysfs_softDevice: the interface of a VF with soft RoCE is no device of its own, not even at the moment when it has
// gone into a pod and its function cannot be asked for any more. One without a function is.
func TestSysfs_softDevice(t *testing.T) {
	dir := t.TempDir()
	s := sysfs(dir)
	must(t, os.MkdirAll(s.path("devices/pci0000:40/0000:41:10.0/net/pf0v0"), 0o755))
	must(t, os.MkdirAll(s.path("devices/pci0000:40/0000:41:00.0"), 0o755))
	must(t, os.MkdirAll(s.path(classNet, "dummy0"), 0o755))
	must(t, os.MkdirAll(s.path(classNet, "pf0v0"), 0o755))
	must(t, os.MkdirAll(s.path(busPCI), 0o755))
	must(t, os.Symlink("../../../devices/pci0000:40/0000:41:10.0", s.path(busPCI, "0000:41:10.0")))
	must(t, os.Symlink("../0000:41:00.0", s.path("devices/pci0000:40/0000:41:10.0/physfn")))
	must(t, os.Symlink("../../../devices/pci0000:40/0000:41:10.0", s.path(classNet, "pf0v0/device")))
	for name, want := range map[string]bool{"dummy0": true, "pf0v0": false, "pf0v1": false} {
		if pci, got := s.softDevice(name); got != want {
			t.Errorf("%s, of function %q, is a device of its own: %t", name, pci, got)
		}
	}
}

func TestHost_Rails(t *testing.T) {
	h := Host{Sys: tree(t, "igb.txt"), DataDir: t.TempDir(), Rails: map[string]int{"pf0": 3, "0000:81:00.0": 2, "eth0": 7}}
	devices, err := h.Devices()
	must(t, err)
	got := map[string]int{}
	for _, d := range devices {
		got[d.ID] = d.Rail
	}
	want := map[string]int{"0000:41:10.0": 3, "0000:41:10.2": 3, "eth0": 7, "pf1": -1}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rails (-want +got):\n%s", diff)
	}
}

func TestDevice_Usable(t *testing.T) {
	h := Host{Sys: tree(t, "mlx5.txt"), DataDir: t.TempDir()}
	for id, want := range map[string]error{"0000:3b:00.2": nil, "0000:3b:00.3": ErrUnbound, "0000:3b:00.4": ErrVFIO} {
		d, err := h.Device(id)
		must(t, err)
		if err := d.Usable(); !errors.Is(err, want) {
			t.Errorf("device %s: %v, want %v", id, err, want)
		}
	}
}

// A glance differs when a port's state, an RDMA device or a journal does, and not otherwise.
func TestHost_Glance(t *testing.T) {
	h := Host{Sys: tree(t, "igb.txt"), DataDir: t.TempDir()}
	state := func(text string) { write(t, filepath.Join(h.Sys, classIB, "rxe0/ports/1/state"), text) }
	j := &journal{Wiring: Wiring{Device: Device{ID: "0000:41:10.0"}}}
	last := h.Glance()
	for _, step := range []struct {
		name    string
		do      func()
		differs bool
	}{
		{"a port", func() { state("4: ACTIVE") }, true},
		{"nothing", func() {}, false},
		{"a port goes down", func() { state("1: DOWN") }, true},
		{"an RDMA device goes", func() { must(t, os.Remove(filepath.Join(h.Sys, classIB, "rxe0"))) }, true},
		{"a pod gets a device", func() { must(t, errors.Join(h.records().Make(), h.write(j))) }, true},
		{"its journal is written again", func() { must(t, h.write(j)) }, true},
		{"a pod gives it back", func() { must(t, h.forget(j.Wiring.Device.ID)) }, true},
		{"still nothing", func() {}, false},
	} {
		<-time.After(10 * time.Millisecond) // the kernel's time stamps of files are a few milliseconds apart
		step.do()
		if now := h.Glance(); (now != last) != step.differs {
			t.Errorf("%s: the glance is %q, and %q before", step.name, now, last)
		} else {
			last = now
		}
	}
}
