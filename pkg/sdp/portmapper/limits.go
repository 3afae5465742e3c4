// SPDX-License-Identifier: Apache-2.0

package portmapper

import "time"

const (
	// DefaultMaxLookups bounds the questions of a client that wait for an answer: each has a
	// socket.
	DefaultMaxLookups = 256

	// DefaultSilentFor is how long a port mapper that did not answer is not asked again: as long
	// as destinations without SMC-R are left alone.
	DefaultSilentFor = time.Minute

	// maxKept bounds the answers that a client keeps, and maxOutcomes the port mappers, and the SDP addresses, of which it
	// knows whether they answered last: 200 bytes each. The oldest go.
	maxKept     = 4096
	maxOutcomes = 4096

	// connectTimeout bounds how long a connection to an SDP address may take, before it is the
	// conventional one's turn: a firewall may drop what it does not know. The kernel sends three
	// SYNs in it.
	connectTimeout = 5 * time.Second

	// muteAfter is how long nobody must have answered at an SDP address before it is left alone: the kernel has sent a second SYN.
	muteAfter = time.Second + 100*time.Millisecond

	// readBytes is what is read of a datagram: a message, and iwpmd's longer one.
	readBytes = 64

	// pauseAfterError is how long a server waits when its socket cannot be read.
	pauseAfterError = 10 * time.Millisecond
)
