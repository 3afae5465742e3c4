// SPDX-License-Identifier: Apache-2.0

// How a message is read that is copied, see fold_amd64.h: what is read is written R11 bytes behind.

#define LOAD(at, to) \
	LOADW((at)(SI), to) \
	LOADW(to, (at)(SI)(R11*1))

#define ADD(at, tmp, acc) \
	LOAD(at, W14) \
	XOR3(W14, tmp, acc)

#define ADD16(tmp, acc) \
	VMOVDQU    0(SI), X14 \
	VMOVDQU    X14, 0(SI)(R11*1) \
	XOR3(X14, tmp, acc)

#define CRC8(at, register) \
	MOVQ   (at)(BX), R12 \
	MOVQ   R12, (at)(BX)(R11*1) \
	CRC32Q R12, register
