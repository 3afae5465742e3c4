// SPDX-License-Identifier: Apache-2.0

// Package suite has tests for a machine with rxe: package rocev2's test runs them
// in a guest.
//
// rxe is opened through libibverbs and the software device in a network namespace
// whose interface reaches rxe's. With both in one process the conformance suite
// of providers runs with one of them as its first device and the other as its
// second. So do peers that do not keep to what they have announced.
//
// It needs KUBE_SMCR_RDMA_DEVICE, the rxe device, and the variables that the
// constants name.
package suite
