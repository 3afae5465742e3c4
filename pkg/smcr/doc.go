// SPDX-License-Identifier: Apache-2.0

// Package smcr carries TCP connections over RDMA with SMC-R (RFC 7609),
// compatible on the wire with the Linux kernel's.
//
// A [Stack] is one SMC-R instance with its link groups, each of which has a protection
// domain of its own. A [Dialer] and a [Listener] make a [Conn], which is a net.Conn: it
// is carried by SMC-R when both ends can, and by plain TCP otherwise.
// [Conn.Info] says which, and why.
//
//	dev, err := soft.Open(soft.Config{Name: "soft0", Addr: netip.MustParseAddr("192.0.2.1")})
//	stack, err := smcr.NewStack(smcr.Config{Devices: []rdma.Device{dev}, Option: opt})
//	conn, err := (&smcr.Dialer{Stack: stack}).DialContext(ctx, "tcp", "192.0.2.2:80")
//
// # Who owns what
//
// The protocol state (package linkgroup) belongs to the holder of the stack's
// turn. The device's goroutine takes the turn when completions arrive, the
// stack's own when timers expire, and a goroutine that writes or reads a Conn
// when it has something to tell. On the data path nobody waits for the turn:
// who finds it taken leaves a mark, which the holder sees before it goes. Of much
// that comes at once a device's goroutine, like a writer's, does a part and leaves the rest to the stack's:
// packets of other stacks may wait for it.
// The device calls for what arrives, but for completed SENDs only while something
// depends on them ([linkgroup.Group.AwaitsSent]): in a dialogue nothing does.
//
// The bytes of a connection lie in two rings of registered memory. In the send
// buffer the device owns the span from completed to produced, the writer the
// rest; in the RMBE the reader owns the span from consumed to
// peerProduced, the device the rest. The positions are atomics, and they order the accesses: the
// device writes the RMBE, then a completion is taken from the CQ, then the
// holder of the turn stores peerProduced, then the reader loads it.
//
// A connection on which nothing moves for a second or two gives the pages of empty buffers
// back, where devices do not pin them. The peer may write an RMBE before it says so: only the device
// knows that nothing is in it (see cooling).
//
// # The TCP connection
//
// It stays open and idle under the SMC-R connection and ends last. Its reset
// resets the SMC-R connection, so that a peer that died is noticed at once. One
// goroutine of the stack looks at all of them; connections and links have none.
//
// # The end of a link group
//
// The queue pairs of a group that ended in order stay for 0.9 s and only
// acknowledge: the peer's last message may be on its way, and some peers wait
// for the acknowledgement. [Stack.Close] does not wait for those that have
// answered, nor where RDMA writes were under way: these end at once.
//
// # Versions
//
// Version 2 is used where both ends can: they may be in different IP subnets,
// and need an enterprise ID in common ([Config].EIDs). Version 1, that of
// RFC 7609, is used where the peer has nothing else, and both are in one subnet.
// A link group belongs to one version.
//
// A device that is gone takes its links with it, and its place stays empty
// until [Stack.AddDevice] fills it again. Of a device's GID table each version
// uses the first row of its type: RoCE v2, and RoCE v1 for version 1 where the
// device has it.
//
// In version 2 a link may pass a router. [Config].Route tells how devices
// reach the peer's; those that find the way themselves do without.
//
// # Path MTU
//
// The path MTU of a link is the smaller one of what the two ports have. If the network between them loses large
// packets, the link group ends, and the next ones with that peer have a smaller path MTU for ten minutes; where even 256 bytes
// are too large, connections are TCP. [Hooks].PathMTU tells of it. Only who sends large packets finds that out: what a kernel sends
// ends one link group after the other.
//
// # What net.Conn does not have
//
// Urgent data, one byte of the stream that the peer should look at first:
// [Conn.WriteUrgent], [Conn.ReadUrgent] and what stands with them. Relays
// between a program's TCP connection and the network use [Conn.RelayFrom],
// [Conn.RelayTo], [Conn.AwaitEnd] and, without SMC-R, [RelayTCP]: they carry
// urgent data at its place, and resets even while no byte can move.
//
// Each of them has a goroutine for as long as it lasts. A relay of many connections
// that are idle makes the same calls of a [Direction] ([Conn.StartRelayFrom] and so on):
// such a call has none while it has nothing to do, and waits in a [Parker].
//
// # Limitations
//
// Over TCP no channel tells of urgent data: a program asks UrgentPending. For
// data before an urgent byte RelayTo makes room in the program's socket only
// with CAP_NET_ADMIN.
package smcr
