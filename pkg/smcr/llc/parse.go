// SPDX-License-Identifier: Apache-2.0

package llc

import (
	"encoding/binary"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Bits of the flags byte.
const (
	flagResponse = 0x80

	addLinkReject = 0x40

	deleteLinkAll     = 0x40
	deleteLinkOrderly = 0x20

	rkeyNegative = 0x20
	rkeyRetry    = 0x10

	extDirect = 0x80
)

const (
	classMask     = 0xc0 // RFC 7609 A.3: what to do with an unknown type
	classOptional = 0x80

	versionMask = 0xf0
	versionBits = 0x20 // version 2 in the high four bits of the type byte
	typeMask    = 0x0f

	pairSize       = 16
	linkRTokenSize = 13
	gidSize        = 16

	addLinkPairsOffset = 72
	rkeysOffset        = 8
	gidsOffset         = 28
)

// UnknownTypeError reports a message of a type that its version does not
// have.
type UnknownTypeError struct {
	Type     uint8 // the first byte of the message
	Optional bool  // RFC 7609 A.3: the sender expects it to be discarded silently
}

func (e *UnknownTypeError) Error() string {
	if e.Optional {
		return fmt.Sprintf("llc: unknown optional message type 0x%02x", e.Type)
	}
	return fmt.Sprintf("llc: unknown message type 0x%02x", e.Type)
}

// ParseError reports a message that is not well formed.
type ParseError struct {
	Type   Type
	Detail string
}

func (e *ParseError) Error() string { return fmt.Sprintf("llc: parse %v: %s", e.Type, e.Detail) }

// TypeOf returns the type that a message says it has, 0 if there are no bytes or the
// type byte is not one of LLC. The rest of the message may be anything.
func TypeOf(b []byte) Type {
	if len(b) == 0 || b[0]&versionMask != 0 && b[0]&versionMask != versionBits {
		return 0
	}
	return Type(b[0] & typeMask)
}

// Parse parses what one receive completion of a link delivered: b ends where
// the completion's byte count says. version is that of the link group; a
// group of version 2 may also carry messages of version 1, as with Linux.
func Parse(d Dialect, version uint8, b []byte) (Message, error) {
	if len(b) == 0 {
		return nil, &ParseError{Detail: "no bytes"}
	}
	v2 := b[0]&versionMask == versionBits
	if b[0]&versionMask != 0 && (!v2 || version < Version2) {
		return nil, &UnknownTypeError{Type: b[0], Optional: b[0]&classMask == classOptional}
	}
	switch Type(b[0] & typeMask) {
	case TypeConfirmLink:
		return box(ParseConfirmLink(b))
	case TypeAddLink:
		return box(ParseAddLink(d, b))
	case TypeAddLinkContinuation:
		return box(ParseAddLinkContinuation(b))
	case TypeDeleteLink:
		return box(ParseDeleteLink(b))
	case TypeConfirmRKey:
		return box(ParseConfirmRKey(b))
	case TypeTestLink:
		return box(ParseTestLink(b))
	case TypeConfirmRKeyContinuation:
		return box(ParseConfirmRKeyContinuation(b))
	case TypeRequestAddLink:
		if v2 {
			return box(ParseRequestAddLink(b))
		}
	case TypeDeleteRKey:
		if v2 {
			return box(ParseDeleteRKeyV2(b))
		}
		return box(ParseDeleteRKey(b))
	}
	return nil, &UnknownTypeError{Type: b[0]}
}

// box keeps a failed parse from becoming a non-nil Message.
func box[M Message](m M, err error) (Message, error) {
	if err != nil {
		return nil, err
	}
	return m, nil
}

// parseHeader checks type and length and returns the header and the flags
// without the response bit. After it, b has at least Size bytes.
func parseHeader(t Type, b []byte) (Header, byte, error) {
	if len(b) < Size {
		return Header{}, 0, &ParseError{t, fmt.Sprintf("%d bytes, want %d at least", len(b), Size)}
	}
	if Type(b[0]&typeMask) != t {
		return Header{}, 0, &UnknownTypeError{Type: b[0], Optional: b[0]&classMask == classOptional}
	}
	h := Header{Response: b[3]&flagResponse != 0}
	switch b[0] & versionMask {
	case 0:
		h.Version = Version1
		if len(b) != Size || b[1] != Size {
			return Header{}, 0, &ParseError{t, fmt.Sprintf("%d bytes and length field %d, want %d", len(b), b[1], Size)}
		}
	case versionBits:
		h.Version = Version2
		if len(b) > MaxSizeV2 {
			return Header{}, 0, &ParseError{t, fmt.Sprintf("%d bytes, want %d at most", len(b), MaxSizeV2)}
		}
		h.BigEndian = lengthIsBigEndian(b)
	default:
		return Header{}, 0, &UnknownTypeError{Type: b[0], Optional: b[0]&classMask == classOptional}
	}
	return h, b[3] &^ flagResponse, nil
}

// parseFixed is parseHeader for a message whose length is always the same.
func parseFixed(t Type, b []byte) (Header, byte, error) {
	h, flags, err := parseHeader(t, b)
	if err == nil {
		err = checkLen(t, b, Size)
	}
	return h, flags, err
}

func checkLen(t Type, b []byte, want int) error {
	if len(b) != want {
		return &ParseError{t, fmt.Sprintf("%d bytes, want %d", len(b), want)}
	}
	return nil
}

// lengthIsBigEndian finds the order of the length field of version 2: the
// one that gives the number of bytes delivered, else the one that gives a
// possible length. The field decides nothing else.
func lengthIsBigEndian(b []byte) bool {
	little, big := int(binary.LittleEndian.Uint16(b[1:])), int(binary.BigEndian.Uint16(b[1:]))
	possible := func(n int) bool { return n >= Size && n <= len(b) }
	switch {
	case little == len(b):
		return false
	case big == len(b):
		return true
	case possible(little):
		return false
	}
	return possible(big)
}

// ParseConfirmLink parses a CONFIRM LINK of either version.
func ParseConfirmLink(b []byte) (ConfirmLink, error) {
	h, flags, err := parseFixed(TypeConfirmLink, b)
	if err != nil {
		return ConfirmLink{}, err
	}
	return ConfirmLink{
		Header:   h,
		Flags:    ConfirmLinkFlags(flags),
		MAC:      rdma.MAC(b[4:10]),
		GID:      rdma.GID(b[10:26]),
		QPN:      rdma.QPN(uint24(b[26:])),
		Link:     LinkID(b[29]),
		UserID:   binary.BigEndian.Uint32(b[30:]),
		MaxLinks: b[34],
		MaxConns: b[35],
	}, nil
}

// ParseAddLink parses an ADD LINK of either version; d is the dialect of
// version 1.
func ParseAddLink(d Dialect, b []byte) (AddLink, error) {
	h, flags, err := parseHeader(TypeAddLink, b)
	if err != nil {
		return AddLink{}, err
	}
	if h.Version == Version2 {
		d = DialectLinux
	}
	gid := b[10:]
	if d == DialectLinux {
		gid = b[12:]
	}
	m := AddLink{
		Header:  h,
		Dialect: d,
		Reject:  flags&addLinkReject != 0,
		MAC:     rdma.MAC(b[4:10]),
		GID:     rdma.GID(gid[:gidSize]),
		QPN:     rdma.QPN(uint24(gid[16:])),
		Link:    LinkID(gid[19]),
		MTU:     rdma.MTU(gid[20] & 0x0f),
		PSN:     rdma.PSN(uint24(gid[21:])),
	}
	if h.Version == Version1 {
		m.Reason = RejectReason(b[2] & 0x0f)
		return m, nil
	}
	if m.Reject {
		return m, nil // it may be the whole request, sent back
	}
	if m.Response && len(b) == Size {
		m.Reject = true // the request, sent back by a peer that did not expect it
		return m, nil
	}
	m.Ext, m.BigEndian, err = parseAddLinkExt(h.BigEndian, b)
	if err != nil {
		return AddLink{}, err
	}
	return m, nil
}

// parseAddLinkExt parses what follows the 44th byte. The number of pairs is
// in the order of the sending host; the one that fills the message exactly
// is right whatever the length field said.
func parseAddLinkExt(bigEndian bool, b []byte) (AddLinkExt, bool, error) {
	if len(b) < addLinkPairsOffset {
		return AddLinkExt{}, false, &ParseError{
			TypeAddLink,
			fmt.Sprintf("%d bytes without room for the extension, want %d at least", len(b), addLinkPairsOffset),
		}
	}
	little, big := int(binary.LittleEndian.Uint16(b[70:])), int(binary.BigEndian.Uint16(b[70:]))
	n, room := little, len(b)-addLinkPairsOffset
	switch {
	case little == big: // as the length field has it
	case little*pairSize == room:
		bigEndian = false
	default:
		n, bigEndian = big, true
	}
	if n*pairSize != room {
		return AddLinkExt{}, false, &ParseError{
			TypeAddLink,
			fmt.Sprintf("%d or %d RToken pairs in %d bytes, which have room for %d", little, big, len(b), room/pairSize),
		}
	}
	x := AddLinkExt{Direct: b[44]&extDirect != 0, TargetGID: rdma.GID(b[46:62])}
	if n > 0 {
		x.Pairs = make([]RTokenPair, n)
		for i := range x.Pairs {
			x.Pairs[i] = parsePair(b[addLinkPairsOffset+i*pairSize:])
		}
	}
	return x, bigEndian, nil
}

// ParseAddLinkContinuation parses an ADD LINK CONTINUATION.
func ParseAddLinkContinuation(b []byte) (AddLinkContinuation, error) {
	h, _, err := parseFixed(TypeAddLinkContinuation, b)
	if err != nil {
		return AddLinkContinuation{}, err
	}
	m := AddLinkContinuation{Header: h, Link: LinkID(b[4]), Remaining: b[5]}
	for i := range m.Pairs {
		m.Pairs[i] = parsePair(b[8+i*pairSize:])
	}
	return m, nil
}

// ParseDeleteLink parses a DELETE LINK of either version.
func ParseDeleteLink(b []byte) (DeleteLink, error) {
	h, flags, err := parseFixed(TypeDeleteLink, b)
	if err != nil {
		return DeleteLink{}, err
	}
	return DeleteLink{
		Header:  h,
		All:     flags&deleteLinkAll != 0,
		Orderly: flags&deleteLinkOrderly != 0,
		Link:    LinkID(b[4]),
		Reason:  DeleteReason(binary.BigEndian.Uint32(b[5:])),
	}, nil
}

// ParseConfirmRKey parses a CONFIRM RKEY of either version.
func ParseConfirmRKey(b []byte) (ConfirmRKey, error) {
	h, flags, err := parseFixed(TypeConfirmRKey, b)
	if err != nil {
		return ConfirmRKey{}, err
	}
	if b[4] > MaxOtherLinks {
		return ConfirmRKey{}, &ParseError{TypeConfirmRKey, fmt.Sprintf("%d other links, want %d at most", b[4], MaxOtherLinks)}
	}
	m := ConfirmRKey{
		Header:   h,
		Negative: flags&rkeyNegative != 0,
		Retry:    flags&rkeyRetry != 0,
		Others:   b[4],
		This:     parseRToken(b[5:]),
	}
	for i := range m.Other {
		m.Other[i] = parseLinkRToken(b[4+linkRTokenSize*(1+i):])
	}
	return m, nil
}

// ParseConfirmRKeyContinuation parses a CONFIRM RKEY CONTINUATION.
func ParseConfirmRKeyContinuation(b []byte) (ConfirmRKeyContinuation, error) {
	h, flags, err := parseFixed(TypeConfirmRKeyContinuation, b)
	if err != nil {
		return ConfirmRKeyContinuation{}, err
	}
	if b[4] > MaxOtherLinks {
		return ConfirmRKeyContinuation{}, &ParseError{
			TypeConfirmRKeyContinuation,
			fmt.Sprintf("%d other links, want %d at most", b[4], MaxOtherLinks),
		}
	}
	m := ConfirmRKeyContinuation{Header: h, Negative: flags&rkeyNegative != 0, Remaining: b[4]}
	for i := range m.Other {
		m.Other[i] = parseLinkRToken(b[5+linkRTokenSize*i:])
	}
	return m, nil
}

// ParseDeleteRKey parses a DELETE RKEY of version 1.
func ParseDeleteRKey(b []byte) (DeleteRKey, error) {
	h, flags, err := parseHeader(TypeDeleteRKey, b)
	if err != nil {
		return DeleteRKey{}, err
	}
	if h.Version != Version1 {
		return DeleteRKey{}, &UnknownTypeError{Type: b[0]}
	}
	if b[4] > MaxDeleteRKeys {
		return DeleteRKey{}, &ParseError{TypeDeleteRKey, fmt.Sprintf("%d keys, want %d at most", b[4], MaxDeleteRKeys)}
	}
	m := DeleteRKey{Header: h, Negative: flags&rkeyNegative != 0, Count: b[4], ErrorMask: b[5]}
	for i := range m.RKeys {
		m.RKeys[i] = rdma.RKey(binary.BigEndian.Uint32(b[rkeysOffset+4*i:]))
	}
	return m, nil
}

// ParseDeleteRKeyV2 parses a DELETE RKEY of version 2.
func ParseDeleteRKeyV2(b []byte) (DeleteRKeyV2, error) {
	h, flags, err := parseHeader(TypeDeleteRKey, b)
	if err != nil {
		return DeleteRKeyV2{}, err
	}
	if h.Version != Version2 {
		return DeleteRKeyV2{}, &UnknownTypeError{Type: b[0]}
	}
	n, omitted := int(b[4]), 0
	if !h.Response && int(b[5]) > n {
		return DeleteRKeyV2{}, &ParseError{TypeDeleteRKey, fmt.Sprintf("%d invalid keys of %d", b[5], n)}
	}
	if h.Response && len(b) == Size {
		// Linux answers in 44 bytes however many keys the request had.
		omitted = max(0, n-ShortDeleteRKeysV2)
		n -= omitted
	}
	if err := checkLen(TypeDeleteRKey, b, max(Size, rkeysOffset+4*n)); err != nil {
		return DeleteRKeyV2{}, err
	}
	m := DeleteRKeyV2{Header: h, Negative: flags&rkeyNegative != 0, Invalid: b[5], Omitted: uint8(omitted)}
	if n > 0 {
		m.RKeys = make([]rdma.RKey, n)
		for i := range m.RKeys {
			m.RKeys[i] = rdma.RKey(binary.BigEndian.Uint32(b[rkeysOffset+4*i:]))
		}
	}
	return m, nil
}

// ParseTestLink parses a TEST LINK of either version.
func ParseTestLink(b []byte) (TestLink, error) {
	h, _, err := parseFixed(TypeTestLink, b)
	if err != nil {
		return TestLink{}, err
	}
	return TestLink{Header: h, UserData: [16]byte(b[4:20])}, nil
}

// ParseRequestAddLink parses a REQUEST ADD LINK, which only version 2 has.
func ParseRequestAddLink(b []byte) (RequestAddLink, error) {
	h, _, err := parseHeader(TypeRequestAddLink, b)
	if err != nil {
		return RequestAddLink{}, err
	}
	if h.Version != Version2 {
		return RequestAddLink{}, &UnknownTypeError{Type: b[0]}
	}
	n := int(b[24])
	if err := checkLen(TypeRequestAddLink, b, max(Size, gidsOffset+gidSize*n)); err != nil {
		return RequestAddLink{}, err
	}
	m := RequestAddLink{Header: h}
	if n > 0 {
		m.GIDs = make([]rdma.GID, n)
		for i := range m.GIDs {
			m.GIDs[i] = rdma.GID(b[gidsOffset+gidSize*i:][:gidSize])
		}
	}
	return m, nil
}

func parseRToken(b []byte) RToken {
	return RToken{RKey: rdma.RKey(binary.BigEndian.Uint32(b)), VAddr: binary.BigEndian.Uint64(b[4:])}
}

func parseLinkRToken(b []byte) LinkRToken {
	return LinkRToken{Link: LinkID(b[0]), RToken: parseRToken(b[1:])}
}

func parsePair(b []byte) RTokenPair {
	return RTokenPair{Reference: rdma.RKey(binary.BigEndian.Uint32(b)), New: parseRToken(b[4:])}
}

func uint24(b []byte) uint32 { return uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2]) }
