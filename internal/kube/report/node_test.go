// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

func TestNodeStatus_conditions(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Snapshot)
		want   string // TYPE=STATUS/REASON of those that differ from a healthy node with pods
		says   string // in one of their messages
	}{
		{"healthy", func(*Snapshot) {}, "", ""},
		{"no pods", func(s *Snapshot) { s.Status.Pods.Ready = 0 }, "Accelerating=True/NoPods", "no opted-in pod is ready for it: annotate pods"},
		{"pods could not be set up", func(s *Snapshot) {
			s.Status.Pods.Ready, s.Status.Pods.Failed = 0, 2
		}, "Accelerating=True/NoPods", "2 pods could not be set up: kubectl smcr attachments --node " + node},
		{"starting", func(s *Snapshot) { s.Reconciled = false }, "Ready=False/Starting", "not yet read"},
		{"draining", func(s *Snapshot) { s.Status.Draining = true }, "Ready=False/Draining Accelerating=False/Draining", "stopping"},
		{
			"old kernel", func(s *Snapshot) { s.Status.Unable = "the option cannot be written: EPERM" },
			"Accelerating=False/NodeUnfit", "EPERM; everything is plain TCP: see status.capabilities",
		},
		{
			"no RDMA", func(s *Snapshot) { s.Status.Devices = nil },
			"Accelerating=False/NoDevices DevicesHealthy=False/NoDevices", "name one in agent.devices of the chart",
		},
		{
			"no RDMA, a pod on its kernel's SMC-R", func(s *Snapshot) {
				s.Status.Devices = nil
				s.Attachments = []agentapi.Attachment{{Pod: "shop/db", State: agentapi.StateReady, Datapath: config.DatapathKernel.String()}}
			},
			"Accelerating=True/PodsReady DevicesHealthy=False/NoDevices", "only pods on the kernel's datapath can have connections on SMC-R: the agent has no RDMA device: name one",
		},
		{
			"old kernel, a pod that its kernel's SMC-R left", func(s *Snapshot) {
				s.Status.Unable = "the option cannot be written: EPERM"
				s.Attachments = []agentapi.Attachment{
					{Pod: "shop/db", State: agentapi.StateIdle, Datapath: config.DatapathKernel.String()}, {Pod: "shop/web", State: agentapi.StateReady},
				}
			},
			"Accelerating=False/NodeUnfit", "EPERM; everything is plain TCP",
		},
		{
			"one of two ports down", func(s *Snapshot) { s.Status.Devices = append(s.Status.Devices, device("soft1", "DOWN")) },
			"DevicesHealthy=False/PortDown", "soft1 (eth0): check",
		},
		{
			"one of two devices missing", func(s *Snapshot) {
				d := device("mlx5_1", "DOWN")
				d.Missing = "RDMA device mlx5_1 is gone"
				s.Status.Devices = append(s.Status.Devices, d)
			},
			"DevicesHealthy=False/DeviceMissing", "mlx5_1 is gone",
		},
		{
			"only pods have devices", func(s *Snapshot) {
				s.Status.Devices = nil
				s.PodDevices = []agentapi.PodDevice{{ID: "eth4", State: agentapi.DevicePod, Used: &agentapi.Device{Port: "ACTIVE"}}}
			}, "", "",
		},
		{
			"a pod's device missing", func(s *Snapshot) {
				s.PodDevices = []agentapi.PodDevice{{ID: "0000:01:10.2", State: agentapi.DeviceMissing, Used: &agentapi.Device{Missing: "device 0000:01:10.2 of pod shop/db cannot be used"}}}
			},
			"DevicesHealthy=False/DeviceMissing", "0000:01:10.2 of pod shop/db",
		},
		{
			"a pod's device with its port down", func(s *Snapshot) {
				s.PodDevices = []agentapi.PodDevice{
					{ID: "0000:01:10.2", State: agentapi.DevicePod, Pods: []string{"shop/db"}, Used: &agentapi.Device{Port: "DOWN"}},
					{ID: "0000:01:10.3", State: agentapi.DeviceDown}, // nobody uses it
				}
			},
			"DevicesHealthy=False/PortDown", "ports that are down: 0000:01:10.2 of pod shop/db: check",
		},
		{
			"all ports down", func(s *Snapshot) { s.Status.Devices[0].Port = "DOWN" },
			"Accelerating=False/NoActiveDevice DevicesHealthy=False/PortDown", "everything is plain TCP",
		},
		{"CNI by somebody else", func(s *Snapshot) { s.CNI = CNI{} }, "CNIInstalled=Unknown/NotManaged", "cni.install is false"},
		{
			"no conflist", func(s *Snapshot) { s.CNI = CNI{"Waiting", "no configuration in /etc/cni/net.d"} },
			"Ready=False/CNINotInstalled CNIInstalled=False/Waiting", "no configuration in",
		},
		{"another agent installs", func(s *Snapshot) { s.CNI = CNI{State: "Standby"} }, "CNIInstalled=Unknown/Standby", "another agent"},
		{
			"metrics port in use", func(s *Snapshot) { s.Status.NoMetrics = "no metrics: address already in use" },
			"MetricsServed=False/PortNotAvailable", "address already in use",
		},
		{"contested", func(s *Snapshot) { s.CNI = CNI{State: "Contested"} }, "CNIInstalled=False/Contested", "not in the CNI chain"},
		{
			"uninstalled", func(s *Snapshot) { s.Uninstalled = true },
			"Ready=False/Uninstalled Accelerating=False/Uninstalled CNIInstalled=False/Uninstalled Uninstalled=True/Uninstalled", "removed its rules",
		},
		{
			"left", func(s *Snapshot) { s.Uninstalled, s.Left = true, "the node has a label" },
			"Ready=False/AgentGone Accelerating=False/AgentGone DevicesHealthy=Unknown/AgentGone CNIInstalled=False/NodeLeft Uninstalled=True/NodeLeft",
			"the agent left the node clean: the node has a label; connections go directly",
		},
	}
	base := func() Snapshot {
		s := healthy()
		s.Status.Pods.Ready, s.Status.Metrics = 1, true
		return s
	}
	healthySnapshot := base()
	normal := nodeStatus(&identity{node: node}, &healthySnapshot, true).Conditions
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := base()
			tt.change(&s)
			var diff, messages []string
			for _, c := range nodeStatus(&identity{node: node}, &s, true).Conditions {
				if !slices.Contains(normal, c) {
					diff = append(diff, fmt.Sprintf("%s=%s/%s", c.Type, c.Status, c.Reason))
					messages = append(messages, c.Message)
				}
			}
			if got := strings.Join(diff, " "); got != tt.want {
				t.Errorf("conditions %s, want %s", got, tt.want)
			}
			if !strings.Contains(strings.Join(messages, "\n"), tt.says) {
				t.Errorf("messages %q, want %q in one", messages, tt.says)
			}
		})
	}
}

