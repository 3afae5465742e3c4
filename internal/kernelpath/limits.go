// SPDX-License-Identifier: Apache-2.0

package kernelpath

import "time"

const (
	// searchTime and endPatience bound Revoke: how long it looks for the programs that have sockets, and how
	// long it waits until what they sent is with the peer. Together with what came before, a changed
	// policy, that is less than the 2 s in which connections are to have ended. In the first, on a machine of today,
	// 100,000 processes and files are looked at.
	searchTime  = 800 * time.Millisecond
	endPatience = 500 * time.Millisecond
	// maxEnding bounds the connections that Revoke waits for at once, with a thread each.
	maxEnding = 64
)

// maxRules bounds the rules of a kind: MAX_RULES of bpf/kernelpath.bpf.c. Kubelet runs 110
// pods unless told otherwise, and nobody more than 1,000.
const maxRules = 4096

// maxUEIDs is how many enterprise IDs the kernel takes.
const maxUEIDs = 4

// fallbackPause is the pause of who reads fallbacks after those that there are. Some 800 find room
// meanwhile.
const fallbackPause = 100 * time.Millisecond
