// SPDX-License-Identifier: Apache-2.0

package kube

import "time"

const (
	// debounce is how long no object must change before the objects are translated:
	// changes come in bursts, for example when a Deployment is rolled out. maxDebounce
	// bounds the wait while changes keep coming, so that one is in force within 2 s.
	debounce    = 50 * time.Millisecond
	maxDebounce = 500 * time.Millisecond

	// firstWait is how long a starting agent waits for the API server before it
	// begins with what the file says. Meanwhile an earlier agent serves, or
	// connections are plain TCP.
	firstWait = 10 * time.Second

	// adoptEvery is how often opted-in pods without an attachment record are
	// looked for, and namespaceDir where. maxNamespaces bounds the search.
	adoptEvery    = 5 * time.Second
	namespaceDir  = "/run/netns"
	maxNamespaces = 4096
	// sandboxDir is where the CNI library keeps results for runtimes. On a node it has some
	// hundred files of some kilobytes, and more if runtimes crashed and left the files of pods
	// that have ended.
	sandboxDir      = "/var/lib/cni/results"
	maxSandboxes    = 8192
	maxSandboxBytes = 1 << 20

	// departureWait is how long an agent that is to end waits for the API server to say
	// whether another agent comes, and departureReports how long for its last reports to
	// be written. With the drain, both fit into the pod's grace period.
	departureWait    = 3 * time.Second
	departureReports = 5 * time.Second

	// takeBackEvery is how often the annotation of an earlier uninstallation is taken off an
	// SMCRNode, until the watch shows that the annotation is gone.
	takeBackEvery = time.Second

	// saveEvery bounds how often the file with the last objects is written:
	// peers' addresses change all the time in a large cluster.
	saveEvery = 5 * time.Second

	// complainEvery is how often a watch that does not work is logged.
	complainEvery = time.Minute

	// stateFile is the name of the file with the last objects, in the data directory.
	stateFile = "policies.json"
	// maxStateBytes bounds the file with the last objects: 500 pods of 1 KiB,
	// 1000 policies of 4 KiB and 100000 addresses of peers are 7 MiB.
	maxStateBytes = 64 << 20
)
