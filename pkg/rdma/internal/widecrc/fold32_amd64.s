// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"
#include "go_asm.h"
#include "width32_amd64.h"
#include "read_amd64.h"

// func fold32(p *byte, n int, register uint32, f *folds, chunks int) uint32
TEXT ·fold32(SB), NOSPLIT, $0-44
#include "fold_amd64.h"
	MOVL AX, ret+40(FP)
	VZEROUPPER
	RET
