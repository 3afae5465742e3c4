// SPDX-License-Identifier: Apache-2.0

// Package rdma tests kube-smcr on a real Kubernetes whose nodes have RDMA devices of the kernel. Node
// n1 is on this machine, and has none. Nodes n2 and n3 are guests with rxe0 and rxe1 (package
// guest), whose kernels have SMC-R, too, which is the datapath of some pods. The tests compare what users see
// with what the guests' kernels say of their queue pairs and of their own SMC-R.
//
//	make test-cluster-rdma
//	make test-cluster-rdma ARGS=-run=TestRDMA/links
//
// TestRDMA has one cluster for all its scenarios, in the order of the table in rdma_test.go. Each leaves the cluster as
// it found it, so that any of them can run alone, except the last, which uninstalls. When a scenario fails, the state of
// the cluster is in its output, and the logs of everything in out/test-cluster-rdma.
//
// TestVFs has a cluster of its own, whose guests have VFs with soft RoCE, each on one of two NICs and NUMA nodes. Pods get a VF by
// a claim, or by the device plugin and a further network (package secondnet). When the pods have ended, the guests' kernels must say of
// interfaces, VFs and RDMA devices what they said before, and no record and no address may be left. Logs are in out/test-cluster-vfs.
//
// TestKernelVFs has a cluster of its own, too. Its pods have VFs, and their datapath is the SMC-R of the guests' kernels, which at first
// only one of the two guests has. Logs are in out/test-cluster-kernel-vfs.
//
// What needs no such device is in package test/cluster.
//
// # Limitations
//
// The tests need root, the programs of a cluster, QEMU and 3.3 GiB of memory. The guests are emulated
// and share the cores with everything else, so the times in the tests only bound hangs. The one exception is how soon a
// connection on the kernel's datapath ends, which the product promises. Pods on that datapath have a macvlan child of the
// RNIC's interface without Multus: during that scenario the guests' pod network consists of such children. A node that is reset is
// synced before, because its disk has no journal.
package rdma
