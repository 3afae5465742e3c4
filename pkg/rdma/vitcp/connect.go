// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Discriminator tells the programs behind one IP address and TCP port apart (§2.2.2.2.1): up to
// [MaxDiscriminator] bytes. Two are equal, by ==, when length and bytes are.
type Discriminator struct {
	n uint8
	b [MaxDiscriminator]byte // zero behind n
}

// NewDiscriminator returns the discriminator of these bytes.
func NewDiscriminator(s string) (Discriminator, error) {
	if len(s) > MaxDiscriminator {
		return Discriminator{}, fmt.Errorf("discriminator of %d bytes, want at most %d: %w", len(s), MaxDiscriminator, rdma.ErrInvalid)
	}
	d := Discriminator{n: uint8(len(s))}
	copy(d.b[:], s)
	return d, nil
}

func (d Discriminator) String() string { return string(d.b[:d.n]) }

// Attr are the attributes of a connection: what one side offers, or what both have agreed on
// (§3.2).
type Attr struct {
	Reliable    bool   // reliable reception; without it requests complete when TCP has them
	RDMAWrite   bool   // RDMA WRITE is enabled
	RDMARead    bool   // RDMA READ is enabled
	FlowControl bool   // a message that takes a receive waits until there is one
	Peer        bool   // both sides call
	MaxTransfer uint32 // bytes of a message
	ReadWindow  uint16 // RDMA READs that wait for their answer, in each direction
}

// Flag bits of the attributes.
const (
	attrReliable = 1 << iota
	attrWrite
	attrRead
	attrFlowControl
	attrPeer
)

func (a Attr) bits() uint16 {
	var f uint16
	for i, set := range [...]bool{a.Reliable, a.RDMAWrite, a.RDMARead, a.FlowControl, a.Peer} {
		if set {
			f |= 1 << i
		}
	}
	return f
}

// CE is the connection establishment header (§3.2):
//
//	|       Calling Attributes      | Calling Discriminator Length  |
//	|                            MTU Size                           |
//	|                Calling Discriminator (16 bytes)               |
//	|    Calling RDMA Read Window   |  Called Discriminator Length  |
//	|                Called Discriminator (16 bytes)                |
//	|                      Security Information                     |
//
// The discriminators are those of the request in the answer, too; the attributes of a
// Connect Accept are those that are agreed on.
type CE struct {
	Attr
	Calling, Called Discriminator
	Security        []byte // at most MaxSecurity
}

// ParseCE decodes what is behind the segment header. Its result refers to b.
func ParseCE(b []byte) (CE, error) {
	if len(b) < CELen || len(b) > CELen+MaxSecurity {
		return CE{}, fmt.Errorf("%w: CE header of %d bytes, want %d to %d", ErrProtocol, len(b), CELen, CELen+MaxSecurity)
	}
	f := binary.BigEndian.Uint16(b)
	c := CE{Attr: Attr{
		Reliable: f&attrReliable != 0, RDMAWrite: f&attrWrite != 0, RDMARead: f&attrRead != 0,
		FlowControl: f&attrFlowControl != 0, Peer: f&attrPeer != 0,
		MaxTransfer: binary.BigEndian.Uint32(b[4:]), ReadWindow: binary.BigEndian.Uint16(b[24:]),
	}}
	var err error
	if c.Calling, err = parseDiscriminator(b[2:4], b[8:24]); err != nil {
		return CE{}, fmt.Errorf("calling discriminator: %w", err)
	}
	if c.Called, err = parseDiscriminator(b[26:28], b[28:44]); err != nil {
		return CE{}, fmt.Errorf("called discriminator: %w", err)
	}
	if len(b) > CELen {
		c.Security = b[CELen:]
	}
	return c, nil
}

// parseDiscriminator takes what the length says, whatever stands behind it.
func parseDiscriminator(length, room []byte) (Discriminator, error) {
	n := binary.BigEndian.Uint16(length)
	if n > MaxDiscriminator {
		return Discriminator{}, fmt.Errorf("%w: length %d, want at most %d", ErrProtocol, n, MaxDiscriminator)
	}
	d := Discriminator{n: uint8(n)}
	copy(d.b[:], room[:n])
	return d, nil
}

