// SPDX-License-Identifier: Apache-2.0

package cdc

import (
	"encoding/binary"
	"fmt"
)

// Type is the first byte of every CDC message. Its two high bits tell it
// apart from LLC messages on the same link.
const Type = 0xfe

// AlertToken names a connection to the peer that assigned it: a message
// carries the token of its receiver. Zero is not a token.
type AlertToken uint32

func (t AlertToken) String() string { return fmt.Sprintf("0x%08x", uint32(t)) }

// Flags are the producer flags (high byte) and the connection state flags
// (low byte) of a message.
type Flags uint16

// Bits of Flags (RFC 7609 A.4): five of the producer, three of the connection.
const (
	flagWriterBlocked         Flags = 0x8000
	flagUrgentPending         Flags = 0x4000
	flagUrgentPresent         Flags = 0x2000
	flagCursorUpdateRequested Flags = 0x1000
	flagFailoverValidation    Flags = 0x0800
	flagSendingDone           Flags = 0x0080
	flagClosed                Flags = 0x0040
	flagAbort                 Flags = 0x0020

	knownFlags = flagWriterBlocked | flagUrgentPending | flagUrgentPresent | flagCursorUpdateRequested | flagFailoverValidation |
		flagSendingDone | flagClosed | flagAbort
)

// WriterBlocked is B: its sender is blocked and wants to be told when there is room.
func (f Flags) WriterBlocked() bool { return f&flagWriterBlocked != 0 }

// UrgentPending is P: urgent data will come.
func (f Flags) UrgentPending() bool { return f&flagUrgentPending != 0 }

// UrgentPresent is U: the producer cursor is one past the last urgent byte.
func (f Flags) UrgentPresent() bool { return f&flagUrgentPresent != 0 }

// CursorUpdateRequested is R: the consumer cursor is wanted now.
func (f Flags) CursorUpdateRequested() bool { return f&flagCursorUpdateRequested != 0 }

// FailoverValidation is F: only token and sequence number mean something.
func (f Flags) FailoverValidation() bool { return f&flagFailoverValidation != 0 }

// SendingDone is D: its sender will write nothing more.
func (f Flags) SendingDone() bool { return f&flagSendingDone != 0 }

// Closed is C: its sender is done with the connection.
func (f Flags) Closed() bool { return f&flagClosed != 0 }

// Abort is A: its sender is done with the connection, abnormally.
func (f Flags) Abort() bool { return f&flagAbort != 0 }

// WithWriterBlocked returns f with B set.
func (f Flags) WithWriterBlocked() Flags { return f | flagWriterBlocked }

// WithUrgentPending returns f with P set.
func (f Flags) WithUrgentPending() Flags { return f | flagUrgentPending }

// WithUrgentPresent returns f with U set.
func (f Flags) WithUrgentPresent() Flags { return f | flagUrgentPresent }

// WithCursorUpdateRequested returns f with R set.
func (f Flags) WithCursorUpdateRequested() Flags { return f | flagCursorUpdateRequested }

// WithFailoverValidation returns f with F set.
func (f Flags) WithFailoverValidation() Flags { return f | flagFailoverValidation }

// WithSendingDone returns f with D set.
func (f Flags) WithSendingDone() Flags { return f | flagSendingDone }

// WithClosed returns f with C set.
func (f Flags) WithClosed() Flags { return f | flagClosed }

// WithAbort returns f with A set.
func (f Flags) WithAbort() Flags { return f | flagAbort }

// String returns the RFC's letters of the bits set: "BPURF" then "DCA".
func (f Flags) String() string {
	if f == 0 {
		return "-"
	}
	const letters = "BPURF...DCA....."
	s := make([]byte, 0, len(letters))
	for i := range len(letters) {
		if f&(1<<(15-i)) != 0 {
			s = append(s, letters[i])
		}
	}
	return string(s)
}

