// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// had are the devices of every pod.
type had []string

func (h had) Devices(config.PodName) []string { return h }

func TestAssigned(t *testing.T) {
	as := assigned{had{"soft1", "soft0"}, had(nil), had{"0000:01:10.2", "soft0"}}
	if diff := cmp.Diff([]string{"0000:01:10.2", "soft0", "soft1"}, as.Devices(config.PodName{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestOffered(t *testing.T) {
	virtual := func(pci string, n int, state vf.State, owner *vf.Owner) vf.Device {
		return vf.Device{
			ID: pci, PCI: pci, PF: "pf0", PFPCI: "0000:01:00.0", VF: n, NUMANode: 1, Rail: 0, RDMA: []string{"mlx5_" + string(rune('2'+n))},
			State: state, Owner: owner,
		}
	}
	owner := &vf.Owner{ContainerID: "c", IfName: "net1", Pod: records.Pod{Namespace: "shop", Name: "db-0"}}
	all := []inventory.Device{
		{Kind: inventory.KindRDMA, Up: true, Device: vf.Device{ID: "eth1", VF: -1, NUMANode: -1, Rail: -1, RDMA: []string{"rxe_eth1"}}},
		{Kind: inventory.KindRDMA, Up: true, Device: vf.Device{ID: "eth2", VF: -1, NUMANode: -1, Rail: -1, State: vf.StatePod, Owner: owner}},
		{Kind: inventory.KindRDMA, Up: true, Device: vf.Device{ID: "0000:02:00.0", PCI: "0000:02:00.0", VF: -1}},
		{Kind: inventory.KindSoftware, Device: vf.Device{ID: "soft0", VF: -1, NUMANode: 0, Rail: 0}},
		{Kind: inventory.KindSoftware, Up: true, Device: vf.Device{ID: "soft1", VF: -1, NUMANode: -1, Rail: 1}},
		{Kind: inventory.KindVF, Up: true, Device: virtual("0000:01:10.0", 0, vf.StateDown, nil)},
		{Kind: inventory.KindVF, Up: true, Device: virtual("0000:01:10.2", 1, vf.StatePod, owner)},
		{Kind: inventory.KindVF, Device: virtual("0000:01:10.4", 2, vf.StateVFIO, nil)},
	}
	for n, state := range []vf.State{vf.StateDown, vf.StatePod} {
		d := virtual("0000:01:11."+string(rune('0'+n)), 3+n, state, nil)
		d.RDMA = nil
		all = append(all, inventory.Device{Kind: inventory.KindVF, Up: true, Device: d})
	}
	want := []deviceplugin.Device{
		{ID: "eth1", NUMANode: -1, Rail: ownRail, RDMA: "rxe_eth1"},
		{ID: "eth2", NUMANode: -1, Rail: ownRail + 1, Why: "pod shop/db-0 has it for itself"},
		{ID: "soft0", NUMANode: 0, Why: "its port is down"},
		{ID: "soft1", NUMANode: -1, Rail: 1},
		{ID: "0000:01:10.0", VF: true, NUMANode: 1, PF: "0000:01:00.0", RDMA: "mlx5_2"},
		{ID: "0000:01:10.2", VF: true, NUMANode: 1, PF: "0000:01:00.0", RDMA: "mlx5_3"},
		{ID: "0000:01:10.4", VF: true, NUMANode: 1, PF: "0000:01:00.0", RDMA: "mlx5_4", Why: "it is vfio, or the port of its PF pf0 is down"},
		{ID: "0000:01:11.0", VF: true, NUMANode: 1, PF: "0000:01:00.0", Why: "it has no RDMA device: RDMA of its driver is not loaded, or is not enabled for VFs"},
		{ID: "0000:01:11.1", VF: true, NUMANode: 1, PF: "0000:01:00.0"},
	}
	if diff := cmp.Diff(want, offered(all)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
