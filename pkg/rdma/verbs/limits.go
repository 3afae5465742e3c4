// SPDX-License-Identifier: Apache-2.0

package verbs

import "time"

const (
	// maxGIDIndex is the largest row of the GID table that a queue pair can
	// name: libibverbs has eight bits for it.
	maxGIDIndex = 1<<8 - 1
	// gidGap ends the search for GIDs in sysfs: a GID takes the first free row,
	// so that holes are as long as addresses were removed. rxe has 1024 rows,
	// and each is a file.
	gidGap = 32

	// maxPorts bounds what is looked at of a device.
	maxPorts = 16

	// batch is how many work requests are posted with one call, and how many
	// completions are polled.
	batch = 64

	// wantInline is asked for when the device is opened, and less if it has
	// less: it holds the 44-byte SMC-R message, and more makes the work requests
	// of some devices larger, so that fewer fit.
	wantInline = 64

	// maxSGE bounds the pieces of one work request. Devices with 30 and more
	// still pay for each that is asked for with room in every work request.
	maxSGE = 8
	// recvSGE is what a receive has: see [rdma.RecvWR].
	recvSGE = 2

	// maxReadsServed is how many RDMA READs of the peer a queue pair answers at
	// once, if the device has as many. Peers do not tell how many they serve, so
	// that of ours one is outstanding.
	maxReadsServed = 16
	maxReadsAsked  = 1

	// streamReads is how many RDMA READs a queue pair of iWARP serves, and may have outstanding, where its user says nothing:
	// peers tell each other (RFC 6581 §5).
	streamReads = 16

	// backlog is how many requests wait in a listener of rdma_cm.
	backlog = 64
	// eventsWaiting is how many events wait for who connects: one for each step, and then its failure.
	eventsWaiting = 8
	// resolveTimeout bounds the search for an address, and for the route to it. The kernel asks the neighbour table.
	resolveTimeout = 5 * time.Second

	// maxPoll bounds how long completions are looked for before the goroutine of
	// their queue waits once: others may need its processor.
	maxPoll = 200 * time.Microsecond

	// goneInterval is the pause between two looks whether the device is still
	// there. Some drivers, rxe among them, tell nobody that it is being removed
	// and wait until everybody has closed it.
	goneInterval = 250 * time.Millisecond
	// askInterval is the pause between two questions for the port's state and MTU,
	// of which events may not tell. A link that is made in between does not come
	// about if the port is down or the MTU is too large; the next one does.
	askInterval = time.Second
	// limitsInterval is the pause between two questions for the queue pairs that the
	// device has: some drivers have the device's firmware answer.
	limitsInterval = 10 * time.Second
)
