// SPDX-License-Identifier: Apache-2.0

// Package cdc is the data path of a connection carried by SMC-R: the
// Connection Data Control message (RFC 7609 A.4) with its codec, the
// arithmetic of the cursors that it carries (RFC 7609 4.2, 4.5, 4.6), and the
// machine of a connection's two streams and of its end (4.5, 4.8).
//
// The package is pure: no clock, no lock, no I/O. [Message], [Cursor] and
// [Ring] are plain values without an owner; a [Conn] belongs to the owner of
// its link group. Nothing on the data path allocates: [Parse],
// [Message.Append] into a slice with room, and all methods of [Ring] and
// [Conn].
//
// # Use
//
// A [Ring] describes an RMBE. Both sides keep positions in the byte stream as
// uint64 and turn them into cursors where they send them, with [Ring.Cursor].
// What the peer sends becomes a position again with [Ring.Advance], which
// refuses what no correct peer can send.
//
// A [Conn] moves no bytes. Its owner tells it how far the application has come
// ([Conn.Produce], [Conn.Consume], [Conn.Shutdown], [Conn.Close]), what
// arrived ([Conn.HandleMessage]) and what was delivered ([Conn.HandleSent]);
// while [Conn.Pending], [Conn.Next] says which bytes to write to the peer and
// which message to send after them.
//
// An urgent byte is announced with [Conn.Urgent] before it is produced; the
// peer's is told by the event [PeerUrgent] and lies before position
// [Conn.PeerUrgent] (4.7.5, 4.7.6). Small pieces wait for company when
// [Conn.Coalesce] says so; while [Conn.Coalesced], the owner runs a timer and calls
// [Conn.Flush] when it ends (4.5.2).
//
// When the link of a connection is lost, [Conn.Failover] makes the next
// transmissions the failover validation message (4.6.1) and the repetition of
// all that may be lost (4.6.2). A message that came over the lost link may be
// handed in late; one that was acknowledged there must be handed in before the
// peer's validation message, or else the connection is reset. [Conn.Misses]
// tells when to look for such messages first, and so does [Conn.Skips] for a peer that changes the link
// of a connection without a validation message, as Linux does while the connection is being closed.
//
// # Snapshots
//
// [Conn.Snapshot] says all that a connection knows, as a value without pointers, and
// [Restore] makes the same connection of it, in another process if need be. It can be
// taken between any two calls; a transmission that Next has given is the owner's, who
// carries it out first. The bytes of the two buffers are the owner's, too.
//
// # Limitations
//
// A cursor says no more than one capacity ahead of the last one known, which
// is also all that a correct peer can send. Bytes 26 to 43 of a message are
// reserved; they are not kept, and sent as zeros. There is one urgent byte at a
// time in each direction, as with TCP; that the byte is read out of the stream
// is the owner's part.
package cdc
