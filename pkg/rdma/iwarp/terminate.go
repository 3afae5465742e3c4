// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"encoding/binary"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Code is the reason of a Terminate: layer (4 bits), type of the error (4), error (8), in
// the order of RFC 5040 §4.8. As an error it is what a received segment did wrong.
type Code uint16

// Codes of RDMAP (RFC 5040 §4.8), DDP (RFC 5041 §7.2) and MPA (RFC 5044 §8, RFC 6581
// §8).
const (
	CodeLocal Code = 0x0000 // RDMAP: local catastrophic error

	CodeReadSTag     Code = 0x0100 // RDMAP, remote protection: invalid STag
	CodeReadBounds   Code = 0x0101
	CodeAccess       Code = 0x0102 // the STag does not give this right
	CodeReadStream   Code = 0x0103 // the STag is not for this stream
	CodeReadWrap     Code = 0x0104
	CodeInvalidateID Code = 0x0109 // STag cannot be invalidated, told as protection error
	CodeProtection   Code = 0x01ff

	CodeRDMAPVersion Code = 0x0205 // RDMAP, remote operation
	CodeOpcode       Code = 0x0206
	CodeStream       Code = 0x0207 // catastrophic, this stream
	CodeGlobal       Code = 0x0208 // catastrophic, all streams
	CodeInvalidate   Code = 0x0209 // STag cannot be invalidated
	CodeOperation    Code = 0x02ff

	CodeDDPLocal Code = 0x1000 // DDP: local catastrophic error

	CodeTaggedSTag    Code = 0x1100 // DDP, tagged buffer
	CodeTaggedBounds  Code = 0x1101
	CodeTaggedStream  Code = 0x1102
	CodeTaggedWrap    Code = 0x1103
	CodeTaggedVersion Code = 0x1104

	CodeQN              Code = 0x1201 // DDP, untagged buffer
	CodeNoBuffer        Code = 0x1202
	CodeMSN             Code = 0x1203
	CodeMO              Code = 0x1204
	CodeTooLong         Code = 0x1205
	CodeUntaggedVersion Code = 0x1206

	CodeTCP      Code = 0x2001 // MPA: TCP connection closed or lost
	CodeCRC      Code = 0x2002
	CodeMarker   Code = 0x2003 // marker and length of an FPDU do not match
	CodeStartup  Code = 0x2004 // invalid Request or Reply
	CodeMPALocal Code = 0x2005
	CodeIRD      Code = 0x2006 // not enough READs
	CodeRTR      Code = 0x2007 // no common RTR message
)

// Parts of a code.
const (
	codeLayerMask Code = 0xf000
	codeETypeMask Code = 0x0f00

	codeProtection Code = 0x0100 // layer and type of the error
	codeTagged     Code = 0x1100
	codeUntagged   Code = 0x1200
	codeLLP        Code = 0x2000
)

// name returns the words of a code, "" for one that no document has.
func (c Code) name() string {
	switch c {
	case CodeReadSTag:
		return "remote protection: invalid STag"
	case CodeReadBounds:
		return "remote protection: base or bounds violation"
	case CodeAccess:
		return "remote protection: access rights violation"
	case CodeReadStream:
		return "remote protection: STag is not for this stream"
	case CodeReadWrap:
		return "remote protection: tagged offset wraps"
	case CodeInvalidateID:
		return "remote protection: STag cannot be invalidated"
	case CodeProtection:
		return "remote protection: unspecified"
	case CodeRDMAPVersion:
		return "invalid RDMAP version"
	case CodeOpcode:
		return "unexpected operation"
	case CodeStream:
		return "catastrophic error of the stream"
	case CodeGlobal:
		return "catastrophic error of all streams"
	case CodeInvalidate:
		return "STag cannot be invalidated"
	case CodeOperation:
		return "remote operation: unspecified"
	case CodeDDPLocal:
		return "DDP: local catastrophic error"
	case CodeTaggedSTag:
		return "tagged buffer: invalid STag"
	case CodeTaggedBounds:
		return "tagged buffer: base or bounds violation"
	case CodeTaggedStream:
		return "tagged buffer: STag is not for this stream"
	case CodeTaggedWrap:
		return "tagged buffer: tagged offset wraps"
	case CodeTaggedVersion, CodeUntaggedVersion:
		return "invalid DDP version"
	case CodeQN:
		return "untagged buffer: invalid queue number"
	case CodeNoBuffer:
		return "untagged buffer: none is posted"
	case CodeMSN:
		return "untagged buffer: invalid message sequence number"
	case CodeMO:
		return "untagged buffer: invalid message offset"
	case CodeTooLong:
		return "untagged buffer: message is too long for it"
	default:
		return c.nameLLP()
	}
}

