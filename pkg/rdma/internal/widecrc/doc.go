// SPDX-License-Identifier: Apache-2.0

// Package widecrc computes the CRCs of packets (RoCE's ICRC, CRC-32 of Ethernet) and of iWARP's FPDUs (CRC-32C).
// It is PURE, and safe for concurrent use.
//
// Package hash/crc32 sums some 30 GB/s, so a CRC costs as much as two copies of what it covers. It computes CRC-32C by the
// processor's instruction for it, 24 bytes at a time, and CRC-32 by carry-less multiplication of 16 bytes at a time or,
// from 1 KiB on, of 64 bytes; each multiplication waits for the one before. Package widecrc takes less time if the processor has VPCLMULQDQ:
//
//   - With AVX-512 (Intel since Ice Lake, AMD since Zen 4) it multiplies four registers of 64 bytes at once, from 256 bytes
//     on and for both CRCs: half to three quarters of the time. From 3.5 KiB on it shares a CRC-32C between multiplications and
//     the processor's instruction, which run at the same time: a third of the time.
//   - With AVX2 alone (AMD Zen 3, Intel Alder Lake) the registers have 32 bytes: half to four fifths of the time for CRC-32, and
//     0.6 to 0.9 of it for CRC-32C from 1 KiB on.
//
// On other processors, and for shorter messages, widecrc calls hash/crc32.
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
