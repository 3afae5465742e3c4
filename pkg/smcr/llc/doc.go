// SPDX-License-Identifier: Apache-2.0

// Package llc encodes and decodes the Link Layer Control messages of SMC-R
// (RFC 7609 A.3), which set up, test and remove the links of a link group
// and the keys of its RMBs. It also knows the forms of SMC-R version 2, which
// the RFC does not describe.
//
// The package is pure: it has no state, no clock and no I/O. It owns nothing;
// no value returned by it refers to the bytes that were parsed. The exchanges
// made of these messages live in package linkgroup.
//
// # Use
//
// A receiver calls [Parse] with the bytes of one receive completion and
// switches on the concrete type. One that knows what to expect calls the
// parser of that type, which does not allocate. The exceptions are the three
// lists of variable length in version 2: [AddLinkExt], [RequestAddLink] and
// [DeleteRKeyV2] allocate their list once, after its length was checked.
//
// A responder sets [Header.Response] in what it received, changes what it has
// to, and sends the result of Append. Everything the peer wrote into defined
// fields is kept, also list entries beyond the announced count.
//
// # Dialects and versions
//
// [DialectRFC] follows the figures of RFC 7609. [DialectLinux] differs in one
// layout: ADD LINK has two reserved bytes between MAC and GID. Version 2 has
// type bytes 0x2X and a 16-bit length, and always uses Linux's layout. The
// length and the number of keys in ADD LINK are in the byte order of the
// sending host, so they say nothing reliable: the byte count of the
// completion decides, and [Header.BigEndian] remembers the order seen.
//
// # Limitations
//
// Reserved fields are not checked, not kept, and sent as zeros. Lengths are
// exact in both versions, with two exceptions that Linux needs: a rejected ADD
// LINK of version 2 may be the whole request sent back, and the response to a
// DELETE RKEY of version 2 has 44 bytes whatever it counts.
package llc
