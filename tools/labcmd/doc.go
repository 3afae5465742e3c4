// SPDX-License-Identifier: Apache-2.0

// Package labcmd is what the tools that start laboratories, the cluster and the vm command,
// have in common: the root command, and the commands "list" and "down".
package labcmd
