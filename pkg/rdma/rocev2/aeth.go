// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"fmt"
	"time"
)

// msnMask keeps the bits of a message sequence number.
const msnMask = 1<<24 - 1

// AETH is the acknowledge extended transport header (IBTA 9.3.5).
type AETH struct {
	Syndrome Syndrome
	MSN      uint32 // messages the responder has completed, 24 bits
}

// Syndrome is the kind of an acknowledgement with its value (IBTA 9.7.5.1):
//
//	0 0 0 c c c c c   ACK, c the end-to-end credit code
//	0 0 1 t t t t t   RNR NAK, t the timer code
//	0 1 1 n n n n n   NAK, n the NAK code
//
// Everything else is reserved.
type Syndrome uint8

// NAK codes of a Syndrome (IBTA 9.7.5.2).
type NAKCode uint8

// NAK codes.
const (
	NAKSequence       NAKCode = 0 // a PSN was skipped
	NAKInvalidRequest NAKCode = 1 // wrong operation, length or state
	NAKRemoteAccess   NAKCode = 2 // RKey, bounds or permission
	NAKRemoteOp       NAKCode = 3 // the responder cannot go on
)

func (c NAKCode) String() string {
	switch c {
	case NAKSequence:
		return "PSN sequence error"
	case NAKInvalidRequest:
		return "invalid request"
	case NAKRemoteAccess:
		return "remote access error"
	case NAKRemoteOp:
		return "remote operational error"
	}
	return fmt.Sprintf("NAKCode(%d)", uint8(c))
}

const (
	syndromeKind  = 0xe0
	syndromeValue = 0x1f
	kindACK       = 0x00
	kindRNR       = 0x20
	kindNAK       = 0x60

	// creditsInvalid is the credit code of a responder that does not count
	// receive buffers for its peer (IBTA 9.7.7.2).
	creditsInvalid = 31
)

// SyndromeACK is a positive acknowledgement with a credit code.
func SyndromeACK(credit uint8) Syndrome { return kindACK | Syndrome(credit&syndromeValue) }

// SyndromeRNR says that no receive buffer was there, and how long to wait.
func SyndromeRNR(timer uint8) Syndrome { return kindRNR | Syndrome(timer&syndromeValue) }

// SyndromeNAK is a negative acknowledgement.
func SyndromeNAK(c NAKCode) Syndrome { return kindNAK | Syndrome(c&syndromeValue) }

// ACK returns the credit code of a positive acknowledgement.
func (s Syndrome) ACK() (credit uint8, ok bool) {
	return uint8(s & syndromeValue), s&syndromeKind == kindACK
}

// RNR returns the timer code of an RNR NAK.
func (s Syndrome) RNR() (timer uint8, ok bool) {
	return uint8(s & syndromeValue), s&syndromeKind == kindRNR
}

// NAK returns the code of a NAK.
func (s Syndrome) NAK() (c NAKCode, ok bool) {
	return NAKCode(s & syndromeValue), s&syndromeKind == kindNAK
}

func (s Syndrome) String() string {
	if c, ok := s.ACK(); ok {
		return fmt.Sprintf("ACK credit %d", c)
	}
	if t, ok := s.RNR(); ok {
		return fmt.Sprintf("RNR NAK, %v", RNRTimer(t))
	}
	if c, ok := s.NAK(); ok {
		return "NAK " + c.String()
	}
	return fmt.Sprintf("Syndrome(0x%02x)", uint8(s))
}

// RNRTimer returns the wait that a 5-bit timer code asks for (IBTA 9.7.5.2.8,
// table 46).
func RNRTimer(code uint8) time.Duration {
	// In hundredths of a millisecond: the table's unit.
	table := [32]time.Duration{
		65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
		256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
	}
	return table[code&31] * (time.Millisecond / 100)
}
