// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"encoding/binary"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Type is the type of a segment (§3.1).
type Type uint8

// Types of segments.
const (
	TypeSend Type = iota + 1
	TypeReadRequest
	TypeReadResponse
	TypeWrite
	TypeNOP
	TypeConnectRequest
	TypeConnectAccept
	TypeConnectReject
	TypeConnectNoMatch
	numTypes
)

func (t Type) String() string {
	names := [numTypes]string{
		"", "Send", "RDMA Read Request", "RDMA Read Response", "RDMA Write", "NOP",
		"Connect Request", "Connect Accept", "Connect Reject", "Connect No Match",
	}
	if t == 0 || t >= numTypes {
		return fmt.Sprintf("Type(%d)", uint8(t))
	}
	return names[t]
}

// isConnect reports whether the segment establishes a connection, and may have a CE header.
func (t Type) isConnect() bool { return t >= TypeConnectRequest && t < numTypes }

// hasRDMA reports whether the segment has an RDMA header.
func (t Type) hasRDMA() bool { return t == TypeReadRequest || t == TypeReadResponse || t == TypeWrite }

// Flags are the flags of a segment (§3.1).
type Flags uint8

// Flags of a segment.
const (
	FlagImmediate     Flags = 1 << iota // Immediate is valid
	FlagEnd                             // the last segment of its message
	FlagTransmitError                   // the sender could not read its memory: what was sent is not the message
	allFlags          = FlagImmediate | FlagEnd | FlagTransmitError
)

// ErrorType is the VI error that a segment reports (§3.1, Remote Error Code).
type ErrorType uint8

// VI errors.
const (
	ErrorNone       ErrorType = iota
	ErrorMemory               // RDMA memory protection: handle, bounds or right
	ErrorDescriptor           // the receive, or the request itself
)

func (e ErrorType) String() string {
	switch e {
	case ErrorNone:
		return "no error"
	case ErrorMemory:
		return "RDMA memory protection error"
	case ErrorDescriptor:
		return "VI descriptor error"
	}
	return fmt.Sprintf("ErrorType(%d)", uint8(e))
}

// Cause is the implementation specific error code: it says more of a VI error.
type Cause uint8

// Causes of errors.
const (
	CauseNone       Cause = iota
	CauseNoReceive        // no receive is posted
	CauseTooSmall         // the receive is too small
	CauseHandle           // no region has this handle
	CauseBounds           // the region does not hold all bytes
	CauseRight            // the region, or the queue pair, does not grant the right
	CauseReadWindow       // more RDMA READs than agreed
	CauseReceive          // the memory of the receive is not registered for it
	CauseTooLong          // longer than the agreed transfer size
	CauseTransmit         // the sender said Transmit Error
	numCauses
)

func (c Cause) String() string {
	names := [numCauses]string{
		"no cause given", "no receive posted", "receive too small", "unknown handle", "out of bounds", "no right",
		"READ window exceeded", "memory of the receive is not registered for it", "transfer too long", "transmit error",
	}
	if c < numCauses {
		return names[c]
	}
	return fmt.Sprintf("Cause(%d)", uint8(c))
}

// Header is the Segment Header (§3.1), which begins every segment:
//
//	|7 6 5 4 3 2 1 0|7 6 5 4 3 2 1 0|7 6 5 4 3 2 1 0|7 6 5 4 3 2 1 0|
//	|    Version    |   Type  |Flags|         Segment Length        |
//	|                          Data Offset                          |
//	|                         Immediate Data                        |
//	|                         Message Number                        |
//	|                          Message ACK                          |
//	|      Rx Descriptors Posted    | VI Error Type | IS Error Code |
type Header struct {
	Type      Type
	Flags     Flags
	Length    uint16 // of the segment in bytes, with all its headers
	Offset    uint32 // bytes of the message in the segments before
	Immediate uint32
	Message   uint32 // number of the message
	Ack       uint32 // number of the last message that was delivered, or of the one in error
	Posted    uint16 // receives posted since the queue pair was made, modulo 2^16
	Error     ErrorType
	Cause     Cause
}

// PayloadOffset is where the payload of the segment begins.
func (h *Header) PayloadOffset() int {
	if h.Type.hasRDMA() {
		return HeaderLen + RDMALen
	}
	return HeaderLen
}

