// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Lengths of the start-up frames.
const (
	keyLen      = 16
	enhancedLen = 4

	// StartLen is the length of a start-up frame without private data: key, flags, revision and
	// the length of the private data.
	StartLen = 20
)

// The keys that start-up frames begin with (RFC 5044 §7.1.1).
const (
	RequestKey = "MPA ID Req Frame"
	replyKey   = "MPA ID Rep Frame"
)

// Revisions of MPA.
const (
	Rev1 = 1 // RFC 5044
	Rev2 = 2 // RFC 6581
)

// Flags of a start-up frame.
const (
	flagMarkers  = 0x80
	flagCRC      = 0x40
	flagReject   = 0x20
	flagEnhanced = 0x10
)

// Flags of the two words of an enhanced start-up (RFC 6581 §9).
const (
	flagPeerToPeer = 0x8000 // A, in the word with IRD
	flagRTRSend    = 0x4000 // B, in the word with IRD
	flagRTRWrite   = 0x8000 // C, in the word with ORD
	flagRTRRead    = 0x4000 // D, in the word with ORD
	readsMask      = 0x3fff
)

// Errors of start-up frames.
var (
	ErrKey         = errors.New("iwarp: not an MPA start-up frame of the expected kind")
	ErrPrivateData = errors.New("iwarp: length of the private data does not fit")
)

// Enhanced is what RFC 6581 puts before the private data.
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+-+-+---------------------------+-+-+---------------------------+
//	|A|B|           IRD             |C|D|           ORD             |
//	+-+-+---------------------------+-+-+---------------------------+
type Enhanced struct {
	PeerToPeer bool   // A: the initiator sends an RTR message first
	RTRSend    bool   // B: it may be an empty SEND
	RTRWrite   bool   // C: it may be an empty WRITE
	RTRRead    bool   // D: it may be an empty READ
	IRD        uint16 // READs that the sender of the frame serves at a time
	ORD        uint16 // READs that it wants to have outstanding
}

func parseEnhanced(b []byte) Enhanced {
	ird, ord := binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	return Enhanced{
		PeerToPeer: ird&flagPeerToPeer != 0,
		RTRSend:    ird&flagRTRSend != 0,
		RTRWrite:   ord&flagRTRWrite != 0,
		RTRRead:    ord&flagRTRRead != 0,
		IRD:        ird & readsMask,
		ORD:        ord & readsMask,
	}
}

func (e *Enhanced) append(b []byte) []byte {
	ird, ord := e.IRD&readsMask, e.ORD&readsMask
	ird |= bit(e.PeerToPeer, flagPeerToPeer) | bit(e.RTRSend, flagRTRSend)
	ord |= bit(e.RTRWrite, flagRTRWrite) | bit(e.RTRRead, flagRTRRead)
	b = binary.BigEndian.AppendUint16(b, ird)
	return binary.BigEndian.AppendUint16(b, ord)
}

func bit(on bool, mask uint16) uint16 {
	if on {
		return mask
	}
	return 0
}

// Frame is an MPA Request or Reply (RFC 5044 §7.1.1).
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+---------------------------------------------------------------+
//	|          Key: "MPA ID Req Frame" or "MPA ID Rep Frame"        |
//	|                                                               |
//	|                                                               |
//	|                                                               |
//	+-+-+-+-+-------+---------------+-------------------------------+
//	|M|C|R|S|  Res  |     Rev       |          PD_Length            |
//	+-+-+-+-+-------+---------------+-------------------------------+
//	|               Enhanced, if S; private data                    |
//	+---------------------------------------------------------------+
type Frame struct {
	Reply       bool
	Markers     bool // M: the sender of the frame wants markers in what it receives
	CRC         bool // C: CRCs in both directions, if one of both frames says so
	Reject      bool // R: of a Reply only
	Rev         uint8
	IsEnhanced  bool // S: of revision 2 and later
	Enhanced    Enhanced
	PrivateData []byte // aliases the input
}

// FrameLen returns the length of a whole start-up frame, of which b has at least the
// first 20 bytes. With reply it must be a Reply, else a Request.
func FrameLen(b []byte, reply bool) (int, error) {
	if len(b) < StartLen {
		return 0, fmt.Errorf("%w: %d bytes", ErrKey, len(b))
	}
	key := RequestKey
	if reply {
		key = replyKey
	}
	if string(b[:keyLen]) != key {
		return 0, fmt.Errorf("%w: it begins with %q", ErrKey, b[:keyLen])
	}
	n := int(binary.BigEndian.Uint16(b[18:]))
	if n > MaxPrivateData {
		return 0, fmt.Errorf("%w: %d bytes, at most %d are allowed", ErrPrivateData, n, MaxPrivateData)
	}
	return StartLen + n, nil
}

// ParseFrame parses a whole start-up frame. Reserved bits are ignored, and so is R in a
// Request.
func ParseFrame(b []byte) (Frame, error) {
	f := Frame{Reply: bytes.HasPrefix(b, []byte(replyKey))}
	n, err := FrameLen(b, f.Reply)
	if err != nil {
		return Frame{}, err
	}
	if n != len(b) {
		return Frame{}, fmt.Errorf("%w: the frame has %d bytes and says %d", ErrPrivateData, len(b), n)
	}
	flags := b[16]
	f.Markers = flags&flagMarkers != 0
	f.CRC = flags&flagCRC != 0
	f.Reject = f.Reply && flags&flagReject != 0
	f.Rev = b[17]
	f.PrivateData = b[StartLen:]
	f.IsEnhanced = f.Rev >= Rev2 && flags&flagEnhanced != 0
	if f.IsEnhanced {
		if len(f.PrivateData) < enhancedLen {
			return Frame{}, fmt.Errorf("%w: %d bytes, an enhanced frame has %d or more",
				ErrPrivateData, len(f.PrivateData), enhancedLen)
		}
		f.Enhanced = parseEnhanced(f.PrivateData)
		f.PrivateData = f.PrivateData[enhancedLen:]
	}
	return f, nil
}

// Len returns the length of the frame.
func (f *Frame) Len() int {
	n := StartLen + len(f.PrivateData)
	if f.IsEnhanced {
		n += enhancedLen
	}
	return n
}

// Append appends the frame to b. The private data must fit: see [MaxPrivateData].
func (f *Frame) Append(b []byte) []byte {
	key := RequestKey
	if f.Reply {
		key = replyKey
	}
	flags := bit(f.Markers, flagMarkers) | bit(f.CRC, flagCRC) | bit(f.Reject, flagReject) | bit(f.IsEnhanced, flagEnhanced)
	b = append(b, key...)
	b = append(b, byte(flags), f.Rev)
	b = binary.BigEndian.AppendUint16(b, uint16(f.Len()-StartLen))
	if f.IsEnhanced {
		b = f.Enhanced.append(b)
	}
	return append(b, f.PrivateData...)
}
