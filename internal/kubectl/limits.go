// SPDX-License-Identifier: Apache-2.0

package kubectl

import "time"

const (
	// maxAnswerBytes bounds what is read of one agent: as the agent's own client.
	maxAnswerBytes = 64 << 20
	// maxErrorBytes bounds what an agent says on stderr.
	maxErrorBytes = 16 << 10
	// askTimeout bounds one question to one agent.
	askTimeout = 30 * time.Second
	// maxAsks is how many agents are asked at a time: each is a connection
	// through the API server.
	maxAsks = 16
	// maxPeers is how many endpoints of a Service are asked: enough to see what
	// one of several does differently.
	maxPeers = 5
	// listLimit is how many objects the API server is asked for at a time.
	listLimit = 500
)
