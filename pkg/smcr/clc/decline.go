// SPDX-License-Identifier: Apache-2.0

package clc

import "encoding/binary"

// Decline ends the negotiation: the TCP connection carries the application's
// data itself (RFC 7609 §3.5.1.6.4, A.2.5). Version 2 has 16 bytes more.
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//	|                     header (2 words), S bit                   |
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//	|                  sender's peer ID (2 words)                   |
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//	|                       diagnosis code                          |
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//	|OS type|                    reserved                           |
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//	|         more diagnosis (4 words, version 2 only)              |
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//	|     E2        |     D4        |      C3       |      D9       |
//	+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
type Decline struct {
	Version uint8
	// OutOfSync is the S bit: the receiver must clean up its side of the
	// link group (RFC 7609 C.4).
	OutOfSync bool
	PeerID    PeerID
	Reason    Reason
	OS        OSType
	Extra     [4]uint32 // version 2
}

// ParseDecline decodes a whole Decline. Errors are of type *[ParseError].
func ParseDecline(b []byte) (Decline, error) {
	h, err := parseEnvelope(b, TypeDecline)
	if err != nil {
		return Decline{}, err
	}
	want := declineV1Len
	if h.Version >= V2 {
		want = declineV2Len
	}
	if err := checkLen(b, h.Type, want); err != nil {
		return Decline{}, err
	}
	d := Decline{
		Version:   h.Version,
		OutOfSync: h.flag(),
		PeerID:    PeerID(b[8:]),
		Reason:    Reason(binary.BigEndian.Uint32(b[16:])),
		OS:        OSType(b[20] >> 4),
	}
	if h.Version >= V2 {
		for i := range d.Extra {
			d.Extra[i] = binary.BigEndian.Uint32(b[24+4*i:])
		}
	}
	return d, nil
}

// Append encodes the Decline.
func (d Decline) Append(b []byte) []byte {
	h := Header{Type: TypeDecline, Version: d.Version}
	if d.OutOfSync {
		h.Flags = flagBit
	}
	start := len(b)
	b = h.append(b)
	b = append(b, d.PeerID[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(d.Reason))
	b = append(b, byte(d.OS)<<4, 0, 0, 0)
	if d.Version >= V2 {
		for _, x := range d.Extra {
			b = binary.BigEndian.AppendUint32(b, x)
		}
	}
	return finish(b, start)
}
