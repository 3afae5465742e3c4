// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// links: the main thing. Two pods on two nodes, and a link group on both devices of each, to
// users and to the kernels.
func links(s *suite) {
	server, client := s.pair(hold)
	for _, side := range []struct {
		pod        pod
		role, peer string
	}{{client, "Client", s.hw[0].Name}, {server, "Server", s.hw[1].Name}} {
		l := s.link(side.pod, v1alpha1.RedundancySymmetric)
		got := []any{l.Status.Node, l.Status.Peer, l.Status.Role, l.Status.Devices, l.Status.Version, l.Status.MTUBytes}
		want := []any{side.pod.node, side.peer, side.role, "rxe0,rxe1", int32(2), int32(4096)}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			s.Errorf("SMCRLink %s is %v, want %v", l.Name, got, want)
		}
		for _, n := range s.hw {
			for _, address := range []string{n.Address().String(), n.Rail().String()} {
				if !strings.Contains(l.Status.GIDs, address) {
					s.Errorf("SMCRLink %s has the GIDs %s, want %s among them", l.Name, l.Status.GIDs, address)
				}
			}
		}
	}
	for _, n := range s.hw {
		s.carries(n, "rxe0", "rxe1")
		var o v1alpha1.SMCRNode
		s.must(s.get("", n.Name, &o))
		if got := fmt.Sprint(o.Status.Transport, " ", o.Status.DeviceSummary); got != "Hardware 2/2" {
			s.Errorf("SMCRNode %s: %s, want Hardware 2/2", n.Name, got)
		}
	}
	s.grows(client, sum{}, 20)
}

// cut: the cable of a NIC is pulled under load, and put back. No connection ends and no byte is
// wrong, and Kubernetes says what happened.
func cut(s *suite) {
	_, client := s.pair(hold)
	l := s.link(client, v1alpha1.RedundancySymmetric)
	n := s.hw[1]
	before := s.grows(client, sum{}, 20)
	s.must(n.Guest.SetLink(1, false))
	s.Cleanup(func() { _ = n.Guest.SetLink(1, true) })
	single := s.link(client, v1alpha1.RedundancySingle)
	if single.Name != l.Name || single.Status.Devices != "rxe0" {
		s.Errorf("without eth1 SMCRLink %s is on %s, want %s on rxe0", single.Name, single.Status.Devices, l.Name)
	}
	s.event(l.Name, "RedundancyLost")
	s.event(n.Name, "DeviceDown")
	s.devices(n.Name, "1/2")
	without := s.grows(client, before, 20)
	s.must(n.Guest.SetLink(1, true))
	s.link(client, v1alpha1.RedundancySymmetric)
	s.event(l.Name, "RedundancyRestored")
	s.event(n.Name, "DeviceUp")
	s.devices(n.Name, "2/2")
	s.carries(n, "rxe0", "rxe1")
	after := s.grows(client, without, 20)
	s.Logf("of %d exchanges of the open connection the longest took %d ms, %d ms before the cable was pulled", after.OK, after.WorstMillis, before.WorstMillis)
}

// devices waits until an SMCRNode says how many devices of how many are usable.
func (s *suite) devices(node, want string) {
	s.Helper()
	s.eventually(fmt.Sprintf("%s devices of %s", want, node), func() error {
		var o v1alpha1.SMCRNode
		if err := s.get("", node, &o); err != nil {
			return err
		}
		healthy := meta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.ConditionDevicesHealthy)
		if o.Status.DeviceSummary != want || healthy != (want == "2/2") {
			return fmt.Errorf("%s, healthy: %t", o.Status.DeviceSummary, healthy)
		}
		return nil
	})
}

// deviceGone: a device is removed while connections use it, and comes back. The driver waits for
// the agent, which lets go; the connections stay on the other device.
func deviceGone(s *suite) {
	_, client := s.pair(hold)
	s.link(client, v1alpha1.RedundancySymmetric)
	n := s.hw[1]
	before := s.grows(client, sum{}, 1)
	ctx, cancel := context.WithTimeout(s.Context(), soon)
	defer cancel()
	s.Cleanup(func() {
		if err := n.Guest.AddRXE(context.Background(), 1); err != nil {
			s.Error(err)
		}
	})
	s.must(n.Guest.RemoveRXE(ctx, 1))
	s.link(client, v1alpha1.RedundancySingle)
	s.devices(n.Name, "1/2")
	s.carries(n, "rxe0")
	without := s.grows(client, before, 20)
	s.must(n.Guest.AddRXE(ctx, 1))
	s.link(client, v1alpha1.RedundancySymmetric)
	s.devices(n.Name, "2/2")
	s.carries(n, "rxe0", "rxe1")
	s.grows(client, without, 20)
}
