// SPDX-License-Identifier: Apache-2.0

// Package config turns the node agent's configuration file into one validated
// value, [Node], that nobody changes afterwards, and answers from it the one
// question the agent has: may this connection be carried over SMC-R
// ([Node.Decide]).
//
// [Parse] reads bytes, not files, and reports every mistake of a file at once,
// each with its line, column and field. The package is pure: no clock, socket,
// file or log, so that every rule is tested as a value.
//
// # Policies of a file, and of a cluster
//
// In a file at most one policy matches a connection: two policies that can both
// match one are refused when the file is read, so the order of the policies has
// no meaning and a decision always names the one policy that made it.
//
// In a cluster the policies are objects that several people write. [FromObjects]
// makes of them an ordered list for each opted-in pod ([Node.Pods]): the first
// that selects a connection decides it. What the file says about policies is
// not asked then.
//
// Limitations: the policies of a file select pods by namespace, name and
// interface; those of a cluster by namespace and label.
package config
