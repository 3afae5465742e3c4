// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// Option puts the SMC-R TCP option (RFC 7609 A.1) on handshakes and tells
// what the peer sent. Package synopt implements it for Linux.
type Option interface {
	// ControlDial prepares a socket before it connects, as in
	// [net.Dialer.Control].
	ControlDial(network, address string, c syscall.RawConn) error
	// ControlListen prepares a socket before it listens, as in
	// [net.ListenConfig.Control].
	ControlListen(network, address string, c syscall.RawConn) error
	// PeerOffered tells, on a connected socket, whether the SYN-ACK carried
	// the option.
	PeerOffered(c syscall.Conn) (bool, error)
	// SYNOffered tells, on an accepted socket, whether the SYN carried it.
	SYNOffered(c syscall.Conn) (bool, error)
}

// VersionSet says which versions of SMC-R may be used.
type VersionSet uint8

// Version sets. Version 1 is that of RFC 7609 and wants both ends in one IP
// subnet. Version 2 is for peers in any subnets that have an enterprise ID in
// common.
const (
	VersionsBoth VersionSet = iota // version 2 where the peer can, else version 1
	VersionsV1
	VersionsV2
)

// DefaultEID is the enterprise ID of stacks that are not given any: two of
// them find each other, wherever they are.
const DefaultEID = "KUBE-SMCR"

// DialectSet says which wire dialects of version 1 may be used.
type DialectSet uint8

// Dialect sets. Linux's dialect has no RMBE eye catchers and cursors from 0;
// RFC 7609's has them, and cursors from 4 (section 4.3).
const (
	DialectsBoth  DialectSet = iota // ask for Linux's, accept either
	DialectsLinux                   // Linux's only: decline a peer that insists on eye catchers
)

