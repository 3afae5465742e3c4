// SPDX-License-Identifier: Apache-2.0

// Package ssp decides what becomes of a TCP connection that may become one of RDMA: a Socket
// Service Point, as the iWARP extensions of DAT 2.0 describe it, and the one connection request
// that it can have.
//
// A [Point] is PURE: it has no socket, clock or lock. Whoever has the socket shows it what the
// stream begins with, and takes from the stream what it is told to, which is the Request and
// nothing else. So the connection can go back to the program at any time before that, with all
// its bytes.
package ssp
