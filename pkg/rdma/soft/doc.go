// SPDX-License-Identifier: Apache-2.0

// Package soft is a software RDMA device: the reliable connected service of
// RoCEv2 over a UDP socket, in user space, without privileges.
//
//	d, err := soft.Open(soft.Config{Name: "soft0", Addr: netip.MustParseAddr("10.0.0.1")})
//	...
//	c, err := d.Open() // an rdma.Context
//
// The protocol is that of [github.com/smcr-io/kube-smcr/pkg/rdma/rocev2]; this
// package is its shell: memory regions, completion queues, the socket, timers.
//
// # Who owns what
//
// A device has one receive goroutine, which waits in the network poller, one
// goroutine for timers and the link state, and one goroutine per open context
// that delivers events. Each queue pair has an owner at every moment: whoever
// holds its ownership word (see owner). Posting takes the queue pair if it is
// free and then transmits in the caller's goroutine; if it is not free, the
// work requests go to a ring that the owner empties before it lets go, so that
// posting never blocks. All access to registered memory by the device happens
// while a queue pair is owned. That is why closing a region has only to take
// it out of the table and to own every queue pair of its domain once.
//
// A completion queue has many producers under a lock and one consumer without.
//
// # The wire
//
// [Wire] moves datagrams. The usual one is a UDP socket of the network
// namespace that the caller of [Open] was in; it stays there. Consecutive
// packets of one size are one send with UDP_SEGMENT, and UDP_GRO gives them
// back in one piece where the path allows.
//
// # Limitations
//
// Traffic class, flow label and hop limit of a path are not used: a socket
// serves many queue pairs. The UDP source port is that of the device, so that
// equal-cost routing does not spread the queue pairs of two devices. There is
// no congestion control beyond the window of packets in flight. The IPv4
// identification that the ICRC covers is not visible to a socket; see
// [rocev2.ICRC] for what that means. Linux only.
package soft
