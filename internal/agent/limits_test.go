// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"math/bits"
	"testing"
	"time"
)

// TestLimits: what the comments of limits.go say of two limits together.
func TestLimits(t *testing.T) {
	for what, holds := range map[string]bool{
		"an agent manages the node again while the diversions to it hold":             successorPatience < handoverTTL,
		"listeners outlast a lost SYN-ACK, which is repeated after a second":          listenerLinger > time.Second,
		"somebody who waits for the node's lock outwaits one look":                    nodeLockPoll < nodeLockPatience,
		"two renewals may be missed":                                                  renewalsPerTTL >= 3,
		"the outbound ports are Linux's default range, 32768 to 60999":                firstOutboundPort == 32768 && firstOutboundPort+numOutboundPorts-1 == 60999,
		"every residue of the factor is another port":                                 outboundPortFactor%2 == 1,
		"the kernel's own answer to a dial comes first, after 127 s":                  dialTimeout > 127*time.Second,
		"a client is left alone before it is refused":                                 sourceResume < sourceShare && sourceShare < sourceMost && sourceMost < 100,
		"a pause ends with more free than it begins":                                  resumeShare < pauseShare,
		"a pause ends soon after it may":                                              pauseLook < pauseLeast,
		"a connection that waits for a reservation sees the end of a pause":           pauseLook < pendingPatience,
		"a destination in a meshed pod is left alone until the next look":             leastMeshBypass > othersEvery,
		"looks at the rules of others get rarer":                                      othersEvery < othersMost,
		"the pause before a set-up is tried again grows":                              retryFirst < retryMost,
		"a request to the API fits into what it may have":                             apiBodyBytes <= apiHeaderBytes,
		"a socket has a buffer for each direction":                                    appSocketBytes == 2*appBufferBytes,
		"the network's socket of a relay is no smaller than the application's":        netBufferLeast >= appBufferBytes && netBufferLeast < netBufferBest,
		"the log says what a device refused while the status shows it, again at most": refusalPause < refusalShown,
	} {
		if !holds {
			t.Errorf("does not hold: %s", what)
		}
	}
}

// TestLimits_marks: the agent's marks differ, and none is a single bit, as the marks of others are.
func TestLimits_marks(t *testing.T) {
	seen := map[uint32]bool{}
	for _, m := range []uint32{markWire, markApp, markPlain} {
		if seen[m] || bits.OnesCount32(m) < 2 {
			t.Errorf("mark %#x", m)
		}
		seen[m] = true
	}
}
