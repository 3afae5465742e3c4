// SPDX-License-Identifier: Apache-2.0

// Package config turns the node agent's configuration file, and the objects of a
// cluster, into one validated value, [Node], which nobody changes afterwards.
// [Node.Decide] answers from it whether a connection may be carried over SMC-R.
//
// [Parse] reads bytes, not files, and reports all mistakes of a file at once, each with
// its line, column and field. The package is pure: it has no clock, socket, file or log,
// so that every rule can be tested with values.
//
// # Policies of a file, and of a cluster
//
// In a file at most one policy selects a connection: Parse refuses two policies that
// could both select the same one. So the order of the policies has no meaning, and a
// decision names the only policy that is concerned.
//
// In a cluster the policies are objects that several people write. [FromObjects] makes
// an ordered list of them for each opted-in pod ([Node.Pods]), and the first policy that
// selects a connection decides. A file with policies is refused there.
//
// # Pods in the node's network
//
// Only the kernel's datapath carries those ([Node.HostPods]). A file names them with their cgroups, and is refused if no policy
// puts one on that datapath. In a cluster the pod's own annotation opts it in, if policies do; else its [Verdict] says what is missing.
//
// Limitations: the policies of a file select pods by namespace, name and
// interface; those of a cluster by namespace and label.
package config
