// SPDX-License-Identifier: Apache-2.0

// Package kubectl is the kubectl plugin "kubectl smcr": it asks the agents of a
// cluster what they do and why, from anywhere.
//
//	c, err := kubectl.NewCluster(restConfig, "shop")
//	answer, err := c.Explain(ctx, "web-0", "redis:6379")
//	err = kubectl.PrintAnswer(os.Stdout, answer)
//
// An agent has no port in the network. The plugin finds the agent's pod on the node, and
// runs smcrctl in it, as "kubectl exec" does: a user who may exec into that pod may ask.
// The plugin also reads pods, namespaces, Services and EndpointSlices, with the rights of
// its user. If the user may not read them, the answer says what is missing.
//
// [Cluster] has no state but its connections and may be used by several
// goroutines.
//
// # Limitations
//
// During an upgrade there may be two agents on a node. The newer one that is ready is
// asked, so connections that the other one still carries are not seen. If a Service has
// many endpoints, only the agents of a few are asked.
package kubectl
