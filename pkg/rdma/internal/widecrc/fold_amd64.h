// SPDX-License-Identifier: Apache-2.0

// What the functions do, but for the width of their registers (see width64_amd64.h), and for how they read the message, at SI and
// the streams at BX:
//
//	LOAD(at, to)          to becomes the WIDTH bytes at SI and so many more
//	ADD(at, tmp, acc)     acc becomes the sum of itself, tmp and the WIDTH bytes there
//	ADD16(tmp, acc)       the same with the 16 bytes at SI
//	CRC8(at, register)    register takes the eight bytes at BX and so many more
//
// The result is in AX.

// STEP is how far the four accumulators fold at a time.
#define STEP (4*WIDTH)

// MULTIPLY multiplies acc, whose lanes have 16 bytes each, by the factors: the low quadword of a lane by the first
// one, the high one by the second. The sum of the two products is tmp + acc.
#define MULTIPLY(acc, factors, tmp) \
	VPCLMULQDQ $0x00, factors, acc, tmp \
	VPCLMULQDQ $0x11, factors, acc, acc

// FOLD folds acc over the WIDTH bytes at SI and so many more.
#define FOLD(acc, at, factors, tmp) \
	MULTIPLY(acc, factors, tmp) \
	ADD(at, tmp, acc)

// STREAMS takes eight bytes of each of three streams, the first of which is at BX, into registers of CRC-32C.
#define STREAMS(at) \
	CRC8(at, AX) \
	CRC8(at+const_streamBytes, R8) \
	CRC8(at+2*const_streamBytes, R9)

// SHARED folds the four accumulators over the STEP bytes at SI, and has the instruction take 40 bytes of each stream
// meanwhile.
#define SHARED(factors) \
	FOLD(W0, 0, factors, W4) \
	STREAMS(0) \
	FOLD(W1, WIDTH, factors, W5) \
	STREAMS(8) \
	FOLD(W2, 2*WIDTH, factors, W6) \
	STREAMS(16) \
	FOLD(W3, 3*WIDTH, factors, W7) \
	STREAMS(24) \
	STREAMS(32) \
	ADDQ $STEP, SI \
	ADDQ $40, BX

	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
	MOVL register+16(FP), AX
	MOVQ f+24(FP), DX

	BROADCAST(folds_by4W(DX), W8)
	BROADCAST(folds_byW(DX), W9)
	VMOVD  AX, X4
	LOAD(0, W0)
	LOAD(WIDTH, W1)
	LOAD(2*WIDTH, W2)
	LOAD(3*WIDTH, W3)
	XOR(W4, W0, W0)
	ADDQ   $STEP, SI
	SUBQ   $STEP, CX

	MOVQ  chunks+32(FP), DI
	TESTQ DI, DI
	JZ    bySTEP

	// A chunk is bytes that are folded, and three streams behind them:
	//
	//	[STEP bytes before] [folded: 8 x STEP] [stream] [stream] [stream] [STEP bytes behind]
	//
	// Folding goes on behind the streams: the first distance there is longer by them (W10). The streams'
	// registers are multiplied for the distance from the end of their stream to there, and added (W11).
	MOVE(W8, W10)
	XOR(W11, W11, W11)

chunk:
	LEAQ   (const_chunkFolds*STEP)(SI), BX
	XORL   AX, AX
	XORL   R8, R8
	XORL   R9, R9
	SHARED(W10)
	XOR(W11, W0, W0)
	MOVQ   $(const_chunkFolds-1), R10

shared:
	SHARED(W8)
	DECQ R10
	JNZ  shared

	BROADCAST(folds_byStreams(DX), W10)
	VMOVQ           AX, X11
	VPCLMULQDQ      $0x00, folds_byStream2(DX), X11, X11
	VMOVQ           R8, X12
	VPCLMULQDQ      $0x00, folds_byStream(DX), X12, X12
	VMOVQ           R9, X13
	XOR3(X12, X13, X11)
	ADDQ            $(3*const_streamBytes), SI
	SUBQ            $(const_chunkFolds*STEP+3*const_streamBytes), CX
	DECQ            DI
	JNZ             chunk

	FOLD(W0, 0, W10, W4)
	FOLD(W1, WIDTH, W10, W5)
	FOLD(W2, 2*WIDTH, W10, W6)
	FOLD(W3, 3*WIDTH, W10, W7)
	XOR(W11, W0, W0)
	ADDQ   $STEP, SI
	SUBQ   $STEP, CX

	// STEP bytes at a time, so that four multiplications are under way.
bySTEP:
	CMPQ CX, $STEP
	JB   one
	FOLD(W0, 0, W8, W4)
	FOLD(W1, WIDTH, W8, W5)
	FOLD(W2, 2*WIDTH, W8, W6)
	FOLD(W3, 3*WIDTH, W8, W7)
	ADDQ $STEP, SI
	SUBQ $STEP, CX
	JMP  bySTEP

	// The four become one.
one:
	BROADCAST(folds_by3W(DX), W5)
	BROADCAST(folds_by2W(DX), W6)
	MULTIPLY(W0, W5, W4)
	MULTIPLY(W1, W6, W5)
	MULTIPLY(W2, W9, W6)
	XOR3(W4, W3, W0)
	XOR3(W5, W6, W1)
	XOR3(W1, W2, W0)

byWIDTH:
	CMPQ CX, $WIDTH
	JB   lanes
	FOLD(W0, 0, W9, W4)
	ADDQ $WIDTH, SI
	SUBQ $WIDTH, CX
	JMP  byWIDTH

	// Its lanes become one, X3.
lanes:
	LANES
	VMOVDQU folds_by16(DX), X10

by16:
	CMPQ CX, $16
	JB   done
	MULTIPLY(X3, X10, X1)
	ADD16(X1, X3)
	ADDQ $16, SI
	SUBQ $16, CX
	JMP  by16

	// The first eight of the last 16 bytes go over the others, and the first four of these.
done:
	VPXOR      X5, X5, X5
	VPCLMULQDQ $0x10, X10, X3, X1
	VPSRLDQ    $8, X3, X3
	VPXOR      X1, X3, X3
	VPBLENDD   $1, X3, X5, X1
	VPCLMULQDQ $0x00, folds_by4(DX), X1, X1
	VPSRLDQ    $4, X3, X3
	VPXOR      X1, X3, X3

	// Barrett: the quotient's low 32 bits times P have the same low 32 bits as what is left, and the
	// remainder is above them.
	VMOVDQU    folds_barrett(DX), X10
	VPBLENDD   $1, X3, X5, X1
	VPCLMULQDQ $0x10, X10, X1, X1
	VPBLENDD   $1, X1, X5, X1
	VPCLMULQDQ $0x00, X10, X1, X1
	VPXOR      X1, X3, X3
	VPEXTRD    $1, X3, AX
