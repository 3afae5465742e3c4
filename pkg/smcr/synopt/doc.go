// SPDX-License-Identifier: Apache-2.0

// Package synopt puts the SMC-R option on TCP handshakes and tells what the
// peer sent.
//
// RFC 7609 §3.1 and A.1: a host says that it speaks SMC-R by an experimental
// TCP option (kind 254, length 6, identifier E2D4C3D9) on the SYN, and its
// peer by the same option on the SYN-ACK. Only when both were seen may CLC
// messages follow. A socket has no call to write such an option, so an eBPF
// sock_ops program does, on the process's own cgroup v2. A socket belongs to
// the cgroup of the process that made it, in whatever network namespace it is:
// one program covers the sockets that a node agent opens inside all pods, and
// touches no socket of the pods themselves. Within the cgroup it acts on
// sockets with one SO_MARK only. The example shows both sides.
//
// # Who owns what
//
// An [Option] owns the program's link to the cgroup and the map with the
// peers' answers. Both go away with Close or with the process, even when it is
// killed: nothing is pinned. Its methods may be called by any goroutine. What
// the map keeps for a socket is freed by the kernel with the socket.
//
// The program is called for the handshake of a marked socket and then no more:
// an established connection costs nothing.
//
// # Rules of the program
//
//   - A marked connecting socket offers on its SYN and on the first
//     retransmission. Later retransmissions go without the option, so that a
//     device which drops SYNs with unknown options delays a connection but
//     does not prevent it.
//   - A marked listener answers with the option only if the SYN had it, and
//     never together with a syncookie: then the server keeps nothing of the SYN
//     and would not know what it had answered.
//   - Nothing but SYN and SYN-ACK ever carries it. A handshake whose option
//     space is used up (TCP MD5 or AO) goes without.
//
// # Limitations
//
//   - Linux 5.10 or later with cgroup v2 (mounted or not), CAP_BPF and
//     CAP_NET_ADMIN. [Probe] tells beforehand; [UnsupportedError] says what is
//     missing and what to do.
//   - [net.ListenConfig] makes Multipath TCP listeners unless told otherwise,
//     and those have no TCP_SAVE_SYN: ControlListen refuses them. net then
//     tries plain TCP; SetMultipathTCP(false) spares the first try, and is
//     needed where the listening socket is made in another way.
//   - A process that moves to another cgroup is not followed: its new sockets
//     carry no option, and PeerOffered returns [ErrNotTracked].
//   - Several Options, of one process or of several, may be at work on one
//     cgroup. A foreign sock_ops program that asks for header calls on a listener
//     of this cgroup which is not marked makes ours answer there too: for a
//     SYN-ACK the kernel does not tell which listener it is of.
//   - A device on the path that strips the option from one direction only
//     leaves the two ends of different opinion, and one that echoes options it
//     does not know makes a plain peer look like an SMC-R peer. A timeout for
//     the first CLC message has to resolve the first case, and the CLC
//     eyecatcher the second.
package synopt
