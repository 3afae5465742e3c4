// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"encoding/binary"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Versions of the protocol. A message with a higher version has the layout of
// version 2.
const (
	V1 uint8 = 1
	V2 uint8 = 2
)

// Type is the kind of a CLC message.
type Type uint8

// The four CLC messages (RFC 7609 A.2).
const (
	TypeProposal Type = iota + 1
	TypeAccept
	TypeConfirm
	TypeDecline
)

func (t Type) String() string {
	switch t {
	case TypeProposal:
		return "Proposal"
	case TypeAccept:
		return "Accept"
	case TypeConfirm:
		return "Confirm"
	case TypeDecline:
		return "Decline"
	}
	return fmt.Sprintf("Type(%d)", uint8(t))
}

// Mode says which of the SMC protocols is offered or chosen. SMC-D is the
// sibling for internal shared memory; we only recognize it.
type Mode uint8

// Modes. The numbers are those of the wire.
const (
	ModeR Mode = iota
	ModeD
	ModeNone
	ModeBoth
)

// HasR reports whether SMC-R is among the modes.
func (m Mode) HasR() bool { return m == ModeR || m == ModeBoth }

// HasD reports whether SMC-D is among the modes.
func (m Mode) HasD() bool { return m == ModeD || m == ModeBoth }

func (m Mode) String() string {
	switch m {
	case ModeR:
		return "SMC-R"
	case ModeD:
		return "SMC-D"
	case ModeNone:
		return "none"
	case ModeBoth:
		return "SMC-R+SMC-D"
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}

// "SMCR" and "SMCD" in EBCDIC.
const (
	eyeCatcher  uint32 = 0xe2d4c3d9
	eyeCatcherD uint32 = 0xe2d4c3c4
)

// Bits of header byte 7. The upper nibble is the version.
const (
	flagBit     = 0x08 // first contact (Accept, Confirm), out of sync (Decline)
	modeV1Mask  = 0x03
	modeV2Mask  = 0x0c
	modeV2Shift = 2
)

// Header is the start of every CLC message.
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//	|     E2        |     D4        |      C3       |      D9       |
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//	|     Type      |            Length             |Version| flags |
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
type Header struct {
	Type    Type
	Length  int // of the whole message: header and trailer included
	Version uint8
	Flags   uint8 // lower nibble of byte 7; its meaning depends on Type
	// SMCD says that the eye catcher is that of SMC-D. Clients that offer
	// nothing else may send it; a Proposal can then only be declined.
	SMCD bool
}

func (h Header) eyeCatcher() uint32 {
	if h.SMCD {
		return eyeCatcherD
	}
	return eyeCatcher
}

// ParseHeader decodes the first eight bytes of a message, so that a reader
// can take exactly one message off the TCP connection. What follows it is
// application data when a Decline ends the negotiation.
func ParseHeader(b [HeaderLen]byte) (Header, error) {
	eye := binary.BigEndian.Uint32(b[:])
	if eye != eyeCatcher && eye != eyeCatcherD {
		return Header{}, parseErr(0, "eye catcher is %08x, want %08x", eye, eyeCatcher)
	}
	h := Header{
		SMCD:    eye == eyeCatcherD,
		Type:    Type(b[4]),
		Length:  int(binary.BigEndian.Uint16(b[5:])),
		Version: b[7] >> 4,
		Flags:   b[7] & 0x0f,
	}
	if h.Version < V1 {
		return Header{}, parseErr(7, "version 0")
	}
	if h.SMCD && h.Type != TypeProposal {
		return Header{}, parseErr(0, "%v of SMC-D, SMC-R was expected", h.Type)
	}
	lo, hi := 0, 0
	switch h.Type {
	case TypeProposal:
		lo, hi = minProposalLen, maxProposalLen
	case TypeAccept:
		lo, hi = acceptV1Len, maxAcceptLen
	case TypeConfirm:
		lo, hi = acceptV1Len, maxConfirmLen
	case TypeDecline:
		lo, hi = declineV1Len, declineV2Len
	default:
		return Header{}, parseErr(4, "unknown message type %d", b[4])
	}
	if h.Length < lo || h.Length > hi {
		return Header{}, parseErr(5, "%v of %d bytes, want %d to %d", h.Type, h.Length, lo, hi)
	}
	return h, nil
}

// flag reports the first contact or out of sync bit.
func (h Header) flag() bool { return h.Flags&flagBit != 0 }

// append writes the header; finish sets the length.
func (h Header) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, h.eyeCatcher())
	return append(b, byte(h.Type), 0, 0, h.Version<<4|h.Flags&0x0f)
}

// finish appends the trailer, which repeats the eye catcher, to the message that
// starts at b[start:] and sets the length in its header.
func finish(b []byte, start int) []byte {
	b = append(b, b[start:start+trailerLen]...)
	binary.BigEndian.PutUint16(b[start+5:], uint16(len(b)-start))
	return b
}

