// SPDX-License-Identifier: Apache-2.0

// Package afsmc opens sockets of the kernel's SMC, as smc_run makes them of a
// program's TCP sockets.
//
//	c, err := afsmc.Dial("10.0.0.1:5000", 0)
//	l, err := afsmc.Listen("10.0.0.1:5000", 0)
//
// Only the kernel knows what carries a connection, SMC-R or TCP: package smcnl
// asks it.
//
// # Who owns what
//
// A Conn is a file in Go's poller, as a program with an event loop would have it,
// and belongs to whoever opened it.
//
// # Limitations
//
// Dial blocks a thread for as long as the kernel waits for the peer.
//
// A signal makes the kernel drop what it had to tell the peer of a close: a program
// that uses this package begins with [WithoutPreemption].
package afsmc