// Config says how a Stack behaves. The zero value of each field but Devices is
// useful.
type Config struct {
	// Devices carry the links, 1 to 8 of one provider, each under a name of its own. Link groups with a
	// peer that also has several get a link through each of two. Of those that
	// do equally well the first is taken.
	Devices []rdma.Device
	// Rail tells by the name of a device on which rail of the fabric it is, the
	// ports of one NIC or switch, say: the second link of a group is on another
	// rail than the first if it can be. nil means that each device is on one of
	// its own. It is asked while the stack's state is held, and must not wait.
	Rail func(device string) int
	// Option is the TCP option. nil means that this stack offers SMC-R to
	// nobody: every connection is plain TCP with reason PEERNOSMC.
	Option Option
	// RMBESizeBytes is the receive buffer of a connection, 16 KiB to 512 KiB,
	// a power of two. Default 512 KiB. Of a link group's connections the first 8 have
	// buffers of the configured sizes, the next 8 half as large ones, and further ones
	// a quarter; none is smaller for that than 128 KiB. Where the devices are in software, the peer
	// speaks version 2, and 512 KiB are configured, the first two have 2 MiB and the next two 1 MiB while
	// less than a quarter of MemoryBytes is in use.
	RMBESizeBytes int
	// SendBufferBytes is the send buffer of a connection, a power of two.
	// Default: RMBESizeBytes.
	SendBufferBytes int
	// RMBEsPerRMB is how many connections share one registered RMB at most. The
	// first RMB of a link group is smaller. Default 8.
	RMBEsPerRMB int
	// MemoryBytes bounds the registered memory of the stack, in whole pages; a connection
	// that would exceed it is declined with MEM. Default 512 MiB.
	MemoryBytes int
	// Account is charged for the registered memory, too: several stacks may share
	// one. What it refuses is declined likewise. nil: there is none.
	Account MemoryAccount
	// QueuePairs is charged for the queue pairs of the stack's links: several stacks
	// may share it. If it refuses one for a first contact, the connection is declined
	// with MEM; a link group that it refuses another link has one less. nil: there is
	// none, and the devices are the limit.
	QueuePairs QueuePairAccount
	// Coalesce lets small pieces wait for more. Default: none waits.
	Coalesce Coalesce
	// MaxConns bounds the connections of the stack. Default 4096.
	MaxConns int
	// MaxHalfOpen bounds the rendezvous of a server whose clients have buffers and
	// have not confirmed yet; a quarter of them may be of one address. Others wait for
	// a second at most, and are declined then. Default 256.
	MaxHalfOpen int
	// Versions limits the versions of SMC-R. Default VersionsBoth.
	Versions VersionSet
	// EIDs are the enterprise IDs for version 2, at most 8, the preferred one
	// first; peers need one in common (see [clc.ParseUEID] for what they are
	// made of). Default: DefaultEID.
	EIDs []clc.EID
	// Hostname is what peers of version 2 are told to show people; 32 bytes of
	// it at most.
	Hostname string
	// ConnsPerGroup and LinksPerGroup bound a link group: 16 to 255
	// connections, default 255, and 1 to 8 links, default 2. In version 2 the
	// smaller numbers of both sides hold.
	ConnsPerGroup, LinksPerGroup int
	// Route tells how the device with the address src reaches the RNIC with
	// the address dst, which is not in its subnet. It is asked for each new
	// link, some of the time while the stack's state is held, and must not
	// wait: a gateway whose MAC address is not known yet has none. nil means
	// that devices find the way themselves, as software devices do.
	Route func(src, dst netip.Addr) (clc.Route, error)
	// Dialects limits the wire dialects. Default DialectsBoth.
	Dialects DialectSet
	// Prefixes are the addresses of the interface that TCP uses, with the
	// length of their prefix; version 1 needs one in the peer's subnet
	// (RFC 7609 3.5.1.2). Empty: the
	// stack derives them from the connection's local address (/24 and /64)
	// unless AnyPrefix is set.
	Prefixes []netip.Prefix
	// AnyPrefix makes a server accept clients from other IP subnets, where
	// the operator knows that the RoCE fabric is routed.
	AnyPrefix bool
	// MessageTimeout bounds the wait for each CLC message of the peer
	// (RFC 7609 C.5). Default 6 s, as in Linux.
	MessageTimeout time.Duration
	// AnswerPoll is how long the device's goroutine looks, after it has written
	// a small message to the program behind [Conn.RelayTo], for its answer
	// before it sleeps, as long as answers come within that time: processor
	// time for shorter round trips. Default 75 us, at most 200 us; negative: not at all.
	AnswerPoll time.Duration
	// CloseTimeout bounds the wait for the peer's close (RFC 7609 4.8.1).
	// Default 60 s.
	CloseTimeout time.Duration
	// IdleGroupTimeout ends a link group that carries no connection.
	// Default 600 s; a client waits 10 s longer, so that the server does it.
	IdleGroupTimeout time.Duration
	// Hooks report what happens. They are called while the stack's state is
	// held, some by the device's goroutine: they must neither block nor call
	// methods of the stack or its connections.
	Hooks Hooks
}

// Hooks are callbacks of a Stack; nil ones are skipped.
type Hooks struct {
	// ConnOpened is called when a rendezvous ends with SMC-R or fallback.
	ConnOpened func(Info)
	// ConnClosed is called once for each Conn that was opened, with its last
	// counters.
	ConnClosed func(Info)
	// GroupChanged is called when a link group changes state.
	GroupChanged func(GroupInfo)
	// Malformed is called for each message of a peer that was not understood, or that
	// contradicts what came before. A peer that keeps to the protocol causes none.
	Malformed func(where string, err error)
	// Failed is called when something else went wrong: the stack, its devices or the
	// system lack something, or a rendezvous broke. The connection concerned is TCP, or
	// reset; a link group has a link less.
	Failed func(what string, err error)
	// Trespass is called when a link has ended because the peer with this address
	// asked for memory that is not its own.
	Trespass func(peer netip.Addr, err error)
	// PathMTU is called when a link has ended because the network did not carry its large packets, as far as that can be told.
	// The next link groups with the peer have a smaller path MTU, for some minutes.
	PathMTU func(PathMTU)
}

