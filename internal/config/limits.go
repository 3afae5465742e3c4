// SPDX-License-Identifier: Apache-2.0

package config

import "time"

// Limits of a configuration file. They bound what the agent holds and how long
// a reload takes, whatever the file says.
const (
	maxFileBytes = 1 << 20 // a file of that size has a mistake in it
	maxErrors    = 100     // nobody reads more
	maxPolicies  = 1024    // every pair is compared for overlap: half a million comparisons
	maxListItems = 1024    // CIDRs, ports or patterns of one policy
	maxNameLen   = 253     // a Kubernetes object name
	// maxShownValue is how much of a wrong annotation is shown.
	maxShownValue = 64
	maxDevices    = 8 // links of a link group: more RNICs would never all be used

	// maxWireInterfaces bounds the interfaces that RoCE packets come by: more than
	// that on one machine are pods'. maxInterfaceName is the kernel's.
	maxWireInterfaces = 64
	maxInterfaceName  = 15
	// maxNodeAddresses bounds the devices of one SMCRNode: those of the node and
	// those of its pods, as its CRD does.
	maxNodeAddresses = 8 + 256

	maxPort = 255 // verbs number ports with a byte

	// minRelays and minPending leave room between the mark at which diversion
	// pauses, seven eighths, and the limit.
	minRelays  = 16
	minPending = 16
	maxConns   = 1 << 20 // of a budget: as many files as a process may have by default on the largest systems

	// The buffer sizes that the SMC-R size code can say (RFC 7609 A.2.2) and
	// that Linux peers use.
	minBufferBytes = 16 << 10
	maxBufferBytes = 512 << 10

	// ConnsPerRegion is how many connections' buffers are registered at a
	// time: fewer regions, each an entry in the device's tables, against
	// memory that nobody uses yet.
	ConnsPerRegion = 8

	// What one pod's redirection takes: prefixes, port ranges in all of them
	// together, and blocks of addresses and ports that they make. Beyond it
	// more than what is selected is diverted, and carried as plain TCP.
	maxSelections      = 256
	maxSelectionRanges = 512
	maxSelectionBlocks = 1024
	// maxInboundPorts is the same for the ports of a pod.
	maxInboundPorts = 256

	minMTU = 256
	maxMTU = 4096

	// maxSocketPath is what fits into sun_path with its terminating zero.
	maxSocketPath = 107
	// maxSocketName is the longest name of a socket in kubelet's directory, with
	// its slash.
	maxSocketName = 32

	// maxDriverSocketName is the longest name of a DRA driver's socket below
	// kubelet's directory, /plugins_registry/roce.smcr.io-INSTANCE-reg.sock.
	maxDriverSocketName = 52
	// maxSlots bounds how many pods may share a device: kubelet allows 110 pods
	// on a node if it is not told, and 500 are the most that is heard of.
	maxSlots = 1000

	minRedirectTTL = 500 * time.Millisecond // below it a short stall of the node looks like a hung agent
	maxRedirectTTL = time.Minute            // a hung agent is noticed after this long
	maxTTL         = time.Hour              // a destination that learned SMC-R meanwhile is left alone no longer
)

// DefaultEID is the enterprise ID of nodes that are not given any: agents find
// each other out of the box.
const DefaultEID = "KUBE-SMCR"

// Defaults of fields that a file leaves out.
const (
	defaultBufferBytes     = 512 << 10
	defaultPodMemoryBytes  = 512 << 20
	defaultPodConns        = 4096
	defaultNodeMemoryBytes = 4 << 30
	defaultNodeConns       = 65536
	// Connections are plain TCP once for each destination without SMC-R, and
	// then not diverted; so these are for programs that talk to many. A relay
	// that moves data has two buffers of 64 KiB, so 4096 of them are half a GiB.
	defaultPodRelays  = 1024
	defaultNodeRelays = 4096
	// A rendezvous takes milliseconds, a dial to an address that is silent 130 s.
	defaultPodPending  = 1024
	defaultNodePending = 4096
	// defaultPodMaxShare: a policy may give a pod so many times the budget that
	// pods have otherwise, if the node has as much.
	defaultPodMaxShare      = 4
	defaultRedirectTTL      = 2 * time.Second
	defaultNegativeCacheTTL = time.Minute
	// The agent looks for answers for twice what a program takes to be
	// scheduled and to answer at once, where processors sleep deeply.
	defaultAnswerPoll     = 75 * time.Microsecond
	maxAnswerPoll         = 200 * time.Microsecond
	defaultDrainTimeout   = 30 * time.Second
	defaultDataDir        = "/run/kube-smcr"
	defaultAPISocket      = "/run/kube-smcr/agent.sock"
	defaultMetricsAddress = "127.0.0.1:9464"
	// Where container runtimes look unless they are told otherwise.
	defaultCNIBinDir = "/opt/cni/bin"
	// As many pods as a node has: a device's capacity is shared by connections,
	// and the budgets are what bounds these.
	defaultSlots = 100
	// Where kubelet and Multus look; kubelet cannot be told.
	defaultKubeletDir   = "/var/lib/kubelet"
	defaultPluginDir    = "/var/lib/kubelet/device-plugins"
	defaultPodResources = "/var/lib/kubelet/pod-resources/kubelet.sock"
	defaultInfoDir      = "/var/run/k8s.cni.cncf.io/devinfo/dp"
	defaultCNIConfDir   = "/etc/cni/net.d"
)
