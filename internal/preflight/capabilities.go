// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"strings"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// maxDetail is how long a capability's detail may be in the CRD, in bytes.
const maxDetail = 1024

// Capabilities is the report as capabilities of an SMCRNode.
func (r Report) Capabilities() []v1alpha1.NodeCapability {
	out := make([]v1alpha1.NodeCapability, 0, len(r.Checks))
	for _, c := range r.Checks {
		out = append(out, c.Capability())
	}
	return out
}

// Capability is the check as a capability of an SMCRNode.
func (c Check) Capability() v1alpha1.NodeCapability {
	return v1alpha1.NodeCapability{Name: c.Name, State: c.Result.state(), Reason: c.Reason, Detail: c.sentence()}
}

// state is the CRD's word for OK, WARN, FAIL or NONE.
func (r Result) state() string {
	switch r {
	case OK:
		return "Available"
	case Warn:
		return "Degraded"
	case None:
		return "Unavailable"
	case Fail:
	}
	return "Missing"
}

// sentence is the check as one text: what was found, what that means, and what to do.
func (c Check) sentence() string {
	var parts []string
	for _, s := range []string{c.Detail, c.Means, c.Advice} {
		if s != "" {
			parts = append(parts, strings.ReplaceAll(s, "\n", "; "))
		}
	}
	s := strings.Join(parts, ". ")
	if len(s) > maxDetail {
		s = strings.ToValidUTF8(s[:maxDetail-len("...")], "") + "..."
	}
	return s
}
