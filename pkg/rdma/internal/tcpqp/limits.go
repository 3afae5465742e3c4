// SPDX-License-Identifier: Apache-2.0

package tcpqp

import "time"

const (
	// maxLinger is how long a connection that was let go waits for the end of the peer's half:
	// as long as a queue pair that has ended its own waits for it.
	maxLinger = 2 * time.Second

	// maxLingering bounds the connections of a device that wait so: those beyond it are
	// closed at once.
	maxLingering = 1024

	// maxPieces is the number of pieces that one sendmsg takes: UIO_MAXIOV of Linux.
	maxPieces = 1024
)
