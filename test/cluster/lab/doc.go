// SPDX-License-Identifier: Apache-2.0

// Package lab runs a real Kubernetes cluster on one machine: etcd, the control
// plane, and nodes with containerd, runc, kubelet and kube-proxy, each machine
// in namespaces of its own (package machine).
//
//	c, err := lab.Up(ctx, lab.Config{Images: []string{"kube-smcr.tar"}})
//	defer c.Down(ctx)
//	out, err := c.Kubectl(ctx, "get", "nodes")
//	out, err = c.Helm(ctx, "install", ...)
//	err = c.Nodes[1].PowerOff(ctx)
//	rules, err := c.Nodes[0].Run(ctx, "nft", "list", "ruleset")
//
// The same for people: make cluster-up, make cluster-down (tools/cluster).
//
//	+- control-plane --------+   +- n1 --------------------+  +- n2 ------
//	|  etcd                  |   |  containerd, kubelet,   |  |
//	|  kube-apiserver        |   |  kube-proxy             |  |
//	|  kube-controller-      |   |  cni0 10.244.1.1        |  |
//	|    manager, -scheduler |   |   | pods 10.244.1.0/24  |  |
//	|  br0 10.250.0.1 -------|---|--eth0 10.250.0.11       |  | eth0 .12
//	|  br1 10.251.0.1 -------|---|--eth1 10.251.0.11       |  | eth1 .12
//	+------------------------+   +-------------------------+  +-----------
//
// With Config.External there are further nodes, on machines that somebody else starts and connects
// with br0: package guest does so with guests that have RDMA devices.
//
// The nodes route between the pods' subnets. Services are kube-proxy's. If the
// machine has IPv6, everything has an IPv6 address too. There is no DNS in the
// cluster, and no way out of it. Images are those that were loaded: pods say
// imagePullPolicy: Never or IfNotPresent.
//
// # Who owns what
//
// A supervisor, a process of its own, has the machines as its children; a
// Cluster asks it by a Unix socket. A cluster that is not detached ends when
// the process ends that called Up, in whatever way: its supervisor holds the
// other end of a pipe. When the supervisor is killed the kernel ends the
// machines. Then its directory and cgroups remain, which the next Up, Down or
// Sweep removes. Nothing else is made on the host: no interface, no rule, no
// mount, no setting; but the module br_netfilter is loaded if it was not.
//
// # Limitations
//
// Linux and root. It ran on a host with cgroups version 1; on version 2 alone it
// was tried as far as a host without most controllers goes, which is up to ready
// nodes. The nodes share the kernel, the cores and the clock. The control plane
// has no redundancy and syncs nothing to disk, so a killed machine, the real
// one, loses the cluster.
package lab
