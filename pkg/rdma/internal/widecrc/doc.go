// SPDX-License-Identifier: Apache-2.0

// Package widecrc computes the CRCs of packets (RoCE's ICRC, CRC-32 of Ethernet) and of iWARP's FPDUs (CRC-32C).
// It is PURE, and safe for concurrent use.
//
// Package hash/crc32 takes 16 bytes at a time by the carry-less multiplication of the first processors that
// had it, or 24 by their instruction for CRC-32C: some 30 GB/s, which makes a CRC as dear as two copies of what it
// covers. Processors with AVX-512 multiply 64 bytes at a time (VPCLMULQDQ: Intel since Ice Lake, AMD since Zen 4). There
// package widecrc takes half of the time. Elsewhere, and for what is short, it is hash/crc32.
//
// # How
//
// A CRC is the remainder of the message, as a polynomial over GF(2), divided by the generator P. To fold is to
// replace the first bytes of a message by their product with x^n mod P, added to the bytes that lie n bits behind
// them: the remainder stays the same. So a message is folded until 16 bytes of it are left, which have the same CRC as the
// whole, and these are divided by P by two more multiplications, as Barrett does
// (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009).
//
// What is in registers is bit-reflected, as both CRCs want it: the first bit of a message is the least significant one
// of its first byte.
package widecrc
