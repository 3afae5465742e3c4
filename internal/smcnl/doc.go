// SPDX-License-Identifier: Apache-2.0

// Package smcnl asks the Linux kernel's SMC for its counters, link groups,
// devices and sockets, and changes its settings.
//
// Data that arrives proves nothing about SMC-R: without it the kernel falls
// back to TCP and says nothing. So what wants to know reads [ReadCounters] before and
// after, on the machine whose kernel is the peer, and looks at the difference
// ([Counters.Sub]): how many connections were SMC-R, as client and as server,
// in which version, and how many fell back, for which reason. [Groups],
// [Devices] and [Sockets] show what there is at a moment, for instance that
// nothing is left.
//
//	before, err := smcnl.ReadCounters()
//	...
//	after, err := smcnl.ReadCounters()
//	diff := after.Sub(before)
//	// diff.ServerV2 == 3 && len(diff.Fallbacks) == 0
//
// # Who owns what
//
// Nothing is kept open: every call is one exchange on a netlink socket of its
// own. Counters, sockets and the table of physical networks belong to the network
// namespace of the calling thread; link groups, devices and enterprise IDs to
// the machine, and whoever asks in whatever namespace sees all of them.
// Everything here has JSON names, since in tests what asks runs in a guest and
// what judges runs outside.
//
// # Limitations
//
// Linux only; the module smc must be loaded ([ErrNoSMC]), and smc_diag for [Sockets].
// SMC-D is left out. Sockets that were made with IPPROTO_SMC have their ports and no
// addresses, as the kernel tells these of AF_SMC only. The kernel remembers at most 30 reasons for fallbacks on
// each side; what comes after them is in the totals only. Counters of a
// program that the kernel serves are added when the rendezvous ends, which
// may be a moment after the peer has seen its end.
package smcnl
