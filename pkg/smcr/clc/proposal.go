// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"encoding/binary"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Proposal is the client's first message (RFC 7609 §3.5.1.2, A.2.2). The
// lengths of its parts, in order:
//
//	+--------+---------+-----+-----+--------+
//	| header | peer ID | GID | MAC | offset |  40
//	+--------+---------+-----+-----+--------+
//	| growth area: SMC-D area             |  0 (RFC 7609), or 40 (Linux)
//	+-------------------------------------+
//	| IPv4 subnet, number of IPv6 prefixes  |  8, not if V1 is ModeNone
//	| IPv6 prefixes                         |  17 each
//	+---------------------------------------+
//	| version 2 extension                   |  40, only if V2 is not ModeNone
//	| enterprise IDs                        |  32 each
//	+---------------------------------------+
//	| SMC-Dv2 extension                     |  48, only if V2 has SMC-D
//	| ISM GIDs                              |  10 each
//	+---------------------------------------+
//	| eye catcher                           |  4
//	+---------------------------------------+
type Proposal struct {
	// Version is that of the header. Linux always sends 2, also when it
	// offers version 1 only.
	Version uint8
	// EyeCatcherD says that the message has the eye catcher of SMC-D. Nothing
	// in it can then be accepted.
	EyeCatcherD bool

	V1 Mode // what is offered as version 1
	V2 Mode // what is offered as version 2; ModeNone if Version is 1

	PeerID PeerID // zero if V1 is ModeNone
	GID    rdma.GID
	MAC    rdma.MAC

	// IPv4 is the client's subnet, not valid on an IPv6 connection.
	IPv4 netip.Prefix
	// IPv6 has the client's prefixes, empty on an IPv4 connection.
	IPv6 List[netip.Prefix]

	// HasSMCD says that the growth area has the layout of SMC-D. It is
	// implied by a V2 other than ModeNone.
	HasSMCD bool
	SMCD    SMCDArea

	Ext V2Extension // if V2 is not ModeNone
	// SMCDv2 is the SMC-Dv2 extension, if V2 has SMC-D.
	SMCDv2 SMCDv2Extension
}

// SMCDArea is the growth area of a Proposal as Linux uses it.
type SMCDArea struct {
	GID           uint64 // of the ISM device
	CHID          uint16
	VendorOUI     [3]byte
	VendorOptions [5]byte
}

// SMCDv2Extension is the part of a Proposal with the SMC-D devices beyond the
// first.
type SMCDv2Extension struct {
	SEID    EID // the system's own
	Devices List[ISMDevice]
}

// ISMDevice is a device of SMC-D.
type ISMDevice struct {
	GID  uint64
	CHID uint16
}

// V2Extension is what a Proposal offers as version 2.
type V2Extension struct {
	EIDs        List[EID]
	Release     uint8 // 4 bits
	SEID        bool  // the system's own EID is offered (SMC-D)
	GID         rdma.GID
	MaxConns    uint8 // per link group
	MaxLinks    uint8
	FeatureMask uint16
}

// Offsets of fields in a Proposal.
const (
	propPeerID     = 8
	propGID        = 16
	propMAC        = 32
	propIPAreaOff  = 38
	propSMCD       = 40
	propV2ExtOff   = propSMCD + 10 // in the SMC-D area
	propV2ExtBase  = propV2ExtOff + 2
	propVendorOUI  = propSMCD + 12
	propVendorOpts = propSMCD + 15
	v2ExtOptsLen   = 8 // the head of the extension, the SMC-Dv2 offset counts from its end
)

// hasPrefixArea reports whether the mask/prefix area is there.
func (p *Proposal) hasPrefixArea() bool { return p.V1 != ModeNone }

// ParseProposal decodes a whole Proposal. Errors are of type *[ParseError].
func ParseProposal(b []byte) (Proposal, error) {
	var p Proposal
	if err := p.parse(b); err != nil {
		return Proposal{}, err
	}
	return p, nil
}

// parse fills in a zero Proposal, which is too large to be copied about.
func (p *Proposal) parse(b []byte) error {
	h, err := parseEnvelope(b, TypeProposal)
	if err != nil {
		return err
	}
	p.Version, p.EyeCatcherD = h.Version, h.SMCD
	p.V1, p.V2 = Mode(h.Flags&modeV1Mask), ModeNone
	p.PeerID = PeerID(b[propPeerID:])
	p.GID = rdma.GID(b[propGID:])
	p.MAC = rdma.MAC(b[propMAC:])
	if h.Version >= V2 {
		p.V2 = Mode(h.Flags & modeV2Mask >> modeV2Shift)
	} else if p.V1 == ModeNone {
		return parseErr(7, "version 1 Proposal offers no mode")
	}
	r := proposalReader{b: b, end: len(b) - trailerLen, off: propSMCD}
	if err := r.growthArea(p); err != nil {
		return err
	}
	if p.hasPrefixArea() {
		if err := r.prefixArea(p); err != nil {
			return err
		}
	}
	if p.V2 != ModeNone {
		if err := r.v2Extension(p); err != nil {
			return err
		}
	}
	if r.off != r.end {
		return parseErr(5, "Proposal has %d bytes more than its parts", r.end-r.off)
	}
	return nil
}

