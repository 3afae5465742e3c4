// SPDX-License-Identifier: Apache-2.0

// Package agent is the node agent: it carries the TCP connections of attached pods over SMC-R.
//
//	err := agent.Run(ctx, agent.Config{Node: node, Log: log})
//
// # The way of a connection
//
// Outbound: the redirection in the pod's namespace brings the connection to the agent's listener
// there. The agent asks the policy, dials the destination from the same namespace and address with
// the SMC-R option on its SYN, runs the rendezvous, and relays. A destination without SMC-R is
// entered in the redirection's negative cache, so the next connection goes there directly.
//
// Inbound: a SYN that carries the option comes to the agent's transparent listener. The agent
// connects to the application under the client's address, runs the rendezvous, and relays.
//
// # Devices
//
// The stack of a pod runs on the node's devices. If the pod has devices of its own (its attachment
// records name them, or else kubelet does), the stack runs on these only. The agent opens a pod's
// own devices when a policy selects the pod, and closes them when the pod ends or is no longer
// selected. If a device is gone, the agent closes it at once, because the driver waits for that. If
// none of a pod's own devices can be used, the pod is on plain TCP (POD_DEVICE) and not on the
// node's devices, which other pods use, too.
//
// Devices are opened in the host's namespace. If the network interface of a device is in the pod's
// namespace, its addresses and routes are looked up there.
//
// # The kernel's datapath
//
// A pod whose policy wants its kernel's SMC-R has no stack, listener or redirection: the agent chooses its sockets, keeps its filter,
// and tells what the kernel tells (kernelpath.go and its neighbours, package kernelpath). A pod in the node's network can have this
// datapath only. It has no attachment record: its cgroup stands for its namespace (hostpods.go).
//
// # The wire
//
// The agent that manages the node keeps a table in the host's namespace, by which only devices of
// other nodes and configured peers can send RoCE packets to the node's own devices: see wire.go.
//
// # Budgets
//
// The ledger bounds what pods and their peers can make the agent use: registered memory,
// connections on SMC-R, relays (connections on plain TCP), pending connections (SMC-R or TCP is not
// decided yet), and the kernel's socket buffers. Each pod has one account. Half of the node's
// budget is kept for the pods in equal shares.
//
// Before a budget is full, the agent diverts less: in a pod that has nearly used up its relays or
// pending connections, and from a client that has a quarter of them, only what policies require to
// be on SMC-R (see watchBudget). A connection that is diverted all the same waits. For want of a
// budget the agent resets a connection only if a policy requires SMC-R, or if the client has three
// quarters of what the pod has (see acceptor).
//
// # Failing open, and never silently
//
// Every way in which a connection can miss SMC-R has one reason code (agentapi.Code), which is
// counted, logged when it is new, and kept for explain. An application whose agent was killed must
// get ECONNRESET, never a short stream that looks complete. So all carried sockets have SO_LINGER
// 0, by which the kernel resets them when it closes them, until just before the agent closes them
// in order. A pod's connections are diverted only while its accept loops and its SMC-R stack
// answer: see heartbeat.
//
// # Passing the agent once
//
// The agent resets a connection that was made to its listeners and not diverted there. The agent's
// own connections carry a mark and are not diverted again. For pods in which another program
// redirects connections, too, see mesh.go.
//
// # Who owns what
//
// The manager's goroutine compares the pods with the records and policies. The job of a pod, a
// goroutine of its own, starts and stops the pod's proxy, so no pod waits for another. A proxy is
// all that serves one pod: namespace handle, stack, listeners, redirection, and goroutines. A
// session is one connection that the agent carries. It belongs to the goroutine that connects it,
// and then to its relay, each direction of which has a goroutine while something moves: a direction
// in which nothing has moved for a second or two is parked ([smcr.Parker]), and one goroutine of the
// agent waits for all of these. Whoever closes the connections of a session wakes its relay. The
// pod's set of devices ([rnics.Set]) belongs to the job until the proxy starts, and then to the
// proxy. The devices themselves are in the agent's pool, see package rnics.
//
// # Taking over, and leaving
//
// With node.takeover an agent gets the node from the agent that runs, and gives the node to a later
// one, without a failed connection: see handover.go. The agent that handed over stands by: it
// carries its sessions until it is told to end. Of several agents on a node, the one that holds the
// lock of the node manages it. Config.Leave removes everything from the node.
//
// # What a relay carries
//
// Bytes, the end of each direction, resets, and urgent data. The receiving application gets SIGURG,
// select's exception set, recv with MSG_OOB and SIOCATMARK as over direct TCP, and hears of urgent
// data even while it does not read. While the bytes of a connection cannot move, the relay looks
// for a reset or urgent data behind them, in growing steps of at most 250 ms.
//
// # Limitations
//
// A pod's own devices must be of one kind: of the kernel, or software. RNICs that the RDMA
// subsystem keeps in the pod's namespace (exclusive mode) are out of reach. A policy with mode
// Required holds for connections that pods make, and for connections that come in with the option;
// a peer without the option reaches the application directly. If an application does not read and
// the buffers before it are full (128 to 512 KiB on each node, the send buffer and the RMBE), it hears of
// urgent data behind them only when it reads on.
package agent
