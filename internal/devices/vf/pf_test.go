// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestDetach_renamedPF: the PF's interface has another name by now, and another interface the name that it had, or the PF's
// interface left the host.
func TestDetach_renamedPF(t *testing.T) {
	const vfPCI, pfPCI = "0000:41:10.0", "0000:41:00.0"
	for _, tt := range []struct {
		name, is, want string
		asked          Settings
		driver, fails  bool
	}{
		{name: "same name", is: "cable0", want: "cable0"},
		{name: "renamed", is: "cable1", want: "cable1"},
		{name: "left", asked: Settings{VLAN: ptr(100)}, driver: true, fails: true},
		{name: "left, and nothing was set", driver: true},
		{name: "without its driver", asked: Settings{VLAN: ptr(100)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t, 2, 0)
			pf := filepath.Join(e.h.Sys, busPCI, pfPCI)
			must(t, os.MkdirAll(pf, 0o755))
			if tt.is != "" {
				must(t, os.MkdirAll(filepath.Join(pf, "net", tt.is), 0o755))
			}
			if tt.driver {
				must(t, os.Symlink("../drivers/igb", filepath.Join(pf, "driver")))
			}
			must(t, os.MkdirAll(filepath.Join(e.h.Sys, busPCI, vfPCI), 0o755))
			must(t, os.Symlink("../"+pfPCI, filepath.Join(e.h.Sys, busPCI, vfPCI, "physfn")))
			task, err := e.h.newTask(&journal{Asked: tt.asked, Wiring: Wiring{
				Device: Device{ID: vfPCI, PCI: vfPCI, PF: "cable0", PFPCI: pfPCI, VF: 0}, Mode: ModeMove, IfName: "net0",
				Original: Original{Name: device(0), PF: &PFSettings{MAC: noMAC}},
			}})
			must(t, err)
			defer task.close()
			must(t, in(e.home, func(h *netlink.Handle) error {
				got := ""
				l, err := task.findPF(h)
				if l != nil {
					got = l.Attrs().Name
				}
				if got != tt.want {
					t.Errorf("the PF's interface is %q, want %q", got, tt.want)
				}
				return err
			}))
			err = task.restore(t.Context())
			if errors.Is(err, errNoPF) != tt.fails || err != nil && !tt.fails {
				t.Errorf("take back: %v", err)
			}
		})
	}
}

// TestSysfs_ownNetDev: a PF in mode switchdev has interfaces that stand for its VFs, whose names may come before that of
// its own port.
func TestSysfs_ownNetDev(t *testing.T) {
	const pci = "0000:41:00.0"
	s := sysfs(t.TempDir())
	for name, port := range map[string]string{"eth0": "pf0vf0", "eth1": "c1pf0sf88", "uplink0": "p0"} {
		must(t, os.MkdirAll(s.path(busPCI, pci, "net", name), 0o755))
		write(t, s.path(classNet, name, "phys_port_name"), port)
	}
	if got := s.ownNetDev(pci); got != "uplink0" {
		t.Errorf("the PF's own interface is %q", got)
	}
	must(t, os.Remove(s.path(classNet, "uplink0", "phys_port_name"))) // as drivers without representors
	if got := s.ownNetDev(pci); got != "uplink0" {
		t.Errorf("without phys_port_name: %q", got)
	}
	if got := s.ownNetDev("0000:41:00.1"); got != "" {
		t.Errorf("a function without interface has %q", got)
	}
}
