// SPDX-License-Identifier: Apache-2.0

package rocev2

import "github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"

const (
	// Port is the UDP destination port of RoCEv2.
	Port = 4791

	// PKey is the partition key of every packet: the default partition, full
	// membership. RoCE has no subnet manager that would hand out others.
	PKey = 0xffff

	// MaxSGE is the largest number of pieces that one send gathers. It bounds
	// TxPacket, which holds a slice for each piece, because a packet can span
	// them all.
	MaxSGE = 4

	// MaxMessage is the longest message that IBTA 9.3.3 lets one work request
	// or RETH announce: 2^31 bytes.
	MaxMessage = wq.MaxMessage

	// MaxQueue bounds the send and the receive queue.
	MaxQueue = wq.MaxQueue

	// MaxInlineLimit bounds MaxInline: each slot of the send queue owns that
	// many bytes.
	MaxInlineLimit = 4096

	// DefaultWindow is the number of request packets in flight when the
	// configuration does not say. At 1 KiB packets it covers 1 MiB, two of
	// the largest RMBEs.
	DefaultWindow = 1024

	// maxTimeoutShift bounds how much the ACK timer grows: IBTA 9.7.6.1.3 has a
	// timeout between one and four times the queue pair's.
	maxTimeoutShift = 2

	// initialCwnd is the number of packets in flight before the first answer.
	// More than that can be lost where the neighbour's address is not yet
	// resolved: Linux queues about 200 KiB meanwhile.
	initialCwnd = 32

	// MaxWindow keeps the packets in flight far below half the PSN space
	// (IBTA 9.7.1: at most 2^23), where old and new could be confused.
	MaxWindow = 1 << 16

	// MaxReads is the number of READ requests that wait for their responses,
	// on each side. Peers learn it out of band in InfiniBand; with SMC-R they
	// do not use READ at all, and 16 is what common RNICs offer.
	MaxReads = 16

	// MaxMTUBytes is the payload of the largest path MTU.
	MaxMTUBytes = 4096

	// MaxHeaderLen is the room for BTH and extended headers in a TxPacket:
	// BTH, RETH and immediate data are 32 bytes, the longest that we send.
	MaxHeaderLen = 32

	// ICRCLen is the length of the invariant CRC that ends every packet.
	ICRCLen = 4

	// MaxPacketLen is the longest UDP payload of RoCEv2: the longest headers
	// (BTH and AtomicETH), the largest MTU and the ICRC.
	MaxPacketLen = bthLen + atomicETHLen + MaxMTUBytes + ICRCLen

	// maxDelayedBytes is how much may be received before several messages are a stream and not
	// a dialogue: one packet of the largest MTU.
	maxDelayedBytes = MaxMTUBytes

	// maxHeldPackets is how many packets an ACK may stand for that waits. It is below the
	// window of peers: 128 packets with rxe.
	maxHeldPackets = 96
)
