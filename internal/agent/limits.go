// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"time"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// holdMarks are the marks of verdicts.
var holdMarks = linux.HoldMarks{
	Divert: markDivert, Reset: markReset, HostUnreachable: markHostUnreachable, NetUnreachable: markNetUnreachable, Prohibited: markProhibited,
}

const (
	// Marks of the agent's sockets: towards the network with the option, towards applications, and
	// towards the network without the option. markWire is "SMCR", the others follow it. Other
	// programs that use marks set single bits, and no such mask matches these values alone.
	markWire  = 0x534d4352
	markApp   = 0x534d4353
	markPlain = 0x534d4354
	// Marks of verdicts on held SYNs follow, see holdMarks.
	markDivert          = 0x534d4355
	markReset           = 0x534d4356
	markHostUnreachable = 0x534d4357
	markNetUnreachable  = 0x534d4358
	markProhibited      = 0x534d4359

	// holdPatience is how long a destination may take to answer the agent while a SYN is held, and
	// so how much longer connect() can take at most. It is less than synqueue.DefaultDeadline, so
	// that the agent's answer comes first.
	holdPatience = 500 * time.Millisecond
	// requiredPatience is how long it may take if a policy requires SMC-R: the SYN is dropped after
	// the deadline, TCP repeats it after 1, 3 and 7 s, and by then the answer may be there. That a
	// neighbour is not there takes the kernel 3 s.
	requiredPatience = 5 * time.Second
	// arrivalPatience is how long a session on SMC-R waits for the application's connection, whose SYN
	// was diverted: if it was lost because the backlog was full, TCP repeats it after a second.
	arrivalPatience = 3 * time.Second
	// bypassPatience is how long a connection waits until its destination is in the negative cache, which takes far less
	// than a millisecond unless the kernel is busy with other changes of nftables.
	bypassPatience = 250 * time.Millisecond
	// speaksFor is how long each connection to a destination is asked for by itself after one was
	// on SMC-R.
	speaksFor = time.Minute
	// staleFor is for how many times its time in the negative cache a destination is believed to be
	// plain: after the entry in the kernel ended it is asked again, and nobody waits for that.
	staleFor = 2
	// keeperPause is the pause before the process that keeps the queues is started again.
	keeperPause = time.Second
	// keeperEndPatience is how long that process may take to end once the agent does: it has little to do then.
	keeperEndPatience = 2 * time.Second

	// pollEvery is how often the agent reads the attachment records without being asked. It matters
	// only if a plugin could not reach the agent.
	pollEvery = time.Second
	// retryFirst and retryMost bound the pause before a pod's set-up, or the end of its
	// connections, is tried again.
	retryFirst = time.Second
	retryMost  = 30 * time.Second
	// leaveEvery is the pause between two looks whether a pod that is not to be on its kernel's SMC-R any
	// more still has sockets of it: until their programs end, mostly.
	leaveEvery = 5 * time.Second

	// cgroupPatience is how long after a pod in the node's network is known kubelet may take to make its cgroup: until
	// the pod's volumes are looked at, mostly.
	cgroupPatience = 15 * time.Second

	// revokeFor is how long a pod's connections are looked at after its filter changed: a SYN that passed
	// the one before may still become a connection on SMC-R. Linux gives a rendezvous up after 6 s.
	revokeFor = 10 * time.Second
	// handshakeLife is how long they are looked at now and then after that: Linux repeats its answer to a
	// SYN for 63 s (tcp_synack_retries is 5), and only when the peer has acknowledged that the rendezvous begins.
	handshakeLife = 70 * time.Second
	// maxSpared is how many addresses that left a pod's filter, while its policies say the same, end no connection: a
	// few times what a filter has. Most of them are those of pods that have ended.
	maxSpared = 1024

	// handoverTTL is how long diversions to the listeners of an agent that handed over stay in
	// force, or for node.redirectTTL if that is longer. The successor replaces them pod by pod, in some ten milliseconds each.
	handoverTTL = 10 * time.Second
	// successorPatience is how long nobody may manage the node before the agent that handed over
	// does so again. It is less than handoverTTL, so that the diversions still hold, and long
	// enough for a container that crashed at its start to be started again.
	successorPatience = 5 * time.Second
	// listenerLinger is how long listeners stay open after nothing is diverted to them any more,
	// for handshakes under way: a lost SYN-ACK is repeated after a second.
	listenerLinger = 1200 * time.Millisecond
	// nodeLockPoll is how often an agent tries to take the node's lock, and nodeLockPatience for
	// how long: an agent that handed over, or ends, is about to give the lock back.
	nodeLockPoll     = 20 * time.Millisecond
	nodeLockPatience = 3 * time.Second
	// takeoverPatience is how long an agent asks another agent that accepts connections and does
	// not answer. One answer may take a little less.
	takeoverPatience = 12 * time.Second
	// leaveDrain is how long sessions may go on when kube-smcr is uninstalled: somebody waits for
	// the end.
	leaveDrain = 5 * time.Second

	// othersEvery is how often the agent looks for other redirectors in each pod, which takes some
	// 100 microseconds. The kernel catches redirectors that come in between. With very many rules a
	// look takes longer; then the agent looks so rarely that looking takes 1/othersShare of a
	// processor, but at least every othersMost.
	othersEvery = time.Second
	othersShare = 200
	othersMost  = time.Minute
	// untrackAfter is how long a pod must have been without rules of others before the agent keeps
	// packets from connection tracking there. The rules of a sidecar come with its init container,
	// before the first program of the pod runs.
	untrackAfter = 30 * time.Second

	// renewalsPerTTL is how often a redirection is renewed within its TTL at least: two renewals may be
	// missed before new connections go directly.
	renewalsPerTTL = 3
	// renewMost is the time between two renewals at most, also with a long TTL: for so long heartbeat and
	// the accept loops do not see that the proxy closes its listeners, and one goroutine closes those of all.
	renewMost = time.Second
	// lastPatience is how long a program may take to read what came before a reset: short for a person who waits for
	// the reset, and long for bytes that have room.
	lastPatience = 250 * time.Millisecond
	// acceptPause is the pause after Accept failed for want of descriptors or memory. It is no
	// progress of the accept loop, so if the failure lasts, the diversion ends.
	acceptPause = 20 * time.Millisecond
	// drainAccept is how long an accept loop takes connections from the listener's backlog after
	// the diversion ended.
	drainAccept = 50 * time.Millisecond
	// drainPoll is how often a proxy that drains looks whether the last bytes of its connections are delivered.
	drainPoll = 50 * time.Millisecond
	// drainLimit is how long it does so at most while only connections come that were not diverted.
	drainLimit = time.Second

	// dialTimeout ends dials to destinations: a little more than Linux's
	// default of six SYN retransmissions, 127 s, so the kernel's own answer
	// comes first.
	dialTimeout = 130 * time.Second
	// appPatience is how long a client waits for SMC-R while the backlog of the application is full. Linux, which sends
	// an application's SYN at 0, 1 and 3 s meanwhile, gives a rendezvous up after 6 s, and the connection with it. A
	// connection that must be on SMC-R waits for appTimeout.
	appPatience = 3200 * time.Millisecond
	appTimeout  = 10 * time.Second
	// clientEvery: behind a Decline the agent dials the application for dialTimeout, and the client may have gone.
	clientEvery = time.Second

	// Outbound listeners are on ports that programs use for connections and not to listen: Linux's
	// default range. The factor spreads the inode numbers of namespaces, which are close to each
	// other, over the range.
	firstOutboundPort  = 32768
	numOutboundPorts   = 28232
	outboundPortFactor = 0x9e3779b97f4a7c15

	// keptShare: 1/keptShare of each of the node's budgets is kept for the pods in equal shares.
	keptShare = 2
	// leastPending is how many pending connections are kept for each pod: as many as a program
	// opens to others in one go. They cost nothing while they are unused.
	leastPending = 64
	// pendingPatience is how long a connection that must be on SMC-R waits for a reservation: long
	// enough for many rendezvous of others to end, and shorter than clients wait.
	pendingPatience = time.Second
	// Parts of what a pod can have that one client may use, in hundredths. From sourceShare of the
	// pending connections or of the relays on, the client's new connections are not diverted; below
	// sourceResume they are diverted again. Connections on their way are accepted up to sourceMost,
	// so that a client alone can open hundreds of connections at once. A client never has more than
	// sourceMost of the connections on SMC-R, their memory and queue pairs. maxGreedy bounds the clients that a table names; no
	// more than about twenty can have sourceResume each.
	sourceShare  = 25
	sourceResume = 12
	sourceMost   = 75
	maxGreedy    = 64
	// A diversion pauses when less than 1/pauseShare of what the pod can have is left, which is
	// enough for the connections that come while the table is replaced. It resumes when less than
	// 1/resumeShare is used. A pause lasts pauseLeast at least, since each change is a transaction
	// in the pod. During a pause the agent looks at the account every pauseLook.
	pauseShare  = 8
	resumeShare = 2
	pauseLeast  = time.Second
	pauseLook   = 250 * time.Millisecond
	// A session has two sockets. Besides these the agent has some ten files for each pod
	// (namespace, listeners, netlink, those of a device), and kubelet runs at most 250 pods unless
	// told otherwise; the agent has a few hundred files of its own.
	filesPerConn  = 2
	reservedFiles = 4096

	// What the kernel may use for a socket's buffers: one to send and one to receive. An
	// application's on SMC-R gets connBufferBest, as much as the RMBE and the send buffer on the other
	// side of the agent: with appBufferBytes the agent wakes twice as often for a stream. The network's
	// socket of a relay gets netBufferBest, which does for 4 Gbit/s at 1 ms. Both only if the pod has
	// plentyShare times as much left, and else the least.
	buffersPerSocket = 2
	appSocketBytes   = config.ConnSocketBytes
	appBufferBytes   = appSocketBytes / buffersPerSocket
	connBufferBest   = 512 << 10
	netBufferBest    = 512 << 10
	netBufferLeast   = 128 << 10
	plentyShare      = 16

	// The budget of a stack that the pods of a namespace share is that of sharedPods pods. Each pod
	// still keeps to its own budget.
	sharedPods = 8

	// parkAfter is how long nothing must move in a direction of a session, and half of how long it
	// may, before it is parked: programs in a dialogue do not pause for so long.
	parkAfter = time.Second
	// ableEvery is how often an agent that lacks something for SMC-R, or the port of its
	// metrics, looks again.
	ableEvery = 10 * time.Second

	// wireLogPause is the least time between two log records about dropped RoCE packets.
	wireLogPause = time.Minute

	// refusalShown is how long the status shows what a device refused, and refusalPause how long
	// the log then shows no other refusal.
	refusalShown = 10 * time.Minute
	refusalPause = 10 * time.Second

	// portTries bounds the search for a port that is free for both address families.
	portTries = 16

	// maxDecisions bounds the decisions kept for explain: about 300 bytes each.
	maxDecisions = 4096
	// logPerSecond and logBurst bound the log records about connections.
	logPerSecond = 5
	logBurst     = 50
	// fellBackLately is how long a connection of a pod that its kernel made TCP stands for the next one.
	fellBackLately = time.Minute
	// forgetEvery is how often the agent looks for rules of pods that are gone: there is room for 4,096, and one is
	// left behind where a pod ends without an agent.
	forgetEvery = 10 * time.Minute
	// leadEvery is how often the agent looks whether another program came to the hook of that which chooses the
	// kernel's SMC-R. That somebody starts one is rare, and what is opened meanwhile is plain TCP.
	leadEvery = 10 * time.Second
	// maxBypasses bounds the negative cache that the API shows; the kernel's own sets have their
	// own limit.
	maxBypasses = 4096
	// recentOfPod is how many of these a pod may have before it makes place for the next one of any pod.
	recentOfPod = 256
	// maxShownConns bounds the connections in one answer of the API.
	maxShownConns = 65536
	// hostEvery is the least time between two looks at the host's devices for pods; one look reads
	// some thirty files for every VF. If it takes long, looks are rarer, and hostMost apart at most.
	hostEvery = time.Second
	hostShare = 100
	hostMost  = 10 * time.Second
	// maxShownPods bounds the pods that the API lists for one device.
	maxShownPods = 256
	// maxMalformed bounds the bad records that the API lists.
	maxMalformed = 64

	// Limits of the API's server: a request is one line, and answers come from memory.
	apiHeaderTimeout = 5 * time.Second
	apiWriteTimeout  = 30 * time.Second
	apiHeaderBytes   = 16 << 10
	apiBodyBytes     = 4 << 10
	apiStopTimeout   = 2 * time.Second

	// The TTL of the negative cache is divided by tempShare for reasons that pass by themselves.
	tempShare = 10
	// leastMeshBypass is the least TTL of the negative cache in a pod with another redirector:
	// longer than it takes to change the table.
	leastMeshBypass = 2 * time.Second
)
