// SPDX-License-Identifier: Apache-2.0

// What fold and foldCopy do, but for how they read the message, at SI and the streams at BX:
//
//	LOAD64(at, to)        to becomes the 64 bytes at SI and so many more
//	ADD64(at, tmp, acc)   acc becomes the sum of itself, tmp and the 64 bytes there
//	ADD16(tmp, acc)       the same with the 16 bytes at SI
//	CRC8(at, register)    register takes the eight bytes at BX and so many more
//
// The result is in AX.

// MULTIPLY multiplies acc, whose lanes have 16 bytes each, by the factors: the low quadword of a lane by the first
// one, the high one by the second. The sum of the two products is tmp + acc.
#define MULTIPLY(acc, factors, tmp) \
	VPCLMULQDQ $0x00, factors, acc, tmp \
	VPCLMULQDQ $0x11, factors, acc, acc

// FOLD folds acc over the 64 bytes at SI and so many more.
#define FOLD(acc, at, factors, tmp) \
	MULTIPLY(acc, factors, tmp) \
	ADD64(at, tmp, acc)

// STREAMS takes eight bytes of each of three streams, the first of which is at BX, into registers of CRC-32C.
#define STREAMS(at) \
	CRC8(at, AX) \
	CRC8(at+const_streamBytes, R8) \
	CRC8(at+2*const_streamBytes, R9)

// SHARED folds the four accumulators over the 256 bytes at SI, and has the instruction take 40 bytes of each stream
// meanwhile.
#define SHARED(factors) \
	FOLD(Z0, 0, factors, Z4) \
	STREAMS(0) \
	FOLD(Z1, 64, factors, Z5) \
	STREAMS(8) \
	FOLD(Z2, 128, factors, Z6) \
	STREAMS(16) \
	FOLD(Z3, 192, factors, Z7) \
	STREAMS(24) \
	STREAMS(32) \
	ADDQ $256, SI \
	ADDQ $40, BX

	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
	MOVL register+16(FP), AX
	MOVQ f+24(FP), DX

	VBROADCASTI64X2 folds_by256(DX), Z8
	VBROADCASTI64X2 folds_by64(DX), Z9
	VMOVD  AX, X4
	LOAD64(0, Z0)
	LOAD64(64, Z1)
	LOAD64(128, Z2)
	LOAD64(192, Z3)
	VPXORQ Z4, Z0, Z0
	ADDQ   $256, SI
	SUBQ   $256, CX

	MOVQ  chunks+32(FP), DI
	TESTQ DI, DI
	JZ    by256

	// A chunk is bytes that are folded, and three streams behind them:
	//
	//	[256 bytes before] [folded: 8 x 256] [stream] [stream] [stream] [256 bytes behind]
	//
	// Folding goes on behind the streams: the first distance there is longer by them (Z10). The streams'
	// registers are multiplied for the distance from the end of their stream to there, and added (Z11).
	VMOVDQA64 Z8, Z10
	VPXORQ    Z11, Z11, Z11

chunk:
	LEAQ   (const_chunkFolds*const_foldedBytes)(SI), BX
	XORL   AX, AX
	XORL   R8, R8
	XORL   R9, R9
	SHARED(Z10)
	VPXORQ Z11, Z0, Z0
	MOVQ   $(const_chunkFolds-1), R10

shared:
	SHARED(Z8)
	DECQ R10
	JNZ  shared

	VBROADCASTI64X2 folds_byStreams(DX), Z10
	VMOVQ           AX, X11
	VPCLMULQDQ      $0x00, folds_byStream2(DX), X11, X11
	VMOVQ           R8, X12
	VPCLMULQDQ      $0x00, folds_byStream(DX), X12, X12
	VMOVQ           R9, X13
	VPTERNLOGQ      $0x96, X12, X13, X11
	ADDQ            $(3*const_streamBytes), SI
	SUBQ            $const_chunkBytes, CX
	DECQ            DI
	JNZ             chunk

	FOLD(Z0, 0, Z10, Z4)
	FOLD(Z1, 64, Z10, Z5)
	FOLD(Z2, 128, Z10, Z6)
	FOLD(Z3, 192, Z10, Z7)
	VPXORQ Z11, Z0, Z0
	ADDQ   $256, SI
	SUBQ   $256, CX

	// 256 bytes at a time, so that four multiplications are under way.
by256:
	CMPQ CX, $256
	JB   one
	FOLD(Z0, 0, Z8, Z4)
	FOLD(Z1, 64, Z8, Z5)
	FOLD(Z2, 128, Z8, Z6)
	FOLD(Z3, 192, Z8, Z7)
	ADDQ $256, SI
	SUBQ $256, CX
	JMP  by256

	// The four become one.
one:
	VBROADCASTI64X2 folds_by192(DX), Z5
	VBROADCASTI64X2 folds_by128(DX), Z6
	MULTIPLY(Z0, Z5, Z4)
	MULTIPLY(Z1, Z6, Z5)
	MULTIPLY(Z2, Z9, Z6)
	VPTERNLOGQ $0x96, Z4, Z3, Z0
	VPTERNLOGQ $0x96, Z5, Z6, Z1
	VPTERNLOGQ $0x96, Z1, Z2, Z0

by64:
	CMPQ CX, $64
	JB   lanes
	FOLD(Z0, 0, Z9, Z4)
	ADDQ $64, SI
	SUBQ $64, CX
	JMP  by64

	// Its four lanes become one: three are multiplied, each by factors of its own, and the last one is added.
lanes:
	VEXTRACTI64X2 $3, Z0, X3
	VMOVDQU64     folds_lanes(DX), Z1
	MULTIPLY(Z0, Z1, Z2)
	VPXORQ        Z2, Z0, Z0
	VEXTRACTI64X4 $1, Z0, Y1
	VPXOR         Y1, Y0, Y0
	VEXTRACTI128  $1, Y0, X1
	VPTERNLOGQ    $0x96, X0, X1, X3
	VMOVDQU       folds_by16(DX), X10

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
