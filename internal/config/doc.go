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
// At most one policy matches a connection: two policies that can both match
// one are refused when the file is read, so the order of the policies has no
// meaning and a decision always names the one policy that made it.
//
// Limitations: policies select pods by namespace, name and interface, not by
// label; labels arrive with the Kubernetes objects.
package config
