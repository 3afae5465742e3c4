// SPDX-License-Identifier: Apache-2.0

package inventory

import "time"

const (
	// every is how often the machine is looked at without a reason. Users of the
	// list are to know of a port that went down within 2 s.
	every = time.Second
	// settle is the pause between a notice of the kernel and the look: an
	// interface that goes down sends several.
	settle = 20 * time.Millisecond
	// maxDevices bounds the list: 8 PFs with 256 VFs each. More would not fit
	// into what Kubernetes takes either.
	maxDevices = 2048
	// complainEvery is how often a look that does not work is logged.
	complainEvery = time.Minute
)
