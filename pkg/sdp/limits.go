// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

const (
	// DefaultSendSlots is how many messages may be under way: with receive buffers of the default size
	// they hold 512 KiB.
	DefaultSendSlots = 32

	// maxSendSlots bounds them: a slot is as large as a receive buffer.
	maxSendSlots = 1024

	// readsAhead is how many RDMA READs and WRITEs the queue pair has room for beside the messages.
	readsAhead = socket.DefaultReads + socket.MaxRDMAWrites

	// maxWaiting bounds the reads, and the writes, that wait at a time in one connection. It is less than the
	// machine takes (socket.MaxReads), so that nobody meets that limit.
	maxWaiting = 128

	// maxTransfer is the longest stretch that is given to the machine at once.
	maxTransfer = 1 << 30

	// copyBytes is the size of each of both Buffers by which ReadFrom and WriteTo move a stream.
	copyBytes = 1 << 20

	// DefaultSetupTimeout bounds the set-up of a connection, from the first byte to HelloAck.
	DefaultSetupTimeout = 5 * time.Second

	// finWait bounds how long a connection that ended in order waits for the peer to end it, too. To
	// close the socket with something unread would reset it, and a reset may overtake our last bytes.
	finWait = time.Second

	// minSuspendPort is the least port to which a peer that has moved may send us: below it are the ports of
	// services with rights.
	minSuspendPort = 1024

	// minTimer is the shortest wait of the timer, so that a time that has passed makes no loop.
	minTimer = time.Millisecond

	// nudgePause is how long a peer on an adapter waits for HelloAck before it sends something again, then twice as long, maxNudges
	// times; see waitReady.
	nudgePause = 20 * time.Millisecond
	maxNudges  = 16

	// maxSettingUp bounds the connections of one [Listener] that are being set up, and those of one
	// address, or network of IPv6: who connects and says nothing has a place until SetupTimeout.
	maxSettingUp        = 256
	maxSettingUpPerPeer = 64

	// backlog is how many connections wait in a [Listener] to be accepted.
	backlog = 64

	// acceptPause is how long a [Listener] waits after an error of accept, and a connection that moves after one that may pass.
	acceptPause = 10 * time.Millisecond
)
