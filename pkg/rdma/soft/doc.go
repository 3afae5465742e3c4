// SPDX-License-Identifier: Apache-2.0

// Package soft is a software RDMA device: the reliable connected service of
// RoCEv2 over a UDP socket, in user space, without privileges.
//
//	d, err := soft.Open(soft.Config{Name: "soft0", Addr: netip.MustParseAddr("10.0.0.1")})
//	...
//	c, err := d.Open() // an rdma.Context
//
// The protocol is that of [github.com/smcr-io/kube-smcr/pkg/rdma/rocev2]; this
// package is its shell: the socket, and on it what all devices in software share
// (pkg/rdma/internal/softdev): memory regions, completion queues, timers.
//
// # Who owns what
//
// A device has these goroutines:
//
//   - one for each of its receiving sockets, of which there are up to four ([Config.Receivers]). It waits in
//     the network poller; in the midst of a stream it polls its socket for more before it waits. The kernel
//     spreads queue pairs over the sockets: see spread for how
//   - one for timers
//   - one for the link state and [Config.TooLarge]
//   - one per open context, which delivers events
//
// Each queue pair has at most one owner at a time, who transmits: a receiver, or a poster that finds the queue pair
// free. Posting never blocks. A peer asks for a long response to a READ with one packet: the owner sends only a
// part of the response, and the timers' goroutine sends the rest, of all such queue pairs by turns.
//
// # What peers can guess
//
// RKeys and LKeys are 32 random bits, queue pair numbers 24, or 23 on a shared address.
// None tells anything about another one, and one that was given back is hardly ever drawn again.
// They are found in hash tables, without a lock. The address of a region is random,
// too, and not that of its memory in the process.
//
// A packet reaches a queue pair only if its source address is that of the pair's peer;
// [Device.Stats] counts the others. RoCEv2 authenticates nothing: who can send with the
// peer's address, knows or guesses the queue pair number, and hits the next PSN, another
// 24 bits, is the peer. Such an attacker can end the queue pair with a request that makes no
// sense. To drop that request and wait for another would be no better: with the same three
// numbers he can send a request that does make sense, and then the real peer's next one, which
// has the same PSN, counts as its repetition. So IBTA's rule stands that a request that makes no
// sense ends the queue pair (9.7.4.1), and it is for the network to keep spoofed addresses
// out. Packets with any other PSN do no harm, however many: old requests are acknowledged again,
// a gap is reported once, and answers to nothing that is outstanding are dropped.
//
// # The wire
//
// [Wire] moves datagrams. The usual one is a UDP socket of the network
// namespace that the caller of [Open] was in; it stays there. Consecutive
// packets of one size are one send with UDP_SEGMENT, and UDP_GRO gives them
// back in one piece where the path allows. Packets are never fragmented: they have to fit the
// interface that has the address or, with an address on loopback, each that is up, unless
// [Config.MTU] says more. What the kernel refuses as too large is as if it was lost, and
// [Config.TooLarge] is told.
//
// # Two devices on one address
//
// A device with [Config.Share] can be replaced without a pause: its successor
// is opened on the same address and port before it is closed, and the kernel
// gives each of the two the packets for its own queue pairs, whose numbers
// differ in their topmost bit. See share for how. A port that somebody else has
// is not taken. The two find each other in
// [Config.Dir], which only their user can enter, and the kernel lets only sockets of
// that user share the port, and none while a device is alone. So the user is trusted: a
// process that runs as the same one in the same network namespace can, while two devices
// are open, bind to the port with SO_REUSEPORT as well, and once it has taken the place
// of one of the two it gets the packets of a generation. A pod with the host's network
// whose processes run as root is such a process of a node's agent.
//
// # Against rxe
//
// test/vm/rocev2 runs the device against the soft RoCE of Linux 6.12 (Debian's),
// over IPv4 and IPv6, with each of the two as requester and as responder: the
// conformance suite of providers as far as it is about two devices (SEND, WRITE,
// WRITE with immediate, READ, all path MTUs, a PSN that wraps, RNR, wrong keys and
// rights, buffers too small, memory closed under writes, queue pairs closed under
// traffic), the same with packets lost, late and repeated, peers that do not keep
// to the PSN or path MTU that they announced, and a storm of RNR NAKs. So do
// ibv_rc_pingpong and programs of perftest, in both roles.
//
// Where rxe is not as IBTA says, and what that means here:
//
//   - It sends IPv6 packets with a UDP checksum of zero: the socket takes them.
//   - It takes retry count 7 for endless: it repeats for ever to a peer that is gone. We
//     repeat seven times.
//   - An ACK that arrives when its timer has just expired does not stop the
//     repetition. If we close a queue pair as soon as the last message is there,
//     rxe may go on repeating that message: close only when the peer is known to be
//     done.
//   - It takes an ACK of a PSN that it has not sent yet for an ACK of what it has sent. If
//     it begins with a PSN below the one that it announced, its WRITEs complete without
//     having been done. We drop such ACKs (IBTA 9.7.5.1), and the request fails.
//   - It says nothing to its program when a queue pair fails as a responder.
//
// # Limitations
//
// Traffic class, flow label and hop limit of a path are not used: a socket
// serves many queue pairs. The UDP source port is one of eight of the device, chosen by
// the topmost bit and the lowest two of the destination's queue pair number, so equal-cost
// routing finds at most eight ways between two devices. A device with an IPv6 address has
// one receiver. There is no congestion control beyond the window of packets in flight. The IPv4
// identification that the ICRC covers is not visible to a socket; see
// [rocev2.ICRC] for what that means. Linux only.
package soft
