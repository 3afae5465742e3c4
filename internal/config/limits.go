// SPDX-License-Identifier: Apache-2.0

package config

import "time"

// Limits of a configuration file. They bound the memory that it takes and the time of a
// reload, whatever the file says.
const (
	maxFileBytes = 1 << 20 // a larger file is not a configuration
	maxErrors    = 100     // nobody reads more
	maxPolicies  = 1024    // every pair is compared for overlap: half a million comparisons
	maxListItems = 1024    // CIDRs, ports or patterns of one policy
	maxNameLen   = 253     // a Kubernetes object name
	// maxShownValue is how much of a wrong annotation is shown.
	maxShownValue = 64
	// maxHostPods bounds the pods in the node's network: kubelet's default is 110 pods on a node. maxCgroupPath is a
	// quarter of what a path may have, and maxCgroupDepth how many cgroups above its own a socket is judged by.
	maxHostPods    = 256
	maxCgroupPath  = 1024
	maxCgroupDepth = 12
	// maxConfigHash bounds by what kubelet names the cgroup of a static pod: 32 digits, or a UID.
	maxConfigHash = 64
	maxDevices    = 8 // as many as a link group has links: further RNICs would not be used

	// maxWireInterfaces bounds the interfaces that RoCE packets may come by: a machine
	// has fewer, not counting those of pods. maxInterfaceName is the kernel's limit.
	maxWireInterfaces = 64
	maxInterfaceName  = 15
	// maxNodeAddresses bounds the addresses of the devices of one SMCRNode as its CRD does: 1 and 16
	// others of 8 devices of the node, and 1 of 256 of its pods.
	maxNodeAddresses = 8*(1+16) + 256

	maxPort = 255 // verbs number ports with a byte

	// minRelays and minPending leave room between the limit and seven eighths of it,
	// where diversion pauses.
	minRelays  = 16
	minPending = 16
	// minSocketBytes is as much as the sockets of minRelays relays may need.
	minSocketBytes = 16 << 20
	maxConns       = 1 << 20 // of a budget: as many files as a process may have by default on the largest systems

	// The buffer sizes that the size code of SMC-R can express (RFC 7609 A.2.2) and that
	// Linux peers use.
	minBufferBytes = 16 << 10
	maxBufferBytes = 512 << 10

	// ConnsPerRegion is the number of connections whose buffers are registered as one
	// memory region. A larger number means fewer regions, each of which takes an entry in
	// the device's tables, but more memory that is not used yet.
	ConnsPerRegion = 8

	// The size of one pod's redirection: prefixes, port ranges in all of them together,
	// and the blocks of addresses and ports that these make. If the policies need more,
	// destinations are diverted that they do not select, and carried as plain TCP.
	maxSelections      = 256
	maxSelectionRanges = 512
	maxSelectionBlocks = 1024
	// maxInboundPorts bounds the port ranges of a pod whose SYNs are diverted; if the
	// policies need more, all ports are.
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
	// maxIPAMBytes bounds the configuration of an IPAM plugin, which is passed to the CNI
	// plugin for each pod: real ones have some hundred bytes.
	maxIPAMBytes = 16 << 10
	// maxSlots bounds how many pods may share a device: kubelet's default is 110 pods on
	// a node, and clusters with more than 500 are not known.
	maxSlots = 1000

	minRedirectTTL = 500 * time.Millisecond // below it a short stall of the node looks like a hung agent
	maxRedirectTTL = time.Minute            // a hung agent holds up new connections for so long
	maxTTL         = time.Hour              // a destination that got SMC-R is tried again after this long
)

// DefaultEID is the enterprise ID of nodes whose configuration has none, so that agents
// have one in common without configuration.
const DefaultEID = "KUBE-SMCR"

// Defaults of fields that a file leaves out.
const (
	defaultBufferBytes     = 512 << 10
	defaultPodMemoryBytes  = 512 << 20
	defaultPodConns        = 4096
	defaultNodeMemoryBytes = 4 << 30
	defaultNodeConns       = 65536
	// A destination without SMC-R costs one relay: later connections to it are not
	// diverted. So many relays are for programs that connect to many destinations. A
	// relay that moves data has two buffers of 64 KiB, so 4096 relays have half a GiB.
	defaultPodRelays  = 1024
	defaultNodeRelays = 4096
	// A connection is pending for the milliseconds of a rendezvous, but a dial to an
	// address that does not answer takes 130 s. The node's default is 64 for each of 250
	// pods; 64 is the number that the agent keeps for each pod.
	defaultPodPending  = 1024
	defaultNodePending = 16384
	// The kernel's buffers of a relay may have 1.25 MiB, or 0.5 MiB when the budget is
	// nearly used up, and those of a connection on SMC-R 0.25 MiB.
	defaultPodSocketBytes  = 512 << 20
	defaultNodeSocketBytes = 2 << 30
	// defaultPodMaxShare is how many times the budget of a pod a policy may give to a
	// pod, within the node's budget.
	defaultPodMaxShare      = 4
	defaultRedirectTTL      = 2 * time.Second
	defaultNegativeCacheTTL = time.Minute
	// The agent polls for twice the time that a program needs to be scheduled and to
	// answer, on processors with deep sleep states.
	defaultAnswerPoll     = 75 * time.Microsecond
	maxAnswerPoll         = 200 * time.Microsecond
	defaultDrainTimeout   = 30 * time.Second
	defaultDataDir        = "/run/kube-smcr"
	defaultAPISocket      = "/run/kube-smcr/agent.sock"
	defaultMetricsAddress = "127.0.0.1:9464"
	// The default directories of container runtimes, also for defaultCNIConfDir.
	defaultCNIBinDir = "/opt/cni/bin"
	// defaultSlots is about the number of pods of a node: all of them may share a device.
	// The connections are bounded by the budgets.
	defaultSlots = 100
	// The directories of kubelet, which cannot be configured, and of Multus.
	defaultKubeletDir   = "/var/lib/kubelet"
	defaultPluginDir    = "/var/lib/kubelet/device-plugins"
	defaultPodResources = "/var/lib/kubelet/pod-resources/kubelet.sock"
	defaultInfoDir      = "/var/run/k8s.cni.cncf.io/devinfo/dp"
	defaultCNIConfDir   = "/etc/cni/net.d"
)