func (c *Config) setDefaults() {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.RMBESizeBytes, 512<<10)
	def(&c.SendBufferBytes, c.RMBESizeBytes)
	def(&c.RMBEsPerRMB, 8)
	def(&c.MemoryBytes, 512<<20)
	def(&c.MaxConns, 4096)
	def(&c.MaxHalfOpen, defaultHalfOpen)
	def(&c.ConnsPerGroup, clc.DefaultMaxConns)
	def(&c.LinksPerGroup, clc.DefaultMaxLinks)
	if len(c.EIDs) == 0 {
		c.EIDs = []clc.EID{defaultEID()}
	}
	if c.MessageTimeout == 0 {
		c.MessageTimeout = clc.DefaultMessageTimeout
	}
	if c.AnswerPoll == 0 {
		c.AnswerPoll = answerTime
	}
	if c.CloseTimeout == 0 {
		c.CloseTimeout = 60 * time.Second
	}
}

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	c.setDefaults()
	switch {
	case len(c.Devices) == 0 || len(c.Devices) > linkgroup.MaxLinks || slices.Contains(c.Devices, nil):
		return fmt.Errorf("smcr config: %d Devices: want 1 to %d, none of them nil", len(c.Devices), linkgroup.MaxLinks)
	case !validBuffer(c.RMBESizeBytes):
		return fmt.Errorf("smcr config: RMBESizeBytes %d: want a power of two from 16384 to 524288", c.RMBESizeBytes)
	case !validBuffer(c.SendBufferBytes):
		return fmt.Errorf("smcr config: SendBufferBytes %d: want a power of two from 16384 to 524288", c.SendBufferBytes)
	case c.RMBEsPerRMB < 1 || c.RMBEsPerRMB > 255:
		return fmt.Errorf("smcr config: RMBEsPerRMB %d: want 1 to 255", c.RMBEsPerRMB)
	case c.MemoryBytes < 0 || c.MaxConns < 0 || c.MaxHalfOpen < 0 || c.MessageTimeout < 0 || c.CloseTimeout < 0 || c.IdleGroupTimeout < 0:
		return errors.New("smcr config: limits and timeouts must not be negative")
	case c.AnswerPoll > maxAnswerPoll:
		return fmt.Errorf("smcr config: AnswerPoll %v: want at most %v", c.AnswerPoll, maxAnswerPoll)
	case c.Dialects > DialectsLinux:
		return fmt.Errorf("smcr config: unknown dialect set %d", c.Dialects)
	case c.Versions > VersionsV2:
		return fmt.Errorf("smcr config: unknown version set %d", c.Versions)
	case c.ConnsPerGroup < clc.MinMaxConns || c.ConnsPerGroup > clc.DefaultMaxConns:
		return fmt.Errorf("smcr config: ConnsPerGroup %d: want %d to %d", c.ConnsPerGroup, clc.MinMaxConns, clc.DefaultMaxConns)
	case c.LinksPerGroup < clc.MinMaxLinks || c.LinksPerGroup > linkgroup.MaxLinks:
		return fmt.Errorf("smcr config: LinksPerGroup %d: want %d to %d", c.LinksPerGroup, clc.MinMaxLinks, linkgroup.MaxLinks)
	case len(c.EIDs) > clc.MaxEIDs:
		return fmt.Errorf("smcr config: %d EIDs: want at most %d", len(c.EIDs), clc.MaxEIDs)
	}
	for i, d := range c.Devices {
		same := func(other rdma.Device) bool { return other.Name() == d.Name() }
		if first := slices.IndexFunc(c.Devices, same); first != i {
			return fmt.Errorf("smcr config: Devices[%d] and Devices[%d] have the same name %q: give each device once, and a name of its own",
				first, i, d.Name())
		}
	}
	for i, e := range c.EIDs {
		if _, err := clc.ParseUEID(e.String()); err != nil {
			return fmt.Errorf("smcr config: EIDs[%d]: %w", i, err)
		}
	}
	return c.Coalesce.validate()
}

