// SPDX-License-Identifier: Apache-2.0

// Command kernelsmc tells in a guest what the kernel's SMC has, and sets it up.
//
//	kernelsmc                        its counters, link groups and sockets
//	kernelsmc ueid add NAME          its settings: ueid add|del|flush|list, pnet add|flush
//
// Tests ask again and again until the kernel has done something. So it is a program of
// its own, linked statically: an emulated guest starts it in a fraction of the time that
// peer takes, with its C libraries, eBPF and patterns.
package main