func (c Code) nameLLP() string {
	switch c {
	case CodeTCP:
		return "TCP connection closed or lost"
	case CodeCRC:
		return "CRC error"
	case CodeMarker:
		return "length of an FPDU does not fit"
	case CodeStartup:
		return "invalid MPA Request or Reply"
	case CodeMPALocal:
		return "MPA: local catastrophic error"
	case CodeIRD:
		return "not enough READs can be served"
	case CodeRTR:
		return "no common RTR message"
	default:
		if c&^0xff == CodeLocal { // whatever the last octet is
			return "local catastrophic error"
		}
		return ""
	}
}

func (c Code) String() string {
	name := c.name()
	if name == "" {
		name = "unknown error"
	}
	return fmt.Sprintf("%s (%d/%d/0x%02x)", name, c>>12, c>>8&15, uint8(c))
}

func (c Code) Error() string { return "iwarp: " + c.String() }

// hasHeader reports whether a Terminate for a received segment tells its header: not if
// the header could not be read (RFC 5040 §4.8), nor if it is not to be trusted.
func (c Code) hasHeader() bool {
	switch c {
	case CodeTaggedVersion, CodeUntaggedVersion, CodeRDMAPVersion:
		return false
	default:
		return c&codeLayerMask != codeLLP && c != CodeLocal
	}
}

// Flags of a Terminate (RFC 5040 §4.8, HdrCt).
const (
	termLength = 0x80 // M
	termDDP    = 0x40 // D
	termRDMAP  = 0x20 // R
	termFlags  = termLength | termDDP | termRDMAP

	// As little endian kernels send them.
	termLengthLE = 0x01
	termDDPLE    = 0x02
	termRDMAPLE  = 0x04
	termFlagsLE  = termLengthLE | termDDPLE | termRDMAPLE

	// maxTerminateLen is the longest Terminate behind its DDP header.
	maxTerminateLen = 4 + 2 + untaggedLen + readRequestLen
)

// Terminate is why the sender ends a stream (RFC 5040 §4.8), and which segment is to
// blame.
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+-------+-------+---------------+-+-+-+-------------------------+
//	| Layer | EType |  Error code   |M|D|R|        reserved         |
//	+-------+-------+---------------+-+-+-+---------+---------------+
//	| DDP segment length, if M or D | DDP header, if D              |
//	+-------------------------------+-------------------------------+
//	| RDMAP header, if R: of a READ request                         |
//	+---------------------------------------------------------------+
type Terminate struct {
	Code      Code
	HasLength bool
	Length    uint16 // of the ULPDU to blame
	Header    []byte // of that, 14 or 18 bytes, or none
	Request   []byte // of that, if it is a READ request: 28 bytes, or none

	// Swapped says that the nibbles and flags came as Linux's siw lays them out on
	// little endian machines, and Ambiguous that both ways to read them make sense.
	Swapped, Ambiguous bool
}

// ParseTerminate reads what follows the DDP header of a Terminate. Headers that are
// announced and not there, or not whole, are left out: a Terminate ends the stream in any
// case, and the rest is for people.
func ParseTerminate(b []byte) (Terminate, error) {
	if len(b) < 4 {
		return Terminate{}, CodeMarker
	}
	var t Terminate
	flags := t.parseControl(b)
	b = b[4:]
	if flags&(termLength|termDDP) != 0 && len(b) >= 2 {
		t.HasLength = flags&termLength != 0
		t.Length = binary.BigEndian.Uint16(b)
		b = b[2:]
		if n := terminatedLen(b); flags&termDDP != 0 && n <= len(b) && len(b) > 0 {
			t.Header, b = b[:n:n], b[n:]
		}
	}
	if flags&termRDMAP != 0 && t.Header != nil && len(b) >= readRequestLen {
		t.Request = b[:readRequestLen:readRequestLen]
	}
	return t, nil
}

