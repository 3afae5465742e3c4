// SPDX-License-Identifier: Apache-2.0

package dra

import "time"

const (
	// MaxSharers is how many pods may have a shared device at a time: about as many as
	// Kubernetes recommends for a node (110), and few enough to publish a slot for each of
	// them where there is no consumable capacity.
	MaxSharers = 100

	// sliceDevices is how many devices the API allows in a ResourceSlice.
	sliceDevices = 128
	// maxSlots bounds the slots of all shared devices together where there is
	// no consumable capacity: 8 devices are the most that an agent has.
	maxSlots = 8 * MaxSharers

	// restartPause is how long after a failed start the driver tries again:
	// kubelet's directories come when kubelet starts.
	restartPause = 5 * time.Second

	// syncDelay is how long after a change of the slices by another program they are
	// repaired: a kubelet that starts removes all slices within milliseconds, which causes
	// one event for each.
	syncDelay = time.Second
	// mutationCacheTTL is how long a slice that was just made counts as existing, whatever
	// the watch says. It must be longer than the watch lags, but not much: if the slice is
	// removed in this time, that is noticed only after it.
	mutationCacheTTL = 5 * time.Second

	// healthEvery is how often the health of unchanged devices is sent: to kubelet it is
	// unknown after 30 s.
	healthEvery = 10 * time.Second

	// returnWait is how long a call of kubelet waits for devices of pods that are ending. A DEL
	// comes a few seconds after the deletion of its pod, ten on a busy node. It is worth waiting
	// for: kubelet tries a refused claim again only when it looks at all pods, after a minute or
	// more. But there is one call at a time, for which kubelet waits callTimeout, and other claims
	// wait meanwhile. There is time for two calls that wait in vain, for pods that do not end; and
	// devices of pods that are made anew together come back together.
	returnWait = 15 * time.Second

	// callTimeout is how long kubelet waits for a call.
	callTimeout = 45 * time.Second

	// lookAgain is how often the records are read without a notice of a change.
	lookAgain = 5 * time.Second

	// maxStatusIPs is how many addresses of a device the API allows.
	maxStatusIPs = 16

	// maxValueBytes is the longest value of an attribute that the API allows.
	maxValueBytes = 64
	// maxInterfaceName is the longest name of an interface that the kernel allows.
	maxInterfaceName = 15

	// dialTimeout bounds a dial to a Unix socket, which succeeds or fails at once.
	dialTimeout = time.Second
)
