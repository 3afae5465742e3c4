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

	// handoverHold is how long diversions to the listeners of an agent that
	// handed over stay in force without it. Its successor replaces them pod by
	// pod, at some ten milliseconds each.
	handoverHold = 10 * time.Second
	// successorPatience is how long nobody may manage the node before the agent
	// that handed over does so again: while its diversions hold, and not before
	// a container that crashed at once is there again.
	successorPatience = 5 * time.Second
	// doorLinger is how long listeners that nothing is diverted to any more are
	// kept for handshakes under way: a lost SYN-ACK is repeated after a second.
	doorLinger = 1200 * time.Millisecond
	// claimPoll is how often an agent looks whether the node is free, and
	// claimPatience how long: an agent that handed over, or ends, is about to
	// give the claim back.
	claimPoll     = 20 * time.Millisecond
	claimPatience = 3 * time.Second
	// takeoverPatience is how long an agent asks another one that does not
	// answer whole: a little more than one answer may take.
	takeoverPatience = 12 * time.Second
	// sharePoll is how often an agent looks whether one of the two before it
	// has given its RDMA devices back.
	sharePoll = 200 * time.Millisecond
	// leaveDrain is how long connections may go on when the agent is
	// uninstalled, which somebody is waiting for.
	leaveDrain = 5 * time.Second

	// othersEvery is how often other redirectors are looked for in each pod, which
	// takes some 100 microseconds. The kernel catches those that come in between.
	othersEvery = time.Second
	// untrackAfter is how long nobody else must have had rules in a pod before
	// packets are kept from connection tracking there. Rules of a sidecar come with
	// its init container, before the first program runs.
	untrackAfter = 30 * time.Second

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

	// Outbound listeners are on ports that programs use for connections and
	// not to listen: Linux's default range. The factor spreads the inode numbers
	// of namespaces, which are close to each other.
	firstDoorPort  = 32768
	numDoorPorts   = 28232
	doorPortFactor = 0x9e3779b97f4a7c15

	// keptShare is the part of each of the node's budgets that is kept for the
	// pods in equal shares: one of two.
	keptShare = 2
	// A diversion pauses when less than one of pauseShare parts of what the pod
	// can have is left, which is what comes while the table is replaced, and goes
	// on when less than one of resumeShare is used. It pauses for pauseLeast at
	// least: each change is a transaction in the pod. Meanwhile pauseLook is how
	// often its account is looked at.
	pauseShare  = 8
	resumeShare = 2
	pauseLeast  = time.Second
	pauseLook   = 250 * time.Millisecond
	// A carried connection has two sockets. Besides those the agent has some ten
	// files for each pod (namespace, listeners, netlink, those of a device), which
	// are at most 250 on a node if kubelet is not told otherwise, and a few
	// hundred of its own.
	filesPerConn  = 2
	reservedFiles = 4096

	// sharedPods is how many pods' budgets an SMC-R stack has that the pods of
	// a namespace share. Each pod keeps to its own besides.
	sharedPods = 8

	// ableEvery is how often an agent that cannot use SMC-R looks again.
	ableEvery = 10 * time.Second
	// deviceEvery is how soon an agent looks for a device that is gone: a
	// driver that is loaded again takes a few seconds.
	deviceEvery = time.Second

	// wireLogPause is the least time between two records about dropped RoCE
	// packets, of which a flood has millions.
	wireLogPause = time.Minute

	// refusalShown is how long the status shows what a device refused, and
	// refusalPause how long the log says no other refusal.
	refusalShown = 10 * time.Minute
	refusalPause = 10 * time.Second

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
	// hostEvery is the least time between two looks at the host's devices for
	// pods, each of which reads some files for every VF.
	hostEvery = time.Second
	// maxShownPods bounds how many pods are listed that share one device.
	maxShownPods = 256
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
	// leastMeshBypass is how long a destination is at least left alone in a pod with
	// another redirector: longer than the table takes to be changed.
	leastMeshBypass = 2 * time.Second
)
