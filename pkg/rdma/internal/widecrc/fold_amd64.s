// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"
#include "go_asm.h"

#define LOAD64(at, to) \
	VMOVDQU64 (at)(SI), to

#define ADD64(at, tmp, acc) \
	VPTERNLOGQ $0x96, (at)(SI), tmp, acc

#define ADD16(tmp, acc) \
	VPTERNLOGQ $0x96, 0(SI), tmp, acc

#define CRC8(at, register) \
	CRC32Q (at)(BX), register

// func fold(p *byte, n int, register uint32, f *folds, chunks int) uint32
TEXT ·fold(SB), NOSPLIT, $0-44
#include "fold_amd64.h"
	MOVL AX, ret+40(FP)
	VZEROUPPER
	RET
