// SPDX-License-Identifier: Apache-2.0

package main

import "time"

const (
	// callLimit bounds one request to a worker: no load takes longer, see
	// package load, and a guest that hangs is told by the lab.
	callLimit = 60 * time.Second
	// toolLimit bounds one run of a tool in a guest. They take a fraction of a
	// second for what they measure, and two to start on a busy machine.
	toolLimit = 60 * time.Second
	// mostIterations bounds what a tool is asked for, should a first run have
	// told nonsense about its speed.
	mostIterations = 100000
	// leastIterations is what perftest needs.
	leastIterations = 5
	// leastRequests is what redis-benchmark is asked for first, for each client.
	leastRequests = 20
	// rstreamBytes bounds a transfer of rstream on all its connections, which is
	// sent and comes back: over rxe it makes about half a MiB in a second.
	rstreamBytes = 1 << 20
	// toolTries: on a loaded machine a client may come before its server listens,
	// or lose its handshake.
	toolTries = 3
	// rdmaPoll: to ask takes a process in the guest.
	rdmaPoll = 50 * time.Millisecond
	// agentLimit is for an agent to attach its pods in a guest on a busy machine.
	agentLimit = 60 * time.Second
	// agentPoll: an agent looks for pods every 2 s.
	agentPoll = 200 * time.Millisecond
	// startTries: a first contact on a busy machine may take longer than a rendezvous may, and is TCP then.
	startTries = 10
	// startPause is longer than agents remember who had no SMC-R, see agentConfig.
	startPause = 1500 * time.Millisecond
)
