// SPDX-License-Identifier: Apache-2.0

// Package kernelpath tests the kernel's SMC-R as datapath of unmodified programs, in guests:
//
//   - The tests of internal/kernelpath, whose eBPF program makes TCP sockets SMC sockets, run on a kernel that has SMC and the hook.
//
//   - Redis runs in pods of two nodes whose agents, without Kubernetes, have a policy with datapath Kernel. The kernels'
//     counters in the pods prove that connections were on SMC-R.
//
//   - A node that lacks something must say what.
//
//   - Package sockets tries what programs see of such sockets. The result is compared with docs/kernel-sockets.md, which -update
//     writes.
//
//     go test ./test/vm/kernelpath -run 'TestKernelPath/pods'
//     go test ./test/vm/kernelpath -run 'TestKernelPath/pods/(policy|sockets)' -update
package kernelpath
