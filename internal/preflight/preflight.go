// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// Result is the result of a check.
type Result string

// Results.
const (
	OK   Result = "OK"
	Warn Result = "WARN" // the agent runs, with less
	Fail Result = "FAIL" // the agent does not run, or sets up no pod
	None Result = "NONE" // it is not there, and only who asks for it goes without
)

// Check is one line of the report.
type Check struct {
	Name   string `json:"name"`
	Result Result `json:"result"`
	Detail string `json:"detail,omitempty"`
	// Reason is a word for the first thing that is missing, if the check has such words.
	Reason string `json:"reason,omitempty"`
	// Means says what does not work without the feature, and what still does.
	Means  string `json:"means,omitempty"`
	Advice string `json:"advice,omitempty"` // what to do
}

// Report is the answer of all checks.
type Report struct {
	APIVersion string  `json:"apiVersion"`
	Kernel     string  `json:"kernel,omitempty"` // its release
	Worst      Result  `json:"worst"`
	Checks     []Check `json:"checks"`
}

// Machine has the functions and paths by which the checks look at the machine; tests have
// others.
type Machine struct {
	proc        string
	uid         int
	release     func() (string, error)
	option      func() error
	netns       func() error
	nftables    func() error
	tproxy      func() error
	reject      func() error
	transparent func() error
	sysctl      func() error
	queue       func() error
	wire        func() error
	roceSocket  func(context.Context) error
	devices     func() ([]verbs.Info, error)
	verbs       func() Verbs
	uverbs      func() error
	memlock     func() (limit uint64, ok bool)
	podDevices  func() vf.Capabilities
	kernelPath  func() error
	kubelet     []string // directories that may be kubelet's
	inAgent     bool     // the process is the agent, whose own sockets do not count as others'
	use         *Use     // nil: it is not known what devices are to be used
	agentRuns   bool     // an agent runs, so that the UDP port of software devices is its
}

// Use says what devices an agent is configured to use. What it does not use is not missing.
type Use struct {
	Software, Hardware bool
	// ForPods says that pods can get devices of their own, of any kind.
	ForPods bool
}

// hardwareUsed says whether RDMA devices of the kernel are used, or may be.
func (m Machine) hardwareUsed() bool { return m.use == nil || m.use.Hardware || m.use.ForPods }

// For is the machine of an agent that uses these devices.
func (m Machine) For(u Use) Machine {
	m.use = &u
	return m
}

// Beside is the machine on which an agent runs that answered with this status, and, if
// forPods, gives devices to pods.
func (m Machine) Beside(s agentapi.Status, forPods bool) Machine {
	u := Use{ForPods: forPods}
	for _, d := range s.Devices {
		if d.Provider == "soft" {
			u.Software = true
		} else {
			u.Hardware = true
		}
	}
	m.use, m.agentRuns = &u, true
	return m
}

// Names of the checks.
const (
	nameKernel      = "kernel"
	namePrivileges  = "privileges"
	nameCgroup      = "cgroup v2"
	nameOption      = "TCP option (eBPF sock_ops)"
	nameNetNS       = "network namespaces"
	nameNftables    = "nftables"
	nameTProxy      = "nftables tproxy"
	nameReject      = "nftables reject"
	nameTransparent = "transparent sockets"
	nameSysctl      = "sysctl tcp_fwmark_accept"
	nameQueue       = "netfilter queues"
	nameWire        = "filter of RoCE packets"
	nameRDMA        = "RDMA devices"
	nameVerbs       = "hardware verbs"
	nameSoftRoCE    = "software RoCE"
	nameKubelet     = "kubelet's devices"
	namePodDevices  = "devices for pods"
	nameKernelPath  = "kernelPath" // which printer columns name
)

// means says what does not work when a check is not OK, and what still does.
func means(name string) string {
	const plain = "everything stays plain TCP without it; pods with mode Required are refused connections"
	switch name {
	case nameKernel:
		return "the checks below say what works on this kernel"
	case nameCgroup, nameOption:
		return plain
	case namePrivileges, nameNetNS, nameNftables, nameTransparent:
		return "no pod can be set up without it; all connections go directly to their destination, as plain TCP"
	case nameTProxy, nameSysctl:
		return "pods cannot be set up to accept connections over SMC-R without it; all connections go directly, as plain TCP"
	case nameReject:
		return "whoever in a pod connects to the agent's own ports there waits in vain instead of being refused; all else works"
	case nameQueue:
		return "the setting holdSYNs has no effect: connect() of pods' programs succeeds before their destination answers, and what turns out to be plain TCP passes the agent"
	case nameWire:
		return "links work, but their packets are not told from those of strangers, or by the devices' interfaces only"
	case nameRDMA, nameVerbs:
		return "the software device still works, and costs CPU"
	case namePodDevices:
		return "pods get no device of software of their own; they share those of the node, and VFs of hardware are not concerned"
	case nameSoftRoCE:
		return "a software device with this port cannot be opened; hardware devices are not concerned"
	case nameKernelPath:
		return "pods whose policy has datapath Kernel are on plain TCP, those with KernelIfAvailable on datapath Agent; all others do without"
	case nameKubelet:
		return "pods cannot ask kubelet for RDMA devices; those that have some already keep them"
	}
	return ""
}

