// SPDX-License-Identifier: Apache-2.0

// Package kernelpath tests the kernel's SMC-R as datapath of unmodified programs, in guests: the
// program that makes sockets of TCP SMC (internal/kernelpath) by its own tests, which need a
// kernel that has SMC and the hook; and redis in pods of two nodes whose agents, without Kubernetes, have
// a policy with datapath Kernel. That a connection was on SMC-R is proved by the kernels' counters in the pods.
// A node that lacks something says what. And what programs see of such sockets is tried (package sockets) and
// compared with docs/kernel-sockets.md, which -update writes.
//
//	go test ./test/vm/kernelpath -run 'TestKernelPath/pods'
//	go test ./test/vm/kernelpath -run 'TestKernelPath/pods/(policy|sockets)' -update
package kernelpath
