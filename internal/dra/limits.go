// SPDX-License-Identifier: Apache-2.0

package dra

import "time"

const (
	// MaxSharers is how many pods have a shared device at a time: more than the
	// pods that are recommended for a node (110) would not be a limit, and few
	// enough that each is a slot of its own where it must be.
	MaxSharers = 100

	// sliceDevices is how many devices the API allows in a ResourceSlice.
	sliceDevices = 128
	// maxSlots bounds the slots of all shared devices together where there is
	// no consumable capacity: 8 devices are the most that an agent has.
	maxSlots = 8 * MaxSharers

	// restartPause is how long after a failed start the driver tries again:
	// kubelet's directories come when kubelet starts.
	restartPause = 5 * time.Second

	// syncDelay is how long after others changed the slices they are put right: what
	// kubelet removes when it starts comes as one event for each slice, in milliseconds.
	syncDelay = time.Second
	// mutationCacheTTL is how long a slice that was just made is taken to exist,
	// whatever the watch says: longer than the watch lags, and as short as it may be,
	// for a slice that is removed meanwhile is missed for so long.
	mutationCacheTTL = 5 * time.Second

	// healthEvery is how often kubelet is told of devices that did not change.
	// It takes the health of a device for unknown after 30 s.
	healthEvery = 10 * time.Second

	// lookAgain is how often the records are read without a notice.
	lookAgain = 5 * time.Second

	// maxStatusIPs is how many addresses of a device the API allows.
	maxStatusIPs = 16

	// maxValueBytes is what the API allows as the value of an attribute.
	maxValueBytes = 64
	// maxInterfaceName is what the kernel allows.
	maxInterfaceName = 15

	// dialTimeout is for a socket of this machine, on which somebody listens or
	// nobody does.
	dialTimeout = time.Second
)