// rocePort is the UDP port of RoCEv2.
const rocePort = 4791

// The oldest kernel with the features that the program for the TCP option needs.
const oldestMajor, oldestMinor = 5, 10

// Agent is the machine that the process runs on, if the process is the agent.
func Agent() Machine {
	m := This()
	m.inAgent = true
	m.verbs = func() Verbs { return verbsHere(true) }
	return m
}

// This is the machine that the process runs on.
func This() Machine {
	return Machine{
		proc: "/proc", uid: os.Geteuid(),
		kubelet: []string{"/host/kubelet", "/var/lib/kubelet"}, // the first is the chart's
		release: func() (string, error) {
			b, err := os.ReadFile("/proc/sys/kernel/osrelease")
			return strings.TrimSpace(string(b)), err
		},
		option: synopt.Probe, netns: linux.ProbeNetNS, nftables: linux.ProbeNftables, tproxy: linux.ProbeTProxy, reject: linux.ProbeReject,
		transparent: linux.ProbeTransparent, sysctl: linux.ProbeSysctl,
		queue: func() error {
			_, err := linux.ProbeQueue()
			return err
		},
		wire:    func() error { return errors.Join(linux.ProbeWire(), linux.ProbeWireRoutes()) },
		devices: verbs.Devices, verbs: func() Verbs { return verbsHere(false) }, uverbs: tryUverbs, memlock: linux.LockLimit,
		podDevices: vf.Host{}.Probe, kernelPath: kernelpath.NewProber(kernelpath.Dir).Probe,
		roceSocket: func(ctx context.Context) error {
			c, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", net.JoinHostPort("", strconv.Itoa(rocePort)))
			if err != nil {
				return err
			}
			return c.Close()
		},
	}
}

// Examine makes all checks, also after one failed.
func Examine(ctx context.Context, m Machine) Report {
	r := Report{APIVersion: agentapi.Version, Worst: OK}
	if release, err := m.release(); err == nil {
		r.Kernel = release
	}
	// Before the look for the cgroup: where nothing has mounted cgroup v2 yet, as on a machine of v1 alone, the probe does as the agent
	// will, and only then does the kernel tell which one this process is in.
	option := feature(nameOption, Warn, m.option)
	for _, c := range []Check{
		m.kernel(), m.privileges(), m.cgroup(), option,
		feature(nameNetNS, Fail, m.netns),
		feature(nameNftables, Fail, m.nftables),
		feature(nameTProxy, Fail, m.tproxy),
		feature(nameReject, Warn, m.reject),
		feature(nameTransparent, Fail, m.transparent),
		feature(nameSysctl, Fail, m.sysctl),
		feature(nameQueue, Warn, m.queue),
		feature(nameWire, Warn, m.wire),
		m.rdma(), m.hardware(), m.softRoCE(ctx), m.kubeletDevices(ctx), m.devicesForPods(), m.KernelPath(),
	} {
		if c.Result != OK {
			c.Means = means(c.Name)
		}
		r.Checks = append(r.Checks, c)
		if c.Result == Fail || c.Result == Warn && r.Worst == OK {
			r.Worst = c.Result
		}
	}
	return r
}

func (m Machine) kernel() Check {
	c := Check{Name: nameKernel, Result: OK}
	release, err := m.release()
	if err != nil {
		c.Result, c.Detail = Warn, err.Error()
		return c
	}
	c.Detail = "Linux " + release
	var have [2]int
	if _, err := fmt.Sscanf(release, "%d.%d", &have[0], &have[1]); err != nil {
		c.Result, c.Advice = Warn, "the version is not understood; see the other checks"
	} else if have[0] < oldestMajor || have[0] == oldestMajor && have[1] < oldestMinor {
		c.Result, c.Advice = Warn, fmt.Sprintf("use Linux %d.%d or later: older ones cannot write the TCP option", oldestMajor, oldestMinor)
	}
	return c
}