// parseControl reads the first word and returns its flags as RFC 5040 has them. Where the
// flags do not tell in which order the nibbles are, the code does, if only one of both
// ways gives one that there is.
func (t *Terminate) parseControl(b []byte) byte {
	asIs := Code(b[0])<<8 | Code(b[1])
	swapped := Code(b[0]<<4|b[0]>>4)<<8 | Code(b[1])
	asIs, swapped = asIs.plain(), swapped.plain()
	flags := b[2] & termFlags
	if le := b[2] & termFlagsLE; flags == 0 && le != 0 {
		t.Swapped = true
		flags = le&termLengthLE<<7 | le&termDDPLE<<5 | le&termRDMAPLE<<3
	} else if flags == 0 && asIs != swapped && swapped.name() != "" {
		t.Swapped = asIs.name() == ""
		t.Ambiguous = !t.Swapped
	}
	t.Code = asIs
	if t.Swapped {
		t.Code = swapped
	}
	return flags
}

// plain drops the type of an error of the lower layer: RFC 5044 has 0 for it, some
// adapters send 3.
func (c Code) plain() Code {
	if c&codeLayerMask == codeLLP {
		return c &^ codeETypeMask
	}
	return c
}

// terminatedLen returns the length of the DDP header that b begins with.
func terminatedLen(b []byte) int {
	if len(b) > 0 && b[0]&ddpTagged != 0 {
		return taggedLen
	}
	return untaggedLen
}

// Append appends the Terminate to b, in the layout of RFC 5040.
func (t *Terminate) Append(b []byte) []byte {
	var flags byte
	if t.HasLength {
		flags |= termLength
	}
	if t.Header != nil {
		flags |= termDDP
	}
	if t.Request != nil {
		flags |= termRDMAP
	}
	b = append(b, byte(t.Code>>8), byte(t.Code), flags, 0)
	if t.HasLength || t.Header != nil {
		b = binary.BigEndian.AppendUint16(b, t.Length)
	}
	b = append(b, t.Header...)
	return append(b, t.Request...)
}

// TerminateError is the reason of a queue pair's end: a Terminate from the peer, or what
// the peer was told by one.
type TerminateError struct {
	Terminate Terminate
	Sent      bool // we found the error; otherwise the peer did
}

func (e *TerminateError) Error() string {
	switch {
	case e.Sent:
		return "iwarp: terminated for the peer's " + e.Terminate.Code.String()
	case e.Terminate.Ambiguous:
		return "iwarp: peer terminated the stream: " + e.Terminate.Code.String() + ", or with the nibbles the other way round"
	default:
		return "iwarp: peer terminated the stream: " + e.Terminate.Code.String()
	}
}

// Unwrap is [rdma.ErrPeerAccess] if we refused what the peer may not reach.
func (e *TerminateError) Unwrap() error {
	if e.Sent && e.Terminate.Code.isAccess() {
		return rdma.ErrPeerAccess
	}
	return nil
}

// isAccess reports whether a peer named an STag, bytes or a right that it does not have.
func (c Code) isAccess() bool {
	switch c & (codeLayerMask | codeETypeMask) {
	case codeProtection:
		return true
	case codeTagged:
		return c != CodeTaggedVersion
	default:
		return false
	}
}

// status is how a READ ends that the peer answered with a Terminate.
func (c Code) status() rdma.Status {
	switch c & (codeLayerMask | codeETypeMask) {
	case codeProtection, codeTagged:
		return rdma.StatusRemoteAccess
	case codeUntagged:
		return rdma.StatusRemoteInvalid
	default:
		if c == CodeRDMAPVersion || c == CodeOpcode {
			return rdma.StatusRemoteInvalid
		}
		return rdma.StatusRemoteOp
	}
}
