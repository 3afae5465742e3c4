// SPDX-License-Identifier: Apache-2.0

package iwarp

import "time"

const (
	// MaxPrivateData is the longest private data of an MPA start-up frame (RFC 5044
	// §7.1.1), with the octets that RFC 6581 puts before the program's.
	MaxPrivateData = 512

	// PortablePrivateData is how much private data every peer takes: Linux's siw
	// takes 256 octets, and revision 2 uses four of them.
	PortablePrivateData = 256 - enhancedLen

	// MaxULPDU is the longest ULPDU that the length of an FPDU can tell.
	MaxULPDU = 1<<16 - 1

	// MaxOwnULPDU is the longest ULPDU that we send: with the length before it a
	// multiple of four, so that the FPDU needs no pad.
	MaxOwnULPDU = 65530

	// MaxMarkedULPDU is the longest ULPDU that we send with markers: the last of them tells by 16 bits how far
	// behind the FPDU's beginning it is (RFC 5044 §4.3).
	MaxMarkedULPDU = 64768

	// MinULPDU is what MPA offers to DDP however small TCP's segments are
	// (RFC 5044 §4.5).
	MinULPDU = 128

	// DefaultULPDU is used while nothing is known of TCP's segments: an Ethernet
	// frame's, with TCP's time stamps.
	DefaultULPDU = 1440 - fpduOverhead

	// MaxReads bounds the READs in flight, on each side. Start-up lowers them to
	// what the peer offers. Common adapters have 16 or more.
	MaxReads = 128

	// DefaultReads is the number of READs in flight, on each side, when nothing is
	// configured.
	DefaultReads = 16

	// ReadsUnknown stands on the wire for a number of READs that is agreed elsewhere
	// (RFC 6581 §9).
	ReadsUnknown = 0x3fff

	// MaxSGE is the largest number of pieces that one send gathers.
	MaxSGE = 4

	// MaxInlineLimit bounds MaxInline: each place of the send queue owns that many
	// bytes.
	MaxInlineLimit = 4096

	// CloseTimeout is how long a queue pair that has ended its half of the stream
	// waits for the peer to end the other.
	CloseTimeout = 2 * time.Second

	// rxBufferLen holds the longest FPDU and as much again, so that one read takes
	// several FPDUs, and the rest of the last one is seldom moved. A buffer that a read has filled
	// doubles until it has maxRxBufferLen: with more per read the reader sleeps, and is woken, less
	// often.
	rxBufferLen    = 2 * (1 << 16)
	maxRxBufferLen = 256 << 10

	// maxSegments is the number of FPDUs that are offered to TCP at a time, and
	// maxOffered the number of bytes after which no further one is added: nobody waits for
	// the processor that copies them for longer than some 100 us. With CRCs it is
	// maxSummed: what was read for its CRC is in the processor's cache when TCP copies it.
	maxSegments = 128
	maxOffered  = 1 << 20
	maxSummed   = 512 << 10

	// arenaLen is the memory for FPDUs that are copied before they are sent: one of
	// the longest, with its markers, and a Terminate. The first one that is copied makes it copiedLen, so that
	// several are offered at a time.
	arenaLen  = 1<<16 + 1<<10
	copiedLen = 4 * arenaLen

	// maxResponses is how many READ responses are sent in a row while local requests
	// wait, so that the peer's READs cannot starve them.
	maxResponses = 4
)
