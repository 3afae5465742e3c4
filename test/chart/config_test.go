// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// node is a machine of a cluster.
func node() config.Machine {
	return config.Machine{
		Cluster: true, Name: "node-a", Address: netip.MustParseAddr("192.0.2.1"),
		Interfaces: map[string][]netip.Addr{
			"eth1": {netip.MustParseAddr("198.51.100.1")},
			"eth2": {netip.MustParseAddr("203.0.113.1")},
		},
	}
}

func TestAgentUnderstandsItsConfiguration(t *testing.T) {
	for _, r := range renderings(t) {
		t.Run(r.name, func(t *testing.T) {
			cm := find[*corev1.ConfigMap](t, template(t, r.args...), "-agent")
			got, err := config.ParseOn(node(), "node-agent.yaml", []byte(cm.Data["node-agent.yaml"]))
			if err != nil {
				t.Fatalf("%v in\n%s", err, cm.Data["node-agent.yaml"])
			}
			if !got.Takeover {
				t.Error("takeover is off: an update would not start a second agent")
			}
			if want := got.CNI; want.BinDir != "/host/opt/cni/bin" || want.ConfDir != "/host/etc/cni/net.d" {
				t.Errorf("CNI directories %+v: not where the DaemonSet mounts them", want)
			}
			if r.name != "everything" {
				return
			}
			want := *got // fields that the chart sets by itself, and those without a value in the chart
			want.NodeBudget = config.Budget{MemoryBytes: 8 << 30, Conns: 131072, Relays: 8192, Pending: 2048, SocketBytes: 1 << 30}
			want.PodBudget = config.Budget{MemoryBytes: 1 << 30, Conns: 8192, Relays: 2048, Pending: 512, SocketBytes: 256 << 20}
			want.PodMax = config.Budget{MemoryBytes: 2 << 30, Conns: 16384}
			want.Devices = []config.Device{
				{Interface: "eth1", SoftAddress: netip.MustParseAddr("198.51.100.1"), SoftMTU: 4096},
				{Interface: "eth2", SoftAddress: netip.MustParseAddr("203.0.113.1")},
			}
			want.RMBEBytes, want.SendBufferBytes = 256<<10, 128<<10
			want.Versions, want.Dialects, want.AnyPrefix = config.VersionsV2, config.DialectsLinux, true
			want.RedirectTTL, want.NegativeCacheTTL, want.AnswerPoll, want.DrainTimeout = 5*time.Second, 0, 0, 90*time.Second
			want.LogLevel = config.LogDebug
			want.MetricsAddress = netip.MustParseAddrPort("[::]:9465")
			want.MetricsAuth, want.MetricsTLS = true, "/etc/kube-smcr-tls"
			want.CNI.Install = false
			want.DevicePlugin = config.DevicePlugin{
				Enabled: true, VFs: true, Slots: 20, Dir: "/host/kubelet/device-plugins", PodResources: "/host/kubelet/pod-resources/kubelet.sock",
				InfoDir: "/host/devinfo", OtherResources: []string{"example.com/rdma_vf", "vendor.com/*"},
			}
			want.DRA = config.DRA{Enabled: true, KubeletDir: "/var/lib/k0s/kubelet"}
			want.DefaultPeers = config.Peers{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, Except: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}}
			compare := []cmp.Option{cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}, netip.AddrPort{}), cmpopts.IgnoreFields(config.Node{}, "EIDs")}
			if diff := cmp.Diff(&want, got, compare...); diff != "" {
				t.Errorf("a value did not reach the agent (-want +got):\n%s", diff)
			}
			if len(got.EIDs) != 2 || got.EIDs[0].String() != "RACK-1" {
				t.Errorf("enterprise IDs %v", got.EIDs)
			}
		})
	}
}

// The fields of the plugin's entry reach the agent, which writes it.
func TestEntryOfThePlugin(t *testing.T) {
	for _, key := range []string{"required", "reportStatus"} {
		cm := find[*corev1.ConfigMap](t, template(t, "--set", "agent.cni."+key+"=true"), "-agent")
		got, err := config.ParseOn(node(), "node-agent.yaml", []byte(cm.Data["node-agent.yaml"]))
		if err != nil {
			t.Fatalf("%v in\n%s", err, cm.Data["node-agent.yaml"])
		}
		if got.CNI.Required != (key == "required") || got.CNI.ReportStatus != (key == "reportStatus") {
			t.Errorf("with agent.cni.%s required is %v, reportStatus %v", key, got.CNI.Required, got.CNI.ReportStatus)
		}
	}
}

// Nodes of two kinds have devices of two kinds.
func TestDevicesOfNodes(t *testing.T) {
	cm := find[*corev1.ConfigMap](t, template(t, "--set", "hardware.enabled=true",
		"--set-json", `agent.devices=[{"rdma":"mlx5_0"}]`, "--set-json", `agent.devicesOfNode={"general-*":[{"soft":{"address":"node"}}]}`), "-agent")
	for name, want := range map[string]v1alpha1.Transport{"fast-1": v1alpha1.TransportHardware, "general-1": v1alpha1.TransportSoftwareRoCE} {
		m := node()
		m.Name = name
		got, err := config.ParseOn(m, "node-agent.yaml", []byte(cm.Data["node-agent.yaml"]))
		if err != nil {
			t.Fatalf("%v in\n%s", err, cm.Data["node-agent.yaml"])
		}
		if len(got.Devices) != 1 || got.Devices[0].Transport() != want {
			t.Errorf("%s: %v, want a device of kind %s", name, got.Devices, want)
		}
	}
}

