// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/widecrc"
)

// Addresses are the addresses and UDP ports that the ICRC of a packet covers: both IPv4 or
// both IPv6, as the packet has them.
type Addresses struct {
	Src, Dst         netip.Addr
	SrcPort, DstPort uint16
}

const (
	ipv4HeaderLen = 20
	ipv6HeaderLen = 40
	udpHeaderLen  = 8
	lrhDummyLen   = 8 // RoCEv2 annex A17: the CRC starts with 64 one bits
)

// ICRC computes the invariant CRC of packets between two addresses (IBTA annex A17): the
// Ethernet CRC-32 over 64 one bits, the IP and UDP headers and the packet
// from BTH to pad, with all that routers may change (TOS or traffic class,
// TTL or hop limit, flow label, checksums, and BTH byte 4 with the congestion
// marks) taken as ones.
//
// CRCs are linear: the CRC of a header with some lengths and ID is that of
// the header with zeros, xor what each of these fields adds. So the headers
// cost six table look-ups per packet.
//
// The IPv4 header is taken to have the don't-fragment bit and no options, as
// the annex demands. An ICRC is a value; it is safe for concurrent use.
type ICRC struct {
	base uint32 // register after the headers with all lengths and ID zero
	v6   bool
}

// NewICRC prepares the ICRC of packets between two addresses.
func NewICRC(a Addresses) ICRC {
	var h [lrhDummyLen + ipv6HeaderLen + udpHeaderLen]byte
	b := h[:0]
	for range lrhDummyLen {
		b = append(b, 0xff)
	}
	v6 := !a.Src.Is4()
	if v6 {
		src, dst := a.Src.As16(), a.Dst.As16()
		b = append(b, 0x6f, 0xff, 0xff, 0xff, 0, 0, 17, 0xff)
		b = append(b, src[:]...)
		b = append(b, dst[:]...)
	} else {
		src, dst := a.Src.As4(), a.Dst.Unmap().As4()
		b = append(b, 0x45, 0xff, 0, 0, 0, 0, 0x40, 0, 0xff, 17, 0xff, 0xff)
		b = append(b, src[:]...)
		b = append(b, dst[:]...)
	}
	b = binary.BigEndian.AppendUint16(b, a.SrcPort)
	b = binary.BigEndian.AppendUint16(b, a.DstPort)
	b = append(b, 0, 0, 0xff, 0xff)
	// Byte by byte: crc32's functions would have the array on the heap, for each
	// packet from an address that was not seen before.
	r := ^uint32(0)
	for _, v := range b {
		r = crc32.IEEETable[byte(r)^v] ^ r>>8
	}
	return ICRC{base: ^r, v6: v6}
}

// icrcTables are what each byte value at the position of a header field adds
// to the CRC register after the UDP header.
type icrcTables struct {
	udpLen, ip4Len, ip4ID, ip6Len [2][256]uint32
}

// icrcTable is a constant table.
var icrcTable = makeICRCTables()

func makeICRCTables() *icrcTables {
	t := new(icrcTables)
	// The distances from the field's first byte to the end of the headers.
	fill := func(dst *[2][256]uint32, distance int) {
		for i := range dst {
			for v := range dst[i] {
				r := crc32.IEEETable[v]
				for range distance - i - 1 {
					r = crc32.IEEETable[r&0xff] ^ r>>8
				}
				dst[i][v] = r
			}
		}
	}
	fill(&t.udpLen, 4)
	fill(&t.ip4Len, ipv4HeaderLen+udpHeaderLen-2)
	fill(&t.ip4ID, ipv4HeaderLen+udpHeaderLen-4)
	fill(&t.ip6Len, ipv6HeaderLen+udpHeaderLen-4)
	return t
}

func look(t *[2][256]uint32, v int) uint32 {
	return t[0][v>>8&0xff] ^ t[1][v&0xff]
}

// Begin returns the CRC over the headers of a packet whose UDP payload, ICRC
// included, is n bytes. ipID is ignored for IPv6. Continue with [AddHeader] and
// the CRC-32 of payload and pad (crc32.Update), and append the result in little endian
// order.
func (c *ICRC) Begin(ipID uint16, n int) uint32 {
	t := icrcTable
	udp := n + udpHeaderLen
	crc := c.base ^ look(&t.udpLen, udp)
	if c.v6 {
		return crc ^ look(&t.ip6Len, udp)
	}
	return crc ^ look(&t.ip4Len, udp+ipv4HeaderLen) ^ look(&t.ip4ID, int(ipID))
}

// slices[k] is what a byte adds to the register k bytes later: tables for
// taking eight or four bytes at once, because a header's bytes one after
// another would cost more than a kilobyte of payload. A constant table.
var slices = makeSlices()

func makeSlices() *[8][256]uint32 {
	t := new([8][256]uint32)
	t[0] = *crc32.IEEETable
	for k := 1; k < len(t); k++ {
		for v := range t[k] {
			r := t[k-1][v]
			t[k][v] = crc32.IEEETable[r&0xff] ^ r>>8
		}
	}
	return t
}

