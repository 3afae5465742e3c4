// SPDX-License-Identifier: Apache-2.0

// Package kube keeps an agent's configuration in line with the objects of its
// cluster.
//
//	s, err := kube.New(kube.Config{REST: rest, Node: name, Base: readFile, StateFile: path, Log: log})
//	go s.Run(ctx)
//	node := s.First(ctx) // what to start with
//	agent.Config{Node: node, Reload: s.Changed(), Load: s.Load}
//
// A [Source] watches the pods of its own node, the namespaces (metadata only), the
// SMCRPolicies, the SMCRPeerSlices, and the SMCRNodes, which say what devices may send
// RoCE packets to this node's. Each object is trimmed to what is used. Some 50 ms after
// a change the source translates the objects by [config.FromObjects] and, if the result
// differs, tells the agent. A policy whose peer selectors the controller has not resolved yet
// stays as it was: see [config.Resolved].
//
// The pods are read with the rights of the node ([config.Node.PodsAsNode]), where
// Kubernetes allows that: an account of an agent then has no right on any other pod.
//
// [RunAgent] runs an agent on a Source, with what belongs to a node in a cluster: the
// reporter (package report), the installation of the CNI plugin (package
// internal/cni/install), records for pods that are older than the plugin, and the
// uninstallation when the SMCRNode says so. These tasks run while the agent manages the
// node, and end when the agent hands the node over.
//
// # Without the API server
//
// The last known configuration stays in force while the API server is away: watches are
// tried again with growing pauses, and nothing else waits for them. The objects are
// also kept in a file, so that an agent that starts without the API server has
// the configuration of its predecessor. An agent that has neither begins with no
// pod opted in, so that all connections are plain TCP.
//
// Nothing is translated before the first list of every kind of object has arrived. If
// pods were taken without the policies, for example, a pod that a policy selects would be
// given the built-in policy for a moment.
//
// An agent is not ready before it has had these lists, and the API server its SMCRNode
// ([agentapi.Cluster]). From then on it is, whatever the API server does: it serves its pods,
// and an agent that is not ready would have a rolling update replace agents elsewhere.
//
// # Who owns what
//
// The goroutine of Run owns the informers and makes configurations; the others
// read them under the lock. The API server's objects belong to the informers'
// stores and are not changed.
//
// # Limitations
//
// Pods that are older than the plugin are found only where the runtime keeps
// network namespaces in /run/netns, as containerd and CRI-O do. Where the runtime's
// CNI library is older than 1.3 the runtime does not say which pod a namespace belongs
// to, and a pod is not adopted if another namespace has one of its addresses too.
//
// Every agent gets all SMCRPolicies and SMCRPeerSlices of the cluster; it only
// works with those of the namespaces of its pods. It gets all SMCRNodes, for the
// addresses of their devices, and throws the rest away. The file with the last objects
// is up to 5 s old.
package kube
