// SPDX-License-Identifier: Apache-2.0

package twonodes

import "time"

const (
	// applicationsTimeout and failoverTimeout end a story in which something
	// hangs.
	applicationsTimeout = 10 * time.Minute
	failoverTimeout     = 15 * time.Minute
	// readyTimeout is for an agent or a server to start on a busy machine.
	readyTimeout = 20 * time.Second
	// runTimeout is for one run of an application: on a machine whose processors have much else to do, redis-benchmark
	// takes more than a minute, since each round trip waits for them several times.
	runTimeout = 3 * time.Minute
	// endTimeout is for connections to end, on both sides, after the
	// application closed them.
	endTimeout = 10 * time.Second
	// resetTimeout is how long an application may wait for the reset after
	// its agent was killed; the kernel sends it at once.
	resetTimeout = 5 * time.Second
	// directTimeout is the agent's default redirectTTL, 2 s, with room for a
	// busy machine: after it new connections go directly.
	directTimeout = 5 * time.Second
	// tryEvery is the pause between two tries to connect.
	tryEvery = 100 * time.Millisecond
	// shownAfter is when in the run of iperf3 links and connections are shown.
	shownAfter = 700 * time.Millisecond

	// clcBytes is what the TCP connection under an SMC-R connection may
	// carry: handshake, CLC messages (332 bytes), acknowledgments and the end,
	// with their headers some 1.3 KB.
	clcBytes = 2048
	// strayBytes is for neighbour discovery and the like on the pod's link.
	strayBytes = 16 << 10

	// probes is how many probes there are: enough for each of two links to have one.
	probes = 2
	// probeBytes is the size of a probe's requests and replies.
	probeBytes = 64
	// probeEvery is the pause between two requests, which do not wait for each
	// other's replies: the resolution of a stall.
	probeEvery = time.Millisecond
	// lookEvery is the pause between two looks at the links.
	lookEvery = 20 * time.Millisecond
	// shownFor is how long at least is looked at the probes after a fault that
	// is seen at once, and silentFor after one that must be found out. Other
	// work on the machine stalls the probes too, so it is no longer than needed.
	shownFor  = 200 * time.Millisecond
	silentFor = time.Second
	// stallLimit is where nobody waits for a stalled connection any longer.
	stallLimit = 8 * time.Second
	// redundantLimit is how long a second link may take: after a silence, which
	// ends without notice, a server tries every 10 s at first.
	redundantLimit = 15 * time.Second
	// downloadRate leaves the cores of one machine, which stands for two, some
	// time: else the probes would measure the scheduler.
	downloadRate = 100 << 20
	// maxFailures ends an application that cannot work any more.
	maxFailures = 20
)
