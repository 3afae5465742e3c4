// SPDX-License-Identifier: Apache-2.0

// Registers of 64 bytes, for fold_amd64.h: of AVX-512, with VPCLMULQDQ.

#define WIDTH 64

#define W0 Z0
#define W1 Z1
#define W2 Z2
#define W3 Z3
#define W4 Z4
#define W5 Z5
#define W6 Z6
#define W7 Z7
#define W8 Z8
#define W9 Z9
#define W10 Z10
#define W11 Z11
#define W14 Z14

#define BROADCAST(factors, to) \
	VBROADCASTI64X2 factors, to

#define LOADW(from, to) \
	VMOVDQU64 from, to

#define MOVE(from, to) \
	VMOVDQA64 from, to

#define XOR(a, b, to) \
	VPXORQ a, b, to

// XOR3 adds two to acc.
#define XOR3(a, b, acc) \
	VPTERNLOGQ $0x96, a, b, acc

// LANES: three of the four lanes of W0 are multiplied, each by factors of its own, and the last one is added. The sum is X3.
#define LANES \
	VEXTRACTI64X2 $3, Z0, X3 \
	VMOVDQU64     folds_lanes(DX), Z1 \
	MULTIPLY(Z0, Z1, Z2) \
	VPXORQ        Z2, Z0, Z0 \
	VEXTRACTI64X4 $1, Z0, Y1 \
	VPXOR         Y1, Y0, Y0 \
	VEXTRACTI128  $1, Y0, X1 \
	VPTERNLOGQ    $0x96, X0, X1, X3
