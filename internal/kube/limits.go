// SPDX-License-Identifier: Apache-2.0

package kube

import "time"

const (
	// settle is the pause between a change and its translation: changes come in
	// bursts, and a Deployment that is rolled out is one. maxSettle bounds it
	// while they keep coming. Changes are to be in force within 2 s.
	settle    = 50 * time.Millisecond
	maxSettle = 500 * time.Millisecond

	// firstWait is how long a starting agent waits for the API server before it
	// begins with what the file says. Meanwhile an earlier agent serves, or
	// connections are plain TCP.
	firstWait = 10 * time.Second

	// adoptEvery is how often opted-in pods without an attachment record are
	// looked for, and namespaceDir where. maxNamespaces bounds the search.
	adoptEvery    = 5 * time.Second
	namespaceDir  = "/run/netns"
	maxNamespaces = 4096
	// sandboxDir is where the CNI library keeps results for runtimes. A node has
	// some hundred files of some kilobytes; those of pods that ended badly may be
	// left.
	sandboxDir      = "/var/lib/cni/results"
	maxSandboxes    = 8192
	maxSandboxBytes = 1 << 20

	// saveEvery bounds how often the file with the last objects is written:
	// peers' addresses change all the time in a large cluster.
	saveEvery = 5 * time.Second

	// complainEvery is how often a watch that does not work is logged.
	complainEvery = time.Minute

	// stateFile is its name in the data directory.
	stateFile = "policies.json"
	// maxStateBytes bounds the file with the last objects: 500 pods of 1 KiB,
	// 1000 policies of 4 KiB and 100000 addresses of peers are 7 MiB.
	maxStateBytes = 64 << 20
)
