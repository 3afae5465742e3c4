// SPDX-License-Identifier: Apache-2.0

package synqueue

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// ErrNotSYN means that a packet is not a whole SYN of TCP, so that nothing is known of where it
// goes.
var ErrNotSYN = errors.New("not a SYN")

const (
	protocolTCP = 6

	ipv4Header = 20
	ipv6Header = 40
	tcpHeader  = 20

	flagFIN, flagSYN, flagRST, flagACK = 0x01, 0x02, 0x04, 0x10
)

// Extension headers of IPv6 that may stand before TCP in a SYN. The others change
// where a packet goes, or hide what it is.
const (
	nextHopByHop    = 0
	nextDestination = 60
)

// A Conn names a connection by its two ends.
type Conn struct {
	Src, Dst netip.AddrPort
}

// A SYN is what is known of a held packet.
type SYN struct {
	Conn
	Seq uint32 // the initial sequence number: another one is another connection
}

// ParseSYN reads a packet that begins with its IP header. Bytes behind the TCP
// header may be missing. The error is [ErrNotSYN] for everything else than a whole
// SYN without ACK.
func ParseSYN(b []byte) (SYN, error) {
	if len(b) == 0 {
		return SYN{}, ErrNotSYN
	}
	var src, dst netip.Addr
	var tcp, size int // where the TCP header begins, and where the packet ends
	switch b[0] >> 4 {
	case 4:
		if len(b) < ipv4Header {
			return SYN{}, ErrNotSYN
		}
		const moreOrOffset = 0x3fff // a fragment
		tcp, size = int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
		if tcp < ipv4Header || b[9] != protocolTCP || binary.BigEndian.Uint16(b[6:])&moreOrOffset != 0 {
			return SYN{}, ErrNotSYN
		}
		src, dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	case 6:
		if len(b) < ipv6Header {
			return SYN{}, ErrNotSYN
		}
		size = ipv6Header + int(binary.BigEndian.Uint16(b[4:]))
		var ok bool
		if tcp, ok = skipExtensions(b); !ok {
			return SYN{}, ErrNotSYN
		}
		src, dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	default:
		return SYN{}, ErrNotSYN
	}
	if len(b) < tcp+tcpHeader {
		return SYN{}, ErrNotSYN
	}
	t := b[tcp:]
	header := int(t[12]>>4) * 4
	if header < tcpHeader || header > len(t) || tcp+header > size || t[13]&(flagSYN|flagACK|flagRST|flagFIN) != flagSYN {
		return SYN{}, ErrNotSYN
	}
	return SYN{
		Conn: Conn{
			Src: netip.AddrPortFrom(src, binary.BigEndian.Uint16(t)),
			Dst: netip.AddrPortFrom(dst, binary.BigEndian.Uint16(t[2:])),
		},
		Seq: binary.BigEndian.Uint32(t[4:]),
	}, nil
}

// skipExtensions returns where the TCP header of an IPv6 packet begins.
func skipExtensions(b []byte) (at int, ok bool) {
	next, at := b[6], ipv6Header
	for range maxExtensionHeaders {
		switch next {
		case protocolTCP:
			return at, true
		case nextHopByHop, nextDestination:
			if len(b) < at+2 {
				return 0, false
			}
			next, at = b[at], at+8*(int(b[at+1])+1)
		default:
			return 0, false
		}
	}
	return 0, false
}
