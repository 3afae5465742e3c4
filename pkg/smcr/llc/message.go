// SPDX-License-Identifier: Apache-2.0

package llc

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Message is one of the concrete messages of this package.
type Message interface {
	Type() Type
	IsResponse() bool
	// Append appends the message as it travels. A field out of its range is
	// a bug of the caller and panics.
	Append(b []byte) []byte
	String() string

	sealed()
}

// Header is what all messages have in common.
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+-------+-------+---------------+---------------+-+-------------+
//	|   0   | Type  |  Length = 44  |   Reserved    |R|    Flags    |  version 1
//	+-------+-------+---------------+---------------+-+-------------+
//	|   2   | Type  |     Length, in host order     |R|    Flags    |  version 2
//	+-------+-------+-------------------------------+-+-------------+
type Header struct {
	Version   uint8 // Version1 or Version2
	Response  bool
	BigEndian bool // version 2: byte order of the sending host
}

// IsResponse reports whether the message answers a request.
func (h Header) IsResponse() bool { return h.Response }

func (h Header) sealed() {}

func (h Header) describe(t Type) string {
	kind := "request"
	if h.Response {
		kind = "response"
	}
	if h.Version == Version2 {
		return t.String() + " v2 " + kind
	}
	return t.String() + " " + kind
}

// ConfirmLink is the first message over a new link, once in each direction
// (RFC 7609 A.3.1).
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+---------------+---------------+---------------+-+-------------+
//	|   Type = 1    |  Length = 44  |   Reserved    |R|    Flags    |
//	+---------------+---------------+---------------+-+-------------+
//	|  MAC (6)                      |                               |
//	+                               +-------------------------------+
//	|                               |  GID (16) ...                 |
//	+-------------------------------+-------------------------------+
//	|  ... GID                      |  QPN (3)                      |
//	+---------------+---------------+-------------------------------+
//	|  ... QPN      |  Link number  |  Link user ID (4)             |
//	+---------------+---------------+---------------+---------------+
//	|  ... Link user ID             |  Max links    |  Max conns v2 |
//	+-------------------------------+---------------+---------------+
//	|  Reserved (8)                                                 |
//	+---------------------------------------------------------------+
type ConfirmLink struct {
	Header
	Flags    ConfirmLinkFlags
	MAC      rdma.MAC
	GID      rdma.GID
	QPN      rdma.QPN
	Link     LinkID
	UserID   uint32 // of the sender, for display
	MaxLinks uint8
	MaxConns uint8 // version 2.1; zero otherwise
}

// Type returns [TypeConfirmLink].
func (m ConfirmLink) Type() Type { return TypeConfirmLink }

func (m ConfirmLink) String() string {
	return fmt.Sprintf("%s link=%d flags=%v mac=%v gid=%v qpn=%v user=%08x maxLinks=%d maxConns=%d",
		m.describe(TypeConfirmLink), m.Link, m.Flags, m.MAC, m.GID, m.QPN, m.UserID, m.MaxLinks, m.MaxConns)
}

// AddLink offers a new link, or asks for one when a client sends the request
// (RFC 7609 A.3.2). Offsets right of the bar are those of [DialectLinux].
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+---------------+---------------+-------+-------+-+-+-----------+
//	|   Type = 2    |  Length = 44  |       |Reason |R|Z|           |
//	+---------------+---------------+-------+-------+-+-+-----------+
//	|  4: MAC (6) ...                                               |  4
//	| 10: GID (16) ...                                              | 12, two reserved bytes before
//	| 26: QPN (3) ...                                               | 28
//	| 29: link number (1), 30: MTU (low 4 bits), 31: PSN (3)        | 31, 32, 33
//	| 34: reserved ...                                              | 36
//	+---------------------------------------------------------------+
//
// Version 2 appends an [AddLinkExt] unless the message is a rejection. A response without it is one,
// whatever its flags: Linux sends an ADD LINK back that comes while it waits for CONFIRM LINK.
type AddLink struct {
	Header
	Dialect Dialect // of the layout; version 2 is always DialectLinux
	Reject  bool
	Reason  RejectReason // version 1
	MAC     rdma.MAC
	GID     rdma.GID
	QPN     rdma.QPN
	Link    LinkID
	MTU     rdma.MTU // low four bits, not validated: an invalid one has its own reject reason
	PSN     rdma.PSN
	Ext     AddLinkExt // version 2, not in a rejection
}

// AddLinkExt is the part of ADD LINK of version 2 after the 44th byte, which
// replaces the ADD LINK CONTINUATION exchange of version 1.
//
//	+44: bit 0x80 direct, +46: client's target GID (16), +62: reserved (8),
//	+70: number of pairs (2, host order), +72: pairs of 16 bytes
type AddLinkExt struct {
	Direct    bool // the peers are on one subnet, no gateway between them
	TargetGID rdma.GID
	Pairs     []RTokenPair // at most MaxPairsV2
}

