// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// A device with one SGE for a receive, as erdma, would refuse each queue pair.
func TestDeviceLimits_enough(t *testing.T) {
	for sge, want := range map[int]string{1: "at most 1 SGE, receives need 2", 2: "", 30: ""} {
		err := deviceLimits{sge: sge}.enough()
		if want == "" && err != nil || want != "" && (!errors.Is(err, rdma.ErrNotSupported) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%d SGE: %v, want %q", sge, err, want)
		}
	}
}

func TestDevice_classed(t *testing.T) {
	for _, c := range []struct{ device, path, want uint8 }{{0, 0, 0}, {106, 0, 106}, {106, 184, 184}, {0, 184, 184}} {
		d := Device{class: c.device}
		if got := d.classed(rdma.Path{TrafficClass: c.path, HopLimit: 1}); got != (rdma.Path{TrafficClass: c.want, HopLimit: 1}) {
			t.Errorf("path of class %d with a device of %d: %+v, want %d", c.path, c.device, got, c.want)
		}
	}
}

// Some drivers say that they have no interrupts for completions: the first is right for these.
func TestDevice_nextVector(t *testing.T) {
	for n, want := range map[int][]int{-1: {0, 0}, 0: {0, 0}, 1: {0, 0}, 3: {0, 1, 2, 0}} {
		var d Device
		for i, w := range want {
			if got := d.nextVector(n); got != w {
				t.Errorf("context %d, %d interrupts: %d, want %d", i, n, got, w)
			}
		}
	}
}

// The port is up while it has the GID that was chosen, of the interface that it was chosen for, whatever name that has.
func TestDevice_store(t *testing.T) {
	named := func(name, addr string) rdma.GIDEntry {
		g := row(3, rdma.GIDTypeRoCEv2, addr)
		g.NetDev = name
		return g
	}
	const local, other = "fe80::1", "fe80::2"
	for _, c := range []struct {
		name  string
		gids  []rdma.GIDEntry
		links map[string]int
		want  rdma.PortState
	}{
		{"as before", []rdma.GIDEntry{named("eth0", local)}, map[string]int{"eth0": 7}, rdma.PortActive},
		{"renamed", []rdma.GIDEntry{named("ens1", local)}, map[string]int{"ens1": 7}, rdma.PortActive},
		{"renamed, and its VLAN has the GID", []rdma.GIDEntry{named("ens1.5", local), named("ens1", local)}, map[string]int{"ens1": 7, "ens1.5": 9}, rdma.PortActive},
		{"only its VLAN has the GID", []rdma.GIDEntry{named("eth0.5", local)}, map[string]int{"eth0.5": 9}, rdma.PortDown},
		{"another one has its name", []rdma.GIDEntry{named("eth0", local), named("ens1", other)}, map[string]int{"eth0": 9, "ens1": 7}, rdma.PortDown},
		{"made again", []rdma.GIDEntry{named("eth0", local)}, map[string]int{"eth0": 12}, rdma.PortActive},
		{"in another namespace", []rdma.GIDEntry{named("", local)}, map[string]int{}, rdma.PortDown},
		{"without the GID", []rdma.GIDEntry{named("ens1", other)}, map[string]int{"ens1": 7}, rdma.PortDown},
	} {
		d := &Device{gid: named("eth0", local), link: 7}
		for range 2 {
			d.store(&portNow{attr: rdma.PortAttr{State: rdma.PortActive}, gids: slices.Clone(c.gids), links: c.links})
			first := d.GIDs()[0]
			if up := first.GID == d.gid.GID && d.link != 0 && c.links[first.NetDev] == d.link; d.Port().State != c.want || up != (c.want == rdma.PortActive) {
				t.Errorf("%s: %v, and first of the table %v of %q", c.name, d.Port().State, first.GID.Addr(), first.NetDev)
			}
		}
	}
}

// A device is gone when its node is, or another device has it. A look that memory or descriptors are short for does not end what
// runs on the device.
func TestDevice_there(t *testing.T) {
	dir := t.TempDir()
	node, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.Stat(filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		now  os.FileInfo
		err  error
		want bool
	}{
		{"there", node, nil, true},
		{"another one", other, nil, false},
		{"removed", nil, syscall.ENOENT, false},
		{"its directory removed", nil, syscall.ENOTDIR, false},
		{"without a driver", nil, syscall.ENODEV, false},
		{"out of memory", nil, syscall.ENOMEM, true},
		{"out of files", nil, syscall.ENFILE, true},
		{"interrupted", nil, syscall.EINTR, true},
	} {
		d := &Device{node: node, stat: func() (os.FileInfo, error) {
			if c.err != nil {
				return nil, &os.PathError{Op: "stat", Path: "uverbs0", Err: c.err}
			}
			return c.now, nil
		}}
		if got := d.there(); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}
