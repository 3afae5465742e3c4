// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
)

// pfDown: a PF is set down under a connection of pods with two rails, and comes back. The connection goes on, its rail is
// offered to nobody meanwhile, and the pods' VFs come back.
func pfDown(s *suite) {
	ns := s.namespace("test-pf")
	defer s.endNamespaces(ns)
	s.vfTemplate(ns, "both", 0, 1)
	again := s.unchanged()
	server, client, of := s.pairOfVFs(2, func(name string, args ...string) *corev1.Pod { return claiming(ns, name, "both", args...) })
	s.onlyOn(client, v1alpha1.RedundancySymmetric, of[1])
	n := s.hw[1]
	before := s.grows(client, sum{}, 20)
	// The connection's TCP is on the first VF, and rests there; what is lost is the other one.
	pf := s.pfsOf(n, of[1][1:])[0]
	setPF := func(to string) error {
		_, err := n.Guest.Run(s.Context(), "ip", "link", "set", pf, to)
		return err
	}
	s.must(setPF("down"))
	down := true
	defer func() {
		if down {
			_ = setPF("up")
		}
	}()
	l := s.link(client, v1alpha1.RedundancyAsymmetric) // from the VF that is left to both of the server
	s.Logf("without %s SMCRLink %s is on %s", pf, l.Name, l.Status.Devices)
	s.allocatable(n, deviceplugin.ResourceVF, vfsPerPF)
	without := s.grows(client, before, 20)
	s.must(s.p.Client.Create(s.Context(), on(claiming(ns, "late", "both"), n)))
	s.unschedulable(ns, "late", "cannot allocate all claims")
	s.delete(pod{ns: ns, name: "late"}) // igbvf and the move of a VF wait for each other while its PF changes
	s.must(setPF("up"))
	down = false
	s.link(client, v1alpha1.RedundancySymmetric)
	s.allocatable(n, deviceplugin.ResourceVF, vfsPerNode)
	s.withVF(n, s.run(on(claiming(ns, "late", "both"), n), n.Node), 2)
	after := s.grows(client, without, 20)
	s.Logf("of %d exchanges of the open connection to %s the longest took %d ms, %d ms before", after.OK, server, after.WorstMillis, before.WorstMillis)
	s.endPods(ns)
	again()
}
