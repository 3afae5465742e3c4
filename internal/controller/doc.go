// SPDX-License-Identifier: Apache-2.0

// Package controller is what the controller's replicas run: it keeps the statuses of the
// objects of kube-smcr, and the SMCRPeerSlices, up to date.
//
// Its reconcilers, each with one kind of key:
//
//   - policies (key: a namespace) writes the status of all SMCRPolicies of a
//     namespace from its pods, their smcr.io/status, and their SMCRLinks.
//   - peers (key: a policy) writes the SMCRPeerSlices of a policy: the addresses
//     that its peer selectors select.
//   - nodes (key: a node) writes into an SMCRNode whether its agent is alive. If the agent
//     is gone, or the node never had one, nodes writes that into the status of the node's pods,
//     in the agent's place, and deletes the node's SMCRLinks. When the agents' DaemonSet goes,
//     nodes takes these statuses off again where no agent left anything behind. It also deletes
//     the objects of nodes that are gone and, if configured, takes the start-up taint off.
//   - pairs (key: an SMCRLink) writes into the SMCRLinks of the two sides of a link group
//     which pod the other side is.
//   - pod-events (key: an event) passes the events of agents about pods on to these pods.
//   - metrics reads the caches when it is scraped.
//
// The decisions are made by pure functions (aggregate, findConflicts, resolvePeers,
// placeAddresses, agentState); the reconcilers read caches and write what differs. An
// event only marks its key: the reconciler looks at the key [coalesce] after the first
// event, so that a key costs at most one pass and one write in that time, however many
// pods change. A status follows a change within about two seconds.
//
//	err := controller.Run(ctx, restConfig, controller.Config{Namespace: "kube-smcr", ...})
//
// Run goes on while the API server is away: when the lease is lost it starts
// again in the same process. [ApplyCRDs] and [Uninstall] are what the Helm hooks
// call.
//
// Who owns what: the caches belong to controller-runtime and are shared, so an object that
// was read is never changed. Objects in the caches are trimmed to the fields that are read
// here (see trim.go). Status is written by server-side apply as field manager
// smcr-controller, with the object's UID, so that a write neither changes another object
// of the same name nor makes a deleted object again.
//
// Limitations: a pod that several policies select counts for each of them. The peer
// selectors of a policy select at most [maxPeerAddresses] addresses. Times that other
// machines wrote are never compared with the time of this machine.
package controller
