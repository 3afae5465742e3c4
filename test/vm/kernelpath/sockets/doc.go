// SPDX-License-Identifier: Apache-2.0

// Package sockets finds out what a program sees of its TCP sockets: it tries options and calls, between a
// server and a client, and writes down what comes of each. Done once on TCP and once on sockets that
// are SMC's in place of TCP's, it tells what differs for programs.
//
//	sockprobe serve -port 7000                # at one node, until it is killed
//	sockprobe probe -server 10.0.0.1:7000     # at another: the rows as JSON
//
// The server listens on two ports more, for IPv4 and IPv6 and with TCP_DEFER_ACCEPT. [Table] writes the rows of
// several runs side by side.
//
// Results do not depend on times or addresses, so that they are the same in each run: what is waited for has
// a deadline, and what a byte count or a number of events may be by chance is left out.
//
// # Limitations
//
// The client's end is tried more than the server's, whose sockets have the same operations. What needs
// more than a socket is left out, as io_uring, which makes sockets in a way of its own, and eBPF.
package sockets
