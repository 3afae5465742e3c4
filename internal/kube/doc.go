// SPDX-License-Identifier: Apache-2.0

// Package kube keeps an agent's configuration in line with the objects of its
// cluster.
//
//	s, err := kube.New(kube.Config{REST: rest, Node: name, Base: readFile, StateFile: path, Log: log})
//	go s.Run(ctx)
//	node := s.First(ctx) // what to start with
//	agent.Config{Node: node, Reload: s.Changed(), Load: s.Load}
//
// A [Source] watches the pods of its own node, the namespaces (metadata only),
// the SMCRPolicies, the SMCRPeerSlices and the SMCRNodes, whose devices may send
// RoCE packets to this one's, each trimmed to what is used. Some
// 50 ms after a change it translates them by [config.FromObjects] and, if the
// result differs, tells the agent.
//
// The pods are read with the rights of the node ([config.Node.PodsAsNode]), where
// Kubernetes allows that: an account of an agent then has no right on any other pod.
//
// [RunAgent] runs an agent on it, with what belongs to a node in a cluster: the
// reporter (package report), the installation of the CNI plugin (package
// cniinstall), records for pods that are older than the plugin, and the end of
// everything when the SMCRNode says so. They run while the agent manages the
// node, and end when it hands over.
//
// # Without the API server
//
// What was known last stays in force for as long as it takes: watches are tried
// again with growing pauses, and nothing else waits for them. The objects are
// also kept in a file, so that an agent that starts without the API server has
// the configuration of its predecessor. An agent that has neither begins with no
// pod opted in, so that all connections are plain TCP.
//
// Kinds of objects whose first list has not arrived yet count as a whole: as
// long as one is missing nothing is taken over, because a pod without its
// policies would be given the built-in one.
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
// CNI library is older than 1.3 it does not say whose they are, and a pod whose
// addresses another namespace has, too, is not adopted.
//
// Every agent gets all SMCRPolicies and SMCRPeerSlices of the cluster; it only
// works with those of the namespaces of its pods. It gets all SMCRNodes for their
// devices' addresses, which hardly ever change; the rest of them changes now and
// then, and is thrown away. The file with the last objects
// is up to 5 s old.
package kube