func validBuffer(n int) bool { return n >= 16<<10 && n <= 512<<10 && n&(n-1) == 0 }

// Mode says what carries a connection.
type Mode uint8

// Modes.
const (
	ModeTCP Mode = iota
	ModeSMCR
)

func (m Mode) String() string {
	if m == ModeSMCR {
		return "SMC-R"
	}
	return "TCP"
}

// Role is the side in the rendezvous: whoever opened the TCP connection that
// made the link group is its client.
type Role uint8

// Roles.
const (
	RoleClient Role = iota
	RoleServer
)

func (r Role) String() string {
	if r == RoleServer {
		return "server"
	}
	return "client"
}

// Info describes a connection.
type Info struct {
	Local, Peer net.Addr
	Mode        Mode
	// Reason says why the connection is TCP; 0 with SMC-R.
	Reason clc.Reason
	// PeerDeclined is set when the peer sent the reason.
	PeerDeclined bool
	Role         Role
	Opened       time.Time
	Setup        time.Duration // of the rendezvous, after the TCP handshake
	BytesSent    uint64        // by the application
	BytesRecv    uint64
	// With SMC-R:
	GroupID      uint32 // link group, unique in the process
	LinkID       uint8
	FirstContact bool
	Version      uint8 // of SMC-R
	// NoV2 is why version 1 was chosen though both sides know version 2. Only
	// the server learns it.
	NoV2       clc.Reason
	Token      uint32 // our alert token
	State      string // of RFC 7609 4.8
	SendBuffer int    // bytes
	RMBE       int    // bytes, ours
	PeerRMBE   int    // bytes, the peer's
	RDMAWrites uint64
	CDCSent    uint64
	CDCRecv    uint64
}

// GroupInfo describes a link group.
type GroupInfo struct {
	ID      uint32
	Role    Role
	PeerID  clc.PeerID
	State   string
	Dialect string
	// Redundancy is SINGLE, SYMMETRIC, ASYMMETRIC LOCAL (both links share our
	// RNIC) or ASYMMETRIC PEER (they share the peer's); RFC 7609 2.2.1.
	Redundancy string
	// Degraded says that the group was SYMMETRIC and is not now.
	Degraded bool
	Version  uint8
	// Of version 2: the enterprise ID that both sides have, the release, and
	// what the peer calls itself: a claim that nobody checked, of the characters
	// that host names have, and '?' for others.
	EID      string
	Release  uint8
	PeerHost string
	// NoV2 is, at a server, why a group of version 1 is not of version 2 though
	// both sides know that.
	NoV2     clc.Reason
	Conns    int
	RMBBytes int
	Opened   time.Time
	Links    []LinkInfo
	Err      error // why it ended
}

// LinkInfo describes a link of a group.
type LinkInfo struct {
	ID        uint8
	State     string
	Device    string
	LocalGID  rdma.GID
	PeerGID   rdma.GID
	LocalQPN  rdma.QPN
	PeerQPN   rdma.QPN
	MTU       rdma.MTU
	UserID    uint32
	Conns     int
	BytesSent uint64
	BytesRecv uint64
}

// Stats are the counters of a Stack since it started.
type Stats struct {
	MemoryBytes   uint64 // registered now
	Groups        int
	Conns         int
	Closing       int // of Conns: closed in order, while the peer has not closed and may still read
	ConnsSMCR     uint64
	ConnsTCP      uint64
	BytesSentSMCR uint64 // of connections that ended and live ones
	BytesRecvSMCR uint64
	CLCSent       uint64 // messages, also those that follow
	LLCSent       uint64
	CDCSent       uint64
	AnswerPolls   uint64 // how often answers of programs were looked for (Config.AnswerPoll)
	AnswersPolled uint64 // and found
	RMBWaits      uint64 // rendezvous that had to wait for CONFIRM RKEY
	MessagesBad   uint64
	GroupsGaveWay uint64 // idle ones that ended before their time, for others' sake
	Trespasses    uint64 // links that ended because the peer asked for memory that is not its own
}
