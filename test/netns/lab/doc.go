// SPDX-License-Identifier: Apache-2.0

// Package lab builds two nodes with pods on one machine, from network
// namespaces: the room in which the demo, the benchmarks and the namespace
// tests run.
//
//	l, err := lab.New(lab.Config{})
//	defer l.Close()
//	client, err := l.Nodes[0].AddPod(ctx, lab.PodConfig{Name: "client"})
//	server, err := l.Nodes[1].AddPod(ctx, lab.PodConfig{Name: "server"})
//	a, err := l.Nodes[0].StartAgent(lab.AgentConfig{Binary: "bin/node-agent"})
//	p, err := client.Start(lab.Command{Args: []string{"curl", ...}})
//
// The topology:
//
//	+- namespace PREFIX-node1 ------+        +- namespace PREFIX-node2 ------+
//	|  agent                        |        |                       agent   |
//	|  underlay0 192.168.89.1 ------|--veth--|------ underlay0 192.168.89.2  |
//	|  underlay1 192.168.90.1 ------|--veth--|------ underlay1 192.168.90.2  |
//	|  bridge pods0 -- trunk -------|--veth--|------- trunk -- bridge pods0  |
//	|     |                         |        |                    |          |
//	+-----|-------------------------+        +--------------------|----------+
//	   eth0 10.89.0.16..                        eth0 10.89.0.32..
//	   namespace PREFIX-client                  namespace PREFIX-server
//
// RoCE packets go over the underlays, one for each RNIC of a node, the pods' TCP
// over trunk. With Config.Switched there is a switch in each underlay, a bridge in
// a third namespace, and RNICs can be broken in the ways that [Node.SetPort],
// [Node.Unplug] and [Node.Deafen] know. The two bridges are
// one layer 2 segment, so all pods share an IP subnet, as SMC-R version 1
// demands (RFC 7609 §3.5.2). With Config.Routed the pods of each node have a
// subnet of their own, 10.89.1.0/24 and 10.89.2.0/24, and the nodes route between
// them, as in Kubernetes. Pods are attached as a container runtime does it:
// libcni executes the plugins of a configuration list, the distribution's
// bridge and host-local and then smcr-cni.
//
// # Who owns what
//
// A Lab is owned by one goroutine, and so are its nodes and pods, but that several may
// start processes; a Proc may be used by several. Close ends every process that was started in the lab, by
// its process id, and removes the namespaces and the directory. Nothing is made
// outside of them: no interface, rule or route in the machine's own namespace.
// Leftovers says whether that worked. A process that was killed before it could
// close its lab leaves namespaces, whose names carry its process id, and a
// directory, whose lock is free then: Sweep removes those of this user, and leaves
// alone what somebody else mounted or put there.
//
// # Limitations
//
// Linux, root. The namespaces share the machine's cores and memory, so figures
// measured here are good for comparisons within one run only. The namespaces
// share the machine's file system and process ids too; pods are isolated in
// the network and by having no privileges, not otherwise.
package lab
