// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 holds the Kubernetes objects of kube-smcr, group smcr.io.
//
//   - [SMCRPolicy] is the only one that people write: which connections of the
//     opted-in pods of its namespace use SMC-R, and how.
//   - [SMCRLink] is one link group as one of its two sides sees it. The agent of
//     that side's node writes it.
//   - [SMCRNode] is what a node can do and how it is. Its agent writes it.
//   - [SMCRPeerSlice] carries the addresses of peers that a policy names by
//     selectors from the controller to the agents.
//
// A pod opts in by the annotation [AnnotationEnabled], on itself or on its
// namespace.
//
// The package imports apimachinery only, so that clients can use it. The CRDs in
// config/crd are generated from it.
//
// +kubebuilder:object:generate=true
// +groupName=smcr.io
package v1alpha1

//go:generate go tool -modfile=../../tools/pinned/go.mod controller-gen object:headerFile=../../tools/license.go.txt crd:headerFile=../../tools/license.yaml.txt paths=. output:crd:dir=../../config/crd
//go:generate go run ../../tools/apidoc -types . -o ../../docs/api.md
