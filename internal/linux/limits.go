// SPDX-License-Identifier: Apache-2.0

package linux

import "time"

const (
	// maxOutboundRules and maxOutboundRanges bound the policy of one pod: the
	// compilation takes time proportional to the product of port boundaries
	// and port ranges.
	maxOutboundRules  = 256
	maxOutboundRanges = 512
	// maxOutboundElements bounds the set elements that the rules compile to, per address
	// family: a netlink transaction must fit into the send buffer of its socket.
	maxOutboundElements = 1024
	// maxInboundRanges bounds the inbound port ranges of one pod, for the same reason.
	maxInboundRanges = 256
	// maxInboundExcept bounds the clients of one pod whose connections are not diverted.
	// They are those with the most connections, so there cannot be many.
	maxInboundExcept = 64
	// maxFilterNever bounds the addresses with which a pod has no connection on its kernel's SMC-R: those
	// of its node, with the node's pods, of which there are some hundreds at most.
	maxFilterNever = 1024
	// maxCgroups and maxCgroupDepth bound one look through the cgroups of a node, or of a pod: a program that may make some
	// can make very many. Kubelet's of pods are at most 6 deep; a node of 250 pods has some thousand. What is below a pod has no
	// bound of depth.
	maxCgroups     = 32 << 10
	maxCgroupDepth = 12
	// maxBypass bounds the negative cache of one pod: an application that connects to
	// every address of a range must not fill kernel memory. An entry that a full cache
	// drops only costs another fallback. The cache also has to fit into the transaction
	// of an Update.
	maxBypass = 1024

	// DefaultFailOpenTTL is how long a dead or hung agent may hold up new connections:
	// users do not take 2 s for an outage yet.
	DefaultFailOpenTTL = 2 * time.Second
	// minFailOpenTTL leaves room for three renewals per period; the kernel counts the
	// timeouts of sets in jiffies of up to 10 ms.
	minFailOpenTTL = 100 * time.Millisecond
	// maxFailOpenTTL bounds the outage that a hung agent can cause.
	maxFailOpenTTL = time.Minute
	// maxBypassTTL bounds how long connections to a destination that got SMC-R since
	// still go directly.
	maxBypassTTL = time.Hour

	// caughtTTL is how long nothing is diverted after another program redirected a
	// connection of the agent. In that time the agent looks for the program's rules. If
	// it finds none, diversion begins again, and one connection per caughtTTL is
	// redirected a second time, after the agent.
	caughtTTL = time.Minute
	// openingTTL is how long a program that got no answer to its SYN may wait for one: the kernel
	// gives up 64 s after the last SYN (RFC 6298, with the default of tcp_syn_retries). Each SYN starts it anew.
	openingTTL = 65 * time.Second
	// openedTTL is how long the kernel may take to tell a program what the verdict on its SYN was: to hand a
	// packet to a socket of the same namespace.
	openedTTL = time.Second
	// maxOpening bounds the connections of one pod that are being opened to where SMC-R is required, per
	// address family: those of a second or two, and of some that wait for destinations that do not answer.
	// What is beyond may be opened by its peer meanwhile.
	maxOpening = 8192
	// maxDumpEntries, maxDumpBytes and maxDumpTime bound one look through the rules or
	// addresses of a pod's namespace, of which a program with CAP_NET_ADMIN there can
	// make millions. A sidecar has some dozens of rules; to read 64 Ki takes a second.
	maxDumpEntries = 64 << 10
	maxDumpBytes   = 16 << 20
	maxDumpTime    = 250 * time.Millisecond // of the processor
	// timedFrom is how many entries are read without a look at that time, which is somebody else's, too, in a guest whose
	// processor is taken away: some dozens are what namespaces have.
	timedFrom = 128
	// maxLegacyBytes bounds a table of iptables, which the kernel returns as a whole: some
	// 4000 rules. The tables of many pods may be read at the same time.
	maxLegacyBytes = 1 << 20
	// dumpBufferBytes is the size of the buffer for one part of a list: the kernel makes
	// parts of at most 32 KiB, and larger ones for a few kinds of lists.
	dumpBufferBytes = 64 << 10
	// maxRuleDeletes bounds how many routing rules with our priority are deleted: we make
	// one per address family.
	maxRuleDeletes = 64

	// routeTable and rulePriority are the table and the priority of our routing rules in
	// a pod's namespace. The number is that of the RFC: no other tool uses it by default,
	// and it comes before main (32766) and before source-based routing rules, which the
	// kernel numbers downwards from there.
	routeTable   = 7609
	rulePriority = 7609
	// maxBoundLinks is to how many interfaces of a pod sockets may be bound: it has one, and one more for each
	// further network.
	maxBoundLinks = 16
	// boundMetric is above the metric of the route by loopback, which the kernel makes 1024 for IPv6.
	boundMetric = 2048

	// maxElementsPerMessage keeps a list of set elements, of at most 120 bytes
	// each, below the 64 KiB of a netlink attribute.
	maxElementsPerMessage = 256
	// netlinkBufferBytes has room for the largest transaction (about 5000 elements) and
	// its answers: the kernel accepts or refuses a transaction as a whole.
	netlinkBufferBytes = 1 << 20

	// outsideTries is how many ports outside of the range from which the kernel chooses are
	// tried in DialFrom first, if at least minOutside are there. With as many, and half of them
	// in use, one search in 256 finds none.
	outsideTries = 8
	minOutside   = 1024
	// portTries bounds the search for a local port that the kernel chooses, after that, and
	// the sockets that a search has open. A port is not free if a connection of the client to
	// this server port has it, or had it within the last minute. No port is tried twice. A try
	// costs some ten microseconds.
	portTries = 64

	// maxWireOwn bounds the RDMA devices of a machine and their interfaces: eight
	// of the node, and those of pods, as in an SMCRNode.
	maxWireOwn = 512
	// maxWireNodes bounds the addresses of the devices of other machines: 4,000
	// machines of four each. They must fit into one netlink transaction, at 36
	// bytes each.
	maxWireNodes = 16384
	// maxWirePeers bounds the networks of configured peers, as the file does.
	maxWirePeers = 1024

	// dumpTries bounds how often a list is read because it changed while it was read: the
	// interfaces of a pod change when it starts and ends, those of a busy node more often.
	dumpTries = 11

	// firstQueue and numQueues are the numbers of the queues that an agent tries: other programs
	// use low ones, and an agent that hands over still has its own.
	firstQueue uint16 = 7609
	numQueues  uint16 = 8
	// DefaultQueueLen bounds the packets of one pod that the kernel holds. It is more
	// than a synqueue.Table holds, which lets the others go at once.
	DefaultQueueLen = 512
	// DefaultQueueCopy is what is copied of a held packet: the headers of IPv6, with some
	// extensions, and TCP.
	DefaultQueueCopy = 256
	// queuePacketBytes is what a SYN takes of the receive buffer until it is read: the
	// kernel counts the memory of the message, some 830 bytes, and gives the buffer
	// twice what was asked for.
	queuePacketBytes = 1024
	// queueHeaderRoom is for what stands around the copy in a message.
	queueHeaderRoom = 512
	// queueBatch bounds the packets that are read at once.
	queueBatch = 32
	// localPatience is how long an address of IPv6 is waited for that was just set. Mostly it takes less than a millisecond.
	localPatience = time.Second
	// nftAnswerTime is for the kernel's answers to a transaction, which it gives while we send. It passes twice before one is given up. Once a
	// pod's table is there, it is a sixth of the time that the table lives without a renewal: the next renewal comes in time then.
	nftAnswerTime = 2 * time.Second
	// queueAnswerTime is for the kernel's answer, which it gives while we send.
	queueAnswerTime = time.Second

	// KeeperPatience is how long a packet waits in a queue at most when its agent does
	// nothing. It is below a second, and more than two keeperIntervals above the time for
	// which an agent lets a SYN wait for an answer (synqueue.DefaultDeadline): the keeper
	// knows times to two intervals, and is not to let go a SYN before its agent does.
	KeeperPatience = 850 * time.Millisecond
	// keeperInterval is the time between two looks of the keeper at the queues, and so how
	// exactly it knows for how long a packet has waited.
	keeperInterval = 100 * time.Millisecond
	// keeperReadPatience is how long a message may wait for room in the socket to the keeper, which has room for some hundred, and
	// reads at least one in a keeperInterval. A keeper that was stopped alone reads none.
	keeperReadPatience = 2 * time.Second
	// queueListBytes bounds what the keeper reads of a list of queues: a thousand lines, which the kernel makes in
	// a millisecond or two. The kernel begins at the first queue again for each page of the list, so a list costs the square of
	// its length. A pod's program that binds more queues than that loses what the keeper does for its own pod only.
	queueListBytes = 64 << 10
	// keeperLookBytes is about how much of a list is read in a keeperInterval: where a pod has bound a hundred queues or more,
	// the next look at its list is later. So its programs cannot make the keeper use more than some thousandths of a processor.
	keeperLookBytes = 8 << 10
)
