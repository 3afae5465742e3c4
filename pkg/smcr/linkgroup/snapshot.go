// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// SnapshotVersion is the version of a [Snapshot] that this package writes, and the only one
// that it reads. A field that comes, goes or changes its meaning needs another version, and so
// does a state that gets another number.
const SnapshotVersion = 4

// Snapshot is all that a [Group] knows, as a plain value: it can be encoded, also as JSON,
// and given to another process. It has no pointers; its parts name each other by numbers:
//
//	a link         LinkIndex, or its place: LinkIndex+1, and 0 for none
//	an RMB         RMBID
//	a connection   Conn.Slot
//	a peer's RMB   its place in Keys.Peers and, after these, in Keys.Forgotten, from 1 on; 0 for none
//
// A snapshot has the order of queues. It does not have what follows from the rest: counts, sets
// of links, which link is asymmetric. States are the numbers that they have in this package.
type Snapshot struct {
	Version uint16 // SnapshotVersion
	Terms   TermsSnapshot
	State   State
	Err     ErrorSnapshot

	Setup  SetupSnapshot
	Links  LinksSnapshot
	Adding AddingSnapshot
	Growth GrowthSnapshot
	Side   SideSnapshot

	Keys      KeysSnapshot
	OurKeys   AnnouncementSnapshot
	PeerKeys  PeerKeysSnapshot
	AfterLoss HoldSnapshot

	Conns     ConnsSnapshot
	IdleSince Instant

	Requests RequestsSnapshot
	Ending   EndingSnapshot
	Last     LastWordsSnapshot

	Discarded, LLCSent, CDCSent uint64
}

// Instant is a point of time as its distance from the time of the snapshot, so that a process
// with another clock can read it. The zero value is the zero time, which means "never".
type Instant struct {
	Known bool
	In    time.Duration // negative: it is past
}

// instant is the distance of t from now.
func instant(now, t time.Time) Instant {
	if t.IsZero() {
		return Instant{}
	}
	return Instant{Known: true, In: t.Sub(now)}
}

// TermsSnapshot is what both sides have agreed on.
type TermsSnapshot struct {
	Role     Role
	Version  uint8
	Release  uint8
	AllowRFC bool
	Offered  uint8
	UserID   uint32
	Dialect  llc.Dialect
	MaxLinks uint8
	MaxConns int

	BigEndian bool
}

// ErrorSnapshot is an error: its text, and which errors of this package it wraps. Other errors
// that it wraps are lost.
type ErrorSnapshot struct {
	Text string // "": there is none
	Is   uint16 // bit set: see errorNumbers
}

// SetupSnapshot is the LLC part of the first contact.
type SetupSnapshot struct {
	Step     uint8 // setupStep
	Deadline Instant
	Failed   llc.LinkID
}

// LinksSnapshot has the places of the links.
type LinksSnapshot struct {
	At     [MaxLinks]LinkSnapshot
	Last   LinkIndex
	Births uint64
	LastID llc.LinkID
}

// LinkSnapshot is a link, or what is left of the last one in its place.
type LinkSnapshot struct {
	ID          llc.LinkID
	State       uint8 // linkState
	Local, Peer Endpoint
	PeerUserID  uint32
	Born        uint64
	Queue       [][]byte // LLC messages that wait
	Ready       []int    // connections that have something to send, by slot
	Inflight    int
	UntilLong   int
	Health      HealthSnapshot
	DrainBy     Instant
	Deletion    llc.DeleteLink
	Sent, Recv  uint64
}

// HealthSnapshot is how long a link has been silent, and how fast it is.
type HealthSnapshot struct {
	Waiting  Instant
	Slowest  time.Duration
	Done     uint64
	Mark     uint64
	Since    Instant
	Heard    Instant
	TestSent Instant
	TestData [16]byte
	Proven   Instant
	Answer   time.Duration
}

