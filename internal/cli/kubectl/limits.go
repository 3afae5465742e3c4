// SPDX-License-Identifier: Apache-2.0

package kubectl

import "time"

const (
	// maxAnswerBytes bounds the answer of one agent, as agentapi.Client does.
	maxAnswerBytes = 64 << 20
	// maxErrorBytes bounds smcrctl's output on stderr.
	maxErrorBytes = 16 << 10
	// askTimeout bounds one question to one agent.
	askTimeout = 30 * time.Second
	// maxAsks is how many agents are asked at a time: each question is a connection
	// through the API server.
	maxAsks = 16
	// maxPeers is how many endpoints of a Service are asked about: enough to see a
	// difference between them.
	maxPeers = 5
	// pollEvery is how often Leave looks whether a node is clean.
	pollEvery = 500 * time.Millisecond
	// listLimit is how many objects the API server is asked for at a time.
	listLimit = 500
)
