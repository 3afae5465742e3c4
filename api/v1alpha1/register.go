// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Group is the API group of all objects of kube-smcr.
const Group = "smcr.io"

// GroupVersion returns the group and version of the objects of this package.
func GroupVersion() schema.GroupVersion {
	return schema.GroupVersion{Group: Group, Version: "v1alpha1"}
}

// AddToScheme registers the objects of this package.
func AddToScheme(s *runtime.Scheme) error {
	gv := GroupVersion()
	s.AddKnownTypes(gv,
		&SMCRPolicy{}, &SMCRPolicyList{}, &SMCRLink{}, &SMCRLinkList{},
		&SMCRNode{}, &SMCRNodeList{}, &SMCRPeerSlice{}, &SMCRPeerSliceList{})
	metav1.AddToGroupVersion(s, gv)
	return nil
}
