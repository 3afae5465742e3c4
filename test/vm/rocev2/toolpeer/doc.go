// SPDX-License-Identifier: Apache-2.0

// Command toolpeer plays the other end of one RDMA program of a distribution with
// a software device, in a guest: see package rdmatools.
//
//	toolpeer -addr 10.0.0.1 -tool ib_write_bw -n 100 -s 65536               # the server
//	toolpeer -addr 10.0.0.1 -tool ib_write_bw -n 100 -s 65536 -to 10.0.0.2  # the client
//
// A server prints "listening" when a client may come. When the run is over it
// waits for the end of its input, keeping its queue pair for a peer that missed an
// answer, and prints the report as a line of JSON.
package main
