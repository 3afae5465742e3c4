// SPDX-License-Identifier: Apache-2.0

// Package rocev2 tests our software RoCEv2 (pkg/rdma/soft) against the Linux
// kernel's (rxe).
//
//	go test ./test/vm/rocev2 -run 'TestRoCEv2/(tools|suite)$'
//
// There are two guests. In the first one UDP port 4791 is ours, the second one has
// rxe. The RDMA programs of the distribution run in the second and talk to ours in the
// first, in both roles (program toolpeer, package rdmatools), also with what a bad
// network does to packets. And the second one runs package suite: the conformance
// suite of providers and misbehaving peers, with rxe as one of the two devices and
// as the other one a software device in a network namespace, which has the guest's
// second NIC.
//
// # Limitations
//
// The kernel is Debian's 6.12. Times say nothing: the guests are emulated.
package rocev2
