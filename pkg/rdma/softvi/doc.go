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
// What the VI Architecture names, the draft and the developer's guide with it, is here:
//
//	VipOpenNic, VipCloseNic             Open and Device.Open; Device.Close
//	VipQueryNic                         Device.Attr
//	VipCreatePtag, VipDestroyPtag       rdma.Context.AllocPD; rdma.PD.Close
//	VipRegisterMem, VipDeregisterMem    rdma.PD.AllocMR or RegMR; rdma.MR.Close
//	memory handle                       rdma.MR.LKey here, RKey at the peer
//	VipCreateVi, VipDestroyVi           rdma.PD.CreateQP and QP.Modify to INIT; QP.Close
//	VIP_NET_ADDRESS                     Addr
//	VipConnectRequest                   Device.Dial, Device.Connect
//	VipConnectWait                      Device.Listen, Listener.Accept
//	VipConnectAccept, VipConnectReject  Request.Accept, Request.Reject
//	VipConnectPeerRequest, -Wait        Device.DialPeer, which is both
//	VipDisconnect                       Device.Disconnect
//	VipPostSend                         rdma.QP.PostSend: OpSend, OpWrite, OpWriteImm, OpRead, SendImm
//	VipPostRecv                         rdma.QP.PostRecv
//	VipCreateCQ, VipDestroyCQ           rdma.Context.CreateCQ; rdma.CQ.Close
//	VipSendDone, VipRecvDone, VipCQDone rdma.CQ.Poll: a work queue always has a completion queue
//	VipSendWait, VipRecvWait, VipCQWait rdma.CQ.Arm and Notify
//	VipSendNotify, -RecvNotify, -CQNotify  rdma.CQ.OnNotify
//	VipErrorCallback                    rdma.Context.Events
//	VipQueryVi                          rdma.QP.State, Device.QPStats
//	states of a VI: idle, connect       RESET and INIT, INIT,
//	  pending, connected, error         RTS, ERR
//
// Reliability levels are Options.Unreliable. What VipConnectRequest and its like return is an error that
// unwraps to one of:
//
//	VIP_TIMEOUT                    vitcp.ErrTimeout
//	VIP_REJECT                     vitcp.ErrRejected
//	VIP_NO_MATCH                   vitcp.ErrNoMatch
//	VIP_NOT_REACHABLE              vitcp.ErrUnreachable
//	VIP_INVALID_MTU                vitcp.ErrMaxTransfer
//	VIP_INVALID_RELIABILITY_LEVEL  vitcp.ErrReliability
//	VIP_INVALID_RDMAREAD           vitcp.ErrRDMARead, and vitcp.ErrRDMAWrite
//	VIP_INVALID_STATE              rdma.ErrState
//
// and the status of a descriptor that of a completion:
//
//	VIP_STATUS_DONE                StatusSuccess
//	VIP_STATUS_FORMAT_ERROR        refused when it is posted, with rdma.ErrInvalid; StatusLocalQP where it was not agreed on
//	VIP_STATUS_PROTECTION_ERROR    StatusLocalProtect
//	VIP_STATUS_LENGTH_ERROR        StatusLocalLength
//	VIP_STATUS_PARTIAL_ERROR       StatusLocalProtect, of a message whose memory went while it was being sent
//	VIP_STATUS_DESC_FLUSHED_ERROR  StatusFlushed
//	VIP_STATUS_TRANSPORT_ERROR     StatusRetryExceeded
//	VIP_STATUS_RDMA_PROT_ERROR     StatusRemoteAccess
//	VIP_STATUS_REMOTE_DESC_ERROR   StatusRNRRetryExceeded, StatusRemoteInvalid or StatusRemoteOp
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
