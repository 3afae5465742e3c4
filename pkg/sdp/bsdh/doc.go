// SPDX-License-Identifier: Apache-2.0

// Package bsdh encodes and decodes the messages of the Sockets Direct Protocol for iWARP
// (draft-pinkerton-iwarp-sdp-01 §6). All of them begin with the Base Sockets Direct Header.
//
// The package is PURE: it has no state, no clock and no I/O. What the messages mean in their order
// is the matter of package socket.
//
// # How to use it
//
// A receiver calls [Parse] with the bytes of one receive completion, and switches on
// [Message.MID]. A sender that has the payload in one piece calls [Message.Append]; one that has it
// elsewhere calls [Message.AppendHeaders], and puts the payload behind what that returns. Neither
// allocates while there are no errors and the slice is large enough. The payload of a parsed
// message is a part of the slice that was parsed.
//
// # Layouts
//
// The draft draws its headers with the ruler of the RFCs: the leftmost bit is the most significant
// one and goes first. [LayoutFigures] reads them so. There are signs that the figures are mirror
// images and that the authors meant the words of InfiniBand's SDP, where the message identifier is
// the first byte: the words of its figure 15 are the parts of one 64-bit number only if they are
// mirrored. [LayoutIBTA] is that. Only words of several fields differ; nothing on the wire says which one
// a peer has, so both peers are configured alike.
//
// # Limitations
//
// Reserved bits are sent as zeros and not looked at. Experimental messages (0x40 to 0x7F) are
// refused as reserved ones are, since nothing negotiates them.
package bsdh