func (m Machine) privileges() Check {
	if m.uid != 0 {
		return Check{
			Name: namePrivileges, Result: Fail, Detail: fmt.Sprintf("user id %d", m.uid),
			Advice: "run as root: the agent needs CAP_NET_ADMIN, CAP_SYS_ADMIN and CAP_BPF, and the checks below need them too",
		}
	}
	return Check{Name: namePrivileges, Result: OK, Detail: "root"}
}

func (m Machine) cgroup() Check {
	c := Check{Name: nameCgroup, Result: OK}
	b, err := os.ReadFile(filepath.Join(m.proc, "self/cgroup"))
	if err != nil {
		c.Result, c.Detail = Warn, err.Error()
		return c
	}
	for line := range strings.Lines(string(b)) {
		if p, ok := strings.CutPrefix(line, "0::"); ok {
			c.Detail = strings.TrimSpace(p)
			return c
		}
	}
	c.Result, c.Detail = Warn, "this process is in no cgroup v2"
	c.Advice = "mount cgroup2 (boot with systemd.unified_cgroup_hierarchy=1): the TCP option program is attached to it"
	return c
}

// feature reports a probe.
func feature(name string, bad Result, probe func() error) Check {
	c := Check{Name: name, Result: OK}
	err := probe()
	if err == nil {
		return c
	}
	c.Result, c.Detail = bad, err.Error()
	var fe *linux.FeatureError
	var ue *synopt.UnsupportedError
	switch {
	case errors.As(err, &fe):
		c.Detail, c.Advice = fmt.Sprintf("%s: %v", fe.Feature, fe.Err), fe.Remedy
	case errors.As(err, &ue):
		c.Detail, c.Advice = fmt.Sprintf("%s: %v", ue.What, ue.Err), "needs "+ue.Need
	}
	return c
}

// KernelPath is the check whether pods can have datapath Kernel, which changes with modules, mounts and devices. To
// make it again for the same Machine costs little.
func (m Machine) KernelPath() Check {
	c := Check{Name: nameKernelPath, Result: OK, Detail: "pods can have datapath Kernel"}
	err := m.kernelPath()
	if err == nil {
		return c
	}
	c.Result, c.Detail, c.Means = None, err.Error(), means(c.Name)
	if missing := (*kernelpath.MissingError)(nil); errors.As(err, &missing) {
		c.Reason, c.Advice = string(missing.Missing), "needs "+missing.Missing.Need()
		c.Detail = fmt.Sprintf("%s: %v", missing.Missing, missing.Err)
	}
	return c
}

func (m Machine) softRoCE(ctx context.Context) Check {
	c := Check{Name: nameSoftRoCE, Result: OK, Detail: fmt.Sprintf("UDP port %d is free", rocePort)}
	err := m.roceSocket(ctx)
	switch {
	case err == nil:
	case errors.Is(err, syscall.EADDRINUSE) && m.use != nil && !m.use.Software:
		c.Detail = fmt.Sprintf("UDP port %d is in use, as by the kernel's rxe module, and no software device is configured", rocePort)
	case errors.Is(err, syscall.EADDRINUSE) && m.inAgent:
		c.Detail = fmt.Sprintf("UDP port %d is this agent's", rocePort)
	case errors.Is(err, syscall.EADDRINUSE) && m.agentRuns:
		c.Detail = fmt.Sprintf("UDP port %d is the agent's", rocePort)
	case errors.Is(err, syscall.EADDRINUSE):
		c.Result, c.Detail = Warn, fmt.Sprintf("UDP port %d is in use", rocePort)
		c.Advice = "no agent answers here, so perhaps the kernel's rxe module has it: remove it (rdma link del) or use another address"
	default:
		c.Result, c.Detail = Warn, err.Error()
	}
	return c
}

// kubeletDevices says whether kubelet accepts device plugins, and answers which devices
// pods have. If kubelet's directories are not mounted, neither is configured.
func (m Machine) kubeletDevices(ctx context.Context) Check {
	c := Check{Name: nameKubelet, Result: OK, Detail: "kubelet is not asked for devices here"}
	for _, dir := range m.kubelet {
		for _, socket := range []string{"device-plugins/kubelet.sock", "pod-resources/kubelet.sock"} {
			path := filepath.Join(dir, socket)
			if _, err := os.Stat(filepath.Dir(path)); err != nil {
				continue
			}
			conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
			if err != nil {
				c.Result, c.Detail = Warn, err.Error()
				c.Advice = "is kubelet running, and is this its directory? With the chart set devicePlugin.kubeletDir, without it node.devicePlugin.dir and podResources"
				return c
			}
			_ = conn.Close() // nothing was sent
			c.Detail = "kubelet answers in " + dir
		}
		if c.Detail == "kubelet answers in "+dir {
			break
		}
	}
	return c
}
