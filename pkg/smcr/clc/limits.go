// SPDX-License-Identifier: Apache-2.0

package clc

import "time"

// Sizes of the messages and of their parts, in bytes.
const (
	// HeaderLen is what a reader takes first; the header says how much follows.
	HeaderLen = 8

	trailerLen = 4

	proposalBaseLen = 40 // header to mask/prefix offset, RFC 7609 A.2.2
	smcdAreaLen     = 40 // the growth area as Linux fills it
	prefixAreaLen   = 8  // IPv4 subnet, its length, number of IPv6 prefixes
	prefixLen       = 17 // an IPv6 prefix and its length
	v2ExtLen        = 40
	smcdV2ExtLen    = 48
	ismGIDLen       = 10

	acceptV1Len    = 68 // RFC 7609 A.2.3, A.2.4
	acceptV2Base   = 104
	fceLen         = 52
	gidListHeadLen = 4
	gidLen         = 16

	declineV1Len = 28 // RFC 7609 A.2.5
	declineV2Len = 44
)

// Limits of what a peer may announce. Every list has room for as many and is
// part of its message, so nothing that a peer sends makes us allocate.
const (
	// MaxPrefixes is the most IPv6 prefixes of a Proposal (RFC 7609 A.2.2).
	MaxPrefixes = 8
	// MaxEIDs is the most enterprise IDs of a Proposal: what Linux reads.
	MaxEIDs = 8
	// MaxISMGIDs is the most SMC-D devices of a Proposal: what Linux reads.
	MaxISMGIDs = 8
	// MaxGIDs is the most GIDs of a Confirm: a link group has at most eight
	// links (RFC 7609 §2.2.2), so more could never be used.
	MaxGIDs = 8

	// maxGrowthLen bounds the area that RFC 7609 A.2.2 lets later versions
	// insert in a Proposal: the only one known has 40 bytes.
	maxGrowthLen = smcdAreaLen

	// MaxLen is the length of the longest message, a Proposal with every list
	// full. A shell's read buffer needs no more.
	MaxLen = maxProposalLen

	maxProposalLen = proposalBaseLen + maxGrowthLen + prefixAreaLen + MaxPrefixes*prefixLen +
		v2ExtLen + MaxEIDs*EIDLen + smcdV2ExtLen + MaxISMGIDs*ismGIDLen + trailerLen
	minProposalLen = proposalBaseLen + prefixAreaLen + trailerLen
	maxAcceptLen   = acceptV2Base + fceLen + trailerLen
	maxConfirmLen  = acceptV2Base + fceLen + gidListHeadLen + MaxGIDs*gidLen + trailerLen
)

// Releases of version 2. Release 1 (2.1) lets both sides announce the limits of
// a link group and optional features.
const (
	Release0 uint8 = 0
	Release1 uint8 = 1

	MaxRelease = Release1
)

// What SMC-Rv2 release 1 demands of the numbers both sides announce; Linux
// declines below them.
const (
	MinMaxConns = 16
	MinMaxLinks = 1
	// MaxMaxLinks is the most links of a group (RFC 7609 §2.2.2). Linux offers
	// and takes two, so with it the smaller number is never more.
	MaxMaxLinks = 8

	// DefaultMaxConns is what the one-byte number of an RMB element allows.
	DefaultMaxConns = 255
	// DefaultMaxLinks is what failover needs, and what Linux has.
	DefaultMaxLinks = 2
)

// Timers of the rendezvous machines (RFC 7609 C.5 leaves them to us).
const (
	// DefaultMessageTimeout is that of Linux, so that neither side gives up much
	// before the other.
	DefaultMessageTimeout = 6 * time.Second
	// DefaultLateDeclineClient and DefaultLateDeclineServer are how long each
	// side waits for the other's Decline when CONFIRM LINK did not come. They
	// differ, because the other side waits as long for CONFIRM LINK: Declines
	// that cross are lost on Linux, which gives them to the program as data. A
	// Linux server was seen to decline 5.2 s after its Accept, when a client of
	// ours has waited 1 s here; a Linux client looks for a Decline from 4 s to
	// 5 s after its Confirm.
	DefaultLateDeclineClient = 3 * time.Second
	DefaultLateDeclineServer = 300 * time.Millisecond
)
