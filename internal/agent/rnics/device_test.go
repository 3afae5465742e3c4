// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// openDevice is an open device with a GID table.
type openDevice struct {
	rdma.Device
	gids []rdma.GIDEntry
}

func (openDevice) Attr() rdma.DeviceAttr   { return rdma.DeviceAttr{Provider: "mlx5"} }
func (d openDevice) GIDs() []rdma.GIDEntry { return d.gids }
func (openDevice) Port() rdma.PortAttr {
	return rdma.PortAttr{State: rdma.PortActive, MaxMTU: rdma.MTU4096, ActiveMTU: rdma.MTU1024}
}

// choosingDevice is a device that says why it chose its GID.
type choosingDevice struct{ openDevice }

func (choosingDevice) GIDChoice() string { return "the only one" }

// TestState_Info: while a device is missing, the API shows its configuration, and while it is open, what the
// device says of itself.
func TestState_Info(t *testing.T) {
	addr := netip.MustParseAddr
	gid := func(kind rdma.GIDType, a, netDev string) rdma.GIDEntry {
		return rdma.GIDEntry{GID: rdma.GIDFromAddr(addr(a)), Type: kind, NetDev: netDev}
	}
	since := time.Unix(1000, 0)
	soft := config.Device{SoftAddress: addr("192.0.2.1"), Interface: "eth1"}
	wanted := config.Device{RDMA: "mlx5_0", GIDAddress: addr("192.0.2.2")}
	open := openDevice{gids: []rdma.GIDEntry{gid(rdma.GIDTypeRoCEv1, "192.0.2.8", ""), gid(rdma.GIDTypeRoCEv2, "192.0.2.9", "eth3")}}
	for _, tt := range []struct {
		name string
		s    State
		want agentapi.Device
	}{
		{"missing", State{Name: "mlx5_0", Config: config.Device{RDMA: "mlx5_0"}, Err: errUnplugged}, agentapi.Device{Provider: "verbs", Port: "DOWN", Missing: errUnplugged.Error()}},
		{"missing, with an address", State{Config: wanted}, agentapi.Device{Provider: "verbs", Port: "DOWN", Address: "192.0.2.2"}},
		{"missing software", State{Config: soft}, agentapi.Device{Provider: "soft", Port: "DOWN", Address: "192.0.2.1", Interface: "eth1"}},
		{"missing, with an interface", State{Config: config.Device{RDMA: "mlx5_0", Interface: "eth9"}}, agentapi.Device{Provider: "verbs", Port: "DOWN", Interface: "eth9"}},
		{"missing interface", State{Config: config.Device{Interface: "eth9"}}, agentapi.Device{Provider: "soft", Port: "DOWN", Interface: "eth9"}},
		{"open", State{Config: wanted, Open: open}, agentapi.Device{Provider: "mlx5", Port: "ACTIVE", MTU: 1024, Address: "192.0.2.9", Interface: "eth3"}},
		{"open, says why", State{Config: wanted, Open: choosingDevice{open}}, agentapi.Device{Provider: "mlx5", Port: "ACTIVE", MTU: 1024, Address: "192.0.2.9", Interface: "eth3", Choice: "the only one"}},
		{"open, without an address", State{Config: wanted, Open: openDevice{}}, agentapi.Device{Provider: "mlx5", Port: "ACTIVE", MTU: 1024, Address: "192.0.2.2"}},
		{"open software", State{Config: soft, Open: open}, agentapi.Device{Provider: "mlx5", Port: "ACTIVE", MTU: 1024, Address: "192.0.2.9", Interface: "eth3"}},
		{"open software, without a configured address", State{Config: config.Device{Interface: "eth3"}, Open: open}, agentapi.Device{Provider: "mlx5", Port: "ACTIVE", MTU: 1024, Address: "192.0.2.9", Interface: "eth3"}},
	} {
		tt.s.Since, tt.want.Since, tt.want.Name = since, since, tt.s.Name
		if d := cmp.Diff(tt.want, tt.s.Info()); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
	}
}

// TestAddress: only an address for RoCEv2 counts.
func TestAddress(t *testing.T) {
	entry := func(kind rdma.GIDType, a string) rdma.GIDEntry {
		return rdma.GIDEntry{GID: rdma.GIDFromAddr(netip.MustParseAddr(a)), Type: kind}
	}
	one, two := entry(rdma.GIDTypeRoCEv1, "192.0.2.1"), entry(rdma.GIDTypeRoCEv2, "192.0.2.2")
	for want, gids := range map[string][]rdma.GIDEntry{"": {one}, "192.0.2.2": {one, two, entry(rdma.GIDTypeRoCEv2, "192.0.2.3")}} {
		if got := address(openDevice{gids: gids}); got != want {
			t.Errorf("%v: %q, want %q", gids, got, want)
		}
	}
}
