// SPDX-License-Identifier: Apache-2.0

// Package kernel holds our engine against the Linux kernel's SMC-R, in
// both roles: guest 0 is the kernel's side, by sockets of AF_SMC over rxe, as
// smc_run makes them of a program's sockets, guest 1 is ours, over our software
// RoCE and over verbs on rxe.
//
// Data that arrives proves nothing, since both sides fall back to TCP. So each
// round of connections is judged by the kernel's own counters: so many
// connections were SMC-R, none or so many fell back, for this reason; by what
// our engine says of each connection; and by what is left at the end, which is
// nothing on either side.
//
//	go test ./test/vm/kernel                                   all
//	go test ./test/vm/kernel -run 'TestKernel/soft/big' -args -bytes 1G
//
// # Limitations
//
// Over rxe the kernel speaks SMC-Rv2 only: its version 1 wants a GID of RoCEv1,
// which rxe does not have. Guests are emulated: what is measured here is logged
// and never judged, but for times that a kernel's timer sets.
package kernel
