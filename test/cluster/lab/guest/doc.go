// SPDX-License-Identifier: Apache-2.0

// Package guest runs a cluster some of whose nodes are guests with RDMA devices: the
// laboratory of package test/cluster/lab, with machines of test/vm/lab in it.
//
//	c, err := guest.Up(ctx, guest.Config{Config: lab.Config{Nodes: 1, Images: images}, Guests: 2})
//	defer c.Down(ctx)
//	out, err := c.Kubectl(ctx, "get", "nodes") // n1 is of this machine, n2 and n3 are guests
//	out, err = c.Guests[0].Run(ctx, "rdma", "link")
//	err = c.Guests[0].Guest.SetLink(1, false)  // pulls the cable of rxe1
//
// The same for people: make cluster-up ARGS=--rdma.
//
//	+- control-plane ---+   +- n1 ------+     +- n2: QEMU, Debian's kernel --+   +- n3: QEMU
//	|  br0 10.250.0.1 --|---|-- eth0 .11|     |  eth0 10.250.0.12 = rxe0     |   |  eth0 .13
//	|   | tap           |   +-----------+     |       10.0.0.1               |   |       .2
//	+---|---------------+                     |  eth1 10.0.0.11   = rxe1     |   |  eth1 .12
//	    +------------------- the segment of the guests: one Ethernet, both NICs of each ---+
//
// A node in a guest has containerd, runc, kubelet and kube-proxy of the same files as the
// others. They are on a disk, with the images imported: to do that in an emulated machine takes
// half a minute. The disk is made once for the same programs and images, and kept in the cache
// directory, the last two of them; guests write beside it. With Config.VFs guests have two NICs with
// virtual functions besides, with soft RoCE on these, each on a NUMA node of its own; and a later
// kernel, without SMC-R of its own, as soft RoCE of the usual one does not work in pods. With
// Config.KernelSMC, too, they have the usual kernel, and a module of soft RoCE that is built to.
//
// # Who owns what
//
// The cluster is lab's and the guests are those of the vm command, under the name
// nodes-NAME; this package connects them, and [Down] ends both. A cluster that is not
// detached ends with the process that called [Up], and its guests do. After a crash, the
// next Up, Down or [Sweep] removes what is left of either.
//
// # Limitations
//
// It needs what both need: root, the programs of a cluster (make cluster-tools), QEMU and the
// guests' image (make vm-image), no KVM; and memory, 1 GiB for each guest and more than half of that for
// its QEMU, which Up looks for first. Its disk is made with overlayfs, so the cache
// directory must not lie on one. Warm, and alone on two cores, two guests are ready after
// a minute. Times in them mean nothing. kube-proxy is in its mode nftables on all nodes,
// as guests have no iptables. A guest is reset by [Node.Reset], not by itself, and cannot be switched off: the first
// one is the others' switch. The second network of the cluster's own nodes is not the guests'.
package guest
