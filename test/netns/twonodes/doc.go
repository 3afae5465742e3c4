// SPDX-License-Identifier: Apache-2.0

// Package twonodes runs the product from end to end on two nodes made of network
// namespaces (package lab): real agents, the CNI plugin in a real chain, and
// applications of the distribution, unchanged, in pods without privileges.
//
//	a := twonodes.NewApplications(twonodes.Config{Bin: "bin", Captures: dir}, audience)
//	defer a.Close()
//	err := a.Run(ctx)
//
// There are two stories. [Applications] measures nginx, redis and iperf3 without
// and with the agents, looks at a capture with tshark, and takes SMC-R away in
// several ways. [Failover] cuts links under running applications and measures how
// long they stall. Each tells an [Audience] what it does, and which statements
// hold. Its tests make each statement a test; the demo (demo/namespaces) prints
// them.
//
// # Where the figures come from
//
// Connections are counted by the pod's own kernel (the ActiveOpens counter of
// its namespace), so also those are seen that no agent knows; less those that
// the agent made itself. How many of them were on SMC-R, and the bytes by
// RDMA, say the agents. The bytes by TCP are what passed the pod's interface
// in both directions, headers included: RoCE packets do not go that way. The
// throughput is what the application says.
//
// # Who owns what
//
// A story, its nodes, pods and agents are owned by the goroutine that runs it,
// which also calls the audience. Applications in the background, probes and the
// watch of the links have goroutines of their own; Run waits for them. Close
// removes what was made, and tells the audience whether it did.
//
// # Limitations
//
// Linux, root, [Programs] and [Binaries]. One machine stands for two: stalls and
// throughput are affected by whatever else it does.
package twonodes
