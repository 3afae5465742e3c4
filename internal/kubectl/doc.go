// SPDX-License-Identifier: Apache-2.0

// Package kubectl is the kubectl plugin "kubectl smcr": it asks the agents of a
// cluster what they do and why, from anywhere.
//
//	c, err := kubectl.NewCluster(restConfig, "shop")
//	answer, err := c.Explain(ctx, "web-0", "redis:6379")
//	err = kubectl.PrintAnswer(os.Stdout, answer)
//
// An agent has no port in the network. The plugin finds the agent's pod on the
// node that is asked about, and runs smcrctl in it, as "kubectl exec" does: who
// may exec into that pod may ask. Besides, it reads pods, namespaces, Services
// and EndpointSlices, with the rights of its user; what these do not allow is
// left out of the answer, and said.
//
// [Cluster] has no state but its connections and may be used by several
// goroutines.
//
// # Limitations
//
// During an upgrade there are two agents on a node; the newer one that is ready
// is asked, and connections that the other one still carries are not seen. Of a
// Service with many endpoints a few are asked.
package kubectl
