// SPDX-License-Identifier: Apache-2.0

package cni

import "time"

const (
	// maxRecordBytes bounds a record that is read: those that are written
	// have a few hundred bytes, with maxIPs addresses a few thousand.
	maxRecordBytes = 64 << 10
	// maxRecords bounds what List returns: a node has at most some hundred
	// pods, and a directory that was filled by accident must not fill memory.
	maxRecords = 8192
	// maxIPs bounds the addresses of one interface.
	maxIPs = 64
	// maxNameBytes is what every file system of Linux takes as a file name,
	// with room for the suffix of a record.
	maxNameBytes = 240
	// maxPodField bounds the names of CNI_ARGS: Kubernetes allows 253 bytes.
	maxPodField = 253
	// staleAfter is when a temporary file cannot belong to a running plugin
	// any more: container runtimes end plugins after a few minutes.
	staleAfter = time.Hour

	// defaultAgentTimeout is the wait for the agent. The start of a pod takes
	// seconds, so users do not notice two more, and it is a hundred times what
	// the agent needs.
	defaultAgentTimeout = 2 * time.Second
	// maxAgentTimeout keeps the wait below what container runtimes allow a
	// plugin.
	maxAgentTimeout = 30 * time.Second
	// maxAnswerBytes bounds what is read of the agent's answer.
	maxAnswerBytes = 4 << 10
)
