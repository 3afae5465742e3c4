// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// noDevice is the reason of a node without RDMA devices.
const noDevice agentapi.Code = "NOSMCDEV"

// fallback: a pod on the node without RDMA devices is opted in as the others are. Its connections
// are plain TCP in both directions, with the reason where people look.
func fallback(s *suite) {
	far, _ := s.pair(load)
	near := s.start(far.ns, "near", s.plain)
	s.status(near, v1alpha1.PodStatusFallback+": "+string(noDevice))
	s.verdict(near, far, noDevice)
	s.must(s.once(far, near))
	var o v1alpha1.SMCRNode
	s.must(s.get("", s.plain.Name, &o))
	a := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionAccelerating)
	if a == nil || a.Status != "False" || a.Reason != "NoDevices" || !meta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.ConditionReady) {
		s.Errorf("SMCRNode %s: Accelerating is %+v, want False by NoDevices, and Ready", s.plain.Name, a)
	}
}
