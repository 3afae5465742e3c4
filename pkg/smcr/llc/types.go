// SPDX-License-Identifier: Apache-2.0

package llc

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Type tells the messages apart, whatever their version: the low four bits
// of the first byte on the wire.
type Type uint8

// Message types (RFC 7609 A.3). REQUEST ADD LINK is of version 2 only.
const (
	TypeConfirmLink             Type = 0x01
	TypeAddLink                 Type = 0x02
	TypeAddLinkContinuation     Type = 0x03
	TypeDeleteLink              Type = 0x04
	TypeRequestAddLink          Type = 0x05
	TypeConfirmRKey             Type = 0x06
	TypeTestLink                Type = 0x07
	TypeConfirmRKeyContinuation Type = 0x08
	TypeDeleteRKey              Type = 0x09
)

func (t Type) String() string {
	switch t {
	case TypeConfirmLink:
		return "CONFIRM LINK"
	case TypeAddLink:
		return "ADD LINK"
	case TypeAddLinkContinuation:
		return "ADD LINK CONTINUATION"
	case TypeDeleteLink:
		return "DELETE LINK"
	case TypeRequestAddLink:
		return "REQUEST ADD LINK"
	case TypeConfirmRKey:
		return "CONFIRM RKEY"
	case TypeTestLink:
		return "TEST LINK"
	case TypeConfirmRKeyContinuation:
		return "CONFIRM RKEY CONTINUATION"
	case TypeDeleteRKey:
		return "DELETE RKEY"
	}
	return fmt.Sprintf("Type(0x%02x)", uint8(t))
}

// Dialect is a wire dialect of version 1.
type Dialect uint8

// Dialects. The RFC's is what its figures say; Linux's is what Linux sends.
const (
	DialectRFC Dialect = iota
	DialectLinux
)

func (d Dialect) String() string {
	switch d {
	case DialectRFC:
		return "RFC"
	case DialectLinux:
		return "Linux"
	}
	return fmt.Sprintf("Dialect(%d)", uint8(d))
}

// Protocol versions of [Header.Version]. In a header to be sent, zero stands
// for Version1.
const (
	Version1 uint8 = 1
	Version2 uint8 = 2
)

// LinkID is the number of a link, assigned by the server and unique within
// the link group (RFC 7609 A.3.1).
type LinkID uint8

// RejectReason says why an ADD LINK was rejected (RFC 7609 A.3.2).
type RejectReason uint8

// Reasons of a rejected ADD LINK. Version 2 carries none.
const (
	RejectNoAlternatePath RejectReason = 1 // same device as an existing link, and no other here
	RejectInvalidMTU      RejectReason = 2
)

func (r RejectReason) String() string {
	switch r {
	case 0:
		return "none"
	case RejectNoAlternatePath:
		return "no alternate path"
	case RejectInvalidMTU:
		return "invalid MTU"
	}
	return fmt.Sprintf("RejectReason(%d)", uint8(r))
}

// DeleteReason says why a link or link group ends (RFC 7609 A.3.4).
type DeleteReason uint32

// Reasons of DELETE LINK; the last two are for responses.
const (
	DeleteLostPath          DeleteReason = 0x00010000
	DeleteOperator          DeleteReason = 0x00020000
	DeleteInactivity        DeleteReason = 0x00030000 // ended by the program, nothing used the link
	DeleteProtocolViolation DeleteReason = 0x00040000
	DeleteAsymmetric        DeleteReason = 0x00050000
	DeleteUnknownLink       DeleteReason = 0x00100000
	DeleteUnknownGroup      DeleteReason = 0x00200000 // Linux; not in the RFC
)

func (r DeleteReason) String() string {
	switch r {
	case 0:
		return "none"
	case DeleteLostPath:
		return "lost path"
	case DeleteOperator:
		return "operator"
	case DeleteInactivity:
		return "inactivity"
	case DeleteProtocolViolation:
		return "protocol violation"
	case DeleteAsymmetric:
		return "asymmetric link no longer needed"
	case DeleteUnknownLink:
		return "unknown link"
	case DeleteUnknownGroup:
		return "unknown link group"
	}
	return fmt.Sprintf("DeleteReason(0x%08x)", uint32(r))
}

// ConfirmLinkFlags are the bits of CONFIRM LINK beside the response bit.
type ConfirmLinkFlags uint8

// NoRMBEEyecatcher is Linux's announcement, not in the RFC, that its RMBEs
// have no eye catcher and cursors start at 0. Linux sets both bits and wants
// to see both.
const NoRMBEEyecatcher ConfirmLinkFlags = 0x03

// Has reports whether all bits of g are set in f.
func (f ConfirmLinkFlags) Has(g ConfirmLinkFlags) bool { return f&g == g }

func (f ConfirmLinkFlags) String() string {
	if f == NoRMBEEyecatcher {
		return "no-eyecatcher"
	}
	return fmt.Sprintf("0x%02x", uint8(f))
}

// RToken says how to write to an RMB over one link.
type RToken struct {
	RKey  rdma.RKey
	VAddr uint64
}

func (t RToken) String() string { return fmt.Sprintf("0x%08x@0x%016x", uint32(t.RKey), t.VAddr) }

// LinkRToken is an RToken together with the link it is for (RFC 7609 A.3.5,
// figure 37).
type LinkRToken struct {
	Link LinkID
	RToken
}

func (t LinkRToken) String() string { return fmt.Sprintf("%d:%v", t.Link, t.RToken) }

// RTokenPair identifies an RMB by its RKey on the link that carries the
// message, and gives its RToken on the new link (RFC 7609 A.3.3, figure 34).
type RTokenPair struct {
	Reference rdma.RKey
	New       RToken
}

func (p RTokenPair) String() string {
	return fmt.Sprintf("0x%08x->%v", uint32(p.Reference), p.New)
}
