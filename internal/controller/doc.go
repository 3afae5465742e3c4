// SPDX-License-Identifier: Apache-2.0

// Package controller keeps the objects of kube-smcr true: it is what the
// controller's replicas run.
//
// Four reconcilers, each with one kind of key:
//
//   - policies (key: a namespace) writes the status of all SMCRPolicies of a
//     namespace from its pods, their smcr.io/status, and their SMCRLinks.
//   - peers (key: a policy) writes the SMCRPeerSlices of a policy: the addresses
//     that its peer selectors stand for.
//   - nodes (key: a node) says in an SMCRNode whether its agent is alive, marks
//     the SMCRLinks of a node without one Unknown, deletes the objects of nodes
//     that are gone, and, if told to, takes the start-up taint off.
//   - metrics reads the caches when it is scraped.
//
// What they decide is in functions of objects and nothing else (aggregate,
// findConflicts, resolvePeers, placeAddresses, agentState); the reconcilers
// read caches and write what differs. An event only marks its key: the
// reconciler runs once [coalesce] after the first one, so that a key costs at
// most one pass and one write in that time, however many pods change, and the
// status follows a change within two seconds or so.
//
//	err := controller.Run(ctx, restConfig, controller.Config{Namespace: "kube-smcr", ...})
//
// Run goes on while the API server is away: when the lease is lost it starts
// again in the same process. [ApplyCRDs] and [Uninstall] are what the Helm hooks
// call.
//
// Who owns what: the caches belong to controller-runtime and are shared, so
// nothing that was read is ever changed. Objects in them are trimmed to what is
// read here (see trim.go). Status is written by server-side apply as field
// manager smcr-controller, with the object's UID, so that nothing is written to
// another object of the same name, or brought back after it was deleted.
//
// Limitations: a pod that several policies select counts for each of them. A
// policy's peer selectors stand for at most [maxPeerAddresses] addresses.
// Clocks of other machines are never compared with the own one.
package controller