// AddHeader continues crc over BTH and what follows it, as extended headers: a multiple of
// four bytes, at least 12.
func AddHeader(crc uint32, hdr []byte) uint32 {
	t := slices
	// Byte 4 has FECN, BECN and reserved bits, which are variant.
	r, mask := ^crc, uint32(0xff)
	for ; len(hdr) >= 8; hdr, mask = hdr[8:], 0 {
		r ^= binary.LittleEndian.Uint32(hdr)
		w := binary.LittleEndian.Uint32(hdr[4:]) | mask
		r = t[7][byte(r)] ^ t[6][byte(r>>8)] ^ t[5][byte(r>>16)] ^ t[4][r>>24] ^
			t[3][byte(w)] ^ t[2][byte(w>>8)] ^ t[1][byte(w>>16)] ^ t[0][w>>24]
	}
	if len(hdr) >= 4 {
		r ^= binary.LittleEndian.Uint32(hdr)
		r = t[3][byte(r)] ^ t[2][byte(r>>8)] ^ t[1][byte(r>>16)] ^ t[0][r>>24]
	}
	return ^r
}

// Sum returns the ICRC of a packet in pieces. hdr is BTH and extended
// headers, pad the number of pad bytes.
func (c *ICRC) Sum(ipID uint16, hdr []byte, payload [][]byte, pad int) uint32 {
	n := len(hdr) + pad + ICRCLen
	for _, p := range payload {
		n += len(p)
	}
	crc := AddHeader(c.Begin(ipID, n), hdr)
	for _, p := range payload {
		crc = widecrc.IEEE.Update(crc, p)
	}
	return addZeros(crc, pad)
}

// SumTx returns the ICRC of a packet from PollTx.
func (c *ICRC) SumTx(ipID uint16, t *TxPacket) uint32 {
	crc := AddHeader(c.Begin(ipID, t.UDPLen()), t.Hdr[:t.HdrLen])
	for i := range t.Segs {
		crc = widecrc.IEEE.Update(crc, t.Payload[i])
	}
	return addZeros(crc, t.Pad)
}

// addZeros continues crc over n zero bytes.
func addZeros(crc uint32, n int) uint32 {
	r := ^crc
	for range n {
		r = crc32.IEEETable[byte(r)] ^ r>>8
	}
	return ^r
}

// Check reports whether the ICRC at the end of a UDP payload is right.
//
// IPv4 headers have an ID, which the CRC covers and a UDP socket does not
// show. Check tries idHint; if that does not fit, it accepts the packet if
// any ID explains the CRC, because the wire's other 16 bits of redundancy
// still hold: for peers whose IDs cannot be guessed (rxe counts them) the
// check misses one corruption in 2^16 instead of 2^32, behind the UDP
// checksum and the Ethernet CRC. IPv6 always has the whole check.
func (c *ICRC) Check(b []byte, idHint uint16) bool {
	if len(b) < bthLen+ICRCLen || len(b) > MaxPacketLen {
		return false
	}
	end := len(b) - ICRCLen
	// 16 bytes are the least that is taken at a time, and a few that are left over at the end cost
	// as much as a kilobyte may. So what goes by tables is as long as leaves a multiple of 16.
	head := end & 15 &^ 3
	if head < bthLen {
		head += 16
	}
	crc := widecrc.IEEE.Update(AddHeader(c.Begin(idHint, len(b)), b[:head]), b[head:end])
	diff := crc ^ binary.LittleEndian.Uint32(b[end:])
	if diff == 0 {
		return true
	}
	if c.v6 {
		return false
	}
	// Take the difference back to where the register met the ID. There it is
	// the difference of the IDs in the low 16 bits, or the packet is wrong.
	d := unshift(diff, end+ipv4HeaderLen+udpHeaderLen-4)
	return d>>16 == 0
}

// unshift undoes n zero bytes on a register difference: it multiplies by
// x^(-8n) modulo the CRC polynomial.
func unshift(r uint32, n int) uint32 {
	for k := 0; n != 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			r = gfMul(r, unshiftPowers[k])
		}
	}
	return r
}

// unshiftPowers[k] is x^(-8*2^k), enough for every packet; a constant table.
var unshiftPowers = makeUnshiftPowers()

const (
	gfOne     = 1 << 31 // the reflected 1
	gfPowers  = 13      // 2^13 > MaxPacketLen and headers
	gfPolyRev = crc32.IEEE
)

func makeUnshiftPowers() (p [gfPowers]uint32) {
	// x^-1 is what shifted once gives 1: in the reflected register, one
	// multiplication by x is a shift to the right with reduction.
	v := uint32(gfOne)
	for range 8 {
		v = gfDivX(v)
	}
	for k := range p {
		p[k] = v
		v = gfMul(v, v)
	}
	return p
}

// gfDivX divides by x.
func gfDivX(v uint32) uint32 {
	if v&gfOne != 0 { // bit 31 of the polynomial is set: it was reduced
		return (v^gfPolyRev)<<1 | 1
	}
	return v << 1
}

// gfMul multiplies two reflected polynomials modulo the CRC polynomial.
func gfMul(a, b uint32) uint32 {
	var r uint32
	for ; a != 0; a <<= 1 {
		if a&gfOne != 0 {
			r ^= b
		}
		b = b>>1 ^ gfPolyRev&-(b&1)
	}
	return r
}
