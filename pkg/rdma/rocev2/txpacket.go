// SPDX-License-Identifier: Apache-2.0

package rocev2

// TxPacket is a packet to be sent: Hdr[:HdrLen], the pieces Payload[:Segs],
// Pad zero bytes and the ICRC, which is the sender's to compute. The pieces
// are registered memory, or the queue pair's own for inline data: send before
// calling another method of the queue pair, and before the owner of the
// memory may unmap it.
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
