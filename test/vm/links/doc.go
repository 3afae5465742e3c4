// SPDX-License-Identifier: Apache-2.0

// Package links holds our engine against the Linux kernel's SMC-R while links
// come and go: guest 0 is the kernel's side with two soft RoCE devices, guest 1
// is ours, over our software RoCE and over verbs on soft RoCE.
//
// Each scenario of TestLinks runs connections under load, checks that they are
// SMC-R by the kernel's counters, does something to links, devices, programs
// or guests, and asks both sides what they make of it: the kernel for its link
// groups by netlink, our engine for each change of its groups. In the end no
// byte is wrong, the longest wait of a connection is within a bound, and
// neither side has anything left.
//
//	go test ./test/vm/links                                     all
//	go test ./test/vm/links -run 'TestLinks/soft/cut'           some
//	go test ./test/vm/links -run /fuzz -args -seed 7 -rounds 50
//
// A peer that breaks the protocol is the program test/vm/links/fuzzer.
//
// # Limitations
//
// Links are cut at QEMU, never in a guest: "ip link set down" at the kernel's
// side hangs its link group for good, since net/smc has soft RoCE retransmit without
// end. For the same reason our engine's program is not killed here while two links
// are under load: nobody is left who could refuse what the kernel repeats. TEST LINK in
// both directions is in package test/vm/kernel.
//
// Guests are emulated and share the cores with other work, so bounds of
// waits are what the timers of both sides add up to, with room.
package links
