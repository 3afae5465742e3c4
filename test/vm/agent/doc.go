// SPDX-License-Identifier: Apache-2.0

// Package agent tests the product in guests: unmodified redis and nginx in a pod
// behind our agent on a device of the kernel (soft RoCE by verbs), with the
// kernel's SMC-R at the other end, as client and as server, and with another
// agent. That a connection was on SMC-R is proved by the kernel's counters and
// not by data that arrived.
//
//	go test ./test/vm/agent
//	go test ./test/vm/agent -run 'TestAgent/(kernelClient|deviceGone)$'
//
// Each subtest begins with agents that run and leaves them running.
//
// Devices of pods are soft RoCE on interfaces that stay on the host, as those of
// ipvlan children do: Linux 6.12 has soft RoCE in the first namespace only.
//
// The kernel's end of unmodified programs is socat with a socket of protocol
// IPPROTO_SMC, where smc_run would preload a library: it is the same socket of
// the kernel, and carries one connection for each one of the program.
package agent