// proposalReader walks over the variable part of a Proposal.
type proposalReader struct {
	b   []byte
	off int
	end int // of the parts: where the trailer starts
}

// take returns the next n bytes.
func (r *proposalReader) take(n int, what string) ([]byte, error) {
	if r.end-r.off < n {
		return nil, parseErr(r.off, "Proposal ends in its %s: %d bytes left of %d", what, r.end-r.off, n)
	}
	b := r.b[r.off : r.off+n]
	r.off += n
	return b, nil
}

func (r *proposalReader) growthArea(p *Proposal) error {
	// Without a version 1 offer there is no mask/prefix area to point to, and
	// Linux leaves the offset zero though its area is there.
	n := smcdAreaLen
	if p.hasPrefixArea() {
		n = int(binary.BigEndian.Uint16(r.b[propIPAreaOff:]))
	}
	if n > maxGrowthLen {
		return parseErr(propIPAreaOff, "offset to the mask/prefix area is %d, at most %d", n, maxGrowthLen)
	}
	if p.V2 != ModeNone && n != smcdAreaLen {
		return parseErr(propIPAreaOff, "version 2 Proposal with a growth area of %d bytes, want %d", n, smcdAreaLen)
	}
	a, err := r.take(n, "growth area")
	if err != nil {
		return err
	}
	if n != smcdAreaLen {
		return nil // RFC 7609 A.2.2: skip what we do not know
	}
	p.HasSMCD = true
	p.SMCD = SMCDArea{
		GID:           binary.BigEndian.Uint64(a),
		CHID:          binary.BigEndian.Uint16(a[8:]),
		VendorOUI:     [3]byte(r.b[propVendorOUI:]),
		VendorOptions: [5]byte(r.b[propVendorOpts:]),
	}
	return nil
}

func (r *proposalReader) prefixArea(p *Proposal) error {
	at := r.off
	a, err := r.take(prefixAreaLen, "mask/prefix area")
	if err != nil {
		return err
	}
	if bits := int(a[4]); bits > 32 {
		return parseErr(at+4, "IPv4 mask of %d bits", bits)
	} else if [4]byte(a) != ([4]byte{}) || bits != 0 {
		p.IPv4 = netip.PrefixFrom(netip.AddrFrom4([4]byte(a)), bits)
	}
	n := int(a[7])
	if n > MaxPrefixes {
		return parseErr(at+7, "%d IPv6 prefixes, at most %d", n, MaxPrefixes)
	}
	at = r.off
	a, err = r.take(n*prefixLen, "IPv6 prefixes")
	if err != nil || n == 0 {
		return err
	}
	for i := range n {
		e := a[i*prefixLen:]
		if e[16] > 128 {
			return parseErr(at+i*prefixLen+16, "IPv6 prefix of %d bits", e[16])
		}
		p.IPv6.Add(netip.PrefixFrom(netip.AddrFrom16([16]byte(e)), int(e[16])))
	}
	return nil
}

func (r *proposalReader) v2Extension(p *Proposal) error {
	if o := int(binary.BigEndian.Uint16(r.b[propV2ExtOff:])); o != r.off-propV2ExtBase {
		return parseErr(propV2ExtOff, "offset to the version 2 extension is %d, want %d", o, r.off-propV2ExtBase)
	}
	at := r.off
	a, err := r.take(v2ExtLen, "version 2 extension")
	if err != nil {
		return err
	}
	eids, isms := int(a[0]), int(a[1])
	if eids > MaxEIDs {
		return parseErr(at, "%d enterprise IDs, at most %d", eids, MaxEIDs)
	}
	if isms > MaxISMGIDs {
		return parseErr(at+1, "%d ISM GIDs, at most %d", isms, MaxISMGIDs)
	}
	p.Ext = V2Extension{
		Release:     a[3] >> 4,
		SEID:        a[3]&0x01 != 0,
		GID:         rdma.GID(a[8:]),
		MaxConns:    a[24],
		MaxLinks:    a[25],
		FeatureMask: binary.BigEndian.Uint16(a[26:]),
	}
	if a, err = r.take(eids*EIDLen, "enterprise IDs"); err != nil {
		return err
	}
	for i := range eids {
		p.Ext.EIDs.Add(EID(a[i*EIDLen:]))
	}
	if !p.V2.HasD() {
		return nil
	}
	if a, err = r.take(smcdV2ExtLen+isms*ismGIDLen, "SMC-Dv2 extension"); err != nil {
		return err
	}
	p.SMCDv2.SEID = EID(a)
	for d := a[smcdV2ExtLen:]; len(d) > 0; d = d[ismGIDLen:] {
		p.SMCDv2.Devices.Add(ISMDevice{GID: binary.BigEndian.Uint64(d), CHID: binary.BigEndian.Uint16(d[8:])})
	}
	return nil
}

