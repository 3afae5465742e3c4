// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// kubeletAt makes a directory in which kubelet listens at some sockets.
func kubeletAt(t *testing.T, dirs ...string) string {
	t.Helper()
	root, err := os.MkdirTemp("", "kubelet") //nolint:usetesting // the kernel allows 107 bytes for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	for _, d := range dirs {
		if err := os.Mkdir(filepath.Join(root, d), 0o700); err != nil {
			t.Fatal(err)
		}
		ln, err := net.Listen("unix", filepath.Join(root, d, "kubelet.sock"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ln.Close() })
	}
	return root
}

// tellsCgroup is the probe of the TCP option on a machine of cgroup v1: the kernel tells the cgroup v2 of a process, as the line
// says, once the probe has mounted it.
func tellsCgroup(proc, line string) func() error {
	file := filepath.Join(proc, "self/cgroup")
	before := os.WriteFile(file, []byte("1:cpu:/x\n"), 0o600)
	return func() error { return errors.Join(before, os.WriteFile(file, []byte("1:cpu:/x\n"+line), 0o600)) }
}

func TestExamine(t *testing.T) {
	good := func(t *testing.T) Machine {
		dir := t.TempDir()
		for name, text := range map[string]string{
			"proc/self/cgroup": "1:cpu:/x\n0::/kube\n",
		} {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		ok := func() error { return nil }
		return Machine{
			proc:    filepath.Join(dir, "proc"),
			release: func() (string, error) { return "6.1.0-13-amd64", nil },
			option:  ok, netns: ok, nftables: ok, tproxy: ok, reject: ok, transparent: ok, sysctl: ok, queue: ok, wire: ok,
			roceSocket: func(context.Context) error { return nil },
			devices:    func() ([]verbs.Info, error) { return []verbs.Info{card("ACTIVE")}, nil },
			verbs:      func() Verbs { return Verbs{Built: true, Detail: "there"} },
			kernelPath: ok,
			uverbs:     ok, memlock: func() (uint64, bool) { return 0, true }, inAgent: true,
			podDevices: func() vf.Capabilities {
				return vf.Capabilities{RDMANetNS: "shared", SoftRoCE: true, IPVlan: true, PFs: 1, VFs: 4}
			},
		}
	}
	tests := []struct {
		name   string
		spoil  func(*Machine)
		check  string
		want   Result
		detail string
		advice string
	}{
		{"all good", func(*Machine) {}, "RDMA devices", OK, "mlx5_0 port 1: ACTIVE, mlx5_core, firmware 28.1, NUMA node 1, on eth2; GID 3, RoCE v2, 192.0.2.1 of eth2: the first IPv4 address", ""},
		{"the kernel's datapath", func(*Machine) {}, "kernelPath", OK, "pods can have datapath Kernel", ""},
		{"no SMC", func(m *Machine) {
			m.kernelPath = func() error {
				return &kernelpath.MissingError{Missing: kernelpath.NoSMC, Err: syscall.EPROTONOSUPPORT}
			}
		}, "kernelPath", None, "NoSMC: protocol not supported", "needs a kernel with CONFIG_SMC"},
		{"SMC that fails otherwise", func(m *Machine) { m.kernelPath = func() error { return syscall.EIO } }, "kernelPath", None, "input/output error", ""},
		{"old kernel", func(m *Machine) { m.release = func() (string, error) { return "5.4.0", nil } }, "kernel", Warn, "Linux 5.4.0", "use Linux 5.10"},
		{"odd kernel", func(m *Machine) { m.release = func() (string, error) { return "plan9", nil } }, "kernel", Warn, "plan9", "not understood"},
		{"not root", func(m *Machine) { m.uid = 1000 }, "privileges", Fail, "user id 1000", "run as root"},
		{"no cgroup v2", func(m *Machine) { m.proc = "/nowhere" }, "cgroup v2", Warn, "no such file", ""},
		{"cgroup v1 alone", func(m *Machine) { m.option = tellsCgroup(m.proc, "") }, "cgroup v2", Warn, "in no cgroup v2", "mount cgroup2"},
		{"cgroup v1 alone, at the first run", func(m *Machine) { m.option = tellsCgroup(m.proc, "0::/\n") }, "cgroup v2", OK, "/", ""},
		{"no BPF", func(m *Machine) {
			m.option = func() error { return &synopt.UnsupportedError{What: "load", Need: "root", Err: syscall.EPERM} }
		}, "TCP option (eBPF sock_ops)", Warn, "load: operation not permitted", "needs root"},
		{"no nftables", func(m *Machine) {
			m.nftables = func() error { return &linux.FeatureError{Feature: "nft", Remedy: "load it", Err: syscall.ENOENT} }
		}, "nftables", Fail, "nft: no such file", "load it"},
		{"no look-up of routes", func(m *Machine) {
			m.wire = func() error {
				return &linux.FeatureError{Feature: "routes", Remedy: "load nft_fib", Err: syscall.ENOENT}
			}
		}, "filter of RoCE packets", Warn, "routes: no such file", "load nft_fib"},
		{"no queues", func(m *Machine) {
			m.queue = func() error {
				return &linux.FeatureError{Feature: "queue", Remedy: "load nft_queue", Err: syscall.ENOENT}
			}
		}, "netfilter queues", Warn, "queue: no such file", "load nft_queue"},
		{"no reject", func(m *Machine) {
			m.reject = func() error {
				return &linux.FeatureError{Feature: "reject", Remedy: "load nft_reject_inet", Err: syscall.ENOENT}
			}
		}, "nftables reject", Warn, "reject: no such file", "load nft_reject_inet"},
		{"another error", func(m *Machine) { m.tproxy = func() error { return errors.New("odd") } }, "nftables tproxy", Fail, "odd", ""},
		{"no RDMA", func(m *Machine) { m.devices = func() ([]verbs.Info, error) { return nil, nil } }, "RDMA devices", OK, "none: the software device", ""},
		{"no RDMA, and it is configured", func(m *Machine) {
			m.devices = func() ([]verbs.Info, error) { return nil, nil }
			*m = m.For(Use{Hardware: true})
		}, "RDMA devices", Warn, "none, and one is configured", "soft in the setting devices"},
		{"RDMA that is not used", func(m *Machine) {
			m.devices = func() ([]verbs.Info, error) { return []verbs.Info{card("DOWN")}, nil }
			m.verbs = func() Verbs { return Verbs{Detail: "hardware verbs are not in this build"} }
			*m = m.For(Use{Software: true})
		}, "hardware verbs", OK, "not needed: no RDMA device of the kernel is configured", ""},
		{"RDMA that pods may use", func(m *Machine) {
			m.verbs = func() Verbs { return Verbs{Detail: "hardware verbs are not in this build"} }
			*m = m.For(Use{Software: true, ForPods: true})
		}, "hardware verbs", Warn, "not in this build", "CGO_ENABLED=1"},
		{"the port is that of the agent that runs", func(m *Machine) {
			m.inAgent, m.roceSocket = false, func(context.Context) error { return syscall.EADDRINUSE }
			*m = m.Beside(agentapi.Status{Devices: []agentapi.Device{{Name: "soft0", Provider: "soft"}}}, false)
		}, "software RoCE", OK, "UDP port 4791 is the agent's", ""},
		{"the port is that of the kernel, whose devices the agent uses", func(m *Machine) {
			m.inAgent, m.roceSocket = false, func(context.Context) error { return syscall.EADDRINUSE }
			*m = m.Beside(agentapi.Status{Devices: []agentapi.Device{{Name: "rxe0", Provider: "verbs"}}}, false)
		}, "software RoCE", OK, "no software device is configured", ""},
		{"RDMA not readable", func(m *Machine) { m.devices = func() ([]verbs.Info, error) { return nil, syscall.EACCES } }, "RDMA devices", Warn, "permission denied", ""},
		{"RDMA port down", func(m *Machine) {
			m.devices = func() ([]verbs.Info, error) { return []verbs.Info{card("DOWN")}, nil }
		}, "RDMA devices", Warn, "mlx5_0 port 1: DOWN", "no RoCE port is active"},
		{"no kubelet here", func(m *Machine) { m.kubelet = []string{"/nowhere"} }, "kubelet's devices", OK, "is not asked", ""},
		{"kubelet answers", func(m *Machine) {
			m.kubelet = []string{"/nowhere", kubeletAt(t, "device-plugins", "pod-resources")}
		}, "kubelet's devices", OK, "kubelet answers in /", ""},
		{"no kubelet at its socket", func(m *Machine) {
			dir := kubeletAt(t, "device-plugins")
			if err := os.Mkdir(filepath.Join(dir, "pod-resources"), 0o700); err != nil {
				t.Fatal(err)
			}
			m.kubelet = []string{dir}
		}, "kubelet's devices", Warn, "pod-resources/kubelet.sock", "devicePlugin.kubeletDir"},
		{"no GID", func(m *Machine) {
			m.devices = func() ([]verbs.Info, error) {
				c := card("ACTIVE")
				c.Ports[0].GIDs = nil
				return []verbs.Info{c}, nil
			}
		}, "RDMA devices", Warn, "no RoCE v2 GID: the port has none at all", "no RoCE port is active"},
		{"iWARP", func(m *Machine) {
			m.devices = func() ([]verbs.Info, error) {
				c := card("ACTIVE")
				c.NodeType = "rnic"
				return []verbs.Info{c}, nil
			}
		}, "RDMA devices", Warn, "it is an iWARP device", ""},
		{"build without cgo", func(m *Machine) {
			m.verbs = func() Verbs { return Verbs{Detail: "hardware verbs are not in this build"} }
		}, "hardware verbs", Warn, "not in this build", "CGO_ENABLED=1"},
		{"no device files", func(m *Machine) { m.uverbs = func() error { return syscall.EPERM } }, "hardware verbs", Warn, "not permitted", "hardware.enabled"},
		{"memory limit", func(m *Machine) { m.memlock = func() (uint64, bool) { return 65536, false } }, "hardware verbs", Warn, "65536 bytes", "IPC_LOCK"},
		{"port in use", func(m *Machine) {
			m.inAgent = false
			m.roceSocket = func(context.Context) error { return syscall.EADDRINUSE }
		}, "software RoCE", Warn, "in use", "rxe"},
		{"port in use by the agent itself", func(m *Machine) {
			m.inAgent, m.roceSocket = true, func(context.Context) error { return syscall.EADDRINUSE }
		}, "software RoCE", OK, "this agent's", ""},
		{"VFs for pods, soft RoCE by ipvlan", func(*Machine) {}, "devices for pods", OK, "SR-IOV: PFs 1, VFs 4; all network namespaces see all RDMA devices (shared)", ""},
		{"RDMA follows, soft RoCE moves", func(m *Machine) {
			m.podDevices = func() vf.Capabilities {
				return vf.Capabilities{RDMANetNS: "exclusive", SoftRoCE: true, SoftRoCEInPods: true}
			}
		}, "devices for pods", OK, "that of a VF follows it into the pod; soft RoCE carries traffic in pods", ""},
		{"no RDMA for pods", func(m *Machine) { m.podDevices = func() vf.Capabilities { return vf.Capabilities{} } }, "devices for pods", OK, "the kernel has no RDMA", ""},
		{"soft RoCE without ipvlan", func(m *Machine) {
			m.podDevices = func() vf.Capabilities { return vf.Capabilities{RDMANetNS: "shared", SoftRoCE: true} }
		}, "devices for pods", Warn, "there is no ipvlan", "load the module ipvlan"},
		{"devices for pods not known", func(m *Machine) {
			m.podDevices = func() vf.Capabilities { return vf.Capabilities{Errors: []string{"rxe: odd"}} }
		}, "devices for pods", Warn, "rxe: odd", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := good(t)
			tt.spoil(&m)
			r := Examine(t.Context(), m)
			worst := tt.want
			if worst == None { // nobody has to have it
				worst = OK
			}
			if r.Worst != worst {
				t.Errorf("worst %s, want %s: %+v", r.Worst, worst, r)
			}
			for _, c := range r.Checks {
				if (c.Result == OK) != (c.Means == "") {
					t.Errorf("%s is %s and means %q", c.Name, c.Result, c.Means)
				}
				if c.Name != tt.check {
					if c.Result != OK {
						t.Errorf("%s is %s too", c.Name, c.Result)
					}
				} else if c.Result != tt.want || !strings.Contains(c.Detail, tt.detail) || !strings.Contains(c.Advice, tt.advice) {
					t.Errorf("%+v", c)
				}
			}
		})
	}
}

