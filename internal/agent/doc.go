// SPDX-License-Identifier: Apache-2.0

// Package agent is the node agent: it carries the TCP connections of attached
// pods over SMC-R.
//
//	err := agent.Run(ctx, agent.Config{Node: node, Log: log})
//
// # The way of a connection
//
// Outbound: the redirection in the pod's namespace brings the connection to
// the agent's listener there. The agent asks the policy, dials the destination
// from the same namespace and address with the SMC-R option on its SYN, runs
// the rendezvous, and relays. A destination without SMC-R is entered in the
// redirection's negative cache, so the next connection goes straight there.
//
// Inbound: a SYN that carries the option comes to the agent's transparent
// listener. The agent connects to the application under the client's address,
// runs the rendezvous, and relays.
//
// # Devices
//
// A stack runs on the node's devices or, if its pod has some for itself (its
// attachment records name them, or else kubelet does), on those only. The pod's
// devices are opened when a policy selects the pod and closed when it ends, when
// it is no longer selected, and at once when they are gone: who makes them anew
// waits for that. A pod none of whose devices can be used is on plain TCP
// (POD_DEVICE), and not on the node's devices, which others use too.
//
// Devices are opened in the host's namespace. Where the network interface is in
// the pod's, so are the addresses and routes that count: they are asked for there.
//
// # The wire
//
// Who manages the node lets only devices of other nodes and configured peers send
// RoCE packets to its own, by a table in the host's namespace: see wire.go.
//
// # Budgets
//
// The ledger bounds what pods and their peers make the agent hold: registered
// memory, connections on SMC-R, relays, and connections that are not settled. All
// of it is in one account for each pod, and half of the node's budget is kept for
// the pods in equal shares. A pod that nearly used up its relays or its unsettled
// connections is not diverted for a while, see govern.
//
// # Failing open, and never silently
//
// Every way in which a connection can miss SMC-R has one reason code
// (agentapi.Code): it is counted, logged when it is new, and kept for explain.
// All carried sockets are set to reset when they are closed without a word
// (SO_LINGER of 0), and are switched to an orderly end just before one: an
// application whose agent was killed gets ECONNRESET, never a short stream
// that looks complete. Diversion in a pod lasts only while its accept loops
// and its SMC-R stack answer, see heartbeat.
//
// # Passing the agent once
//
// A door takes only what was diverted to it. Of what it takes, nothing comes back:
// see mesh.go for pods in which somebody else redirects connections, too.
//
// # Who owns what
//
// The manager goroutine looks what is wanted of the pods; a pod's job alone starts
// and stops its run, so that no pod waits for another. A run is one pod's working set: namespace handle, stack, listeners,
// redirection and the goroutines. A flow is one connection; it is owned by the
// goroutine that accepted it, which waits for the two goroutines of its relay.
// A deviceSet is the job's until its pod's run starts, and then the run's; each
// device of it has a goroutine that looks after it.
//
// # Taking over, and leaving
//
// With Takeover in its configuration an agent gets the node from one that runs,
// and gives it to a later one, without a failed connection: see handover. What
// it carried goes on in the old one, which is told so by nothing but that its
// process is still there, until it is ended. Config.Leave takes everything off
// the node.
//
// Of several agents the one with the claim manages the node.
//
// # What a relay carries
//
// Bytes, the end of each direction, resets, and urgent data: the receiving
// application gets SIGURG, select's exception set, recv with MSG_OOB and
// SIOCATMARK as over direct TCP, and hears of it also while it does not read.
// A connection whose bytes cannot move is looked at in growing steps, at most
// 250 ms, for a reset or urgent data behind them.
//
// # Limitations
//
// A pod's own devices must be of one kind: of the kernel, or software. RNICs that
// the RDMA subsystem keeps in the pod's namespace (exclusive mode) are out of reach.
// A policy with mode Required holds for connections that pods make, and for
// those that come in with the option; a peer without the option reaches the
// application directly. Of urgent data that is more than the buffers behind an
// application that does not read, that application hears when it reads on.
package agent
