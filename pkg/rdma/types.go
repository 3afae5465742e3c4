// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"net/netip"
)

// GID is a 128-bit global identifier of a port. With RoCEv2 it is an IPv6
// address, or an IPv4 address in its IPv4-mapped form.
type GID [16]byte

// GIDFromAddr returns the GID of an IP address: IPv6 as it is, IPv4 as an
// IPv4-mapped IPv6 address.
func GIDFromAddr(a netip.Addr) GID { return GID(a.As16()) }

// Addr returns the IP address of a RoCEv2 GID, unmapped to IPv4 where it is
// an IPv4-mapped address.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

// IsZero reports whether the GID is unset.
func (g GID) IsZero() bool { return g == GID{} }

func (g GID) String() string { return netip.AddrFrom16(g).String() }

// MAC is an Ethernet hardware address.
type MAC [6]byte

func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// QPN is a 24-bit queue pair number.
type QPN uint32

// MaxQPN is the largest queue pair number.
const MaxQPN QPN = 1<<24 - 1

func (q QPN) String() string { return fmt.Sprintf("0x%06x", uint32(q)) }

// PSN is a 24-bit packet sequence number; it wraps to 0.
type PSN uint32

// PSNMask keeps the bits of a PSN.
const PSNMask PSN = 1<<24 - 1

// Add returns the PSN n packets later, wrapped to 24 bits.
func (p PSN) Add(n int) PSN { return PSN(uint32(p)+uint32(n)) & PSNMask }

// Sub returns the signed distance p-o in packets, within half the number
// space: negative when p comes before o.
func (p PSN) Sub(o PSN) int {
	d := int32(uint32(p-o) << 8)
	return int(d >> 8)
}

// LKey authorizes local access to a memory region.
type LKey uint32

// RKey authorizes a peer's access to a memory region.
type RKey uint32

// MTU is a path MTU as IBTA enumerates it: payload bytes of a packet.
type MTU uint8

// Path MTUs. The numbers are those of the wire (RFC 7609 A.2.3).
const (
	MTU256 MTU = iota + 1
	MTU512
	MTU1024
	MTU2048
	MTU4096
)

// Valid reports whether m is one of the five path MTUs.
func (m MTU) Valid() bool { return m >= MTU256 && m <= MTU4096 }

// Bytes returns the payload size in bytes, 0 if m is not valid.
func (m MTU) Bytes() int {
	if !m.Valid() {
		return 0
	}
	return 128 << m
}

func (m MTU) String() string { return fmt.Sprintf("%d", m.Bytes()) }

// Access is a set of rights on a memory region or queue pair.
type Access uint8

// Access rights. A region that peers may write must be locally writable too.
const (
	LocalWrite Access = 1 << iota
	RemoteWrite
	RemoteRead
	// StableRead promises that nobody changes the bytes of a region with RemoteRead while a peer may read them; for
	// example because the program waits until the peer says that it is done. Software iWARP can then make the CRC of a
	// READ's response without copying it. If the promise is broken, the peer finds a wrong CRC, and the connection
	// ends. Other providers ignore StableRead.
	StableRead
)

// GIDType tells by which protocol packets of a GID travel.
type GIDType uint8

// GID types.
const (
	GIDTypeUnknown GIDType = iota
	GIDTypeRoCEv1          // Ethernet, type 0x8915
	GIDTypeRoCEv2          // UDP port 4791
	GIDTypeIWARP           // TCP
)

func (t GIDType) String() string {
	switch t {
	case GIDTypeUnknown:
		return "unknown"
	case GIDTypeRoCEv1:
		return "RoCE v1"
	case GIDTypeRoCEv2:
		return "RoCE v2"
	case GIDTypeIWARP:
		return "iWARP"
	}
	return fmt.Sprintf("GIDType(%d)", uint8(t))
}

