// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

const (
	// coalesce is how long a reconciler waits after the first event about a key. It bounds
	// the passes, and so the writes, to one per key and second, however often objects change.
	coalesce = time.Second

	// agentGrace is how long an agent without a Lease may be away before it counts as gone:
	// the restart of a container is not worth a write for each link and pod.
	agentGrace = 3 * time.Second

	// startGrace is how long the first agent of a node may take to become ready before the
	// node's pods are told that they have no agent. Without startGrace each pod of a new node
	// would be written twice while the agent's image is pulled.
	startGrace = 30 * time.Second

	// silentAfter is how long an agent may fail to renew its Lease, while others renew
	// theirs, before it counts as gone. Agents renew every 2.5 s (internal/kube/report), so
	// two renewals may get lost, and an agent whose container ends and starts again does not
	// count as gone. People are to see within 10 s that an agent is gone.
	silentAfter = 7 * time.Second

	// leaseDuration, renewDeadline and retryPeriod are those of the leader election. When the
	// leader's node loses its power, another replica is to lead, and to say that the agents of
	// that node are gone, within the same 10 s. A leader that cannot renew its Lease for
	// renewDeadline starts again as a candidate.
	leaseDuration = 6 * time.Second
	renewDeadline = 4 * time.Second
	retryPeriod   = time.Second

	// maxLeaseGap is the longest time between two renewals that the clock of type leases
	// counts. The leader renews its own Lease every second. minLeaseCheck is the least pause
	// before a node is looked at again.
	maxLeaseGap   = 4 * time.Second
	minLeaseCheck = 200 * time.Millisecond

	// nodePasses is the number of nodes that are reconciled at a time. A pass over a dead
	// node deletes all its links and writes to its pods; with 8 passes at a time, 50 dead nodes take seconds.
	nodePasses = 8

	// maxReasons is how many fallback reasons a policy's status has, the most frequent
	// ones. The metrics have all that agents have names for.
	maxReasons = 16

	// maxEventAge is for a controller that starts, and finds the agents' events of the last
	// hour: it passes on only those that are at most so much older than the youngest one.
	// podWait is how long the cache may lack a pod that an agent knows already; the event is
	// looked at again every podRetry.
	maxEventAge = 5 * time.Minute
	podWait     = 10 * time.Second
	podRetry    = time.Second

	// maxEventName is how many bytes of the pod's name are in the name of an event: an object's
	// name has at most 253 bytes, and the event's number needs some.
	maxEventName = 200

	// maxInstance is the longest reporting instance that the API server accepts.
	maxInstance = 128

	// maxMessage is the longest message of a condition that the API server accepts.
	maxMessage = 32768

	// maxNames is how many names a condition's message lists.
	maxNames = 5

	// maxPeerSlices bounds the addresses of one policy's peers: every agent keeps all of
	// them in memory, and looks each new connection up in them.
	maxPeerSlices    = 64
	maxPeerAddresses = maxPeerSlices * v1alpha1.MaxPeerAddresses

	// apiQPS and apiBurst bound the requests to the API server. The worst case is that
	// the links of many nodes are written at once; the API server's priority and fairness
	// protects its other clients then.
	apiQPS   = 200
	apiBurst = 400

	// minRestart and maxRestart are the shortest and the longest pause before a manager
	// starts again after it lost the API server.
	minRestart = time.Second
	maxRestart = 15 * time.Second

	// callTimeout ends a call to the API server that hangs.
	callTimeout = 30 * time.Second

	// headerTimeout is how long a client of the metrics or health endpoint may take for
	// the header of a request, idleTimeout until the next request.
	headerTimeout = 5 * time.Second
	idleTimeout   = 2 * time.Minute
)
