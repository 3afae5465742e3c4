// SPDX-License-Identifier: Apache-2.0

package vf

import "time"

const (
	// maxIDBytes bounds a device's ID: an interface name has 15 bytes, a PCI
	// address of a large domain 14; the ID is part of a file's name.
	maxIDBytes = 64
	// maxContainerIDBytes bounds a container's ID, which stands in an
	// interface's alias; container runtimes have 64.
	maxContainerIDBytes = 96
	// maxAliasBytes is the kernel's limit for an alias.
	maxAliasBytes = 255
	// maxNameBytes is the kernel's limit for an interface's name.
	maxNameBytes = 15
	// maxRDMANameBytes is the kernel's limit for an RDMA device's name.
	maxRDMANameBytes = 63
	// maxJournalBytes bounds a journal; a whole one has some two KiB.
	maxJournalBytes = 1 << 16
	// maxJournals bounds their directory, which has a lock of each device, too: more
	// than a node has VFs.
	maxJournals = 1 << 14
	// maxAddresses bounds the addresses of one interface that are brought back.
	// A host that has more on an RDMA port does routing on it.
	maxAddresses = 64
	// maxRDMA bounds the RDMA devices of one device; a VF has one.
	maxRDMA = 8
	// maxGIDRows bounds the search for the interface of a software device: its
	// first row always has it.
	maxGIDRows = 4
	// maxSysfsBytes is more than any attribute that is read has.
	maxSysfsBytes = 4096

	// lockWait bounds the wait for a device's lock. Whoever holds it makes some
	// ten netlink calls and waits for a port.
	lockWait = 20 * time.Second
	// lockPoll is short against the work under the lock, and the wait is rare.
	lockPoll = 2 * time.Millisecond
	// portWait bounds the wait for the port of a device that was set up. A NIC
	// negotiates its link in one to three seconds; the pod starts without it
	// after that, on TCP.
	portWait = 5 * time.Second
	// returnWait bounds the wait for the kernel to give back the interface of a
	// namespace that ended. It destroys namespaces one after another, in
	// batches, which takes fractions of a second; on a node that ends hundreds
	// of pods at once, some seconds.
	returnWait = 10 * time.Second
	// releaseWait bounds the wait for the kernel to take away an RDMA device of software
	// that lost its interface, as its name is free only then. It takes longer the more
	// namespaces there are, and waits for whoever has it open; the agent closes it at once.
	releaseWait = 20 * time.Second
	// dyingWait is how long an RDMA device of software that nobody knows must stay to
	// count as a living one, rather than one that lost its interface.
	dyingWait = 10 * time.Second
	// dumpTries bounds how often a listing is begun again because interfaces came
	// and went meanwhile: on a busy node a few times.
	dumpTries = 10
	// macTries bounds how often the driver of a VF is reset until it takes the
	// address that its PF assigned: igbvf takes it after the first time.
	macTries = 3
	// poll is the pause between two looks at what the kernel does by itself.
	poll = 10 * time.Millisecond
	// maxPause is the longest pause between two tries of what is much work for it.
	maxPause = 200 * time.Millisecond

	// maxVLAN and maxVLANQoS are the limits of IEEE 802.1Q; 4095 is reserved.
	maxVLAN    = 4094
	maxVLANQoS = 7
	// minMTU is the least that IPv4 needs; maxMTU what the kernel stores.
	minMTU, maxMTU = 68, 65535
)
