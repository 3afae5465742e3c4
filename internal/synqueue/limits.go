// SPDX-License-Identifier: Apache-2.0

package synqueue

import "time"

const (
	// DefaultDeadline is how long a SYN is held at most. TCP would repeat it after a
	// second, and does so still if it leaves before.
	DefaultDeadline = 600 * time.Millisecond
	// DefaultMaxHeld bounds the SYNs of one pod that wait at once. The tables are
	// looked through from one end to the other for each SYN, which takes a
	// microsecond; what finds no room passes.
	DefaultMaxHeld = 256
	// DefaultExtraSpeaking are places beyond DefaultMaxHeld for SYNs to destinations that are
	// known to speak SMC-R: whatever else a pod's programs try to reach, these are asked. The
	// kernel's queue has room for both.
	DefaultExtraSpeaking = 64
	// DefaultMaxQuestions bounds the questions of one pod that have no answer yet. There are more
	// of them than SYNs where SMC-R is required: they go on when their SYNs were dropped.
	DefaultMaxQuestions = 512
	// DefaultMaxPerDestination leaves room for other destinations when one is slow
	// to answer: a flood of SYNs to nowhere must not keep others from SMC-R.
	DefaultMaxPerDestination = 64
	// DefaultMaxRemembered bounds the decisions that are remembered for repeated
	// SYNs. A forgotten one is asked for again.
	DefaultMaxRemembered = 512
	// DefaultMaxPeers bounds the destinations of which something is remembered: more than
	// a program has peers. A forgotten one is asked for again. Those that speak SMC-R are
	// forgotten last.
	DefaultMaxPeers = 256
	// DefaultRemember is how long decisions are remembered: the first five repetitions of a SYN come within
	// it (1, 3, 7, 15 and 31 s, or sooner).
	DefaultRemember = 32 * time.Second

	// maxExtensionHeaders of IPv6 are looked through: the kernel sends two at most
	// before TCP unless a program asks for more.
	maxExtensionHeaders = 4
)
