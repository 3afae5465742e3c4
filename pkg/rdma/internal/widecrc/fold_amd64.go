// SPDX-License-Identifier: Apache-2.0

package widecrc

import (
	"math"

	"golang.org/x/sys/cpu"
)

// leastFolded is the length from which on a message is folded.
var leastFolded = makeLeastFolded()

func makeLeastFolded() int {
	if x := &cpu.X86; x.HasSSE42 && x.HasPCLMULQDQ && x.HasAVX2 && x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512VL && x.HasAVX512VPCLMULQDQ {
		return foldedBytes
	}
	return math.MaxInt // the processor cannot, or the system keeps no such registers
}

// fold returns the register after the n bytes at p. n is a multiple of step, and at least foldedBytes. For CRC-32C so
// many chunks of chunkBytes, which begin foldedBytes behind p, may be shared with the processor's instruction for
// it; there are foldedBytes behind them.
//
//go:noescape
func fold(p *byte, n int, register uint32, f *folds, chunks int) uint32

// foldCopy does the same and copies the bytes, which do not overlap their copy.
//
//go:noescape
func foldCopy(p *byte, n int, register uint32, f *folds, chunks int, to *byte) uint32
