// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
)

// The frames of MPA (RFC 5044 §4, §7.1, and RFC 6581 for revision 2), as few of them
// as these tests write themselves.
const (
	requestKey, replyKey = "MPA ID Req Frame", "MPA ID Rep Frame"
	keyBytes             = len(requestKey)
	// startBytes is the length of a Request or Reply without its private data.
	startBytes = keyBytes + 4

	flagMarkers, flagCRC, flagReject, flagEnhanced = 0x80, 0x40, 0x20, 0x10
	// In the private data of revision 2, with IRD and ORD.
	peerToPeer, rtrWrite, rtrRead = 0x8000, 0x8000, 0x4000

	// lengthBytes and crcBytes are around the ULPDU of an FPDU, which is padded to 4.
	lengthBytes, crcBytes = 2, 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// start makes a Request or Reply.
func start(key string, flags, revision byte, privateData ...byte) []byte {
	b := append([]byte(key), flags, revision)
	b = binary.BigEndian.AppendUint16(b, uint16(len(privateData)))
	return append(b, privateData...)
}

// depths are IRD and ORD as revision 2 has them in the private data.
func depths(ird, ord uint16) []byte {
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, ird), ord)
}

// fpdu makes an FPDU. Without a CRC there are zeros in its place, as siw has it.
func fpdu(ulpdu []byte, crc bool) []byte {
	b := append(binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu))), ulpdu...)
	b = append(b, make([]byte, -len(b)&3)...)
	if !crc {
		return append(b, make([]byte, crcBytes)...)
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// startSize and fpduSize are how many bytes a frame has that begins with b, or 0 if b does
// not have it whole.
func startSize(b []byte) int {
	if len(b) < startBytes {
		return 0
	}
	return whole(b, startBytes+int(binary.BigEndian.Uint16(b[startBytes-2:])))
}

func fpduSize(b []byte) int {
	if len(b) < lengthBytes {
		return 0
	}
	n := lengthBytes + int(binary.BigEndian.Uint16(b))
	return whole(b, n+(-n&3)+crcBytes)
}

func whole(b []byte, n int) int {
	if len(b) < n {
		return 0
	}
	return n
}

// readFrame reads a frame. Its error is io.EOF if the stream ends before it.
func readFrame(r io.Reader, size func([]byte) int) ([]byte, error) {
	var b []byte
	for size(b) == 0 {
		b = append(b, 0)
		if _, err := io.ReadFull(r, b[len(b)-1:]); err != nil {
			if errors.Is(err, io.EOF) && len(b) > 1 {
				err = io.ErrUnexpectedEOF
			}
			return b[:len(b)-1], err
		}
	}
	return b, nil
}