// Type returns [TypeAddLink].
func (m AddLink) Type() Type { return TypeAddLink }

func (m AddLink) String() string {
	s := m.describe(TypeAddLink)
	if m.Reject {
		s += fmt.Sprintf(" rejected (%v)", m.Reason)
	}
	s += fmt.Sprintf(" link=%d mac=%v gid=%v qpn=%v mtu=%v psn=%d", m.Link, m.MAC, m.GID, m.QPN, m.MTU, m.PSN)
	if m.hasExt() {
		s += fmt.Sprintf(" direct=%t target=%v pairs=%v", m.Ext.Direct, m.Ext.TargetGID, m.Ext.Pairs)
	}
	return s
}

func (m AddLink) hasExt() bool { return m.Version == Version2 && !m.Reject }

// AddLinkContinuation carries RTokens for a new link, alternating between
// server and client until both have none left (RFC 7609 A.3.3).
//
//	+---------------+---------------+-------------------------------+
//	|  Link number  |   Remaining   |           Reserved            |
//	+---------------+---------------+-------------------------------+
//	|  2 x { reference RKey (4), new RKey (4), new address (8) }    |
//	+---------------------------------------------------------------+
type AddLinkContinuation struct {
	Header
	Link      LinkID
	Remaining uint8 // pairs still to come, those in this message included
	Pairs     [PairsPerContinuation]RTokenPair
}

// Type returns [TypeAddLinkContinuation].
func (m AddLinkContinuation) Type() Type { return TypeAddLinkContinuation }

// N returns how many of Pairs are in use.
func (m AddLinkContinuation) N() int { return min(int(m.Remaining), PairsPerContinuation) }

// Last reports whether the sender has no pairs left after this message.
func (m AddLinkContinuation) Last() bool { return m.Remaining <= PairsPerContinuation }

func (m AddLinkContinuation) String() string {
	return fmt.Sprintf("%s link=%d remaining=%d pairs=%v",
		m.describe(TypeAddLinkContinuation), m.Link, m.Remaining, m.Pairs[:m.N()])
}

// DeleteLink ends a link or the whole group (RFC 7609 A.3.4).
//
//	+---------------+---------------+---------------+-+-+-+---------+
//	|   Type = 4    |  Length = 44  |   Reserved    |R|A|O|         |
//	+---------------+---------------+---------------+-+-+-+---------+
//	|  Link number  |  Reason (4)                                   |
//	+---------------+-----------------------------------------------+
type DeleteLink struct {
	Header
	All     bool // the whole link group; Link means nothing
	Orderly bool
	Link    LinkID
	Reason  DeleteReason
}

// Type returns [TypeDeleteLink].
func (m DeleteLink) Type() Type { return TypeDeleteLink }

func (m DeleteLink) String() string {
	s := m.describe(TypeDeleteLink)
	if m.All {
		s += " all"
	} else {
		s += fmt.Sprintf(" link=%d", m.Link)
	}
	return s + fmt.Sprintf(" orderly=%t reason=%v", m.Orderly, m.Reason)
}

// ConfirmRKey announces a new RMB on all links (RFC 7609 A.3.5).
//
//	+---------------+---------------+---------------+-+-+-+-+-------+
//	|   Type = 6    |  Length = 44  |   Reserved    |R|0|Z|C|       |
//	+---------------+---------------+---------------+-+-+-+-+-------+
//	|  Others (1), RKey (4), address (8) on the link of the message |
//	|  2 x { link number (1), RKey (4), address (8) }               |
//	|  Reserved (1)                                                 |
//	+---------------------------------------------------------------+
type ConfirmRKey struct {
	Header
	Negative bool
	Retry    bool  // with Negative: try again after the current configuration change
	Others   uint8 // number of other links, also those in continuations
	This     RToken
	Other    [OthersPerConfirm]LinkRToken
}

// Type returns [TypeConfirmRKey].
func (m ConfirmRKey) Type() Type { return TypeConfirmRKey }

// N returns how many of Other are in use.
func (m ConfirmRKey) N() int { return min(int(m.Others), OthersPerConfirm) }

func (m ConfirmRKey) String() string {
	return fmt.Sprintf("%s negative=%t retry=%t this=%v others=%d %v",
		m.describe(TypeConfirmRKey), m.Negative, m.Retry, m.This, m.Others, m.Other[:m.N()])
}

// ConfirmRKeyContinuation carries what did not fit into [ConfirmRKey]
// (RFC 7609 A.3.6). Linux does not implement it.
//
//	+---------------+-----------------------------------------------+
//	|  Remaining (1), 3 x { link number (1), RKey (4), address (8)} |
//	+---------------------------------------------------------------+
type ConfirmRKeyContinuation struct {
	Header
	Negative  bool
	Remaining uint8 // links still to come, those in this message included
	Other     [OthersPerContinuation]LinkRToken
}

