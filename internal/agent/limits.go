// SPDX-License-Identifier: Apache-2.0

package agent

import "time"

const (
	// The agent's sockets: towards the network with the option, towards
	// applications, and towards the network without the option. The first is
	// "SMCR" and the others its successors: other users of marks set bits, and
	// these values are in nobody's mask alone.
	markWire  = 0x534d4352
	markApp   = 0x534d4353
	markPlain = 0x534d4354

	// pollEvery is how often the attachment records are read without a nudge.
	// Only a plugin that could not reach the agent waits for it.
	pollEvery = time.Second
	// retryFirst and retryMost are the pauses after a pod could not be set up.
	retryFirst = time.Second
	retryMost  = 30 * time.Second

	// beatsPerTTL is how often in a redirection's TTL it is renewed: two
	// renewals may be late before new connections go direct.
	beatsPerTTL = 3
	// acceptPause is the pause after a shortage of descriptors or memory. It
	// does not count as progress, so a shortage that lasts fails open.
	acceptPause = 20 * time.Millisecond
	// drainAccept is how long listeners take what is already queued after the
	// diversion ended.
	drainAccept = 50 * time.Millisecond

	// dialTimeout ends dials to destinations: a little more than Linux's
	// default of six SYN retransmissions, 127 s, so the kernel's own answer
	// comes first.
	dialTimeout = 130 * time.Second
	// appTimeout ends dials to applications on the same node.
	appTimeout = 10 * time.Second

	// portTries bounds the search for a port that is free for both address
	// families.
	portTries = 16

	// maxDecisions bounds the memory of explain: about 300 bytes each.
	maxDecisions = 4096
	// logPerSecond and logBurst bound the records about connections.
	logPerSecond = 5
	logBurst     = 50
	// maxBypasses bounds the list of the negative cache that the agent shows;
	// the kernel's own set has a limit of its own.
	maxBypasses = 4096
	// maxShownConns bounds one answer of the API.
	maxShownConns = 65536
	// maxMalformed bounds how many bad records the API lists.
	maxMalformed = 64

	// API server limits: questions are a line, answers come from memory.
	apiHeaderTimeout = 5 * time.Second
	apiWriteTimeout  = 30 * time.Second
	apiHeaderBytes   = 16 << 10
	apiBodyBytes     = 4 << 10
	apiStopTimeout   = 2 * time.Second

	// tempShare divides the TTL of the negative cache for reasons that pass.
	tempShare = 10
)
