// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

const (
	// coalesce is how long a key waits after the first event. It bounds the
	// passes, and so the writes, per key and second, whatever the churn.
	coalesce = time.Second

	// agentGrace is how long an agent may be away before its links are Unknown:
	// a container that is started again is not worth a write per link.
	agentGrace = 3 * time.Second

	// nodePasses is how many nodes are looked at at a time. A pass over a dead
	// node writes all its links; several of them keep 50 dead nodes within
	// seconds.
	nodePasses = 8

	// maxReasons is how many fallback reasons a policy's status has, the most
	// frequent ones. Whoever has more finds all in the metrics.
	maxReasons = 16

	// Events of agents about pods are passed on while they are news: after a
	// restart not those of the last hour. podWait is how long the pod may be unknown
	// here that an agent knows already.
	maxEventAge = 5 * time.Minute
	podWait     = 10 * time.Second
	podRetry    = time.Second

	// maxEventName is what is left of a pod's name in that of an event: 253 bytes
	// without the number.
	maxEventName = 200

	// maxInstance is what the API server takes of a reporting instance.
	maxInstance = 128

	// maxNames is how many names a condition's message lists.
	maxNames = 5

	// maxPeerSlices bounds the addresses of one policy's peers: every agent
	// holds them all, and compares every new connection with them.
	maxPeerSlices    = 64
	maxPeerAddresses = maxPeerSlices * v1alpha1.MaxPeerAddresses

	// apiQPS and apiBurst bound the requests to the API server. The worst case
	// is the links of many nodes at once; priority and fairness of the API
	// server protects the others from it.
	apiQPS   = 200
	apiBurst = 400

	// Times between attempts to start again after the API server was lost.
	minRestart = time.Second
	maxRestart = 15 * time.Second

	// callTimeout ends a call to the API server that hangs.
	callTimeout = 30 * time.Second

	// Who asks for metrics or health has so long to say so, and to ask again.
	headerTimeout = 5 * time.Second
	idleTimeout   = 2 * time.Minute
)
