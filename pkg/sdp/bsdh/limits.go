// SPDX-License-Identifier: Apache-2.0

package bsdh

const (
	// HeaderLen is the length of the Base Sockets Direct Header, in bytes (§6.1).
	HeaderLen = 16

	// Lengths of the messages of connection set-up, in bytes (§6.2.1, §6.2.2).
	HelloLen    = HeaderLen + helloLen
	HelloAckLen = HeaderLen + helloAckLen

	// SrcAvailLen and SinkAvailLen are the lengths of the headers before the payload of an advert,
	// in bytes (§6.3.2, §6.3.3).
	SrcAvailLen  = HeaderLen + srcAvailLen
	SinkAvailLen = HeaderLen + sinkAvailLen

	// MaxHeaders is the longest that the headers of a message can be, in bytes.
	MaxHeaders = SinkAvailLen

	// MinBuffer is the smallest buffer that holds every message, with one byte of payload (§10).
	MinBuffer = MaxHeaders + 1

	// MaxBytes bounds the size of buffers and of what one advert offers (§6.2.1.4, §6.3.2.1).
	MaxBytes = 1 << 31

	// VersionMajor and VersionMinor are the version that we speak (§6.2.1.1, §6.2.1.2).
	VersionMajor = 1
	VersionMinor = 1

	// Lengths of extended headers.
	helloLen     = 16
	helloAckLen  = 12
	srcAvailLen  = 16
	sinkAvailLen = 20
	wordLen      = 4
	suspCommLen  = 8
)