// The addresses of claimed VFs reach the agent, and from there the plugin, as they are written in the values.
func TestAddressesOfClaims(t *testing.T) {
	cm := find[*corev1.ConfigMap](t, template(t, "--set", "dra.enabled=true",
		"--set-json", `dra.ipam={"type":"whereabouts","range":"192.0.2.0/24","log_level":"debug","n":1000000}`,
		"--set-json", `dra.ipamOfNode={"node-b.example.com":{"type":"host-local","ranges":[[{"subnet":"192.0.2.0/24","rangeStart":"192.0.2.10"}]]},"node-c":{}}`), "-agent")
	for name, want := range map[string]string{
		"node-a":             `{"log_level":"debug","n":1000000,"range":"192.0.2.0/24","type":"whereabouts"}`,
		"node-b.example.com": `{"ranges":[[{"rangeStart":"192.0.2.10","subnet":"192.0.2.0/24"}]],"type":"host-local"}`,
		"node-c":             "",
	} {
		m := node()
		m.Name = name
		got, err := config.ParseOn(m, "node-agent.yaml", []byte(cm.Data["node-agent.yaml"]))
		if err != nil {
			t.Fatalf("%v in\n%s", err, cm.Data["node-agent.yaml"])
		}
		if got.DRA.IPAM != want {
			t.Errorf("%s: ipam %s, want %s", name, got.DRA.IPAM, want)
		}
	}
}

// Before the cluster is changed, a Job checks the file that the agents would get, as an agent without a node
// would. The Job refuses mistakes that the schema does not find.
func TestSettingsAreCheckedFirst(t *testing.T) {
	for _, r := range renderings(t) {
		rendered := template(t, r.args...)
		checked, used := find[*corev1.ConfigMap](t, rendered, "-check"), find[*corev1.ConfigMap](t, rendered, "-agent")
		if diff := cmp.Diff(used.Data, checked.Data); diff != "" {
			t.Errorf("%s: another file is checked than the agents get (-agents +checked):\n%s", r.name, diff)
		}
		if _, err := config.ParseOn(config.Machine{Cluster: true, Any: true}, "f", []byte(checked.Data["node-agent.yaml"])); err != nil {
			t.Errorf("%s: %v", r.name, err)
		}
	}

	job := find[*batchv1.Job](t, template(t), "-check")
	c := job.Spec.Template.Spec.Containers[0]
	if got, want := strings.Join(append(c.Command, c.Args...), " "), "/usr/bin/node-agent --config /etc/kube-smcr/node-agent.yaml --kubernetes --check --any-node"; got != want {
		t.Errorf("the Job runs %q, want %q", got, want)
	}
	if *job.Spec.BackoffLimit != 0 || job.Annotations["helm.sh/hook-output-log-policy"] != "hook-failed" {
		t.Errorf("backoffLimit %d, annotations %v: want no second try, and that Helm prints the log", *job.Spec.BackoffLimit, job.Annotations)
	}
	first := func(o metav1.Object) int {
		n, err := strconv.Atoi(o.GetAnnotations()["helm.sh/hook-weight"])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, doc := range documents(template(t)) {
		if o := parse(t, doc); strings.Contains(o.GetAnnotations()["helm.sh/hook"], "pre-upgrade") && !strings.HasSuffix(o.GetName(), "-check") && first(o) <= first(job) {
			t.Errorf("%s %s comes before the check", o.GetKind(), o.GetName())
		}
	}
	if none := template(t, "--set", "hooks.check=false"); strings.Contains(none, "kube-smcr-check") {
		t.Error("hooks.check: false, and there is a check")
	}

	for _, tt := range []struct{ set, want string }{
		{"agent.drainTimeout=48h", `node.drainTimeout: "48h", want a duration`},
		{"agent.redirectTTL=1ms", "node.redirectTTL"},
		{"agent.answerPoll=1s", "node.answerPoll"},
		{"agent.rmbe=100KiB", "node.rmbe: 102400 bytes, want a power of two"},
		{"agent.defaultPeers.cidrs={10.0.0.0/8,10.1.0.0/16}", "overlaps with 10.0.0.0/8"},
		{"agent.defaultPeers.cidrs={10.0.0.1/8}", "did you mean 10.0.0.0/8"},
		{"agent.wire.peers={:::}", "want a CIDR"},
		{"agent.budgets.pod.relays=5000", "relays of a pod (5000) is more than of the node (4096)"},
		{"hardware.enabled=true,agent.devices[0].rdma=mlx5_0,agent.devices[1].rdma.name=mlx5_0", "mlx5_0 is given twice"},
		{"dra.enabled=true,dra.ipam.type=static", "node.dra.ipam.addresses: is missing or empty"},
		{"dra.enabled=true,dra.ipam.type=host-local,dra.ipam.subnet=192.0.2.1/24", "node.dra.ipam.subnet: 192.0.2.1/24 has bits set behind its length: did you mean 192.0.2.0/24?"},
		{"dra.enabled=true,dra.ipamOfNode.n1.type=whereabouts,dra.ipamOfNode.n1.range=192.0.2.0/33", `node.dra.ipamOfNode.n1.range: "192.0.2.0/33", want a range`},
	} {
		cm := find[*corev1.ConfigMap](t, template(t, "--set", tt.set), "-check")
		_, err := config.ParseOn(config.Machine{Cluster: true, Any: true}, "f", []byte(cm.Data["node-agent.yaml"]))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.set, err, tt.want)
		}
	}
}
