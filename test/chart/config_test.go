// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"

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
			want := *got // what the chart sets by itself, and what is no value
			want.NodeBudget = config.Budget{MemoryBytes: 8 << 30, Conns: 131072, Relays: 8192, Pending: 2048}
			want.PodBudget = config.Budget{MemoryBytes: 1 << 30, Conns: 8192, Relays: 2048, Pending: 512}
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
			want.CNI.Install, want.CNI.Required, want.CNI.ReportStatus = false, true, true
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