// Type returns [TypeConfirmRKeyContinuation].
func (m ConfirmRKeyContinuation) Type() Type { return TypeConfirmRKeyContinuation }

// N returns how many of Other are in use.
func (m ConfirmRKeyContinuation) N() int { return min(int(m.Remaining), OthersPerContinuation) }

// Last reports whether this message ends the exchange.
func (m ConfirmRKeyContinuation) Last() bool { return m.Remaining <= OthersPerContinuation }

func (m ConfirmRKeyContinuation) String() string {
	return fmt.Sprintf("%s negative=%t remaining=%d %v",
		m.describe(TypeConfirmRKeyContinuation), m.Negative, m.Remaining, m.Other[:m.N()])
}

// DeleteRKey says that RMBs are gone (RFC 7609 A.3.7).
//
//	+---------------+---------------+---------------+-+-+-+---------+
//	|   Type = 9    |  Length = 44  |   Reserved    |R|0|Z|         |
//	+---------------+---------------+---------------+-+-+-+---------+
//	|     Count     |  Error mask   |           Reserved            |
//	+---------------+---------------+-------------------------------+
//	|  8 x RKey (4)                                                 |
//	+---------------------------------------------------------------+
type DeleteRKey struct {
	Header
	Negative  bool
	Count     uint8
	ErrorMask uint8 // of a negative response; most significant bit: first key
	RKeys     [MaxDeleteRKeys]rdma.RKey
}

// Type returns [TypeDeleteRKey].
func (m DeleteRKey) Type() Type { return TypeDeleteRKey }

// N returns how many of RKeys are in use.
func (m DeleteRKey) N() int { return min(int(m.Count), MaxDeleteRKeys) }

// Failed reports whether the peer could not delete RKeys[i].
func (m DeleteRKey) Failed(i int) bool { return m.ErrorMask&(0x80>>i) != 0 }

func (m DeleteRKey) String() string {
	return fmt.Sprintf("%s negative=%t errors=%08b rkeys=%#x",
		m.describe(TypeDeleteRKey), m.Negative, m.ErrorMask, m.RKeys[:m.N()])
}

// DeleteRKeyV2 is [DeleteRKey] of version 2. A response counts the keys that
// the peer did not know. Linux's has zeros for keys and always 44 bytes, so that
// it may leave out keys of the request.
//
//	+---------------+---------------+-------------------------------+
//	|     Count     |    Invalid    |           Reserved            |
//	+---------------+---------------+-------------------------------+
//	|  Count x RKey (4)                                             |
//	+---------------------------------------------------------------+
type DeleteRKeyV2 struct {
	Header
	Negative bool
	Invalid  uint8       // of a response: how many keys its sender did not know
	RKeys    []rdma.RKey // at most MaxDeleteRKeysV2
	Omitted  uint8       // of a response: how many keys of the request it counts, but has no room for
}

// Type returns [TypeDeleteRKey].
func (m DeleteRKeyV2) Type() Type { return TypeDeleteRKey }

func (m DeleteRKeyV2) String() string {
	s := fmt.Sprintf("%s negative=%t invalid=%d rkeys=%#x", m.describe(TypeDeleteRKey), m.Negative, m.Invalid, m.RKeys)
	if m.Omitted > 0 {
		s += fmt.Sprintf(" and %d more", m.Omitted)
	}
	return s
}

// TestLink asks whether the peer's software still answers on a link
// (RFC 7609 A.3.8). The response has the user data of the request.
//
//	+---------------------------------------------------------------+
//	|  User data (16)                                               |
//	+---------------------------------------------------------------+
type TestLink struct {
	Header
	UserData [16]byte
}

// Type returns [TypeTestLink].
func (m TestLink) Type() Type { return TypeTestLink }

func (m TestLink) String() string {
	return fmt.Sprintf("%s data=%x", m.describe(TypeTestLink), m.UserData)
}

// RequestAddLink is how a client of version 2 asks for another link: the
// GIDs it could use.
//
//	+---------------------------------------------------------------+
//	|  4: reserved (20)                                             |
//	| 24: number of GIDs (1), reserved (3), 28: GIDs of 16 bytes    |
//	+---------------------------------------------------------------+
type RequestAddLink struct {
	Header
	GIDs []rdma.GID // at most MaxRequestGIDs
}

// Type returns [TypeRequestAddLink].
func (m RequestAddLink) Type() Type { return TypeRequestAddLink }

func (m RequestAddLink) String() string {
	return fmt.Sprintf("%s gids=%v", m.describe(TypeRequestAddLink), m.GIDs)
}
