// SPDX-License-Identifier: Apache-2.0

package smcnl

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Side is which end of a connection the kernel was.
type Side string

// Sides.
const (
	Client Side = "client"
	Server Side = "server"
)

// Fallback is a kind of connection that became TCP.
type Fallback struct {
	Side   Side
	Reason clc.Reason
}

// String is the side, the code as Linux's tools print it, and its name.
func (f Fallback) String() string {
	return fmt.Sprintf("%s 0x%08x %s", f.Side, uint32(f.Reason), f.Reason)
}

// MarshalText makes a Fallback the key of a JSON object.
func (f Fallback) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (f *Fallback) UnmarshalText(text []byte) error {
	words := strings.Fields(string(text))
	if len(words) < 2 {
		return fmt.Errorf("fallback %q: want a side and a code", text)
	}
	code, err := strconv.ParseUint(words[1], 0, 32)
	if err != nil {
		return fmt.Errorf("fallback %q: %w", text, err)
	}
	*f = Fallback{Side: Side(words[0]), Reason: clc.Reason(code)}
	return nil
}

// Counters are what the kernel counted in SMC-R since the module was loaded.
type Counters struct {
	// Connections whose rendezvous ended with SMC-R.
	ClientV1 uint64 `json:"clientV1"`
	ClientV2 uint64 `json:"clientV2"`
	ServerV1 uint64 `json:"serverV1"`
	ServerV2 uint64 `json:"serverV2"`
	// Rendezvous that broke the connection.
	ClientErrors uint64 `json:"clientErrors"`
	ServerErrors uint64 `json:"serverErrors"`
	// Fallbacks counts connections that became TCP; their totals count those
	// for which the kernel had no room among its reasons too.
	Fallbacks       map[Fallback]uint64 `json:"fallbacks,omitempty"`
	ClientFallbacks uint64              `json:"clientFallbacks"`
	ServerFallbacks uint64              `json:"serverFallbacks"`

	RxBytes uint64 `json:"rxBytes"`
	TxBytes uint64 `json:"txBytes"`
	RxCalls uint64 `json:"rxCalls"`
	TxCalls uint64 `json:"txCalls"`
	// Urgent counts the calls that sent urgent data.
	Urgent uint64 `json:"urgent"`
	// Rx and Tx say how the buffers of each direction fared.
	Rx Buffers `json:"rx"`
	Tx Buffers `json:"tx"`
}

// Buffers counts what happened to buffers.
type Buffers struct {
	// Full and PeerFull count calls that found no room, or no data.
	Full     uint64 `json:"full"`
	PeerFull uint64 `json:"peerFull"`
	// Small and PeerSmall count transfers larger than the buffer.
	Small      uint64 `json:"small"`
	PeerSmall  uint64 `json:"peerSmall"`
	Reused     uint64 `json:"reused"`
	Allocated  uint64 `json:"allocated"`
	Downgraded uint64 `json:"downgraded"` // for lack of memory
}

// Successes is the number of connections that became SMC-R.
func (c Counters) Successes() uint64 { return c.ClientV1 + c.ClientV2 + c.ServerV1 + c.ServerV2 }

// Sub is what happened between before and c. Kinds of fallbacks that did not
// happen are left out. The kernel counts each kind in 16 bits, so that fewer than 65,536 of one must
// have happened; its totals have 64.
func (c Counters) Sub(before Counters) Counters {
	d := Counters{
		ClientV1: c.ClientV1 - before.ClientV1, ClientV2: c.ClientV2 - before.ClientV2,
		ServerV1: c.ServerV1 - before.ServerV1, ServerV2: c.ServerV2 - before.ServerV2,
		ClientErrors: c.ClientErrors - before.ClientErrors, ServerErrors: c.ServerErrors - before.ServerErrors,
		ClientFallbacks: c.ClientFallbacks - before.ClientFallbacks, ServerFallbacks: c.ServerFallbacks - before.ServerFallbacks,
		RxBytes: c.RxBytes - before.RxBytes, TxBytes: c.TxBytes - before.TxBytes,
		RxCalls: c.RxCalls - before.RxCalls, TxCalls: c.TxCalls - before.TxCalls,
		Urgent: c.Urgent - before.Urgent,
		Rx:     c.Rx.sub(before.Rx), Tx: c.Tx.sub(before.Tx),
	}
	note := func(f Fallback) {
		if n := uint16(c.Fallbacks[f] - before.Fallbacks[f]); n != 0 { //nolint:gosec // modulo 65,536 is the point
			if d.Fallbacks == nil {
				d.Fallbacks = make(map[Fallback]uint64)
			}
			d.Fallbacks[f] = uint64(n)
		}
	}
	for f := range c.Fallbacks {
		note(f)
	}
	for f := range before.Fallbacks { // one that is 0 again is not in c
		note(f)
	}
	return d
}

func (b Buffers) sub(o Buffers) Buffers {
	return Buffers{
		Full: b.Full - o.Full, PeerFull: b.PeerFull - o.PeerFull, Small: b.Small - o.Small, PeerSmall: b.PeerSmall - o.PeerSmall,
		Reused: b.Reused - o.Reused, Allocated: b.Allocated - o.Allocated, Downgraded: b.Downgraded - o.Downgraded,
	}
}