// Append encodes the header.
func (c *CE) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, c.bits())
	b = binary.BigEndian.AppendUint16(b, uint16(c.Calling.n))
	b = binary.BigEndian.AppendUint32(b, c.MaxTransfer)
	b = append(b, c.Calling.b[:]...)
	b = binary.BigEndian.AppendUint16(b, c.ReadWindow)
	b = binary.BigEndian.AppendUint16(b, uint16(c.Called.n))
	b = append(b, c.Called.b[:]...)
	return append(b, c.Security...)
}

// connectMessage is a message of connection establishment. A refusal may come without CE.
type connectMessage struct {
	typ    Type
	first  uint32 // the number before that of the sender's first message
	posted uint16 // its receives until now
	ce     CE
}

// parseConnect decodes a whole message. It keeps nothing of b.
func parseConnect(b []byte) (connectMessage, error) {
	h, err := ParseHeader(b[:min(len(b), HeaderLen)])
	switch {
	case err != nil:
		return connectMessage{}, err
	case !h.Type.isConnect():
		return connectMessage{}, fmt.Errorf("%w: %v before the connection is established", ErrProtocol, h.Type)
	case int(h.Length) != len(b):
		return connectMessage{}, fmt.Errorf("%w: %v of %d bytes says that it has %d", ErrProtocol, h.Type, len(b), h.Length)
	}
	m := connectMessage{typ: h.Type, first: h.Message, posted: h.Posted}
	if len(b) > HeaderLen {
		if m.ce, err = ParseCE(b[HeaderLen:]); err != nil {
			return connectMessage{}, fmt.Errorf("%v: %w", h.Type, err)
		}
		m.ce.Security = slices.Clone(m.ce.Security)
	}
	return m, nil
}

// bytes encodes the message.
func (m *connectMessage) bytes() []byte {
	h := Header{
		Type: m.typ, Flags: FlagEnd, Length: uint16(HeaderLen + CELen + len(m.ce.Security)),
		Message: m.first, Posted: m.posted,
	}
	return m.ce.Append(h.Append(nil))
}

// agree returns the attributes of a connection between a caller and the callee that accepts
// (§2.2.1, §3.2): flags must be the same, but that flow control and peer-to-peer hold only
// where both want them; sizes are the lesser ones.
func agree(caller, callee Attr) (Attr, error) {
	a := callee
	a.FlowControl = caller.FlowControl && callee.FlowControl
	a.Peer = caller.Peer && callee.Peer
	a.MaxTransfer = min(caller.MaxTransfer, callee.MaxTransfer)
	a.ReadWindow = min(caller.ReadWindow, callee.ReadWindow)
	switch {
	case caller.Reliable != callee.Reliable:
		return Attr{}, fmt.Errorf("%w: reliable %v at the caller, %v here", ErrReliability, caller.Reliable, callee.Reliable)
	case caller.RDMAWrite != callee.RDMAWrite:
		return Attr{}, fmt.Errorf("%w: %v at the caller, %v here", ErrRDMAWrite, caller.RDMAWrite, callee.RDMAWrite)
	case caller.RDMARead != callee.RDMARead:
		return Attr{}, fmt.Errorf("%w: %v at the caller, %v here", ErrRDMARead, caller.RDMARead, callee.RDMARead)
	case a.MaxTransfer == 0:
		return Attr{}, fmt.Errorf("%w: 0 bytes", ErrMaxTransfer)
	}
	return a, nil
}

// accepted reports what is wrong with the attributes of a Connect Accept: it may only have
// less than was offered.
func (a Attr) accepted(offered Attr) error {
	want, err := agree(offered, a)
	switch {
	case err != nil:
		return err
	case a.MaxTransfer > offered.MaxTransfer:
		return fmt.Errorf("%w: %d bytes accepted, %d offered", ErrMaxTransfer, a.MaxTransfer, offered.MaxTransfer)
	case want != a:
		return fmt.Errorf("%w: accepted %+v, offered %+v", ErrProtocol, a, offered)
	}
	return nil
}
