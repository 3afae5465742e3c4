// SPDX-License-Identifier: Apache-2.0

package softiwarp

import "time"

const (
	// requestTimeout is how long a connection that a [Listener] accepted may take to send its
	// MPA Request, and a peer to take the few bytes of an answer: as long as Linux's siw
	// waits.
	requestTimeout = 5 * time.Second

	// maxPending bounds the connections of a device that wait for an MPA Request, or whose
	// request waits for an answer: each costs a descriptor and 2 KiB.
	maxPending = 4096

	// maxListening bounds the connections of one [Listener] that wait for an MPA Request; further ones wait in the kernel.
	// maxListeningPerPeer bounds those of one address, or network of IPv6; further ones are closed. So a peer that connects
	// and says nothing, and has its places until requestTimeout, leaves places to others.
	maxListening        = 256
	maxListeningPerPeer = maxListening / 4

	// maxLast bounds the last message of the streaming mode, in bytes: a socket's buffers
	// have room for it.
	maxLast = 64 << 10

	// What follows is for peers with Linux's siw, see [ConnectOptions.Streamed].

	// firstDelay is how long an initiator waits with its first FPDU after the Reply. Linux's
	// siw loses the wake-up for what comes right behind its Reply, and looks at it only when
	// more comes.
	firstDelay = 2 * time.Millisecond

	// firstNudge is how long an initiator waits for a first FPDU of the peer before it looks
	// whether that has lost the wake-up in spite of firstDelay; then twice as long, and so
	// on, maxNudges times, which is 6 s. A peer that has nothing to say is none the worse.
	firstNudge = 100 * time.Millisecond
	maxNudges  = 6

	// minStay is how long a connection stays after its start-up, at least: the
	// kernel of a peer with Linux's siw does not survive one that ends while it is
	// being told of its beginning.
	minStay = 50 * time.Millisecond
)
