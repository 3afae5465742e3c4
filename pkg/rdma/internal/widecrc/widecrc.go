// SPDX-License-Identifier: Apache-2.0

package widecrc

import (
	"hash/crc32"
	"math"
	"math/bits"
)

// Table is what a polynomial needs. It is immutable.
type Table struct {
	short *crc32.Table
	least int  // the length from which on a message is folded
	fold  int  // four registers, which are folded at a time
	wide  bool // a register has 64 bytes, not 32
	// chunk is the bytes that are shared with the processor's instruction at a time; 0: it has none for the polynomial.
	chunk int
	folds folds
}

// IEEE is CRC-32 as Ethernet has it.
var IEEE = makeIEEE()

// Castagnoli is CRC-32C, as iSCSI and MPA (RFC 5044) have it.
var Castagnoli = makeCastagnoli()

func makeIEEE() *Table { return makeTable(crc32.IEEE, widths()) }

func makeCastagnoli() *Table { return makeTable(crc32.Castagnoli, widths()) }

// makeTable returns the table of a polynomial for the first of the widths of registers.
func makeTable(polynomial uint32, widths []int) *Table {
	t := &Table{short: crc32.MakeTable(polynomial), least: math.MaxInt}
	if len(widths) == 0 {
		return t
	}
	width := widths[0]
	t.least, t.fold, t.wide, t.folds = leastFolded, 4*width, width == 64, newFolds(polynomial, width)
	if polynomial == crc32.Castagnoli {
		t.chunk = chunkFolds*t.fold + 3*streamBytes
	}
	return t
}

// Update returns the CRC of what crc is of, followed by p. The CRC of nothing is 0: it is what crc32.Update
// returns.
func (t *Table) Update(crc uint32, p []byte) uint32 {
	if len(p) < t.least {
		return crc32.Update(crc, t.short, p)
	}
	n, chunks := t.share(len(p))
	if t.wide {
		crc = fold64(&p[0], n, ^crc, &t.folds, chunks)
	} else {
		crc = fold32(&p[0], n, ^crc, &t.folds, chunks)
	}
	return crc32.Update(^crc, t.short, p[n:])
}

// Copy copies p to dst, which is as long and somewhere else, and returns what Update returns. Both together take two
// thirds of the time of one after the other.
func (t *Table) Copy(crc uint32, dst, p []byte) uint32 {
	if len(p) < t.least {
		copy(dst, p)
		return crc32.Update(crc, t.short, dst[:len(p)])
	}
	n, chunks := t.share(len(p))
	_ = dst[n-1]
	if t.wide {
		crc = foldCopy64(&p[0], n, ^crc, &t.folds, chunks, &dst[0])
	} else {
		crc = foldCopy32(&p[0], n, ^crc, &t.folds, chunks, &dst[0])
	}
	copy(dst[n:], p[n:])
	return crc32.Update(^crc, t.short, dst[n:len(p)])
}

// share returns how many of n bytes are folded, and how many chunks of these the processor's instruction shares.
func (t *Table) share(n int) (folded, chunks int) {
	folded = n &^ (step - 1)
	if t.chunk > 0 {
		chunks = max(0, folded-2*t.fold) / t.chunk
	}
	return folded, chunks
}

const (
	// leastFolded is where folding begins to be faster.
	leastFolded = 256
	// step: what is folded is a multiple of so many bytes.
	step = 16

	// A chunk is bytes that are folded, four registers at a time so many times, and three streams behind them for the
	// instruction, which takes 40 bytes of each while four registers are folded.
	chunkFolds  = 8
	streamBytes = chunkFolds * 40
)

// folds are x^n mod P for the distances over which is folded. Each has two factors: one for the eight bytes
// that come first and so have 64 bits more to go, and one for the eight behind them.
type folds struct {
	by4W, by3W, by2W, byW, by16 [2]uint64    // over so many registers, and 16 bytes
	byStreams                   [2]uint64    // over four registers and three streams
	byStream2, byStream         [2]uint64    // over two streams, and one
	lanes                       [4][2]uint64 // of 64 bytes: over 48, 32 and 16; the last one is not multiplied
	by4                         [2]uint64    // the first one only
	barrett                     [2]uint64    // P, and the quotient of x^64 and P
}

// newFolds returns the factors for registers of so many bytes.
func newFolds(polynomial uint32, width int) folds {
	by := func(n int) [2]uint64 { return distance(polynomial, n) }
	return folds{
		by4W: by(4 * width), by3W: by(3 * width), by2W: by(2 * width), byW: by(width), by16: by(16),
		byStreams: by(4*width + 3*streamBytes), byStream2: by(2 * streamBytes), byStream: by(streamBytes),
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
