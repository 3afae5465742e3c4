// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"
#include "go_asm.h"
#include "width32_amd64.h"
#include "copy_amd64.h"

// func foldCopy32(p *byte, n int, register uint32, f *folds, chunks int, to *byte) uint32
TEXT ·foldCopy32(SB), NOSPLIT, $0-52
	MOVQ to+40(FP), R11
	SUBQ p+0(FP), R11
#include "fold_amd64.h"
	MOVL AX, ret+48(FP)
	VZEROUPPER
	RET