// parseEnvelope checks what all messages have in common: the header, its type,
// its length against b and the eye catcher at the end.
func parseEnvelope(b []byte, want Type) (Header, error) {
	if len(b) < HeaderLen {
		return Header{}, parseErr(len(b), "%v cut short after %d bytes", want, len(b))
	}
	h, err := ParseHeader([HeaderLen]byte(b))
	if err != nil {
		return Header{}, err
	}
	if h.Type != want {
		return Header{}, parseErr(4, "%v, want %v", h.Type, want)
	}
	if h.Length != len(b) {
		return Header{}, parseErr(5, "%v says %d bytes, got %d", want, h.Length, len(b))
	}
	end := len(b) - trailerLen
	if binary.BigEndian.Uint32(b[end:]) != h.eyeCatcher() {
		return Header{}, parseErr(end, "%v ends in %x, want eye catcher %08x", want, b[end:], h.eyeCatcher())
	}
	return h, nil
}

// PeerID identifies an instance of a stack: a 2-byte instance ID that changes
// when the stack restarts, and the MAC address of one of its RNICs
// (RFC 7609 A.2.1).
type PeerID [8]byte

// NewPeerID puts a peer ID together.
func NewPeerID(instance uint16, mac rdma.MAC) PeerID {
	var p PeerID
	binary.BigEndian.PutUint16(p[:], instance)
	copy(p[2:], mac[:])
	return p
}

// Instance returns the instance ID.
func (p PeerID) Instance() uint16 { return binary.BigEndian.Uint16(p[:]) }

// MAC returns the MAC address.
func (p PeerID) MAC() rdma.MAC { return rdma.MAC(p[2:]) }

// IsZero reports whether the peer ID is unset, as in a Proposal that offers
// version 2 only.
func (p PeerID) IsZero() bool { return p == PeerID{} }

func (p PeerID) String() string { return fmt.Sprintf("%04x@%v", p.Instance(), p.MAC()) }

// EIDLen is the length of an enterprise ID.
const EIDLen = 32

// EID is an enterprise ID: in version 2 peers may connect when they have one
// in common. It is padded with blanks.
type EID [EIDLen]byte

// NewEID pads s with blanks; ok is false when s is empty or too long.
func NewEID(s string) (e EID, ok bool) {
	if s == "" || len(s) > EIDLen {
		return EID{}, false
	}
	for i := copy(e[:], s); i < EIDLen; i++ {
		e[i] = ' '
	}
	return e, true
}

// ParseUEID returns the user-defined enterprise ID that s names: at most 32
// capital letters, digits, dots and hyphens, the first a letter or digit, which
// is what Linux takes.
func ParseUEID(s string) (EID, error) {
	e, ok := NewEID(s)
	if !ok {
		return EID{}, fmt.Errorf("clc: enterprise ID %q has %d characters, want 1 to %d", s, len(s), EIDLen)
	}
	for i, c := range []byte(s) {
		alnum := c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || c != '.' && c != '-') {
			return EID{}, fmt.Errorf("clc: enterprise ID %q: character %d is not a capital letter or digit nor, after the first, a dot or hyphen", s, i+1)
		}
	}
	return e, nil
}

func (e EID) String() string { return string(trimBlanks(e[:])) }

// trimBlanks cuts padding of blanks or zeros.
func trimBlanks(b []byte) []byte {
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == 0) {
		b = b[:len(b)-1]
	}
	return b
}

// RMBESize is the size of an RMB element in the 4-bit notation of
// RFC 7609 A.2.3: 16 KiB shifted left by it.
type RMBESize uint8

// RMBE sizes. RFC 7609 A.2.3, which has version 1, ends at 512 KiB. Linux can announce
// up to 512 MiB, and the codec takes all sixteen.
const (
	MinRMBESize   RMBESize = 0
	MaxRMBESizeV1 RMBESize = 5
	MaxRMBESize   RMBESize = 15
	rmbeSizeMask           = 0x0f
	minRMBEBytes           = 16 << 10
)

// RMBESizeFor returns the smallest size of at least n bytes, but never more
// than [MaxRMBESize].
func RMBESizeFor(n int) RMBESize {
	s := MinRMBESize
	for s < MaxRMBESize && s.Bytes() < n {
		s++
	}
	return s
}

// Bytes returns the size in bytes.
func (s RMBESize) Bytes() int { return minRMBEBytes << (s & rmbeSizeMask) }

func (s RMBESize) String() string { return fmt.Sprintf("%dKiB", s.Bytes()>>10) }

// OSType is the peer's operating system, for people.
type OSType uint8

// Operating systems.
const (
	OSUnknown OSType = iota
	OSzOS
	OSLinux
	OSAIX
)

func (o OSType) String() string {
	switch o {
	case OSUnknown:
		return "unknown"
	case OSzOS:
		return "z/OS"
	case OSLinux:
		return "Linux"
	case OSAIX:
		return "AIX"
	}
	return fmt.Sprintf("OSType(%d)", uint8(o))
}
