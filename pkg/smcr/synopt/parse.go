// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// RFC 7609 A.1: the option on SYN and SYN-ACK.
//
//	 0                   1                   2                   3
//	+---------------+---------------+---------------+---------------+
//	|   Kind 254    |   Length 6    |     0xE2      |     0xD4      |
//	+---------------+---------------+---------------+---------------+
//	|     0xC3      |     0xD9      |
//	+---------------+---------------+
const (
	optionKind  = 254
	optionLen   = 6
	optionMagic = 0xE2D4C3D9 // "SMCR" in EBCDIC
)

// TCP options without a length (RFC 9293 §3.1).
const (
	optionEnd = 0
	optionNop = 1
)

const (
	ipv4HeaderBytes = 20
	ipv6HeaderBytes = 40
	tcpHeaderBytes  = 20

	tcpFlagSYN = 0x02
)

// IP protocol numbers of what may stand between an IPv6 header and TCP.
const (
	protoHopByHop    = 0
	protoTCP         = 6
	protoRouting     = 43
	protoFragment    = 44
	protoAuth        = 51
	protoDestOptions = 60
)

// HasOption reports whether the option area of a TCP header carries the SMC-R
// option. An area that is not well formed is read as far as it is.
//
// The first option with our kind and magic decides, as for the eBPF program:
// both ends of one host must never be of different opinion.
func HasOption(tcpOptions []byte) bool {
	for b := tcpOptions; len(b) > 0; {
		switch b[0] {
		case optionEnd:
			return false
		case optionNop:
			b = b[1:]
			continue
		}
		if len(b) < 2 || b[1] < 2 || int(b[1]) > len(b) {
			return false
		}
		n := int(b[1])
		if b[0] == optionKind && n >= optionLen && binary.BigEndian.Uint32(b[2:]) == optionMagic {
			return n == optionLen
		}
		b = b[n:]
	}
	return false
}

// ParseSYN reports whether a SYN or SYN-ACK, given from its IPv4 or IPv6
// header to at least the end of its TCP header, carries the SMC-R option. It is
// an error if b is not that.
func ParseSYN(b []byte) (bool, error) {
	tcp, err := tcpHeader(b)
	if err != nil {
		return false, fmt.Errorf("parse SYN: %w", err)
	}
	if len(tcp) < tcpHeaderBytes {
		return false, fmt.Errorf("parse SYN: TCP header of %d bytes is cut short", len(tcp))
	}
	n := int(tcp[12]>>4) * 4
	if n < tcpHeaderBytes || n > len(tcp) {
		return false, fmt.Errorf("parse SYN: TCP header says %d bytes of %d", n, len(tcp))
	}
	if tcp[13]&tcpFlagSYN == 0 {
		return false, errors.New("parse SYN: TCP flag SYN is not set")
	}
	return HasOption(tcp[tcpHeaderBytes:n]), nil
}

// tcpHeader returns what follows the IP headers of b.
func tcpHeader(b []byte) ([]byte, error) {
	if len(b) == 0 {
		return nil, errors.New("empty packet")
	}
	switch v := b[0] >> 4; v {
	case 4:
		return tcpInIPv4(b)
	case 6:
		return tcpInIPv6(b)
	default:
		return nil, fmt.Errorf("IP version %d", v)
	}
}

func tcpInIPv4(b []byte) ([]byte, error) {
	if len(b) < ipv4HeaderBytes {
		return nil, fmt.Errorf("IPv4 header of %d bytes is cut short", len(b))
	}
	n := int(b[0]&0x0f) * 4
	if n < ipv4HeaderBytes || n > len(b) {
		return nil, fmt.Errorf("IPv4 header says %d bytes of %d", n, len(b))
	}
	if b[9] != protoTCP {
		return nil, fmt.Errorf("IP protocol %d is not TCP", b[9])
	}
	if offset := binary.BigEndian.Uint16(b[6:]) & 0x1fff; offset != 0 {
		return nil, fmt.Errorf("IPv4 fragment at offset %d", int(offset)*8)
	}
	return b[n:], nil
}

func tcpInIPv6(b []byte) ([]byte, error) {
	if len(b) < ipv6HeaderBytes {
		return nil, fmt.Errorf("IPv6 header of %d bytes is cut short", len(b))
	}
	next := b[6]
	b = b[ipv6HeaderBytes:]
	for range maxIPv6Extensions {
		if next == protoTCP {
			return b, nil
		}
		// Every extension header has eight bytes at least (RFC 8200 §4).
		if len(b) < 8 {
			return nil, fmt.Errorf("IPv6 extension header %d of %d bytes is cut short", next, len(b))
		}
		n := 8
		switch next {
		case protoHopByHop, protoRouting, protoDestOptions:
			n = (int(b[1]) + 1) * 8
		case protoAuth:
			n = (int(b[1]) + 2) * 4
		case protoFragment:
			if offset := binary.BigEndian.Uint16(b[2:]) &^ 7; offset != 0 {
				return nil, fmt.Errorf("IPv6 fragment at offset %d", offset)
			}
		default:
			return nil, fmt.Errorf("IPv6 next header %d is not TCP", next)
		}
		if n > len(b) {
			return nil, fmt.Errorf("IPv6 extension header %d says %d bytes of %d", next, n, len(b))
		}
		next, b = b[0], b[n:]
	}
	if next == protoTCP {
		return b, nil
	}
	return nil, fmt.Errorf("more than %d IPv6 extension headers", maxIPv6Extensions)
}
