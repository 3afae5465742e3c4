// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"
#include "go_asm.h"
#include "width64_amd64.h"
#include "read_amd64.h"

// func fold64(p *byte, n int, register uint32, f *folds, chunks int) uint32
TEXT ·fold64(SB), NOSPLIT, $0-44
#include "fold_amd64.h"
	MOVL AX, ret+40(FP)
	VZEROUPPER
	RET
