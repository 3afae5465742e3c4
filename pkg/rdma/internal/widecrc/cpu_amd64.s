// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func features7() uint32
TEXT ·features7(SB), NOSPLIT, $0-4
	MOVL $7, AX
	XORL CX, CX
	CPUID
	MOVL CX, ret+0(FP)
	RET
