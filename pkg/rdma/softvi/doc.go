// SPDX-License-Identifier: Apache-2.0

// Package softvi is an RDMA device in software that speaks VI/TCP, the Virtual Interface
// Architecture on TCP connections (draft-dicecco-vitcp-00): SEND, RDMA WRITE and RDMA READ, immediate
// data, flow control of receives, and completions that say that the peer has the message. It needs no
// rights and no kernel module. Its peers are devices of this package: the draft has no
// numbers, and there is no other implementation.
//
//	d, err := softvi.Open(softvi.Config{Name: "vi0", Addr: netip.MustParseAddr("10.0.0.1"), Port: 18515})
//	ctx, err := d.Open() // an rdma.Context: domains, regions and queue pairs as of any device
//	...
//	err = qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: access})
//	_, err = qp.PostRecv(recvs)
//	_, err = d.Dial(ctx, qp, softvi.Addr{IP: server, Discriminator: "db"}, softvi.Options{})
//
// The protocol, and what of it is our choice, is in
// [github.com/smcr-io/kube-smcr/pkg/rdma/vitcp]; this package is its shell: the TCP port,
// connections, and on them what all devices in software share (pkg/rdma/internal/softdev and
// pkg/rdma/internal/tcpqp). docs/vitcp.md goes through the draft statement by statement.
//
// # Connecting
//
// A program's address is an IP address and a discriminator, a name of up to 16 bytes. One TCP port
// of a device takes the calls of all its programs.
//
//	             who calls            who is called
//	client       Device.Dial          Device.Listen, Listener.Accept, Request.Accept or Reject
//	and server   Device.Connect       the same, and Device.Serve: on a *net.TCPConn that there is
//	peer to peer Device.DialPeer      Device.DialPeer: both call, and one of the calls stands
//
// [Options] say at each side what is wanted, and [Terms] what both agree on.
// Private data, which the draft calls security information, goes with a call and its acceptance;
// its meaning is the program's.
//
// # The end
//
// [Device.Disconnect] ends a connection in order: what was posted arrives first, and the peer's queue
// pair has EventDisconnected. Modify to ERR or Close end it at once. A message that a peer
// refuses fails with the reason, and ends the connection at both sides.
//
// # Who owns what
//
// A TCP connection belongs to the goroutine of its [Request], or to the program's own in
// [Device.Dial], until the call is answered, and then to its queue pair. A call that nobody answers
// is over after the timeouts of [Config]; what is not answered yet is bounded, also for each address, so
// that who connects and says nothing keeps nobody else out.
//
// # The VI Provider Library
//
// Its names, which the draft and the developer's guide have, are in the table of docs/vitcp.md: a VI is a
// queue pair, a descriptor a work request, a protection tag a domain. Reliability levels are
// [Options].Unreliable. What [Device.Dial] and its like return is an error that unwraps to one of package
// vitcp, and the status of a descriptor is that of a completion.
//
// # Limitations
//
// There is no solicited event bit: [rdma.SendSolicited] is refused, and Arm(true) wakes for every
// receive (DeviceAttr.Solicited). There are no atomics.
//
// A peer that is connected and reads nothing, or posts no receives, holds what was posted to it until the queue
// pair is disconnected, moved to ERR or closed: a VI has no timer for that. One whose machine
// is gone is noticed by TCP, by its keepalive or after its retransmissions, and EventPathDown tells.
//
// Nothing is authenticated and nothing is encrypted: who can put bytes into the TCP connection can
// do what the queue pair's peer can do, and nothing but TCP's checksum protects them. Keys and
// addresses of regions are random, see pkg/rdma/internal/softdev, but they travel in the clear.
package softvi