// Append encodes the Proposal.
func (p Proposal) Append(b []byte) []byte {
	h := Header{Type: TypeProposal, Version: p.Version, Flags: uint8(p.V1) & modeV1Mask, SMCD: p.EyeCatcherD}
	v2 := p.Version >= V2 && p.V2 != ModeNone
	if p.Version >= V2 {
		h.Flags |= uint8(p.V2) << modeV2Shift & modeV2Mask
	}
	smcd := p.HasSMCD || v2 || !p.hasPrefixArea()
	start := len(b)
	b = h.append(b)
	b = append(b, p.PeerID[:]...)
	b = append(b, p.GID[:]...)
	b = append(b, p.MAC[:]...)
	if smcd && p.hasPrefixArea() {
		b = binary.BigEndian.AppendUint16(b, smcdAreaLen)
	} else {
		b = append(b, 0, 0)
	}
	if smcd {
		b = p.appendSMCDArea(b, v2)
	}
	if p.hasPrefixArea() {
		b = p.appendPrefixArea(b)
	}
	if v2 {
		b = p.appendV2Extension(b)
	}
	return finish(b, start)
}

func (p *Proposal) appendSMCDArea(b []byte, v2 bool) []byte {
	b = binary.BigEndian.AppendUint64(b, p.SMCD.GID)
	b = binary.BigEndian.AppendUint16(b, p.SMCD.CHID)
	off := 0
	if v2 {
		off = propSMCD + smcdAreaLen - propV2ExtBase
		if p.hasPrefixArea() {
			off += prefixAreaLen + p.IPv6.Len()*prefixLen
		}
	}
	b = binary.BigEndian.AppendUint16(b, uint16(off))
	b = append(b, p.SMCD.VendorOUI[:]...)
	b = append(b, p.SMCD.VendorOptions[:]...)
	return append(b, make([]byte, 20)...)
}

func (p *Proposal) appendPrefixArea(b []byte) []byte {
	if p.IPv4.IsValid() {
		a := p.IPv4.Addr().As4()
		b = append(b, a[:]...)
		b = append(b, byte(p.IPv4.Bits()))
	} else {
		b = append(b, 0, 0, 0, 0, 0)
	}
	b = append(b, 0, 0, byte(p.IPv6.Len()))
	for _, x := range p.IPv6.Slice() {
		a := x.Addr().As16()
		b = append(b, a[:]...)
		b = append(b, byte(x.Bits()))
	}
	return b
}

func (p *Proposal) appendV2Extension(b []byte) []byte {
	e := &p.Ext
	isms, smcdOff := 0, 0
	if p.V2.HasD() {
		isms = p.SMCDv2.Devices.Len()
		smcdOff = v2ExtLen - v2ExtOptsLen + e.EIDs.Len()*EIDLen
	}
	flags := e.Release << 4
	if e.SEID {
		flags |= 0x01
	}
	b = append(b, byte(e.EIDs.Len()), byte(isms), 0, flags, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(smcdOff))
	b = append(b, e.GID[:]...)
	b = append(b, e.MaxConns, e.MaxLinks)
	b = binary.BigEndian.AppendUint16(b, e.FeatureMask)
	b = append(b, make([]byte, 12)...)
	for _, x := range e.EIDs.Slice() {
		b = append(b, x[:]...)
	}
	if p.V2.HasD() {
		b = p.SMCDv2.append(b)
	}
	return b
}

func (x *SMCDv2Extension) append(b []byte) []byte {
	b = append(b, x.SEID[:]...)
	b = append(b, make([]byte, 16)...)
	for _, d := range x.Devices.Slice() {
		b = binary.BigEndian.AppendUint64(b, d.GID)
		b = binary.BigEndian.AppendUint16(b, d.CHID)
	}
	return b
}

// inSubnets is [Proposal.MatchesPrefix] for subnets of one address family.
func (p Proposal) inSubnets(ours []netip.Prefix) bool {
	return len(ours) > 0 && p.MatchesPrefix(ours[0].Addr(), ours)
}

// MatchesPrefix reports whether the client is in one of our IP subnets, which
// version 1 demands at first contact (RFC 7609 §3.5.1.2); if not, the code to
// decline with is [ReasonDiffPrefix]. local is our address of the TCP
// connection, ours are our addresses on its interface with their prefix
// lengths.
func (p Proposal) MatchesPrefix(local netip.Addr, ours []netip.Prefix) bool {
	if local.Unmap().Is4() {
		for _, o := range ours {
			if p.IPv4.IsValid() && o.Addr().Is4() && o.Masked() == p.IPv4.Masked() {
				return true
			}
		}
		return false
	}
	// The lengths may differ with IPv6: an address from DHCPv6 is a /128
	// inside the prefix that routers advertise.
	for _, theirs := range p.IPv6.Slice() {
		for _, o := range ours {
			if o.Addr().Is6() && theirs.Contains(o.Addr().WithZone("")) {
				return true
			}
		}
	}
	return false
}
