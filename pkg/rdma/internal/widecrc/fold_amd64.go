// SPDX-License-Identifier: Apache-2.0

package widecrc

import (
	"math"

	"golang.org/x/sys/cpu"
)

// leastFolded is the length from which on a message is folded.
var leastFolded = makeLeastFolded()

func makeLeastFolded() int {
	if x := &cpu.X86; x.HasPCLMULQDQ && x.HasAVX2 && x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512VL && x.HasAVX512VPCLMULQDQ {
		return foldedBytes
	}
	return math.MaxInt // the processor cannot, or the system keeps no such registers
}

// foldedBytes is the shortest that fold takes.
const foldedBytes = 256

// fold returns the register after the n bytes at p. n is a multiple of step, and at least foldedBytes.
//
//go:noescape
func fold(p *byte, n int, register uint32, f *folds) uint32
