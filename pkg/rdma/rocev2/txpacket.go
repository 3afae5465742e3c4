// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"encoding/binary"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// TxPacket is a packet to be sent: Hdr[:HdrLen], the pieces Payload[:Segs],
// Pad zero bytes and the ICRC, which is the sender's to compute. The pieces
// are registered memory, or the queue pair's own for inline data: send before
// calling another method of the queue pair, or ask [QP.Lends] again, and before
// the owner of the memory may unmap it.
//
// All packets of a message but the last have the same UDPLen (of a WRITE with immediate data, all
// but the first and the last), so that runs of them can leave with one UDP_SEGMENT send.
type TxPacket struct {
	Hdr        [MaxHeaderLen]byte
	HdrLen     int
	Payload    [MaxSGE][]byte
	Segs       int
	PayloadLen int
	Pad        int
}

// UDPLen returns the length of the UDP payload, ICRC included.
func (t *TxPacket) UDPLen() int { return t.HdrLen + t.PayloadLen + t.Pad + ICRCLen }

// FullWrite is the UDPLen of a packet that fills the path MTU, in bytes, with a part of a WRITE.
func FullWrite(mtu int) int { return bthLen + rethLen + mtu + ICRCLen }

// Lends reports whether the payload of a packet that PollTx made before may still be read: that of
// a SEND or WRITE until its work request completes, that of a response to a READ until the
// queue pair is in ERR. Then the memory is the program's again.
func (q *QP) Lends(t *TxPacket) bool {
	if q.attr.State != rdma.QPRTS && q.attr.State != rdma.QPRTR {
		return false
	}
	if !OpCode(t.Hdr[0]).IsRequest() {
		return true
	}
	oldest := q.req.win.una
	if s := &q.req.queue; !s.isEmpty() {
		oldest = s.at(s.head).first
	}
	return near(oldest, rdma.PSN(binary.BigEndian.Uint32(t.Hdr[8:]))&rdma.PSNMask) >= oldest
}
