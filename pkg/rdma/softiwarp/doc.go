// SPDX-License-Identifier: Apache-2.0

// Package softiwarp is an RDMA device in software that speaks iWARP: SEND, RDMA WRITE and RDMA
// READ over an ordinary TCP connection, in user space, without rights and without a kernel
// module. Its peers are devices of this package, Linux's siw, and iWARP adapters.
//
//	d, err := softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: netip.MustParseAddr("10.0.0.1")})
//	ctx, err := d.Open() // an rdma.Context: domains, regions and queue pairs as of any device
//	...
//	err = qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: access})
//	_, err = qp.PostRecv(recvs) // before the peer can send
//	_, err = d.Dial(ctx, qp, "10.0.0.2:7174", softiwarp.ConnectOptions{})
//
// The protocol is that of [github.com/smcr-io/kube-smcr/pkg/rdma/iwarp]; this package is its
// shell: connections, and on them what all devices in software share (pkg/rdma/internal/softdev
// and pkg/rdma/internal/tcpqp).
//
// # Connecting
//
// One side is the initiator, which sends the MPA Request, and the other the responder, who
// answers it. It does not matter who opened the TCP connection.
//
//	              initiator          responder
//	at once       Device.Dial        Device.Listen, Listener.Accept, Request.Accept or Reject
//	later         Device.Connect     Device.NewSSP, SSP.Request, Request.Accept or Reject
//
// Later means that the program has talked over the connection before, as long as it liked: a
// Socket Service Point of DAT 2.0. Both take a *net.TCPConn over, which may be that of a descriptor
// from another process. It is closed for whoever has it, and goes on under another descriptor, so
// that nobody writes into the stream of RDMA by mistake. If there is no RDMA connection in the
// end, the caller gets it back.
//
//	initiator                                               responder
//	            <------ any bytes, in both directions ------>
//	                                                        NewSSP takes the connection over, and
//	            <------ SSPOptions.Last -------------------- sends the last bytes
//	reads exactly these; Connect takes the connection over
//	            ------- MPA Request ----------------------->  SSP.Request; or not, and SSP.Close
//	            <------ MPA Reply -------------------------   Request.Accept, or Reject
//	            ======= RDMA; or bytes again ===============
//
// A responder reads the Request and nothing else, so it gets the connection back with all that the
// peer has said. An initiator does after a refusal; ConnectError.Tainted says whether an answer
// may still come after another failure. docs/ssp.md has the rules of DAT's document, statement
// by statement, and its names.
//
// # The end
//
// [Device.Disconnect] ends a connection in order: the peer's queue pair has EventDisconnected.
// Modify to ERR or Close end it at once; the peer is told by a Terminate if something was
// not done. A connection that has become one of RDMA never is the caller's again.
//
// # Limitations
//
// A SEND or WRITE that succeeded says that its memory is free again, and nothing of the peer
// (DeviceAttr.PeerCompletes is false): a message that must be known to have come is answered, or
// followed by a READ. There is no immediate data and there are no atomics. A READ or WRITE costs
// one copy into the kernel and one out, as TCP does, and one from the device's buffer to the place; the CRC
// reads each byte once more on both sides.
//
// Nothing is authenticated and nothing is encrypted: who can put bytes into the TCP connection can
// do what the queue pair's peer can do. Keys and addresses of regions are random, see
// pkg/rdma/internal/softdev, but they travel in the clear.
package softiwarp
