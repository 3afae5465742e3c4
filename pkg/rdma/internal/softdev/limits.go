// SPDX-License-Identifier: Apache-2.0

package softdev

import "time"

const (
	// MaxQP bounds the queue pairs of a device: so few of the numbers that there are
	// that a late packet, or a guess, hardly ever meets one.
	MaxQP = 1 << 14

	// FirstQPN is the first queue pair number that a device gives away: 0 and 1 are for
	// management.
	FirstQPN = 2

	// maxMR bounds the memory regions of a device, likewise.
	maxMR = 1 << 16

	// minSlots is the number of slots that a table of queue pairs or regions has at
	// first: 4 KiB.
	minSlots = 256

	// MaxMRBytes bounds one region. A length of a work request has 32 bits.
	MaxMRBytes = 1 << 32

	// MaxCQE bounds a completion queue: 40 bytes for each entry.
	MaxCQE = 1 << 20
	// firstCQE is the number of entries that a completion queue has at first, 2.5 KiB:
	// most are emptied long before they have so many.
	firstCQE = 64

	// MaxInline is what SendInline copies at posting, in bytes: it holds the 44-byte
	// SMC-R message and costs every send slot that much memory.
	MaxInline = 64

	// wcBatch is how many completions are taken from a protocol at once.
	wcBatch = 8

	// maxPoll bounds how long a receiver polls before it waits once: other
	// goroutines may need its processor.
	maxPoll = 200 * time.Microsecond
)
