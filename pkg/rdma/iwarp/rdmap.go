// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"encoding/binary"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Bits of RDMAP's control octet (RFC 5040 §4.1).
const (
	rdmapVersion = 0x40
	rdmapVerMask = 0xc0
	rdmapOpMask  = 0x0f
)

// Opcode is the operation of an RDMAP message (RFC 5040 §4.1).
type Opcode uint8

// Operations. Those of RFC 7306, 8 to 11, are not performed.
const (
	OpWrite        Opcode = 0
	OpReadRequest  Opcode = 1
	OpReadResponse Opcode = 2
	OpSend         Opcode = 3
	OpSendInv      Opcode = 4 // SEND with invalidate
	OpSendSE       Opcode = 5 // SEND with solicited event
	OpSendSEInv    Opcode = 6 // SEND with solicited event and invalidate
	OpTerminate    Opcode = 7

	numOpcodes = 8
)

func (o Opcode) String() string {
	names := [numOpcodes]string{
		"RDMA Write", "RDMA Read Request", "RDMA Read Response", "Send", "Send with Invalidate",
		"Send with SE", "Send with SE and Invalidate", "Terminate",
	}
	if o < numOpcodes {
		return names[o]
	}
	return fmt.Sprintf("Opcode(%d)", uint8(o))
}

// tagged reports whether the operation's messages are tagged.
func (o Opcode) tagged() bool { return o == OpWrite || o == OpReadResponse }

// solicited reports whether the operation asks for an event at the receiver.
func (o Opcode) solicited() bool { return o == OpSendSE || o == OpSendSEInv }

// invalidates reports whether the operation's header has an STag to invalidate.
func (o Opcode) invalidates() bool { return o == OpSendInv || o == OpSendSEInv }

// queue returns the queue of an operation whose messages are untagged.
func (o Opcode) queue() uint32 {
	switch o {
	case OpReadRequest:
		return queueReadRequest
	case OpTerminate:
		return queueTerminate
	default:
		return queueSend
	}
}

// sendOpcode returns the form of SEND for the flags of a work request.
func sendOpcode(f rdma.SendFlags) Opcode {
	switch f & (rdma.SendSolicited | rdma.SendInvalidate) {
	case rdma.SendSolicited | rdma.SendInvalidate:
		return OpSendSEInv
	case rdma.SendSolicited:
		return OpSendSE
	case rdma.SendInvalidate:
		return OpSendInv
	default:
		return OpSend
	}
}

// ReadRequest is what follows the header of an RDMA Read Request (RFC 5040 §4.4).
type ReadRequest struct {
	SinkSTag   rdma.RKey // of the requester: the response is sent to it
	SinkTO     uint64
	Size       uint32
	SourceSTag rdma.RKey // of the responder: what is read
	SourceTO   uint64
}

// ParseReadRequest reads a READ request. The error is the [Code] to be told the peer.
func ParseReadRequest(b []byte) (ReadRequest, error) {
	if len(b) != readRequestLen {
		return ReadRequest{}, CodeMarker
	}
	return ReadRequest{
		SinkSTag:   rdma.RKey(binary.BigEndian.Uint32(b)),
		SinkTO:     binary.BigEndian.Uint64(b[4:]),
		Size:       binary.BigEndian.Uint32(b[12:]),
		SourceSTag: rdma.RKey(binary.BigEndian.Uint32(b[16:])),
		SourceTO:   binary.BigEndian.Uint64(b[20:]),
	}, nil
}

// Put writes the READ request to the beginning of b, which has room for it, and returns
// its length.
func (r *ReadRequest) Put(b []byte) int {
	_ = b[readRequestLen-1]
	binary.BigEndian.PutUint32(b, uint32(r.SinkSTag))
	binary.BigEndian.PutUint64(b[4:], r.SinkTO)
	binary.BigEndian.PutUint32(b[12:], r.Size)
	binary.BigEndian.PutUint32(b[16:], uint32(r.SourceSTag))
	binary.BigEndian.PutUint64(b[20:], r.SourceTO)
	return readRequestLen
}

// Append appends the READ request to b.
func (r *ReadRequest) Append(b []byte) []byte {
	var buf [readRequestLen]byte
	return append(b, buf[:r.Put(buf[:])]...)
}
