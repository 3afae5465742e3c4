// SPDX-License-Identifier: Apache-2.0

package widecrc

import (
	"hash/crc32"
	"math/bits"
)

// Table is what a polynomial needs. It is immutable.
type Table struct {
	short *crc32.Table
	folds folds
}

// IEEE is CRC-32 as Ethernet has it.
var IEEE = makeIEEE()

// Castagnoli is CRC-32C, as iSCSI and MPA (RFC 5044) have it.
var Castagnoli = makeCastagnoli()

func makeIEEE() *Table { return &Table{crc32.IEEETable, newFolds(crc32.IEEE)} }

func makeCastagnoli() *Table {
	return &Table{crc32.MakeTable(crc32.Castagnoli), newFolds(crc32.Castagnoli)}
}

// Update returns the CRC of what crc is of, followed by p. The CRC of nothing is 0: it is what crc32.Update
// returns.
func (t *Table) Update(crc uint32, p []byte) uint32 {
	if len(p) < leastFolded {
		return crc32.Update(crc, t.short, p)
	}
	n, chunks := t.share(len(p))
	return crc32.Update(^fold(&p[0], n, ^crc, &t.folds, chunks), t.short, p[n:])
}

// Copy copies p to dst, which is as long and somewhere else, and returns what Update returns. Both together take two
// thirds of the time of one after the other.
func (t *Table) Copy(crc uint32, dst, p []byte) uint32 {
	if len(p) < leastFolded {
		copy(dst, p)
		return crc32.Update(crc, t.short, dst[:len(p)])
	}
	n, chunks := t.share(len(p))
	_ = dst[n-1]
	crc = ^foldCopy(&p[0], n, ^crc, &t.folds, chunks, &dst[0])
	copy(dst[n:], p[n:])
	return crc32.Update(crc, t.short, dst[n:len(p)])
}

// share returns how many of n bytes are folded, and how many chunks of these the processor's instruction shares.
func (t *Table) share(n int) (folded, chunks int) {
	folded = n &^ (step - 1)
	if t == Castagnoli {
		chunks = max(0, folded-2*foldedBytes) / chunkBytes
	}
	return folded, chunks
}

const (
	// foldedBytes is the shortest that is folded, and how far at a time.
	foldedBytes = 256
	// step: what is folded is a multiple of so many bytes.
	step = 16

	// A chunk is bytes that are folded, and three streams behind them for the instruction, which takes 40 bytes of each
	// while 256 are folded.
	chunkFolds  = 8
	streamBytes = chunkFolds * 40
	chunkBytes  = chunkFolds*foldedBytes + 3*streamBytes
)

// folds are x^n mod P for the distances over which is folded. Each has two factors: one for the eight bytes
// that come first and so have 64 bits more to go, and one for the eight behind them.
type folds struct {
	by256, by192, by128, by64, by16 [2]uint64
	byStreams                       [2]uint64    // over 256 bytes and three streams
	byStream2, byStream             [2]uint64    // over two streams, and one
	lanes                           [4][2]uint64 // over 48, 32 and 16 bytes; the last one is not multiplied
	by4                             [2]uint64    // the first one only
	barrett                         [2]uint64    // P, and the quotient of x^64 and P
}

func newFolds(polynomial uint32) folds {
	by := func(n int) [2]uint64 { return distance(polynomial, n) }
	return folds{
		by256: by(256), by192: by(192), by128: by(128), by64: by(64), by16: by(16),
		byStreams: by(foldedBytes + 3*streamBytes), byStream2: by(2 * streamBytes), byStream: by(streamBytes),
		lanes:   [4][2]uint64{by(48), by(32), by(16)},
		by4:     [2]uint64{uint64(power(polynomial, 64)) << 1},
		barrett: barrett(polynomial),
	}
}

// barrett returns P and the quotient of x^64 and P, of 33 bits each, reflected.
func barrett(polynomial uint32) [2]uint64 {
	p := 1<<32 | uint64(bits.Reverse32(polynomial))
	var quotient uint64
	for r, n := uint64(1<<32), 33; n > 0; n-- {
		bit := r >> 32
		quotient = quotient<<1 | bit
		r = (r ^ p*bit) << 1
	}
	return [2]uint64{bits.Reverse64(p) >> 31, bits.Reverse64(quotient) >> 31}
}

// distance returns the factors of a distance in bytes. The reflected product of two 64-bit numbers has one bit
// less than 128, and the CRC has 32 bits: this makes the exponents 8n+32 and 8n-32 and the bit at the end.
func distance(polynomial uint32, n int) [2]uint64 {
	return [2]uint64{uint64(power(polynomial, 8*n+32)) << 1, uint64(power(polynomial, 8*n-32)) << 1}
}

// power returns x^n mod P, reflected.
func power(polynomial uint32, n int) uint32 {
	r := uint32(1 << 31) // x^0
	for range n {
		carry := r & 1
		r >>= 1
		r ^= polynomial & -carry
	}
	return r
}