// ParseHeader decodes the first [HeaderLen] bytes of a segment, and checks what can be told
// from them alone. Its errors are [ErrProtocol]: the stream is not VI/TCP, or out of step.
func ParseHeader(b []byte) (Header, error) {
	if len(b) != HeaderLen {
		return Header{}, fmt.Errorf("%w: segment header of %d bytes, want %d", ErrProtocol, len(b), HeaderLen)
	}
	h := Header{
		Type: Type(b[1] >> 3), Flags: Flags(b[1]) & allFlags,
		Length:    binary.BigEndian.Uint16(b[2:]),
		Offset:    binary.BigEndian.Uint32(b[4:]),
		Immediate: binary.BigEndian.Uint32(b[8:]),
		Message:   binary.BigEndian.Uint32(b[12:]),
		Ack:       binary.BigEndian.Uint32(b[16:]),
		Posted:    binary.BigEndian.Uint16(b[20:]),
		Error:     ErrorType(b[22]), Cause: Cause(b[23]),
	}
	if b[0] != Version {
		return h, fmt.Errorf("%w: version %d, want %d", ErrProtocol, b[0], Version)
	}
	return h, h.check()
}

// check reports lengths, flags and offsets that the type does not allow.
func (h *Header) check() error {
	n := int(h.Length)
	single := h.Flags&FlagEnd != 0 && h.Offset == 0
	ok := false
	switch h.Type {
	case TypeSend, TypeWrite, TypeReadResponse:
		// A segment carries data or ends a message: others would come without end.
		ok = n > h.PayloadOffset() || n == h.PayloadOffset() && h.Flags&FlagEnd != 0
	case TypeReadRequest:
		ok = single && n == HeaderLen+RDMALen
	case TypeNOP:
		ok = single && n == HeaderLen
	case TypeConnectRequest, TypeConnectAccept:
		ok = single && n >= HeaderLen+CELen && n <= MaxConnectLen
	case TypeConnectReject, TypeConnectNoMatch:
		// The draft does not say whether a refusal has a CE header.
		ok = single && (n == HeaderLen || n >= HeaderLen+CELen && n <= MaxConnectLen)
	case numTypes:
	}
	if !ok {
		return fmt.Errorf("%w: %v of %d bytes with flags %#x at offset %d", ErrProtocol, h.Type, n, h.Flags, h.Offset)
	}
	return nil
}

// Append encodes the header.
func (h *Header) Append(b []byte) []byte {
	b = append(b, Version, byte(h.Type)<<3|byte(h.Flags))
	b = binary.BigEndian.AppendUint16(b, h.Length)
	b = binary.BigEndian.AppendUint32(b, h.Offset)
	b = binary.BigEndian.AppendUint32(b, h.Immediate)
	b = binary.BigEndian.AppendUint32(b, h.Message)
	b = binary.BigEndian.AppendUint32(b, h.Ack)
	b = binary.BigEndian.AppendUint16(b, h.Posted)
	return append(b, byte(h.Error), byte(h.Cause))
}

// RDMA is the RDMA header (§3.2.1). Every segment of a Write, Read Request and Read
// Response has it, with the same content:
//
//	|                          RDMA Address                         |
//	|                           (64 bits)                           |
//	|                    Registered Memory Handle                   |
//	|                          RDMA Length                          |
type RDMA struct {
	Addr   uint64
	Handle rdma.RKey
	Length uint32 // bytes of the whole message
}

// ParseRDMA decodes the [RDMALen] bytes behind the segment header.
func ParseRDMA(b []byte) (RDMA, error) {
	if len(b) != RDMALen {
		return RDMA{}, fmt.Errorf("%w: RDMA header of %d bytes, want %d", ErrProtocol, len(b), RDMALen)
	}
	return RDMA{
		Addr:   binary.BigEndian.Uint64(b),
		Handle: rdma.RKey(binary.BigEndian.Uint32(b[8:])),
		Length: binary.BigEndian.Uint32(b[12:]),
	}, nil
}

// Append encodes the header.
func (r RDMA) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, r.Addr)
	b = binary.BigEndian.AppendUint32(b, uint32(r.Handle))
	return binary.BigEndian.AppendUint32(b, r.Length)
}