// Message is a CDC message (RFC 7609 A.4).
//
//	    0                   1                   2                   3
//	    0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	 0 +---------------+---------------+-------------------------------+
//	   |  Type = 0xFE  |  Length = 44  |        Sequence number        |
//	 4 +---------------+---------------+-------------------------------+
//	   |                     Receiver's alert token                    |
//	 8 +-------------------------------+-------------------------------+
//	   |           Reserved            |    Producer wrap sequence     |
//	12 +-------------------------------+-------------------------------+
//	   |                        Producer cursor                        |
//	16 +-------------------------------+-------------------------------+
//	   |           Reserved            |    Consumer wrap sequence     |
//	20 +-------------------------------+-------------------------------+
//	   |                        Consumer cursor                        |
//	24 +-+-+-+-+-+-----+-+-+-+---------+-------------------------------+
//	   |B|P|U|R|F|     |D|C|A|         |           Reserved ...        |
//	28 +-+-+-+-+-+-----+-+-+-+---------+-------------------------------+
type Message struct {
	Seq   uint16
	Token AlertToken
	Prod  Cursor // next byte the sender writes into the receiver's RMBE
	Cons  Cursor // next byte the sender reads from its own RMBE
	Flags Flags
}

func (m Message) String() string {
	return fmt.Sprintf("CDC seq=%d token=%v prod=%v cons=%v flags=%v", m.Seq, m.Token, m.Prod, m.Cons, m.Flags)
}

// ParseError reports a CDC message that is not well formed.
type ParseError struct {
	Len    int   // bytes delivered
	Type   uint8 // zero if there are none
	Length uint8 // the length field, zero if there is none
}

func (e *ParseError) Error() string {
	return fmt.Sprintf("cdc: parse message of %d bytes, type 0x%02x, length field %d: want type 0x%02x, length %d",
		e.Len, e.Type, e.Length, Type, Size)
}

// Parse parses a message. Like Linux it accepts more than 44 bytes, as a
// receiver with larger buffers may see, if the length field says 44.
func Parse(b []byte) (Message, error) {
	if len(b) < Size || b[0] != Type || b[1] != Size {
		return Message{}, newParseError(b)
	}
	b = b[:Size]
	return Message{
		Seq:   binary.BigEndian.Uint16(b[2:]),
		Token: AlertToken(binary.BigEndian.Uint32(b[4:])),
		Prod:  Cursor{Wrap: binary.BigEndian.Uint16(b[10:]), Count: binary.BigEndian.Uint32(b[12:])},
		Cons:  Cursor{Wrap: binary.BigEndian.Uint16(b[18:]), Count: binary.BigEndian.Uint32(b[20:])},
		Flags: Flags(binary.BigEndian.Uint16(b[24:])) & knownFlags,
	}, nil
}

// newParseError is apart from Parse to keep that short.
func newParseError(b []byte) error {
	e := &ParseError{Len: len(b)}
	if len(b) > 0 {
		e.Type = b[0]
	}
	if len(b) > 1 {
		e.Length = b[1]
	}
	return e
}

// Append appends the message to b as it travels.
func (m Message) Append(b []byte) []byte {
	var p [Size]byte
	p[0], p[1] = Type, Size
	binary.BigEndian.PutUint16(p[2:], m.Seq)
	binary.BigEndian.PutUint32(p[4:], uint32(m.Token))
	binary.BigEndian.PutUint16(p[10:], m.Prod.Wrap)
	binary.BigEndian.PutUint32(p[12:], m.Prod.Count)
	binary.BigEndian.PutUint16(p[18:], m.Cons.Wrap)
	binary.BigEndian.PutUint32(p[20:], m.Cons.Count)
	binary.BigEndian.PutUint16(p[24:], uint16(m.Flags&knownFlags))
	return append(b, p[:]...)
}

// SeqNewer reports whether sequence number a comes after b (RFC 7609 A.4).
// Numbers start at 1 and wrap to 0, so they are compared within half the
// number space; exactly half apart is not newer.
func SeqNewer(a, b uint16) bool { return int16(a-b) > 0 }
