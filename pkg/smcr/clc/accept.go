// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"bytes"
	"encoding/binary"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Endpoint is one side of a link and the RMB element of the new connection:
// what Accept and Confirm have in common (RFC 7609 A.2.3, A.2.4).
//
//	+--------+---------+-----+-----+
//	| header | peer ID | GID | MAC |                 38
//	+-----+------+------------+-------------+
//	| QPN | RKey | RMBE index | alert token |        12
//	+-----+------+------------+-------------+-----+
//	| Bsize,MTU | res | RMB address | res   | PSN |  14
//	+-----------+-----+-------------+-------+-----+
//	| EID, 8 reserved                       |        40, version 2
//	| first contact extension               |        52, version 2 first contact
//	| GID list (Confirm only)               |        4 + 16 each, version 2 first contact
//	+---------------------------------------+
//	| eye catcher                           |         4
//	+---------------------------------------+
type Endpoint struct {
	Version uint8
	// FirstContact says that a new link group is made. RFC 7609 has the bit
	// in the Accept only; Linux repeats it in the Confirm, where version 1
	// gives it no meaning.
	FirstContact bool

	PeerID     PeerID
	GID        rdma.GID
	MAC        rdma.MAC
	QPN        rdma.QPN
	RKey       rdma.RKey
	RMBEIndex  uint8 // counts from 1
	AlertToken uint32
	RMBESize   RMBESize
	MTU        rdma.MTU
	RMBAddr    uint64
	PSN        rdma.PSN

	EID EID                   // version 2
	Ext FirstContactExtension // version 2, if FirstContact
}

// RMBEAddr returns the virtual address at which the connection's RMB element
// starts; ok is false when the peer's index or address cannot be right.
func (e Endpoint) RMBEAddr() (addr uint64, ok bool) {
	if e.RMBEIndex == 0 {
		return 0, false
	}
	size := uint64(e.RMBESize.Bytes())
	addr = e.RMBAddr + size*uint64(e.RMBEIndex-1)
	return addr, addr >= e.RMBAddr && addr+size-1 >= addr
}

// FirstContactExtension is what a version 2 peer tells about itself once per
// link group.
type FirstContactExtension struct {
	Direct   bool // the peer is reached without a gateway
	OS       OSType
	Release  uint8 // 4 bits
	Hostname [32]byte

	// Since release 1; reserved before.
	MaxConns    uint8
	MaxLinks    uint8
	FeatureMask uint16
	Vendor      [4]byte
}

// Host returns what the peer calls itself, without the padding. Anybody can call
// himself anything; but people read it in logs and on terminals, so whatever a
// host name does not have is a question mark.
func (x FirstContactExtension) Host() string {
	name := bytes.Clone(trimBlanks(x.Hostname[:]))
	for i, c := range name {
		if !inHostName(c) {
			name[i] = '?'
		}
	}
	return string(name)
}

// inHostName says whether a byte may be in the name of a host: letters, digits,
// '-' and '.', and '_', which is in names that are not in DNS.
func inHostName(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '.' || c == '_'
}

// SetHost stores a host name, cut to 32 bytes and padded with blanks.
func (x *FirstContactExtension) SetHost(name string) {
	for i := copy(x.Hostname[:], name); i < len(x.Hostname); i++ {
		x.Hostname[i] = ' '
	}
}

// Accept is the server's answer to a Proposal (RFC 7609 §3.5.1.2, A.2.3).
type Accept struct {
	Endpoint
}

// Confirm is the client's answer to an Accept (RFC 7609 §3.5.1.3, A.2.4).
type Confirm struct {
	Endpoint
	GIDs List[rdma.GID] // version 2 first contact: where more links may end
}

// ParseAccept decodes a whole Accept. Errors are of type *[ParseError], or of
// type *[DeclineError] when a reserved value was used: then the Accept is
// decoded and can be answered with a Decline.
func ParseAccept(b []byte) (Accept, error) {
	h, err := parseEnvelope(b, TypeAccept)
	if err != nil {
		return Accept{}, err
	}
	switch {
	case h.Version < V2:
		err = checkLen(b, h.Type, acceptV1Len)
	case !h.flag():
		err = checkLen(b, h.Type, acceptV2Base+trailerLen)
	default:
		err = checkLen(b, h.Type, acceptV2Base+fceLen+trailerLen)
	}
	if err != nil {
		return Accept{}, err
	}
	var a Accept
	a.parse(b, h)
	if err := a.check(h); err != nil {
		return a, err
	}
	return a, a.checkMTU(TypeAccept, a.FirstContact)
}

// ParseConfirm decodes a whole Confirm. Errors are as of [ParseAccept], but a reserved MTU is
// for [CheckConfirm] to find.
func ParseConfirm(b []byte) (Confirm, error) {
	h, err := parseEnvelope(b, TypeConfirm)
	if err != nil {
		return Confirm{}, err
	}
	gids := 0
	switch {
	case h.Version < V2:
		err = checkLen(b, h.Type, acceptV1Len)
	case !h.flag():
		err = checkLen(b, h.Type, acceptV2Base+trailerLen)
	default:
		const list = acceptV2Base + fceLen
		if len(b) < list+gidListHeadLen+trailerLen {
			return Confirm{}, parseErr(5, "Confirm of %d bytes has no room for its GID list", len(b))
		}
		if gids = int(b[list]); gids > MaxGIDs {
			return Confirm{}, parseErr(list, "%d GIDs, at most %d", gids, MaxGIDs)
		}
		err = checkLen(b, h.Type, list+gidListHeadLen+gids*gidLen+trailerLen)
	}
	if err != nil {
		return Confirm{}, err
	}
	var c Confirm
	c.parse(b, h)
	for i := range gids {
		c.GIDs.Add(rdma.GID(b[acceptV2Base+fceLen+gidListHeadLen+i*gidLen:]))
	}
	return c, c.check(h)
}

