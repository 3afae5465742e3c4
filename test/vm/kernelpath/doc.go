// SPDX-License-Identifier: Apache-2.0

// Package kernelpath tests the kernel's SMC-R as datapath of unmodified programs, in guests: the
// program that makes sockets of TCP SMC (internal/kernelpath) by its own tests, which need a
// kernel that has SMC and the hook.
package kernelpath
