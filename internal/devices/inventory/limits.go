// SPDX-License-Identifier: Apache-2.0

package inventory

import "time"

const (
	// every is the time between two glances at the machine, which see changes that the kernel does
	// not tell of. The users of the list have to know within 2 s that a port went down.
	every = time.Second
	// lookEvery is the time between two looks at the machine if nothing seems to change. A look reads
	// some sixty files for every VF.
	lookEvery = 10 * time.Second
	// debounce is the pause between a notice of the kernel and the look: an interface
	// that goes down causes several notices.
	debounce = 20 * time.Millisecond
	// maxDevices bounds the list: 8 PFs with 256 VFs each. Kubernetes does not accept
	// more either.
	maxDevices = 2048
	// complainEvery is how often the error of a look is logged.
	complainEvery = time.Minute
)
