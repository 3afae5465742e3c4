// SPDX-License-Identifier: Apache-2.0

package widecrc

import "golang.org/x/sys/cpu"

// widths are the registers' bytes that the processor can fold with, and the system keeps; the best comes first.
func widths() (w []int) {
	x := &cpu.X86
	if !x.HasSSE42 || !x.HasPCLMULQDQ || !x.HasAVX2 {
		return nil
	}
	if x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512VL && x.HasAVX512VPCLMULQDQ {
		w = append(w, 64)
	}
	// Package cpu tells of VPCLMULQDQ only beside AVX-512.
	const vpclmulqdq = 1 << 10
	if features7()&vpclmulqdq != 0 {
		w = append(w, 32)
	}
	return w
}

// features7 is what the processor says in ECX of its leaf 7.
func features7() uint32

// fold64 and fold32 return the register after the n bytes at p, folded with registers of so many bytes. n is a multiple of step, and
// at least four registers. For CRC-32C so many chunks, which begin four registers behind p, may be shared with the
// processor's instruction for it; there are four registers behind them.
//
//go:noescape
func fold64(p *byte, n int, register uint32, f *folds, chunks int) uint32

//go:noescape
func fold32(p *byte, n int, register uint32, f *folds, chunks int) uint32

// foldCopy64 and foldCopy32 do the same and copy the bytes, which do not overlap their copy.
//
//go:noescape
func foldCopy64(p *byte, n int, register uint32, f *folds, chunks int, to *byte) uint32

//go:noescape
func foldCopy32(p *byte, n int, register uint32, f *folds, chunks int, to *byte) uint32
