// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"
#include "go_asm.h"

// What is read is written R11 bytes behind.

#define LOAD64(at, to) \
	VMOVDQU64 (at)(SI), to \
	VMOVDQU64 to, (at)(SI)(R11*1)

#define ADD64(at, tmp, acc) \
	LOAD64(at, Z14) \
	VPTERNLOGQ $0x96, Z14, tmp, acc

#define ADD16(tmp, acc) \
	VMOVDQU    0(SI), X14 \
	VMOVDQU    X14, 0(SI)(R11*1) \
	VPTERNLOGQ $0x96, X14, tmp, acc

#define CRC8(at, register) \
	MOVQ   (at)(BX), R12 \
	MOVQ   R12, (at)(BX)(R11*1) \
	CRC32Q R12, register

// func foldCopy(p *byte, n int, register uint32, f *folds, chunks int, to *byte) uint32
TEXT ·foldCopy(SB), NOSPLIT, $0-52
	MOVQ to+40(FP), R11
	SUBQ p+0(FP), R11
#include "fold_amd64.h"
	MOVL AX, ret+48(FP)
	VZEROUPPER
	RET
