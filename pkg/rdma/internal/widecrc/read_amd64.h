// SPDX-License-Identifier: Apache-2.0

// How a message is read that is not copied: see fold_amd64.h.

#define LOAD(at, to) \
	LOADW((at)(SI), to)

#define ADD(at, tmp, acc) \
	XOR3((at)(SI), tmp, acc)

#define ADD16(tmp, acc) \
	XOR3(0(SI), tmp, acc)

#define CRC8(at, register) \
	CRC32Q (at)(BX), register
