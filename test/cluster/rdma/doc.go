// SPDX-License-Identifier: Apache-2.0

// Package rdma tests kube-smcr on a real Kubernetes whose nodes have RDMA devices of the kernel:
// n1 is a node of this machine without any, n2 and n3 are guests with rxe0 and rxe1 (package
// guest), whose kernels have SMC-R, too. What users see there is held against what the guests' kernels
// say of their queue pairs, and of their own SMC-R, which is the datapath of pods, too.
//
//	make test-cluster-rdma
//	make test-cluster-rdma ARGS=-run=TestRDMA/links
//
// One cluster serves all scenarios, in the order of the table in rdma_test.go, and any of them can
// run alone: each leaves the cluster as it found it, but the last, which uninstalls. When one fails, the state of the
// cluster is in its output, and the logs of everything in out/test-cluster-rdma.
//
// TestVFs has a cluster of its own, whose guests have VFs with soft RoCE, each on one of two NICs and NUMA nodes: pods have them by
// a claim, or by the device plugin and a further network (package secondnet). When they have ended, the guests' kernels must say of
// interfaces, VFs and RDMA devices what they said before, and no record and no address may be left. Logs are in out/test-cluster-vfs.
//
// TestKernelVFs has one, too: its pods have VFs, and the guests' kernels SMC-R, one of the two at first, which is the datapath of these pods.
// Logs are in out/test-cluster-kernel-vfs.
//
// What needs no such device is in package test/cluster.
//
// # Limitations
//
// It needs root, the programs of a cluster, QEMU and 3.3 GiB of memory. The guests are emulated
// and share the cores with all else: what is said of times is a bound for hangs, but that of the end of a
// connection on the kernel's datapath, which is promised. Pods there have a macvlan child of the RNIC's interface
// because the guests' network is made of such for the time of that scenario, without Multus. Reset nodes have written what they had to
// write: their disk has no journal.
package rdma
