// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// FOLD multiplies acc, whose lanes have 16 bytes each, by the factors and adds next to it: the low quadword of a
// lane by the first one, the high one by the second.
#define FOLD(acc, next, factors, tmp) \
	VPCLMULQDQ $0x00, factors, acc, tmp \
	VPCLMULQDQ $0x11, factors, acc, acc \
	VPTERNLOGQ $0x96, next, tmp, acc

// FOLDX is FOLD for one lane, with next in a register.
#define FOLDX(acc, next, factors, tmp) \
	VPCLMULQDQ $0x00, factors, acc, tmp \
	VPCLMULQDQ $0x11, factors, acc, acc \
	VPXOR tmp, next, next \
	VPXOR acc, next, next

// func fold(p *byte, n int, register uint32, f *folds) uint32
TEXT ·fold(SB), NOSPLIT, $0-36
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
	MOVL register+16(FP), AX
	MOVQ f+24(FP), DX

	VBROADCASTI64X2 0(DX), Z8   // by 256
	VBROADCASTI64X2 16(DX), Z9  // by 64
	VMOVDQU 32(DX), X10         // by 16

	VMOVD AX, X4
	VPXORQ 0(SI), Z4, Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3
	ADDQ $256, SI
	SUBQ $256, CX

	// 256 bytes at a time, so that four multiplications are under way.
by256:
	CMPQ CX, $256
	JB   one
	FOLD(Z0, 0(SI), Z8, Z4)
	FOLD(Z1, 64(SI), Z8, Z5)
	FOLD(Z2, 128(SI), Z8, Z6)
	FOLD(Z3, 192(SI), Z8, Z7)
	ADDQ $256, SI
	SUBQ $256, CX
	JMP  by256

	// The four become one.
one:
	FOLD(Z0, Z1, Z9, Z4)
	FOLD(Z0, Z2, Z9, Z4)
	FOLD(Z0, Z3, Z9, Z4)

by64:
	CMPQ CX, $64
	JB   lanes
	FOLD(Z0, 0(SI), Z9, Z4)
	ADDQ $64, SI
	SUBQ $64, CX
	JMP  by64

	// Its four lanes become one.
lanes:
	VEXTRACTI64X2 $1, Z0, X1
	VEXTRACTI64X2 $2, Z0, X2
	VEXTRACTI64X2 $3, Z0, X3
	FOLDX(X0, X1, X10, X4)
	FOLDX(X1, X2, X10, X4)
	FOLDX(X2, X3, X10, X4)

by16:
	CMPQ CX, $16
	JB   done
	VMOVDQU 0(SI), X1
	FOLDX(X3, X1, X10, X4)
	VMOVDQA X1, X3
	ADDQ $16, SI
	SUBQ $16, CX
	JMP  by16

	// The first eight of the last 16 bytes go over the others, and the first four of these.
done:
	VPCLMULQDQ $0x10, X10, X3, X1
	VPSRLDQ $8, X3, X3
	VPXOR X1, X3, X3
	VMOVQ X3, AX
	MOVL AX, AX
	VMOVQ AX, X1
	VPCLMULQDQ $0x00, 48(DX), X1, X1
	VPSRLDQ $4, X3, X3
	VPXOR X1, X3, X3

	// Barrett: the quotient's low 32 bits times P have the same low 32 bits as what is left, and the
	// remainder is above them.
	VMOVDQU 64(DX), X10
	VMOVQ X3, AX
	MOVL AX, AX
	VMOVQ AX, X1
	VPCLMULQDQ $0x10, X10, X1, X1
	VMOVQ X1, AX
	MOVL AX, AX
	VMOVQ AX, X1
	VPCLMULQDQ $0x00, X10, X1, X1
	VPXOR X1, X3, X3
	VPEXTRD $1, X3, AX
	MOVL AX, ret+32(FP)
	VZEROUPPER
	RET