// AddingSnapshot is the exchange that adds a link.
type AddingSnapshot struct {
	Step     uint8 // addStep
	Link     LinkIndex
	Via      uint8 // place
	Fresh    bool
	Request  llc.AddLink
	RMBs     []RMBID
	PeerLeft int
	Since    Instant
	Deadline Instant
	Again    bool
}

// GrowthSnapshot says whether and when another link is tried.
type GrowthSnapshot struct {
	Held uint8 // operator
	Wait time.Duration
	At   Instant
}

// SideSnapshot is what only a server or only a client knows.
type SideSnapshot struct {
	AskedVia   uint8 // place; server
	AskedGID   rdma.GID
	Spare      uint8 // place; client
	SpareUntil Instant
}

// KeysSnapshot has our RMBs and what is known of the peer's.
type KeysSnapshot struct {
	RMBs      []RMBSnapshot
	Last      RMBID
	Gone      []RMBID
	Peers     []PeerRMBSnapshot
	Forgotten []PeerRMBSnapshot // no longer in the table, but a connection still uses them
}

// RMBSnapshot is one of our RMBs.
type RMBSnapshot struct {
	ID          RMBID
	ElementSize uint32
	Elements    []ElementSnapshot
	Retired     bool
	Tokens      [MaxRNICs]RToken
	Registered  uint8
	State       uint8 // rmbState
}

// ElementSnapshot is an RMBE. It is in use if a connection has it.
type ElementSnapshot struct {
	Held, Stale bool
	Freed       Instant
}

// PeerRMBSnapshot is one of the peer's RMBs.
type PeerRMBSnapshot struct {
	Tokens [MaxLinks]RToken
	Known  uint8
	Former [MaxLinks]RToken
}

// AnnouncementSnapshot is how the peer is told of an RMB.
type AnnouncementSnapshot struct {
	List      []llc.LinkRToken
	Told      int
	Continued bool
	Links     uint8
}

// PeerKeysSnapshot is a CONFIRM RKEY of the peer that continues.
type PeerKeysSnapshot struct {
	PeerRMB int
	Left    int
}

// HoldSnapshot says how long RMBEs are held back.
type HoldSnapshot struct {
	Lost  bool
	Until Instant
}

// ConnsSnapshot has the connections.
type ConnsSnapshot struct {
	List     []ConnSnapshot // in the order of their slots
	Closing  []int          // those that wait for the peer's close, by slot, in the order of their deadlines
	RetireAt Instant
}

// ConnSnapshot is a connection.
type ConnSnapshot struct {
	Slot                                  int
	Token                                 cdc.AlertToken
	Link, Target, Awaits, Named, PeerLink uint8 // places
	CameTo                                uint8
	Endpoint                              Endpoint
	Data                                  cdc.Snapshot
	RMB                                   RMBID
	Element                               int
	PeerRMB                               int
	Offset                                uint64
	PeerSize                              uint32
	PeerToken                             cdc.AlertToken
	Deadline, Since                       Instant
	Done, Zombie, Replaced                bool
	Writes, MessagesSent, MessagesRecv    uint64
}

// RequestsSnapshot is the line of our LLC exchanges.
type RequestsSnapshot struct {
	Line                  []ExchangeSnapshot
	Sent                  bool
	Began, Expiry, Resend Instant
	Via                   uint8 // place
}

// ExchangeSnapshot is one of our LLC exchanges.
type ExchangeSnapshot struct {
	Kind      uint8 // exchangeKind
	RMBs      []RMBID
	Tries     int
	HoldUntil Instant
	Deletion  llc.DeleteLink
	Fresh     bool
}

// EndingSnapshot is how the group ends.
type EndingSnapshot struct {
	ByPeer   bool
	Via      uint8 // place
	Deadline Instant
}

// LastWordsSnapshot is what a dead group still has to tell its peer.
type LastWordsSnapshot struct {
	Known, Owed  bool
	Reason       llc.DeleteReason
	Again, Until Instant
	Links        uint8
	Inflight     [MaxLinks]int
}
