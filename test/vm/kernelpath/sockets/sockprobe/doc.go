// SPDX-License-Identifier: Apache-2.0

// Command sockprobe is both ends of the trials of package sockets, for guests.
//
//	sockprobe serve -port 7000
//	sockprobe probe -server 10.0.0.50:7000 -protocol 256
//
// Limitations: what it tries needs root, or is refused on TCP as well.
package main
