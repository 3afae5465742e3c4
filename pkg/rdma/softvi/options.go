// SPDX-License-Identifier: Apache-2.0

package softvi

import (
	"cmp"
	cryptorand "crypto/rand"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

// Addr is the address of a program (§2.2.2.2.1).
type Addr struct {
	IP            netip.Addr
	Port          uint16 // of VI/TCP at its host; 0: the calling device's own, which is the same everywhere
	Discriminator string // at most vitcp.MaxDiscriminator bytes
}

func (a Addr) String() string {
	return fmt.Sprintf("%q at %v", a.Discriminator, netip.AddrPortFrom(a.IP, a.Port))
}

// parse checks the address. d is the device that calls.
func (a Addr) parse(d *Device) (netip.AddrPort, vitcp.Discriminator, error) {
	if err := tcpqp.CheckAddr(a.IP); err != nil {
		return netip.AddrPort{}, vitcp.Discriminator{}, fmt.Errorf("%w: %w", rdma.ErrInvalid, err)
	}
	disc, err := vitcp.NewDiscriminator(a.Discriminator)
	return netip.AddrPortFrom(a.IP, cmp.Or(a.Port, d.Addr().Port())), disc, err
}

// Options say how a connection is to be, at one side. The zero value asks for all that there is.
// Both sides must have the same Unreliable, NoRDMAWrite and NoRDMARead; flow control is where both
// want it; of sizes the lesser one counts (§2.2.1).
type Options struct {
	// Discriminator is a caller's own: the called program sees it, and a peer's call finds
	// ours by it.
	Discriminator string
	// Security goes to the peer's program with the Connect Request or Accept (§3.2, Security
	// Information): private data, of at most vitcp.MaxSecurity bytes.
	Security []byte
	// Unreliable has a SEND or WRITE complete when TCP has it, and nothing of the peer is
	// known: the levels Unreliable and Reliable Delivery of the VI Architecture, which are
	// one on TCP. Without it the level is Reliable Reception.
	Unreliable bool
	// NoRDMAWrite and NoRDMARead do without.
	NoRDMAWrite, NoRDMARead bool
	// NoFlowControl lets a SEND leave before the peer has posted a receive for it, which
	// ends the connection if it has not when it arrives.
	NoFlowControl bool
	// MaxTransfer is the longest message, in bytes; 0: vitcp.DefaultMaxTransfer.
	MaxTransfer uint32
	// ReadWindow is how many RDMA READs wait for their answer, in each direction; 0:
	// vitcp.DefaultReadWindow.
	ReadWindow uint16
	// MaxSegment is the longest segment that is sent, in bytes; 0: vitcp.MaxSegment.
	MaxSegment int
}

// Validate reports what is wrong with the options.
func (o *Options) Validate() error {
	_, err := vitcp.NewDiscriminator(o.Discriminator)
	switch {
	case err != nil:
		return err
	case len(o.Security) > vitcp.MaxSecurity:
		return fmt.Errorf("%d bytes of security information, want at most %d: %w", len(o.Security), vitcp.MaxSecurity, rdma.ErrInvalid)
	case o.ReadWindow > vitcp.MaxReadWindow:
		return fmt.Errorf("window of %d READs, want at most %d: %w", o.ReadWindow, vitcp.MaxReadWindow, rdma.ErrInvalid)
	case o.MaxSegment != 0 && (o.MaxSegment < vitcp.MinSegment || o.MaxSegment > vitcp.MaxSegment):
		return fmt.Errorf("segments of %d bytes, want %d to %d: %w", o.MaxSegment, vitcp.MinSegment, vitcp.MaxSegment, rdma.ErrInvalid)
	}
	return nil
}

// attr is what the options offer.
func (o *Options) attr() vitcp.Attr {
	return vitcp.Attr{
		Reliable: !o.Unreliable, RDMAWrite: !o.NoRDMAWrite, RDMARead: !o.NoRDMARead, FlowControl: !o.NoFlowControl,
		MaxTransfer: cmp.Or(o.MaxTransfer, vitcp.DefaultMaxTransfer), ReadWindow: cmp.Or(o.ReadWindow, vitcp.DefaultReadWindow),
	}
}

// Terms are what both sides of a connection have agreed on.
type Terms struct {
	vitcp.Attr
	// Security is what the peer's program has sent along: Options.Security.
	Security []byte
	// Timestamps says that TCP uses them, so that an old segment is not taken for a new one
	// whose sequence number is the same (§2.2.2.2.4). Linux has them switched on,
	// net.ipv4.tcp_timestamps; without them do not move more than 4 GiB in a few minutes.
	Timestamps bool
}

// randomFirst draws the number before that of the first message.
func randomFirst() uint32 {
	var b [4]byte
	_, _ = cryptorand.Read(b[:]) // never fails
	return binary.BigEndian.Uint32(b[:])
}