// card is an RNIC as there are many.
func card(state string) verbs.Info {
	row := func(i int, addr string, typ rdma.GIDType) rdma.GIDEntry {
		return rdma.GIDEntry{Index: i, GID: rdma.GIDFromAddr(netip.MustParseAddr(addr)), Type: typ, NetDev: "eth2"}
	}
	return verbs.Info{
		Name: "mlx5_0", Driver: "mlx5_core", NodeType: "ca", Firmware: "28.1", PCI: "0000:3b:00.0", NUMANode: 1,
		Ports: []verbs.PortInfo{{
			Num: 1, State: state, PhysState: "LinkUp", LinkLayer: "Ethernet", RateGbps: 100, NetDev: "eth2", MTU: rdma.MTU4096,
			GIDs: []rdma.GIDEntry{
				row(0, "fe80::1", rdma.GIDTypeRoCEv1), row(1, "fe80::1", rdma.GIDTypeRoCEv2),
				row(2, "192.0.2.1", rdma.GIDTypeRoCEv1), row(3, "192.0.2.1", rdma.GIDTypeRoCEv2),
			},
		}},
	}
}

func TestTakeInventory(t *testing.T) {
	got, err := TakeInventory(Machine{
		devices: func() ([]verbs.Info, error) { return []verbs.Info{card("ACTIVE")}, nil },
		verbs:   func() Verbs { return Verbs{Built: true} },
	})
	if err != nil {
		t.Fatal(err)
	}
	table := []GID{
		{0, "fe80::1", "RoCE v1", "eth2"},
		{1, "fe80::1", "RoCE v2", "eth2"},
		{2, "192.0.2.1", "RoCE v1", "eth2"},
		{3, "192.0.2.1", "RoCE v2", "eth2"},
	}
	want := Inventory{APIVersion: "smcr.io/agent/v1", Verbs: Verbs{Built: true}, Devices: []RDMADevice{{
		Name: "mlx5_0", Driver: "mlx5_core", NodeType: "ca", Firmware: "28.1", PCI: "0000:3b:00.0", NUMANode: 1,
		Ports: []RDMAPort{{
			Number: 1, State: "ACTIVE", PhysState: "LinkUp", LinkLayer: "Ethernet", Interface: "eth2", RateGbps: 100, MTU: 4096,
			GIDs: table, Choice: &table[3], Why: "GID 3, RoCE v2, 192.0.2.1 of eth2: the first IPv4 address",
		}},
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("inventory (-want +got):\n%s", diff)
	}
}

// TestVerbsHere: a program that is not the agent does not know of its own.
func TestVerbsHere(t *testing.T) {
	if v := verbsHere(true); v.Built != verbs.Built {
		t.Errorf("in the agent: %+v", v)
	}
	if v := verbsHere(false); !strings.Contains(v.Detail, "node-agent --version") {
		t.Errorf("without the agent: %+v", v)
	}
}

func TestReport_capabilities(t *testing.T) {
	r := Report{Checks: []Check{
		{Name: "kernel", Result: OK, Detail: "Linux 6.1"},
		{Name: "nftables", Result: OK},
		{Name: "cgroup v2", Result: Warn, Detail: "none", Means: "plain TCP", Advice: "mount\nit"},
		{Name: "kernelPath", Result: None, Detail: "NoSMC: odd", Reason: "NoSMC", Means: "not there"},
		{Name: "long", Result: Fail, Detail: strings.Repeat("é", 1000)},
	}}
	want := []v1alpha1.NodeCapability{
		{Name: "kernel", State: "Available", Detail: "Linux 6.1"},
		{Name: "nftables", State: "Available"},
		{Name: "cgroup v2", State: "Degraded", Detail: "none. plain TCP. mount; it"},
		{Name: "kernelPath", State: "Unavailable", Detail: "NoSMC: odd. not there", Reason: "NoSMC"},
		{Name: "long", State: "Missing", Detail: strings.Repeat("é", 510) + "..."},
	}
	if diff := cmp.Diff(want, r.Capabilities()); diff != "" {
		t.Errorf("capabilities (-want +got):\n%s", diff)
	}
}
