// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// MaxPeerAddresses is the most addresses of one SMCRPeerSlice: a change of one
// pod rewrites one slice, and every agent gets it.
const MaxPeerAddresses = 256

// FirstPeerSlice is the name of the slice that each policy with peer selectors has, also
// if they select no pod. The controller writes it after the policy's others: once it has
// the generation of the policy, all addresses are there, and agents put the policy in force.
func FirstPeerSlice(policy string) string { return policy + "-0" }

// SMCRPeerSlice holds some of the addresses that the peer selectors of a policy
// stand for. The controller writes it, agents read it.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=smcrps
// +kubebuilder:printcolumn:name="Policy",type=string,JSONPath=`.policy`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SMCRPeerSlice struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// policy is the name of the SMCRPolicy, in the same namespace, that the slice
	// belongs to.
	// +required
	Policy string `json:"policy"`
	// policyGeneration is the metadata.generation of the policy for which the
	// controller wrote the addresses. Agents put a policy in force once its slice
	// POLICY-0, which is written last, has the generation of the policy.
	// +optional
	PolicyGeneration int64 `json:"policyGeneration,omitempty"`
	// addresses are IP addresses, as 10.1.2.3 or 2001:db8::3. At most 256.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	Addresses []string `json:"addresses,omitempty"`
}

// SMCRPeerSliceList is a list of slices.
//
// +kubebuilder:object:root=true
type SMCRPeerSliceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SMCRPeerSlice `json:"items"`
}
