// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/widecrc"
)

// Parts of an FPDU (RFC 5044 §4.1).
const (
	lengthLen    = 2
	crcLen       = 4
	fpduOverhead = lengthLen + crcLen // without pad and markers

	markerLen     = 4
	markerSpacing = 512 // from one marker to the next, the marker included
)

// crc32c returns the CRC of an FPDU.
func crc32c(b []byte) uint32 { return widecrc.Castagnoli.Update(0, b) }

// padLen returns how many bytes of pad follow a ULPDU: FPDUs are multiples of four.
func padLen(ulpdu int) int { return -(lengthLen + ulpdu) & 3 }

// fpduLen returns the length of a ULPDU's FPDU without markers.
func fpduLen(ulpdu int) int { return lengthLen + ulpdu + padLen(ulpdu) + crcLen }

// MULPDU returns the length of the longest ULPDU whose FPDU fits into a TCP segment of
// emss bytes, with its markers, if any (RFC 5044 §4.5), within [MinULPDU] and
// [MaxOwnULPDU] or, with markers, [MaxMarkedULPDU].
func MULPDU(emss int, markers bool) int {
	n, most := emss-(fpduOverhead+emss%4), MaxOwnULPDU
	if markers {
		n, most = n-markerLen*((emss+markerSpacing-1)/markerSpacing), MaxMarkedULPDU
	}
	return min(max(n, MinULPDU), most)
}

// Errors of FPDUs.
var (
	// ErrIncomplete says that more bytes belong to the FPDU.
	ErrIncomplete = errors.New("iwarp: FPDU is not complete")
)

// Framing turns ULPDUs into a stream of FPDUs and back. With Markers it keeps the
// position in the stream, so that each direction has a Framing of its own.
type Framing struct {
	CRC     bool // generated, or checked
	Markers bool
	pos     int // in the stream, modulo the spacing of markers
}

// mark appends a marker where one is due (RFC 5044 §4.3). It tells how far back the FPDU
// begins: at its length, where the marker does not come right before that.
//
//	 0                   1                   2                   3
//	 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//	+-------------------------------+-------------------------------+
//	|           reserved            |            FPDUPTR            |
//	+-------------------------------+-------------------------------+
func (f *Framing) mark(b []byte, begin int) []byte {
	if !f.Markers || f.pos != 0 {
		return b
	}
	f.pos = markerLen
	b = append(b, 0, 0)
	return binary.BigEndian.AppendUint16(b, uint16(len(b)-2-begin))
}

// put appends bytes of an FPDU whose length is at b[begin], with markers among them.
func (f *Framing) put(b, p []byte, begin int) []byte {
	if !f.Markers {
		return append(b, p...)
	}
	for len(p) > 0 {
		b = f.mark(b, begin)
		n := min(len(p), markerSpacing-f.pos)
		b = append(b, p[:n]...)
		p = p[n:]
		f.pos = (f.pos + n) % markerSpacing
	}
	return b
}

// Append appends the FPDU of a ULPDU, which is given in pieces, to b. A marker right
// before the FPDU's length belongs to the FPDU and so to what the CRC covers.
func (f *Framing) Append(b []byte, ulpdu ...[]byte) []byte {
	n := 0
	for _, p := range ulpdu {
		n += len(p)
	}
	if f.CRC && !f.Markers {
		return appendSummed(b, n, ulpdu)
	}
	first := len(b)
	b = f.mark(b, first)
	begin := len(b)
	b = f.put(b, []byte{byte(n >> 8), byte(n)}, begin)
	for _, p := range ulpdu {
		b = f.put(b, p, begin)
	}
	var pad [4]byte
	b = f.put(b, pad[:padLen(n)], begin)
	b = f.mark(b, begin)
	var crc uint32
	if f.CRC {
		crc = crc32c(b[first:])
	}
	b = binary.LittleEndian.AppendUint32(b, crc)
	f.pos = (f.pos + crcLen) % markerSpacing
	return b
}

// appendSummed is Append with a CRC and without markers: it sums what it copies. n is the ULPDU's length.
func appendSummed(b []byte, n int, ulpdu [][]byte) []byte {
	begin := len(b)
	b = append(slices.Grow(b, fpduLen(n)), byte(n>>8), byte(n))
	crc := crc32c(b[begin:])
	for _, p := range ulpdu {
		at := len(b)
		b = b[:at+len(p)]
		crc = widecrc.Castagnoli.Copy(crc, b[at:], p)
	}
	pad := b[len(b) : len(b)+padLen(n)]
	clear(pad)
	return binary.LittleEndian.AppendUint32(b[:len(b)+len(pad)], widecrc.Castagnoli.Update(crc, pad))
}

// Next takes the first FPDU off b: it returns the ULPDU and how many bytes of b the FPDU
// has. It is ErrIncomplete if the FPDU does not end in b, and else an error whose [Code]
// is to be told the peer. With Markers it moves the ULPDU together, in b.
func (f *Framing) Next(b []byte) (ulpdu []byte, n int, err error) {
	begin := 0
	if f.Markers && f.pos == 0 {
		begin = markerLen
	}
	if len(b) < begin+lengthLen {
		return nil, 0, ErrIncomplete
	}
	size := int(binary.BigEndian.Uint16(b[begin:]))
	body := lengthLen + size + padLen(size)
	n = f.span(body)
	if len(b) < n+crcLen {
		return nil, 0, ErrIncomplete
	}
	if f.CRC && crc32c(b[:n]) != binary.LittleEndian.Uint32(b[n:]) {
		return nil, 0, CodeCRC
	}
	out := b[begin:n]
	if f.Markers {
		if out, err = f.unmark(b[:n], begin); err != nil {
			return nil, 0, err
		}
	}
	f.pos = (f.pos + n + crcLen) % markerSpacing
	return out[lengthLen : lengthLen+size], n + crcLen, nil
}

// span returns how many bytes from here on a body of n bytes takes with its markers, that
// before the CRC included.
func (f *Framing) span(n int) int {
	if !f.Markers {
		return n
	}
	total, pos := 0, f.pos
	for {
		if pos == 0 {
			total, pos = total+markerLen, markerLen
		}
		if n == 0 {
			return total
		}
		k := min(n, markerSpacing-pos)
		total, n, pos = total+k, n-k, (pos+k)%markerSpacing
	}
}

// unmark checks the markers of an FPDU whose length is at b[begin] and moves the bytes
// between them together.
func (f *Framing) unmark(b []byte, begin int) ([]byte, error) {
	out := b[:0]
	for i, pos := 0, f.pos; i < len(b); {
		if pos == 0 {
			if ptr := int(binary.BigEndian.Uint16(b[i+2:])); ptr != max(i-begin, 0) {
				return nil, CodeMarker
			}
			i, pos = i+markerLen, markerLen
		}
		k := min(len(b)-i, markerSpacing-pos)
		out = append(out, b[i:i+k]...)
		i, pos = i+k, (pos+k)%markerSpacing
	}
	return out, nil
}
