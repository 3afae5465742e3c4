// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"cmp"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// Role says which of both peers a socket is.
type Role uint8

// Roles.
const (
	Connecting Role = iota // sends Hello
	Accepting              // answers with HelloAck
)

func (r Role) String() string {
	switch r {
	case Connecting:
		return "connecting"
	case Accepting:
		return "accepting"
	}
	return fmt.Sprintf("Role(%d)", uint8(r))
}

// Right is what an advert lets the peer do.
type Right uint8

// Rights.
const (
	PeerReads  Right = iota // by RDMA READ: bytes of our stream
	PeerWrites              // by RDMA WRITE: a buffer of a Read
)

// Memory opens memory of the program to the peer. The socket calls it while it handles an input or a command.
type Memory interface {
	// AdvertiseStream makes a key for n bytes of our stream from position pos, which are in one Write. The
	// key grants the peer to read these bytes and nothing else.
	AdvertiseStream(pos uint64, n uint32) (rdma.RKey, uint64, error)
	// AdvertiseRead makes a key for the buffer of a Read, all of it, which grants the peer to write there and
	// nothing else.
	AdvertiseRead(id uint64, n uint32) (rdma.RKey, uint64, error)
	// OpenSink makes the buffer of a Read one that RDMA READs fill, until OutRead; it comes before each of them. After an error
	// the peer is asked to send the bytes.
	OpenSink(id uint64) error
	// Revoke makes a key worthless, at once: what it opened is the program's again when Revoke returns.
	Revoke(key rdma.RKey)
}

// Config describes a socket. Zero values mean the defaults.
type Config struct {
	Role        Role
	Layout      bsdh.Layout
	RecvBuffers int    // receive buffers
	RecvBytes   uint32 // size of each
	SendBytes   uint32 // size of the buffers from which messages are sent; 0: as RecvBytes
	SendDepth   int    // messages under way in the send queue
	MaxAdverts  int    // adverts that the peer may have outstanding
	// Sizes to which receive buffers may change when the peer asks (§10.6); 0: they stay. If they may change, OutPost and
	// OutDrop come, and the receive queue must take twice RecvBuffers.
	MinRecvBytes, MaxRecvBytes uint32

	// Keep says that the shell understands OutKeep: receive buffers that hold little are emptied into private memory while the
	// program does not read (§9.5.6). The private memory takes up to RecvBuffers times RecvBytes, with Suspends three times that.
	Keep bool

	// Suspends says that the shell understands OutSuspended: the peer may move the connection, and so may Suspend (§13). It needs Keep:
	// what the program has not read must survive its receive buffer.
	Suspends bool

	// IRD and ORD are how many RDMA READs may be under way: of the peer, which we serve, and of ours. The send queue must have room for
	// ORD of them beside SendDepth messages and MaxRDMAWrites.
	IRD, ORD int
	// ZcopyBytes is the size, in bytes, above which RDMA moves what is in direct memory; NoZcopy: never.
	ZcopyBytes uint32

	SetupTimeout   time.Duration
	SuspendTimeout time.Duration // from SuspComm to the Hello on the next connection
	Memory         Memory        // may be nil only with NoZcopy
}

// Validate reports what no socket can be made of.
func (c *Config) Validate() error {
	switch {
	case c.Role > Accepting:
		return fmt.Errorf("%w: role %v", ErrInvalid, c.Role)
	case c.Layout > bsdh.LayoutIBTA:
		return fmt.Errorf("%w: layout %v", ErrInvalid, c.Layout)
	case c.RecvBuffers != 0 && c.RecvBuffers < MinRecvBuffers || c.RecvBuffers > MaxRecvBuffers:
		return fmt.Errorf("%w: %d receive buffers, want %d to %d", ErrInvalid, c.RecvBuffers, MinRecvBuffers, MaxRecvBuffers)
	case c.RecvBytes != 0 && c.RecvBytes < bsdh.MinBuffer || c.RecvBytes > bsdh.MaxBytes:
		return fmt.Errorf("%w: receive buffers of %d bytes, want %d at least", ErrInvalid, c.RecvBytes, bsdh.MinBuffer)
	case c.SendBytes != 0 && c.SendBytes < bsdh.MinBuffer || c.SendBytes > bsdh.MaxBytes:
		return fmt.Errorf("%w: send buffers of %d bytes, want %d at least", ErrInvalid, c.SendBytes, bsdh.MinBuffer)
	case c.MinRecvBytes != 0 && (c.MinRecvBytes < bsdh.MinBuffer || c.MinRecvBytes > cmp.Or(c.RecvBytes, DefaultRecvBytes)):
		return fmt.Errorf("%w: receive buffers of %d bytes or more, want %d at least, and no more than they begin with", ErrInvalid, c.MinRecvBytes, bsdh.MinBuffer)
	case c.MaxRecvBytes != 0 && (c.MaxRecvBytes < cmp.Or(c.RecvBytes, DefaultRecvBytes) || c.MaxRecvBytes > bsdh.MaxBytes):
		return fmt.Errorf("%w: receive buffers of up to %d bytes, want what they begin with at least", ErrInvalid, c.MaxRecvBytes)
	case c.Suspends && !c.Keep:
		return fmt.Errorf("%w: Suspends without Keep", ErrInvalid)
	case c.SendDepth < 0 || c.MaxAdverts < 0 || c.MaxAdverts > MaxMaxAdverts:
		return fmt.Errorf("%w: send depth %d, %d adverts, want %d at most", ErrInvalid, c.SendDepth, c.MaxAdverts, MaxMaxAdverts)
	case c.IRD < 0 || c.IRD > 0xffff || c.ORD < 0 || c.ORD > 0xffff:
		return fmt.Errorf("%w: IRD %d and ORD %d", ErrInvalid, c.IRD, c.ORD)
	case c.Memory == nil && c.ZcopyBytes != NoZcopy:
		return fmt.Errorf("%w: no memory to advertise", ErrInvalid)
	}
	return nil
}

// withDefaults fills in the defaults of fields that are zero.
func (c Config) withDefaults() Config {
	c.RecvBuffers = cmp.Or(c.RecvBuffers, DefaultRecvBuffers)
	c.RecvBytes = cmp.Or(c.RecvBytes, DefaultRecvBytes)
	c.MinRecvBytes = cmp.Or(c.MinRecvBytes, c.RecvBytes)
	c.MaxRecvBytes = cmp.Or(c.MaxRecvBytes, c.RecvBytes)
	c.SendBytes = cmp.Or(c.SendBytes, c.RecvBytes)
	c.SendDepth = cmp.Or(c.SendDepth, DefaultSendDepth)
	c.MaxAdverts = cmp.Or(c.MaxAdverts, DefaultMaxAdverts)
	c.IRD = cmp.Or(c.IRD, DefaultReads)
	c.ORD = cmp.Or(c.ORD, DefaultReads)
	c.ZcopyBytes = cmp.Or(c.ZcopyBytes, DefaultZcopyBytes)
	c.SetupTimeout = cmp.Or(c.SetupTimeout, DefaultSetupTimeout)
	c.SuspendTimeout = cmp.Or(c.SuspendTimeout, DefaultSuspendTimeout)
	return c
}

// isLong reports whether RDMA should move n bytes.
func (c *Config) isLong(n uint32) bool { return n > c.ZcopyBytes }