// GIDEntry is one row of a port's GID table.
type GIDEntry struct {
	Index  int
	GID    GID
	Type   GIDType
	MAC    MAC    // of the network interface
	NetDev string // name of the network interface, "" if none
	// PrefixBits is the prefix length of the subnet of the IP address (24, say, for
	// 192.0.2.1/24); 0 if it is not known.
	PrefixBits int
}

// OnLink reports whether another GID is in the entry's subnet. If the subnet is
// not known it reports false.
func (e GIDEntry) OnLink(g GID) bool {
	return e.PrefixBits > 0 && netip.PrefixFrom(e.GID.Addr(), e.PrefixBits).Contains(g.Addr())
}

// PortState is the state of a device's port.
type PortState uint8

// Port states.
const (
	PortDown PortState = iota
	PortActive
)

func (s PortState) String() string {
	if s == PortActive {
		return "ACTIVE"
	}
	return "DOWN"
}

// PortAttr describes a port.
type PortAttr struct {
	State     PortState
	MaxMTU    MTU
	ActiveMTU MTU
}

// DeviceAttr describes what a provider's device can do.
type DeviceAttr struct {
	Provider     string // "soft", "verbs", ...
	MaxQP        int
	MaxCQE       int
	MaxMRBytes   uint64 // of one region, in bytes; 0: not known
	MaxSGE       int
	MaxSendWR    int
	MaxRecvWR    int
	MaxInline    int  // bytes that SendInline copies at posting; 0: not supported
	WriteWithImm bool // RDMA WRITE with immediate data
	RDMARead     bool
	SendWithInv  bool      // SendInvalidate
	SendWithImm  bool      // SendImm
	Solicited    bool      // SendSolicited; without it Arm(true) wakes for every receive
	GIDTypes     []GIDType // the device's own, to be read only

	// MaxReadsServed and MaxReadsAsked bound QPAttr.ReadsServed and ReadsAsked; 0:
	// the device has no RDMA READ.
	MaxReadsServed, MaxReadsAsked int

	// Stream says that queue pairs are connected by functions of their provider, on a TCP
	// connection, and not by Modify. Their states are RESET, INIT, RTS and ERR: Modify to
	// RTR or RTS is ErrNotSupported, and PSN, path, path MTU and retries mean nothing.
	Stream bool
	// HostRouted says that packets take the way of the host's routing table, through
	// whichever interface. Without it they leave by the interface of the GID.
	HostRouted bool
	// PeerCompletes says that after a successful SEND or WRITE the peer's device has the
	// message, and its memory the bytes (RoCE, VI/TCP). Without it (iWARP) success says only
	// that the local memory may be used again: a request that the peer refuses has already
	// succeeded, and both queue pairs fail afterwards.
	PeerCompletes bool
	// PartialWrites says that the peer checks a WRITE piece by piece: if it refuses the
	// WRITE, the bytes before the first that it may not write can be in its memory. Without
	// PartialWrites nothing of a refused WRITE is placed.
	PartialWrites bool
	// ReadSinkWrite says that the memory which a READ fills must be of a region with RemoteWrite: the device tells the peer
	// the region's key, and the peer writes there (iWARP, RFC 5040 §5.2.1). To open no more than necessary, register a
	// region of just the bytes to be filled. Without ReadSinkWrite LocalWrite is enough, and the peer learns no key.
	ReadSinkWrite bool

	// What IBTA asks for and not every driver does.

	WCDetails       bool // WC.SrcQP and WC.Solicit are set
	LocalErrors     bool // a request that fails for a local reason completes with that, and not with StatusLocalQP or StatusFlushed
	ResponderEvents bool // EventQPFatal also for a queue pair that fails answering its peer
	SolicitedErrors bool // Arm(true) wakes for failed and flushed requests too

	// RefusalsTold says that, on a stream, a queue pair whose request the peer refuses learns so: it has EventQPFatal, and a READ
	// fails with StatusRemoteAccess. Without it the queue pair has EventDisconnected, and the READ is flushed.
	RefusalsTold bool
}
