// SPDX-License-Identifier: Apache-2.0

package inventory

import "time"

const (
	// every is how often the machine is looked at without a notice of the kernel. The
	// users of the list have to know within 2 s that a port went down.
	every = time.Second
	// debounce is the pause between a notice of the kernel and the look: an interface
	// that goes down causes several notices.
	debounce = 20 * time.Millisecond
	// maxDevices bounds the list: 8 PFs with 256 VFs each. Kubernetes does not accept
	// more either.
	maxDevices = 2048
	// complainEvery is how often the error of a look is logged.
	complainEvery = time.Minute
)
