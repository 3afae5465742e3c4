// SPDX-License-Identifier: Apache-2.0

// Package vf tests the wiring of RoCE VFs into pods in guests with emulated
// SR-IOV NICs: igb, two PFs with two VFs each on two NUMA nodes, and soft RoCE on
// the VFs. The plugin is called as container runtimes call it, by libcni.
//
//	go test ./test/vm/vf
//	go test ./test/vm/vf -run 'TestVF/(node/g0|churn)$'
//
// Each subtest begins with VFs that no pod has, and leaves them so: what differs
// in the host afterwards is an error.
//
// # Limitations
//
// igb does not enforce the check for spoofed addresses in QEMU, and has no link
// state, no lowest rate and no 802.1ad: of these only what the kernel answers can
// be tested. The kernel of g0 has soft RoCE in network namespaces: its VFs move into
// pods. That of g1, the one with SMC-R of its own, has not: its VFs stay in the host,
// with an ipvlan interface for the pod.
package vf