// TestNodeStatus_otherAddresses: the other nodes learn what else a device's interface has, as much as the
// object has room for.
func TestNodeStatus_otherAddresses(t *testing.T) {
	s := healthy()
	for i := range maxAddresses + 1 {
		s.Status.Devices[0].OtherAddresses = append(s.Status.Devices[0].OtherAddresses, fmt.Sprintf("192.0.2.%d", 100+i))
	}
	got := nodeStatus(&identity{node: node}, &s, true).Devices[0].OtherAddresses
	if !slices.Equal(got, s.Status.Devices[0].OtherAddresses[:maxAddresses]) {
		t.Errorf("addresses %q, want the first %d", got, maxAddresses)
	}
}

func TestNodeStatus_podDevices(t *testing.T) {
	s := healthy()
	s.PodDevices = []agentapi.PodDevice{
		{
			ID: "0000:01:10.0", PCI: "0000:01:10.0", PF: "eth1", VF: 0, Interface: "net1", RDMA: []string{"mlx5_2"}, NUMANode: 1, Rail: 0, State: agentapi.DevicePod, Pods: []string{"shop/db"},
			Used: &agentapi.Device{Address: "192.0.2.9", Choice: "GID 3"},
		},
		{ID: "0000:01:10.2", PF: "eth1", VF: 1, NUMANode: -1, Rail: 0, State: agentapi.DeviceUp},
		{ID: "eth4", VF: -1, NUMANode: -1, Rail: -1, State: agentapi.DeviceMissing, Pods: []string{"shop/a", "shop/b"}, Used: &agentapi.Device{Missing: "it is gone"}},
	}
	got := nodeStatus(&identity{node: node}, &s, true)
	n := func(v int32) *int32 { return &v }
	want := []v1alpha1.NodePodDevice{
		{ID: "0000:01:10.0", State: v1alpha1.PodDeviceInPod, Pod: "shop/db", PF: "eth1", VF: n(0), NUMANode: n(1), Rail: n(0), Interface: "net1", RDMA: "mlx5_2", Address: "192.0.2.9", Detail: "GID 3"},
		{ID: "0000:01:10.2", State: v1alpha1.PodDeviceUp, PF: "eth1", VF: n(1), Rail: n(0)},
		{ID: "eth4", State: v1alpha1.PodDeviceMissing, Pod: "2 pods", Detail: "it is gone"},
	}
	if diff := cmp.Diff(want, got.PodDevices); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if got.PodDeviceSummary != "2/3" {
		t.Errorf("summary %s, want 2/3", got.PodDeviceSummary)
	}
	for i := range 2 * maxPodDevices {
		s.PodDevices = append(s.PodDevices, agentapi.PodDevice{ID: fmt.Sprint(i)})
	}
	if got := nodeStatus(&identity{node: node}, &s, true); len(got.PodDevices) != maxPodDevices || got.PodDeviceSummary != "2/515" {
		t.Errorf("%d devices, %s", len(got.PodDevices), got.PodDeviceSummary)
	}
}