func checkLen(b []byte, t Type, want int) error {
	if len(b) != want {
		return parseErr(5, "%v of %d bytes, want %d", t, len(b), want)
	}
	return nil
}

// parse decodes what checkLen has found to be there.
func (e *Endpoint) parse(b []byte, h Header) {
	*e = Endpoint{
		Version:      h.Version,
		FirstContact: h.flag(),
		PeerID:       PeerID(b[8:]),
		GID:          rdma.GID(b[16:]),
		MAC:          rdma.MAC(b[32:]),
		QPN:          rdma.QPN(uint24(b[38:])),
		RKey:         rdma.RKey(binary.BigEndian.Uint32(b[41:])),
		RMBEIndex:    b[45],
		AlertToken:   binary.BigEndian.Uint32(b[46:]),
		RMBESize:     RMBESize(b[50] >> 4),
		MTU:          rdma.MTU(b[50] & 0x0f),
		RMBAddr:      binary.BigEndian.Uint64(b[52:]),
		PSN:          rdma.PSN(uint24(b[61:])),
	}
	if h.Version < V2 {
		return
	}
	e.EID = EID(b[64:])
	if !h.flag() {
		return
	}
	x := b[acceptV2Base:]
	e.Ext = FirstContactExtension{
		Direct:      x[0]&0x80 != 0,
		OS:          OSType(x[1] >> 4),
		Release:     x[1] & 0x0f,
		Hostname:    [32]byte(x[4:]),
		MaxConns:    x[36],
		MaxLinks:    x[37],
		FeatureMask: binary.BigEndian.Uint16(x[38:]),
		Vendor:      [4]byte(x[40:]),
	}
}

// check finds values that a later version may define (RFC 7609 C.6), but the MTU.
func (e *Endpoint) check(h Header) error {
	// In version 1 the mode bits are reserved; an SMC-D message of version 1
	// has another eye catcher.
	if m := Mode(h.Flags & modeV1Mask); e.Version >= V2 && m != ModeR {
		return declineErr(ReasonModeUnsupp, "%v chooses %v, we offer SMC-R", h.Type, m)
	}
	return nil
}

// checkMTU finds a reserved MTU, which counts at first contact only (A.2.3).
func (e *Endpoint) checkMTU(t Type, firstContact bool) error {
	if firstContact && !e.MTU.Valid() {
		return declineErr(ReasonConfigErr, "%v has the reserved MTU value %d", t, uint8(e.MTU))
	}
	return nil
}

// Append encodes the Accept.
func (a Accept) Append(b []byte) []byte {
	start := len(b)
	return finish(a.append(b, TypeAccept), start)
}

// Append encodes the Confirm.
func (c Confirm) Append(b []byte) []byte {
	start := len(b)
	b = c.append(b, TypeConfirm)
	if c.Version >= V2 && c.FirstContact {
		b = append(b, byte(c.GIDs.Len()), 0, 0, 0)
		for _, g := range c.GIDs.Slice() {
			b = append(b, g[:]...)
		}
	}
	return finish(b, start)
}

func (e *Endpoint) append(b []byte, t Type) []byte {
	h := Header{Type: t, Version: e.Version}
	if e.FirstContact {
		h.Flags = flagBit
	}
	b = h.append(b)
	b = append(b, e.PeerID[:]...)
	b = append(b, e.GID[:]...)
	b = append(b, e.MAC[:]...)
	b = appendUint24(b, uint32(e.QPN))
	b = binary.BigEndian.AppendUint32(b, uint32(e.RKey))
	b = append(b, e.RMBEIndex)
	b = binary.BigEndian.AppendUint32(b, e.AlertToken)
	b = append(b, byte(e.RMBESize)<<4|byte(e.MTU)&0x0f, 0)
	b = binary.BigEndian.AppendUint64(b, e.RMBAddr)
	b = append(b, 0)
	b = appendUint24(b, uint32(e.PSN))
	if e.Version < V2 {
		return b
	}
	b = append(b, e.EID[:]...)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
	if !e.FirstContact {
		return b
	}
	return e.Ext.append(b)
}

func (x *FirstContactExtension) append(b []byte) []byte {
	direct := byte(0)
	if x.Direct {
		direct = 0x80
	}
	b = append(b, direct, byte(x.OS)<<4|x.Release&0x0f, 0, 0)
	b = append(b, x.Hostname[:]...)
	b = append(b, x.MaxConns, x.MaxLinks)
	b = binary.BigEndian.AppendUint16(b, x.FeatureMask)
	b = append(b, x.Vendor[:]...)
	return append(b, 0, 0, 0, 0, 0, 0, 0, 0)
}

func uint24(b []byte) uint32 { return uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2]) }

func appendUint24(b []byte, v uint32) []byte { return append(b, byte(v>>16), byte(v>>8), byte(v)) }
