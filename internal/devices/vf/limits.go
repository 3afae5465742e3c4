// SPDX-License-Identifier: Apache-2.0

package vf

import "time"

const (
	// maxIDBytes bounds a device's ID: an interface name has 15 bytes, a PCI
	// address of a large domain 14; the ID is part of a file's name.
	maxIDBytes = 64
	// maxContainerIDBytes bounds a container's ID, which is in an interface's alias;
	// those of container runtimes have 64 bytes.
	maxContainerIDBytes = 96
	// maxAliasBytes is the kernel's limit for an alias.
	maxAliasBytes = 255
	// maxNameBytes is the kernel's limit for an interface's name.
	maxNameBytes = 15
	// maxRDMANameBytes is the kernel's limit for an RDMA device's name.
	maxRDMANameBytes = 63
	// maxJournalBytes bounds a journal; one has some two KiB.
	maxJournalBytes = 1 << 16
	// maxJournals bounds the files in the directory of the journals, which also has the
	// lock of each device: more than a node has VFs.
	maxJournals = 1 << 14
	// maxAddresses bounds the addresses of one interface that are restored. An interface
	// with more is not a host's RDMA port.
	maxAddresses = 64
	// maxRDMA bounds the RDMA devices of one device; a VF has one.
	maxRDMA = 8
	// maxGIDRows bounds the search for the interface of a software device in its GID
	// table: the first row always has it.
	maxGIDRows = 4
	// maxSysfsBytes bounds an attribute that is read; all are shorter.
	maxSysfsBytes = 4096

	// lockWait bounds the wait for a device's lock. The call that has it makes some ten
	// netlink calls and waits for a port.
	lockWait = 20 * time.Second
	// portWait bounds the wait for the port of a device to become active. A NIC
	// negotiates its link in one to three seconds. After portWait the pod starts all the
	// same, on plain TCP.
	portWait = 5 * time.Second
	// returnWait bounds the wait for the kernel to put the interface of a namespace that
	// ended back into the host. The kernel destroys namespaces in batches, which takes
	// fractions of a second, and some seconds on a node that ends hundreds of pods at
	// once.
	returnWait = 10 * time.Second
	// releaseWait bounds the wait for the kernel to remove a software RDMA device that
	// lost its interface, because only then its name is free. That takes the longer the
	// more namespaces there are, and the kernel waits for processes that have the device
	// open; the agent closes it at once.
	releaseWait = 20 * time.Second
	// dyingWait is how long a software RDMA device whose number is not known must still
	// be listed to count as one that stays. Before, it may be one that lost its interface
	// and that the kernel is about to remove.
	dyingWait = 10 * time.Second
	// dumpTries bounds how often the RDMA devices are listed because the list changed
	// meanwhile, which on a busy node happens a few times.
	dumpTries = 10
	// macTries bounds how often the driver of a VF is reset until it uses the address
	// that its PF assigned: igbvf uses it after the first reset.
	macTries = 3
	// poll is the pause between two looks at a state that the kernel changes by itself.
	poll = 10 * time.Millisecond
	// maxPause is the longest pause between two tries that are much work for the kernel.
	maxPause = 200 * time.Millisecond

	// maxVLAN and maxVLANQoS are the limits of IEEE 802.1Q; 4095 is reserved.
	maxVLAN    = 4094
	maxVLANQoS = 7
	// minMTU is the least that IPv4 needs; maxMTU what the kernel stores.
	minMTU, maxMTU = 68, 65535
)
