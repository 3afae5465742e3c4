// SPDX-License-Identifier: Apache-2.0

package records

// Pod names a pod in a record. Outside Kubernetes it is empty.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}
