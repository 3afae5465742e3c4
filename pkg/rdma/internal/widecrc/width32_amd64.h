// SPDX-License-Identifier: Apache-2.0

// Registers of 32 bytes, for fold_amd64.h: of AVX2, with VPCLMULQDQ.

#define WIDTH 32

#define W0 Y0
#define W1 Y1
#define W2 Y2
#define W3 Y3
#define W4 Y4
#define W5 Y5
#define W6 Y6
#define W7 Y7
#define W8 Y8
#define W9 Y9
#define W10 Y10
#define W11 Y11
#define W14 Y14

#define BROADCAST(factors, to) \
	VBROADCASTI128 factors, to

#define LOADW(from, to) \
	VMOVDQU from, to

#define MOVE(from, to) \
	VMOVDQA from, to

#define XOR(a, b, to) \
	VPXOR a, b, to

// XOR3 adds two to acc.
#define XOR3(a, b, acc) \
	VPXOR a, acc, acc \
	VPXOR b, acc, acc

// LANES: the first lane of W0 is multiplied, and the other one is added. The sum is X3.
#define LANES \
	VEXTRACTI128 $1, Y0, X3 \
	VMOVDQU      folds_by16(DX), X1 \
	MULTIPLY(X0, X1, X2) \
	VPXOR        X2, X0, X0 \
	VPXOR        X0, X3, X3
