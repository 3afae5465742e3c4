// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"cmp"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// NodeLabel is the value of [LabelNode] for a node, and what follows [AgentLeasePrefix] in the name
// of its agent's Lease: the node's name, or its UID if the name is too long for a label. The
// chart's admission policy computes the same, which it could not do with a hash of the name.
func NodeLabel(name string, uid types.UID) string {
	if len(name) <= validation.LabelValueMaxLength {
		return name
	}
	return string(uid)
}

// CompareRank orders the policies that select one pod: below 0 if a comes
// before b. The policy with the higher priority comes first; of equal ones the older policy, and
// of equally old ones the policy with the lower name.
func CompareRank(a, b *SMCRPolicy) int {
	return cmp.Or(
		cmp.Compare(b.Spec.Priority, a.Spec.Priority),
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
		cmp.Compare(a.Name, b.Name),
	)
}

// OptIn says whether a pod is opted in, by its own annotations and those of its
// namespace. A value that is neither "true" nor "false" means no; junk reports whether
// there was such a value.
func OptIn(pod, namespace map[string]string) (enabled, junk bool) {
	v, ok := pod[AnnotationEnabled]
	if !ok {
		v, ok = namespace[AnnotationEnabled]
	}
	switch {
	case !ok, v == "false":
		return false, false
	case v == "true":
		return true, false
	default:
		return false, true
	}
}
