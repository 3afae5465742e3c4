// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"encoding/binary"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Lengths of headers, in a ULPDU.
const (
	taggedLen      = 14
	untaggedLen    = 18
	readRequestLen = 28
)

// Queues of untagged messages (RFC 5040 §4.1).
const (
	queueSend        = 0
	queueReadRequest = 1
	queueTerminate   = 2
	numQueues        = 3
)

// Bits of DDP's control octet (RFC 5041 §4.1).
const (
	ddpTagged  = 0x80
	ddpLast    = 0x40
	ddpVersion = 0x01
	ddpVerMask = 0x03
)

// Header is the header of a DDP segment, RDMAP's octets included (RFC 5041 §4.2 and §4.3,
// RFC 5040 §4.1).
//
//	tagged:                                untagged:
//	+---------------+---------------+      +---------------+---------------+
//	|T|L| rsvd |DV  |RV |rsv| OpCode|      |T|L| rsvd |DV  |RV |rsv| OpCode|
//	+---------------+---------------+      +---------------+---------------+
//	|          STag (4)             |      |     STag to invalidate (4)    |
//	+-------------------------------+      +-------------------------------+
//	|      tagged offset (8)        |      |    queue number, QN (4)       |
//	|                               |      +-------------------------------+
//	+-------------------------------+      | message sequence number (4)   |
//	                                       +-------------------------------+
//	                                       |    message offset (4)         |
//	                                       +-------------------------------+
type Header struct {
	Tagged bool
	Last   bool // of the message's segments
	Op     Opcode

	STag rdma.RKey // tagged: the sink; untagged: to be invalidated, of two forms of SEND
	TO   uint64    // tagged: where the payload goes

	QN  uint32 // untagged: queue
	MSN uint32 // untagged: number of the message in its queue, from 1
	MO  uint32 // untagged: where in the message the payload goes
}

// Len returns the length of the header.
func (h *Header) Len() int {
	if h.Tagged {
		return taggedLen
	}
	return untaggedLen
}

// Parse reads the header that a ULPDU begins with. An error is the [Code] to be told the
// peer. It checks what needs no queue pair: length, versions, operation and its model.
func (h *Header) Parse(b []byte) error {
	if len(b) < taggedLen {
		return CodeMarker
	}
	ddp, ctl := b[0], b[1]
	h.Tagged = ddp&ddpTagged != 0
	h.Last = ddp&ddpLast != 0
	h.Op = Opcode(ctl & rdmapOpMask)
	if ddp&ddpVerMask != ddpVersion {
		if h.Tagged {
			return CodeTaggedVersion
		}
		return CodeUntaggedVersion
	}
	if !h.Tagged && len(b) < untaggedLen {
		return CodeMarker
	}
	h.STag = rdma.RKey(binary.BigEndian.Uint32(b[2:]))
	if h.Tagged {
		h.TO = binary.BigEndian.Uint64(b[6:])
	} else {
		h.QN = binary.BigEndian.Uint32(b[6:])
		h.MSN = binary.BigEndian.Uint32(b[10:])
		h.MO = binary.BigEndian.Uint32(b[14:])
	}
	if ctl&rdmapVerMask != rdmapVersion {
		return CodeRDMAPVersion
	}
	if h.Op > OpTerminate || h.Op.tagged() != h.Tagged {
		return CodeOpcode
	}
	if !h.Tagged && h.QN != h.Op.queue() {
		return CodeQN
	}
	return nil
}

// Put writes the header to the beginning of b, which has room for it, and returns its
// length.
func (h *Header) Put(b []byte) int {
	_ = b[untaggedLen-1]
	ddp := byte(ddpVersion)
	if h.Tagged {
		ddp |= ddpTagged
	}
	if h.Last {
		ddp |= ddpLast
	}
	b[0], b[1] = ddp, rdmapVersion|byte(h.Op)&rdmapOpMask
	binary.BigEndian.PutUint32(b[2:], uint32(h.STag))
	if h.Tagged {
		binary.BigEndian.PutUint64(b[6:], h.TO)
		return taggedLen
	}
	binary.BigEndian.PutUint32(b[6:], h.QN)
	binary.BigEndian.PutUint32(b[10:], h.MSN)
	binary.BigEndian.PutUint32(b[14:], h.MO)
	return untaggedLen
}

// Append appends the header to b.
func (h *Header) Append(b []byte) []byte {
	var buf [untaggedLen]byte
	return append(b, buf[:h.Put(buf[:])]...)
}
