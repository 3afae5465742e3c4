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
// # Who owns what
//
// The manager goroutine owns the set of pods and their starts and stops. A
// run is one pod's working set: namespace handle, stack, listeners,
// redirection and the goroutines. A flow is one connection; it is owned by the
// goroutine that accepted it, which waits for the two goroutines of its relay.
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
// A policy with mode Required holds for connections that pods make, and for
// those that come in with the option; a peer without the option reaches the
// application directly. Of urgent data that is more than the buffers behind an
// application that does not read, that application hears when it reads on.
package agent
