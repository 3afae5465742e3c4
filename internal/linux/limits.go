// SPDX-License-Identifier: Apache-2.0

package linux

import "time"

const (
	// maxOutboundRules and maxOutboundRanges bound the policy of one pod: the
	// compilation takes time proportional to the product of port boundaries
	// and port ranges.
	maxOutboundRules  = 256
	maxOutboundRanges = 512
	// maxOutboundElements bounds what they compile to, per address family: a
	// netlink transaction is charged to the send buffer of its socket.
	maxOutboundElements = 1024
	// maxInboundRanges bounds the port ranges of one pod, as above.
	maxInboundRanges = 256
	// maxBypass bounds the negative cache of one pod. An application that walks
	// through an address range must not fill kernel memory; what a full cache
	// forgets only costs a fallback. It also has to fit into the transaction of an
	// Update.
	maxBypass = 1024

	// DefaultFailOpenTTL is how long a dead or hung agent may hold up new
	// connections: the time that users call an outage starts above it.
	DefaultFailOpenTTL = 2 * time.Second
	// minFailOpenTTL: the kernel keeps set timeouts in jiffies of up to 10 ms,
	// and the agent must get three renewals into one period.
	minFailOpenTTL = 100 * time.Millisecond
	// maxFailOpenTTL is what an operator can still call failing open.
	maxFailOpenTTL = time.Minute
	// maxBypassTTL bounds how long a destination that learned SMC-R in the
	// meantime is still left alone.
	maxBypassTTL = time.Hour

	// caughtTTL is how long nothing is diverted after somebody else redirected a
	// connection of the agent's: until then whoever looks through the rules of
	// others has found them. Where none are found, it is how often one
	// connection passes the agent that is redirected after it.
	caughtTTL = time.Minute
	// maxLegacyBytes bounds one table of iptables that is looked through: a pod's
	// has some kilobytes.
	maxLegacyBytes = 4 << 20

	// routeTable and rulePriority are ours in a pod's namespace. The number
	// is that of the RFC: no other tool uses it by default, and it lies
	// before main (32766) and before source-based routing rules, which the
	// kernel numbers downwards from there.
	routeTable   = 7609
	rulePriority = 7609

	// maxElementsPerMessage keeps a list of set elements, of at most 120 bytes
	// each, below the 64 KiB of a netlink attribute.
	maxElementsPerMessage = 256
	// netlinkBufferBytes holds the largest transaction (about 3000 elements)
	// and its answers: the kernel takes or refuses a transaction as a whole.
	netlinkBufferBytes = 1 << 20

	// portTries bounds the search for a local port in DialFrom. Each try
	// fails with the share of the client's ports that are in use towards this
	// server port. A client of short connections, a few hundred per second,
	// has half of them in TIME_WAIT, where eight tries failed now and then:
	// with 64 nine tenths may be, and a try costs some ten microseconds.
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

	// dumpTries bounds how often a list is read again that changed meanwhile;
	// a pod's interfaces change when it starts and ends.
	dumpTries = 8
)