// System is what the kernel says of itself.
type System struct {
	Version  uint8  `json:"version"`
	Release  uint8  `json:"release"`
	Hostname string `json:"hostname"`
	SMCRv2   bool   `json:"smcrV2"`
}

// Group is a link group of SMC-R.
type Group struct {
	ID           uint32 `json:"id"`
	Role         Side   `json:"role"`
	Redundancy   string `json:"redundancy"` // NONE SINGLE SYMMETRIC ASYMMETRIC PEER, ASYMMETRIC LOCAL
	PNetID       string `json:"pnetID,omitempty"`
	Conns        uint32 `json:"conns"`
	Version      uint8  `json:"version"`
	Release      uint8  `json:"release"`
	EID          string `json:"eid,omitempty"`
	PeerHost     string `json:"peerHost,omitempty"`
	MaxConns     uint8  `json:"maxConns"`
	MaxLinks     uint8  `json:"maxLinks"`
	SendBufBytes uint64 `json:"sendBufBytes"`
	RMBBytes     uint64 `json:"rmbBytes"`
	Links        []Link `json:"links,omitempty"`
}

// Link is a link of a group.
type Link struct {
	ID         uint8      `json:"id"`
	Device     string     `json:"device"`
	Port       uint8      `json:"port"`
	GID        netip.Addr `json:"gid"`
	PeerGID    netip.Addr `json:"peerGID"`
	Conns      uint32     `json:"conns"`
	State      string     `json:"state"` // UNUSED INACTIVE ACTIVATING ACTIVE
	UserID     uint32     `json:"userID"`
	PeerUserID uint32     `json:"peerUserID"`
}

// Device is an RDMA device that the kernel uses for SMC-R.
type Device struct {
	Name   string `json:"name"`
	PCI    string `json:"pci,omitempty"`
	Groups uint32 `json:"groups"` // that have a link on it
	Ports  []Port `json:"ports"`
}

// Port is a port of a device.
type Port struct {
	Number uint8 `json:"number"`
	// PNetID is the physical network, and PNetIDByUser that the table says so and
	// not the firmware.
	PNetID       string `json:"pnetID,omitempty"`
	PNetIDByUser bool   `json:"pnetIDByUser,omitempty"`
	NetDev       uint32 `json:"netDev"` // index of the network interface, 0 if there is none
	Active       bool   `json:"active"`
	Links        uint32 `json:"links"`
}

// Modes of a socket.
const (
	ModeSMCR = "SMCR" // also of those that are not connected yet
	ModeTCP  = "TCP"  // it fell back
)

// Socket is a socket of SMC: of AF_SMC, or of AF_INET and AF_INET6 with the protocol
// SMC. Of the second kind [Sockets] knows ports, but no addresses.
type Socket struct {
	State string         `json:"state"`
	Mode  string         `json:"mode"` // ModeSMCR, ModeTCP, SMCD
	Local netip.AddrPort `json:"local"`
	Peer  netip.AddrPort `json:"peer"`
	// IPv6 says that the program opened a socket of IPv6, also if the peer's address is IPv4. It is not known of
	// what a listener accepted.
	IPv6 bool `json:"ipv6,omitempty"`
	// Cookie tells the socket from all that there are and were since the machine started.
	Cookie uint64 `json:"cookie,omitempty"`
	// Shutdown says which directions have ended for this side.
	Shutdown Shutdown `json:"shutdown,omitempty"`
	// Inode is that of the socket's files, in /proc/PID/fd. It is 0 if no program has the
	// socket, as before accept and after close.
	Inode uint64 `json:"inode,omitempty"`
	UID   uint32 `json:"uid,omitempty"`
	// Reason and PeerReason say why it is TCP: what this side found, and what
	// the peer's Decline said.
	Reason     clc.Reason `json:"reason,omitempty"`
	PeerReason clc.Reason `json:"peerReason,omitempty"`
	// Of SMC-R:
	Token         uint32 `json:"token,omitempty"`
	SendBufBytes  uint32 `json:"sendBufBytes,omitempty"`
	RMBEBytes     uint32 `json:"rmbeBytes,omitempty"`
	PeerRMBEBytes uint32 `json:"peerRMBEBytes,omitempty"`
	LinkID        uint8  `json:"linkID,omitempty"`
	Device        string `json:"device,omitempty"`
	// GID and PeerGID are the ends of its link.
	GID     netip.Addr `json:"gid,omitzero"`
	PeerGID netip.Addr `json:"peerGID,omitzero"`
	// Role is that of this side in the link group, and so in the connection.
	Role Side `json:"role,omitempty"`
}

// Shutdown says which directions of a connection have ended.
type Shutdown uint8

// Directions that have ended.
const (
	ShutReceive Shutdown = 1 << iota
	ShutSend

	ShutBoth = ShutReceive | ShutSend
)

// States of a socket that are not those of a connection.
const (
	StateInit   = "INIT" // new, or the rendezvous is under way
	StateClosed = "CLOSED"
	StateListen = "LISTEN"
	// StateActive is that of a connection of which no side has ended anything.
	StateActive = "ACTIVE"
)

// PNet says that a network or RDMA device belongs to the physical network
// Name.
type PNet struct {
	Name   string `json:"name"`
	NetDev string `json:"netDev,omitempty"`
	Device string `json:"device,omitempty"`
	Port   uint8  `json:"port,omitempty"`
}
