// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

const (
	// txBatch bounds the packets that are made and sent together, see burst: with the
	// smallest usual path MTU, 1024, that is two UDP_SEGMENT sends.
	txBatch = 128

	// maxSegments and maxMessageBytes bound a UDP_SEGMENT send: the kernel
	// takes 64 segments before 6.9 and at most 65507 bytes in all.
	maxSegments     = 64
	maxMessageBytes = 65000

	// rxBatch is the number of datagram buffers of a device's receive call,
	// of rxBufferBytes each, which is the most that UDP_GRO hands over.
	rxBatch       = 16
	rxBufferBytes = 1 << 16

	// maxReceivers is the number of receiving sockets of a device, at most: a power of two.
	maxReceivers = 4
	// leftDelay is how long a device waits for all of another one to be gone whose process was killed.
	leftDelay = 2 * time.Second
	// foldTimeout is how long a device that gets company waits until its further receivers
	// have taken what there is.
	foldTimeout = 50 * time.Millisecond

	// defaultSocketBufferBytes holds several windows of several queue pairs.
	// The kernel counts about twice the bytes of small datagrams.
	defaultSocketBufferBytes = 16 << 20

	// packetOverhead is what IPv6, UDP, the longest headers and the ICRC add
	// to a payload, rounded as verbs do when they derive a path MTU.
	packetOverhead = 40 + 8 + rocev2.MaxHeaderLen + rocev2.ICRCLen

	// tellEvery is the pause between two calls of Config.TooLarge: each repetition of a packet is refused, too.
	tellEvery = time.Minute

	// peerCache is the number of peers' addresses and ports whose ICRC state a receiver keeps
	// at hand; more than that only cost time.
	peerCache = 1 << peerBits
	peerBits  = 10

	// joinTimeout bounds how long a device that is being opened waits for the
	// one that shares its address, which answers at once unless it is stopped.
	joinTimeout = 2 * time.Second
	// dyingTimeout is how long a device that shares waits for the port of one that gave
	// its generation up: a process that is killed may give that up first.
	dyingTimeout = 250 * time.Millisecond
	// joinPoll is the pause between two tries to enter the place of an address, which
	// another device does in less than a millisecond.
	joinPoll = 2 * time.Millisecond
)
