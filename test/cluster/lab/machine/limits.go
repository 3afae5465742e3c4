// SPDX-License-Identifier: Apache-2.0

package machine

import "time"

const (
	// stopTimeout is how long a service may take to end before it is killed:
	// containerd and kubelet need about one second.
	stopTimeout = 10 * time.Second

	// reapInterval is how often process 1 looks for children while it has none.
	// Only the time until a zombie disappears depends on it.
	reapInterval = 20 * time.Millisecond

	// cgroupTimeout is how long the kernel may take to let go of the processes
	// of a machine that was powered off. It took 0.2 s with 20 pods.
	cgroupTimeout = 20 * time.Second

	// cgroupInterval is how often a cgroup that is still busy is tried again.
	cgroupInterval = 20 * time.Millisecond
)