// TestNodeStatus_podDevicesWithAddress: an SMCRNode without room for all devices has those that pods use, and
// of these first the ones with an address: the other nodes would drop the packets of an address that is left out.
func TestNodeStatus_podDevicesWithAddress(t *testing.T) {
	s := healthy()
	for i := range 2 * maxPodDevices {
		s.PodDevices = append(s.PodDevices, agentapi.PodDevice{ID: fmt.Sprintf("free%03d", i)})
	}
	s.PodDevices = append(s.PodDevices,
		agentapi.PodDevice{ID: "idle", Pods: []string{"shop/a"}},
		agentapi.PodDevice{ID: "used0", Pods: []string{"shop/b"}, Used: &agentapi.Device{Address: "192.0.2.1"}},
		agentapi.PodDevice{ID: "used1", Pods: []string{"shop/c"}, Used: &agentapi.Device{Address: "192.0.2.2"}},
	)
	got := nodeStatus(&identity{node: node}, &s, true)
	if got.PodDeviceSummary != "3/515" || len(got.PodDevices) != maxPodDevices {
		t.Fatalf("%d devices, %s", len(got.PodDevices), got.PodDeviceSummary)
	}
	var ids []string
	for _, d := range got.PodDevices[:5] {
		ids = append(ids, d.ID)
	}
	if want := []string{"used0", "used1", "idle", "free000", "free001"}; !slices.Equal(ids, want) {
		t.Errorf("the first devices are %q, want %q", ids, want)
	}
	if a := got.PodDevices[1].Address; a != "192.0.2.2" {
		t.Errorf("address %q", a)
	}
	if d := s.PodDevices[0].ID; d != "free000" {
		t.Errorf("the snapshot's devices were sorted: %s is first", d)
	}
}

// TestNodeStatus_room: the SMCRNode says how many connections the budgets have room for.
func TestNodeStatus_room(t *testing.T) {
	s := healthy()
	s.Status.NodeBudget.RoomConns, s.Status.NodeBudget.RoomPeers = 1024, 682
	if got := nodeStatus(&identity{node: node}, &s, true).Budget; got.RoomConnections != 1024 || got.RoomPeers != 682 {
		t.Errorf("budget %+v", got)
	}
}

// TestNodeStatus_wire: the SMCRNode says who may send RoCE packets; of dropped ones
// only a notable number is worth a write.
func TestNodeStatus_wire(t *testing.T) {
	s := healthy()
	if got := nodeStatus(&identity{node: node}, &s, true); got.Wire != (v1alpha1.NodeWire{}) {
		t.Errorf("no device: %+v", got.Wire)
	}
	s.Status.Wire = agentapi.Wire{State: agentapi.WireFailed, Detail: strings.Repeat("x", 2*maxDetail), Dropped: map[string]uint64{"own-address": 100, "malformed": 5}}
	first := nodeStatus(&identity{node: node}, &s, true)
	if first.Wire.State != v1alpha1.WireFailed || len(first.Wire.Detail) > maxDetail || first.Wire.DroppedPackets != 105 {
		t.Errorf("%+v", first.Wire)
	}
	target := func(dropped uint64) target {
		s.Status.Wire.Dropped = map[string]uint64{"malformed": dropped}
		return nodeTarget(&v1alpha1.SMCRNode{Status: nodeStatus(&identity{node: node}, &s, true)})
	}
	was, little, much := target(105), target(110), target(1000)
	if d := was.difference(&little); d != inCounters {
		t.Errorf("some more: %d", d)
	}
	if d := was.difference(&much); d != inNotableCounters {
		t.Errorf("many more: %d", d)
	}
}

// TestReporter_countersHaveAnAge: the time of the counters is that of the snapshot that is
// written, and alone is no reason to write; what is zero is there.
func TestReporter_countersHaveAnAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		g := group("shop/web", 1, 1)
		g.Conns, g.RMBBytes = 0, 0
		src.change(func(s *Snapshot) { s.Links = []agentapi.LinkGroup{g} })
		start(t, srv, src)
		oneSecond()
		srv.taken()
		pass(time.Hour)
		if w := srv.taken(); len(w) != 0 {
			t.Fatalf("an hour of nothing: %v", w)
		}
		src.change(func(s *Snapshot) { s.Status.LinkGroups, s.Links[0].Conns = 1, 1 })
		pass(2 * time.Second)
		l := srv.objects[key{kind: kindLink, name: linkName(node, &g)}].(*v1alpha1.SMCRLink)
		n := srv.objects[key{kind: kindNode, name: node}].(*v1alpha1.SMCRNode)
		if old := time.Since(l.Status.CountedAt.Time); l.Status.Connections != 1 || old > 4*time.Second {
			t.Errorf("SMCRLink: %d connections, counted %v ago", l.Status.Connections, old)
		}
		if old := time.Since(n.Status.CountedAt.Time); n.Status.LinkGroups != 1 || old > 4*time.Second {
			t.Errorf("SMCRNode: %d link groups, counted %v ago", n.Status.LinkGroups, old)
		}
		for _, o := range []struct {
			object any
			zero   string
		}{{l, `"rmbBytes":0`}, {n, `"linkGroups":1`}, {n, `"memoryUsedBytes":0`}, {n, `"ready":0`}} {
			if b, err := json.Marshal(o.object); err != nil || !strings.Contains(string(b), o.zero) {
				t.Errorf("%s lacks %s (%v)", b, o.zero, err)
			}
		}
	})
}
