// SPDX-License-Identifier: Apache-2.0

// Package cdc is the data path of a connection carried by SMC-R: the
// Connection Data Control message (RFC 7609 A.4) with its codec, and the
// arithmetic of the cursors that it carries (RFC 7609 4.2, 4.5, 4.6).
//
// The package is pure: no clock, no lock, no I/O. [Message], [Cursor] and
// [Ring] are plain values without an owner. Nothing on the data path
// allocates: [Parse], [Message.Append] into a slice with room, and all
// methods of [Ring].
//
// # Use
//
// A [Ring] describes an RMBE. Both sides keep positions in the byte stream as
// uint64 and turn them into cursors where they send them, with [Ring.Cursor].
// What the peer sends becomes a position again with [Ring.Advance], which
// refuses what no correct peer can send.
//
// # Limitations
//
// A cursor says no more than one capacity ahead of the last one known, which
// is also all that a correct peer can send. Bytes 26 to 43 of a message are
// reserved; they are not kept, and sent as zeros.
package cdc
