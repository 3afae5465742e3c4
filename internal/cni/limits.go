// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"time"

	"github.com/smcr-io/kube-smcr/internal/devices/claims"
)

const (
	// maxRecordBytes bounds a record. Most have a few hundred bytes, and with maxIPs addresses
	// a few thousand. The longest has 200 KiB: maxDevices devices with maxIPs addresses each,
	// and the longest configuration of an IPAM plugin, which grows when it is indented.
	maxRecordBytes = 256 << 10
	// maxIPAMBytes bounds the configuration of an IPAM plugin in a record. The agent writes no
	// longer ones, and others have some hundred bytes.
	maxIPAMBytes = 16 << 10
	// maxRecords bounds what List returns: a node has at most some hundred
	// pods, and a directory that was filled by accident must not fill memory.
	maxRecords = 8192
	// maxKeptBytes bounds a file of host-local, which has two names: that of a container, with
	// 64 bytes in most cases, and that of an interface, with at most 15.
	maxKeptBytes = 1 << 10
	// maxIPs bounds the addresses of one interface.
	maxIPs = 64
	// maxDevices bounds the devices of one record: that of the network, and those that the pod
	// claimed.
	maxDevices = 1 + claims.MaxDevices
	// maxDeviceID bounds the name of a device: a PCI address has 12 bytes, an
	// interface's name 15.
	maxDeviceID = 64
	// maxPFs bounds the PFs of one network; a server has at most some sixteen.
	maxPFs = 64
	// maxVLAN and maxVLANQoS are those of IEEE 802.1Q.
	maxVLAN    = 4094
	maxVLANQoS = 7
	// minMTU is the least of IPv4, maxMTU what the kernel accepts.
	minMTU = 68
	maxMTU = 65535
	// maxNameBytes is what every file system of Linux takes as a file name,
	// with room for the suffix of a record.
	maxNameBytes = 240
	// maxDataDirDepth is how many directories deep dataDir may be. The default is two deep.
	// Pods' volumes and containers' files, some of which belong to root, are six deep and more.
	maxDataDirDepth = 4
	// maxLinks bounds the symbolic links on the way to dataDir, as /var/run is one.
	maxLinks = 4
	// maxPodField bounds the names of CNI_ARGS: Kubernetes allows 253 bytes.
	maxPodField = 253

	// defaultAgentTimeout is the wait for the agent: a hundred times what the agent
	// needs. The start of a pod takes seconds, so users do not notice two more.
	defaultAgentTimeout = 2 * time.Second
	// maxAgentTimeout keeps the wait below what container runtimes allow a
	// plugin.
	maxAgentTimeout = 30 * time.Second
	// lockWait bounds the wait for another call for the same attachment; runtimes
	// make one at a time, and give up on the whole after minutes.
	lockWait = 30 * time.Second
	// formerWait bounds ADD's wait for another call for the attachment from which ADD takes a
	// device: if one runs for longer, it does itself what ADD would do.
	formerWait = time.Second
	// ipamTimeout bounds one call of an IPAM plugin: DHCP tries for ten
	// seconds and more, and container runtimes wait two minutes.
	ipamTimeout = 60 * time.Second
	// busyTries and busyPoll are for an IPAM plugin whose file is being written and
	// cannot be executed meanwhile: an installer takes some ten milliseconds.
	busyTries = 5
	busyPoll  = 100 * time.Millisecond
	// wireTimeout bounds the work on one device. The slowest part is the port
	// of the RDMA device, which comes up a few seconds after a move.
	wireTimeout = 30 * time.Second
	// maxAnswerBytes bounds what is read of the agent's answer.
	maxAnswerBytes = 4 << 10
)
