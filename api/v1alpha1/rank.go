// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"cmp"
)

// CompareRank orders the policies that select one pod: below 0 if a comes
// before b. The policy with the higher priority comes first; of equal ones the older policy, and
// of equally old ones the one with the lower name.
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
