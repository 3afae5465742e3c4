// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestNodeStatus_conditions(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Snapshot)
		want   string // TYPE=STATUS/REASON of those that differ from a healthy node with pods
		says   string // in one of their messages
	}{
		{"healthy", func(*Snapshot) {}, "", ""},
		{"no pods", func(s *Snapshot) { s.Status.Pods.Ready = 0 }, "Accelerating=True/NoPods", "annotate pods"},
		{"starting", func(s *Snapshot) { s.SettledOnce = false }, "Ready=False/Starting", "not yet read"},
		{"draining", func(s *Snapshot) { s.Status.Draining = true }, "Ready=False/Draining", "stopping"},
		{
			"old kernel", func(s *Snapshot) { s.Status.Unable = "the option cannot be written: EPERM" },
			"Accelerating=False/NodeUnfit", "EPERM; everything is plain TCP: see status.capabilities",
		},
		{
			"no RDMA", func(s *Snapshot) { s.Status.Devices = nil },
			"Accelerating=False/NoDevices DevicesHealthy=False/NoDevices", "node.devices",
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
			"all ports down", func(s *Snapshot) { s.Status.Devices[0].Port = "DOWN" },
			"Accelerating=False/NoActiveDevice DevicesHealthy=False/PortDown", "everything is plain TCP",
		},
		{"CNI by somebody else", func(s *Snapshot) { s.CNI = CNI{} }, "CNIInstalled=Unknown/NotManaged", "cni.install is false"},
		{
			"no conflist", func(s *Snapshot) { s.CNI = CNI{"Waiting", "no configuration in /etc/cni/net.d"} },
			"Ready=False/CNINotInstalled CNIInstalled=False/Waiting", "no configuration in",
		},
		{"another agent installs", func(s *Snapshot) { s.CNI = CNI{State: "Standby"} }, "CNIInstalled=Unknown/Standby", "another agent"},
		{"contested", func(s *Snapshot) { s.CNI = CNI{State: "Contested"} }, "CNIInstalled=False/Contested", "not in the CNI chain"},
		{
			"uninstalled", func(s *Snapshot) { s.Uninstalled = true },
			"Ready=False/Uninstalled Accelerating=False/Uninstalled CNIInstalled=False/Uninstalled Uninstalled=True/Uninstalled", "removed its rules",
		},
	}
	base := func() Snapshot {
		s := healthy()
		s.Status.Pods.Ready = 1
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

func TestDeviceEvents(t *testing.T) {
	at := func(port, detail string) []v1alpha1.NodeDevice {
		return []v1alpha1.NodeDevice{{Name: "mlx5_0", Interface: "eth2", Address: "192.0.2.1", Port: port, Detail: detail}}
	}
	tests := []struct {
		name    string
		was, is []v1alpha1.NodeDevice
		want    string // reason and note
		warning bool
	}{
		{"new", nil, at(nodePortDown, ""), "", false},
		{"the same", at(nodePortActive, "GID 3"), at(nodePortActive, "GID 5"), "", false},
		{"down", at(nodePortActive, ""), at(nodePortDown, ""), "DeviceDown: the port of RDMA device mlx5_0 is down: check the interface eth2, its address and the cable", true},
		{"away", at(nodePortDown, ""), at(nodePortMissing, "it was removed"), "DeviceDown: it was removed", true},
		{"back", at(nodePortMissing, "it was removed"), at(nodePortActive, ""), "DeviceUp: RDMA device mlx5_0 is up, with the address 192.0.2.1 on eth2", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got string
			warning := false
			for _, e := range deviceEvents(corev1.ObjectReference{Name: node}, tt.was, tt.is, time.Unix(1, 0)) {
				got += e.reason + ": " + e.note
				warning = e.warning
			}
			if got != tt.want || warning != tt.warning {
				t.Errorf("event %q, warning %t; want %q, %t", got, warning, tt.want, tt.warning)
			}
		})
	}
}

func TestStatusOf(t *testing.T) {
	ready, idle, failed := attachment("shop/web", agentapi.StateReady), attachment("shop/web", agentapi.StateIdle), attachment("shop/web", agentapi.StateFailed)
	paused := ready
	paused.Paused = agentapi.CodeBudgetRelays
	tests := []struct {
		name   string
		atts   []agentapi.Attachment
		change func(*Snapshot, *config.Verdict)
		want   string
	}{
		{"ready", []agentapi.Attachment{ready}, nil, "Enabled"},
		{"not attached", nil, nil, "Pending: NOT_ATTACHED"},
		{"failed", []agentapi.Attachment{ready, failed}, nil, "Pending: POD_FAILED"},
		{"opted out", []agentapi.Attachment{ready}, func(_ *Snapshot, v *config.Verdict) { v.OptedIn = false }, ""},
		{"uninstalled", []agentapi.Attachment{ready}, func(s *Snapshot, _ *config.Verdict) { s.Uninstalled = true }, ""},
		{"no option", []agentapi.Attachment{idle}, func(s *Snapshot, _ *config.Verdict) {
			s.Status.Unable, s.Status.UnableCode = "x", agentapi.CodeNoOption
		}, "Fallback: NO_OPTION"},
		{"no device", []agentapi.Attachment{ready}, func(s *Snapshot, _ *config.Verdict) { s.Status.Devices = nil }, "Fallback: NOSMCDEV"},
		{"ports down", []agentapi.Attachment{ready}, func(s *Snapshot, _ *config.Verdict) { s.Status.Devices[0].Port = "DOWN" }, "Fallback: NOSMCDEV"},
		{"transport", []agentapi.Attachment{ready}, func(_ *Snapshot, v *config.Verdict) { v.Settings.Bar = config.BarTransport }, "Fallback: TRANSPORT"},
		{"version", []agentapi.Attachment{ready}, func(_ *Snapshot, v *config.Verdict) { v.Settings.Bar = config.BarVersion }, "Fallback: VERSMISMAT"},
		{"mesh", []agentapi.Attachment{func() agentapi.Attachment {
			a := ready
			a.Reason = agentapi.CodeMesh
			return a
		}()}, nil, "Fallback: MESH"},
		{"idle", []agentapi.Attachment{idle}, nil, "Fallback: NO_POLICY"},
		{"paused", []agentapi.Attachment{ready, paused}, nil, "Fallback: BUDGET_RELAYS"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s, v := healthy(), verdict("web")
			if tt.change != nil {
				tt.change(&s, &v)
			}
			var atts []*agentapi.Attachment
			for i := range tt.atts {
				atts = append(atts, &tt.atts[i])
			}
			got := statusOf(&s, &v, atts, &traffic{}, began())
			if got.String() != tt.want {
				t.Errorf("status %q, want %q", got, tt.want)
			}
			if back := parsePodStatus(got.String()); back != got {
				t.Errorf("read again: %+v, want %+v", back, got)
			}
			if got.code != "" && strings.HasPrefix(got.code.Text(), "unknown") && got.code != "TRANSPORT" {
				t.Errorf("%s has no text", got.code)
			}
		})
	}
}

func TestTraffic(t *testing.T) {
	no := agentapi.CodeOf(clc.ReasonPeerNoSMC)
	type step struct {
		at   time.Duration
		mode string // empty: a link group is there
		code agentapi.Code
	}
	tests := []struct {
		name  string
		steps []step
		at    time.Duration
		want  agentapi.Code
	}{
		{"nothing", nil, time.Hour, ""},
		{"one fallback, just now", []step{{0, "TCP", no}}, fallbackAfter - 1, ""},
		{"one fallback, some time ago", []step{{0, "TCP", no}}, fallbackAfter, no},
		{"one fallback, long ago", []step{{0, "TCP", no}}, fallbackMemory + 1, ""},
		{"the last reason counts", []step{{0, "TCP", no}, {time.Second, "TCP", agentapi.CodeBudgetConns}}, time.Minute, agentapi.CodeBudgetConns},
		{"SMC-R before", []step{{0, smcrMode, ""}, {1, "TCP", no}}, time.Minute, no},
		{"SMC-R after", []step{{0, "TCP", no}, {1, smcrMode, ""}}, time.Minute, ""},
		{"a link group", []step{{0, "TCP", no}, {1, "", ""}}, time.Minute, ""},
		{"the destination does not answer", []step{{0, "TCP", agentapi.CodeConnect}}, time.Minute, ""},
		{"refused", []step{{0, "reset", agentapi.CodeRequired}}, time.Minute, agentapi.CodeRequired},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var tr traffic
			for _, s := range tt.steps {
				if s.mode == "" {
					tr.carried(began().Add(s.at))
				} else {
					d := decided("shop/web", s.mode, s.code, began().Add(s.at))
					tr.note(&d)
				}
			}
			if got := tr.reason(began().Add(tt.at)); got != tt.want {
				t.Errorf("reason %q, want %q", got, tt.want)
			}
		})
	}
}

// nodesOfTheTests are two nodes with a device each.
func nodesOfTheTests() map[netip.Addr]string {
	return map[netip.Addr]string{netip.MustParseAddr("192.0.2.2"): "node-b", netip.MustParseAddr("192.0.2.3"): "node-c"}
}

func TestLinkStatus(t *testing.T) {
	tests := []struct {
		name       string
		change     func(*agentapi.LinkGroup)
		state      v1alpha1.LinkState
		redundancy v1alpha1.Redundancy
		peer       string
		links      int
		ready      string // reason
	}{
		{"two links", func(*agentapi.LinkGroup) {}, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "node-b", 2, reasonLinkActive},
		{"asymmetric", func(g *agentapi.LinkGroup) { g.Redundancy = "ASYMMETRIC PEER" }, v1alpha1.LinkActive, v1alpha1.RedundancyAsymmetric, "node-b", 2, reasonLinkActive},
		{"one link", func(g *agentapi.LinkGroup) { g.Redundancy, g.Links = "SINGLE", g.Links[:1] }, v1alpha1.LinkActive, v1alpha1.RedundancySingle, "node-b", 1, reasonLinkActive},
		{"peer without a name", func(g *agentapi.LinkGroup) { g.PeerClaimedName = "" }, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "node-b", 2, reasonLinkActive},
		{"a peer that no node has", func(g *agentapi.LinkGroup) {
			g.Links[0].PeerGID, g.Links[1].PeerGID = "::ffff:192.0.2.9", "::ffff:192.0.2.9"
		}, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "192.0.2.9", 2, reasonLinkActive},
		{"links to two nodes", func(g *agentapi.LinkGroup) { g.Links[1].PeerGID = "::ffff:192.0.2.3" }, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "192.0.2.2", 2, reasonLinkActive},
		{"first contact", func(g *agentapi.LinkGroup) {
			g.State, g.Redundancy, g.Links, g.PeerClaimedName = "FORMING", "SINGLE", nil, ""
		}, v1alpha1.LinkEstablishing, v1alpha1.RedundancyNone, "peer-1", 0, reasonEstablishing},
		{"links without a number yet", func(g *agentapi.LinkGroup) {
			g.Links[0].ID, g.Links[1].ID, g.Links[1].State = 0, 0, "FORMING"
		}, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "node-b", 1, reasonLinkActive},
		{"no link is up", func(g *agentapi.LinkGroup) { g.Links = nil }, v1alpha1.LinkDown, v1alpha1.RedundancyNone, "peer-1", 0, reasonNoLink},
		{"ending", func(g *agentapi.LinkGroup) { g.State = "DRAINING" }, v1alpha1.LinkDown, v1alpha1.RedundancySymmetric, "node-b", 2, reasonEnding},
		{"lost", func(g *agentapi.LinkGroup) { g.State, g.Error = "DEAD", "timeout" }, v1alpha1.LinkDown, v1alpha1.RedundancySymmetric, "node-b", 2, reasonLost},
		{"many links", func(g *agentapi.LinkGroup) {
			for i := range 20 {
				g.Links = append(g.Links, agentapi.Link{ID: uint8(i + 10), State: "ACTIVE", PeerGID: "::ffff:192.0.2.2"})
			}
		}, v1alpha1.LinkActive, v1alpha1.RedundancySymmetric, "node-b", maxLinks, reasonLinkActive},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g := group("shop/web", 1, 2)
			tt.change(&g)
			s := linkStatus(node, &g, "cache", nodesOfTheTests())
			if s.State != tt.state || s.Redundancy != tt.redundancy || s.Peer != tt.peer || len(s.Links) != tt.links || s.Conditions[0].Reason != tt.ready {
				t.Errorf("state %s, redundancy %s, peer %s, %d links, %+v", s.State, s.Redundancy, s.Peer, len(s.Links), s.Conditions)
			}
		})
	}
}

// TestLinkStatus_pci: the SMCRLink names the VFs of a pod that has some.
func TestLinkStatus_pci(t *testing.T) {
	g := group("shop/web", 1, 3)
	g.Links[0].PCI, g.Links[1].PCI, g.Links[2].PCI = "0000:02:10.2", "0000:01:10.0", "0000:01:10.0"
	s := linkStatus(node, &g, "cache", nil)
	if s.PCIAddresses != "0000:01:10.0,0000:02:10.2" || s.Links[0].PCI != "0000:02:10.2" {
		t.Errorf("PCI addresses %s, links %+v", s.PCIAddresses, s.Links)
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

func TestLinkName(t *testing.T) {
	g := group("shop/web", 1, 1)
	name := linkName(node, &g)
	if !strings.HasPrefix(name, "node-a-") || len(name) != len("node-a-01234567") {
		t.Errorf("name %s, want one like node-a-01234567", name)
	}
	again := g
	again.Conns, again.State, again.PeerClaimedName = 17, "DRAINING", ""
	if linkName(node, &again) != name {
		t.Error("the name changes with the state")
	}
	for what, change := range map[string]func(*agentapi.LinkGroup){
		"pod":    func(g *agentapi.LinkGroup) { g.Pod = "shop/db" },
		"peer":   func(g *agentapi.LinkGroup) { g.PeerID = "other" },
		"number": func(g *agentapi.LinkGroup) { g.ID++ },
		"time":   func(g *agentapi.LinkGroup) { g.Opened = g.Opened.Add(1) },
	} {
		other := g
		if change(&other); linkName(node, &other) == name {
			t.Errorf("another %s has the same name", what)
		}
	}
}

func TestNodeLabel(t *testing.T) {
	const uid = "7c1f6f0a-8f60-4a55-9ad0-6b1f9f3d6f3e"
	for _, tt := range []struct{ name, node, want string }{
		{"short", node, node},
		{"as long as a label", strings.Repeat("a", 63), strings.Repeat("a", 63)},
		{"longer", strings.Repeat("a", 64), uid},
		{"as long as a name", strings.Repeat("a", 60) + "." + strings.Repeat("b", 192), uid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := nodeLabel(tt.node, uid); got != tt.want {
				t.Errorf("label %s, want %s", got, tt.want)
			}
		})
	}
	long := strings.Repeat("a", 53) + "." + strings.Repeat("b", 190)
	if v := podLabel(long); len(v) > maxLabelValue || strings.Contains(v, ".-") || podLabel("agent-x") != "agent-x" {
		t.Errorf("label of an agent's pod %s", v)
	}
}

func TestLinkEvents(t *testing.T) {
	type state struct {
		links      int
		redundancy string
		err        string
		group      string
	}
	two, one := state{2, "SYMMETRIC", "", "ACTIVE"}, state{1, "SINGLE", "", "ACTIVE"}
	tests := []struct {
		name  string
		steps []state
		want  []string
	}{
		{"a second link at the beginning", []state{{0, "SINGLE", "", "FORMING"}, one, two}, nil},
		{"a link is lost", []state{two, one}, []string{eventLinkDown, eventRedundancyLost}},
		{"and comes back", []state{two, one, one, two}, []string{eventLinkDown, eventRedundancyLost, eventLinkUp, eventRedundancyRestored}},
		{"a port moves", []state{two, {2, "ASYMMETRIC PEER", "", "ACTIVE"}, two}, []string{eventRedundancyLost, eventRedundancyRestored}},
		{"the group is lost", []state{one, {0, "SINGLE", "timeout", "DEAD"}}, []string{eventLinkDown}},
		{"the group ends", []state{one, {0, "SINGLE", "", "DRAINING"}}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var (
				got      []string
				was      *v1alpha1.SMCRLinkStatus
				degraded bool
			)
			for _, s := range tt.steps {
				g := group("shop/web", 1, s.links)
				g.Redundancy, g.Error, g.State = s.redundancy, s.err, s.group
				is := linkStatus(node, &g, "", nil)
				if was != nil {
					var news []event
					news, degraded = linkEvents(corev1.ObjectReference{}, was, &is, degraded, began())
					for _, e := range news {
						got = append(got, e.reason)
					}
				}
				was = &is
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDecisionEvent(t *testing.T) {
	required := decided("shop/web", agentapi.ModeReset, agentapi.CodeRequired, began())
	required.Detail = "PEERNOSMC: the peer does not speak SMC"
	declined := decided("shop/web", "TCP", agentapi.CodeOf(clc.ReasonMem), began())
	declined.PeerDeclined = true
	inbound := declined
	inbound.Direction = config.Inbound.String()
	tests := []struct {
		name   string
		d      agentapi.Decision
		reason string
		note   []string
	}{
		{"refused", required, eventRefused, []string{"SMCRPolicy cache requires", "the peer does not speak SMC"}},
		{"declined by the peer", declined, eventFallback, []string{"the peer declined", "raise the budgets"}},
		{"inbound", inbound, eventFallback, []string{"client "}},
		{"on SMC-R", decided("shop/web", smcrMode, "", began()), "", nil},
		{"no policy", decided("shop/web", "TCP", agentapi.CodeNoPolicy, began()), "", nil},
		{"ended by a policy", decided("shop/web", agentapi.ModeReset, agentapi.CodePolicyChange, began()), "", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e, ok := decisionEvent(podReference("shop", "web", "1"), &tt.d, began())
			if ok != (tt.reason != "") || e.reason != tt.reason && ok {
				t.Errorf("event %v %+v", ok, e)
			}
			for _, n := range tt.note {
				if !strings.Contains(e.note, n) {
					t.Errorf("note %q, want %q in it", e.note, n)
				}
			}
		})
	}
}

func TestEvents_limits(t *testing.T) {
	now := began()
	q := newEvents()
	about := func(name string) corev1.ObjectReference { return podReference("shop", name, name) }
	q.add(event{about: about("web"), reason: eventFallback, variant: "A", at: now})
	q.add(event{about: about("web"), reason: eventFallback, variant: "A", at: now.Add(eventAgain - 1)})
	if n := len(q.waiting); n != 1 {
		t.Errorf("%d events wait, the same one twice", n)
	}
	now = now.Add(eventAgain)
	for i := range 100 {
		q.add(event{about: about("web"), reason: eventFallback, variant: fmt.Sprint(i), at: now})
	}
	if n := len(q.waiting); n != 1+objectEventsBurst {
		t.Errorf("%d events of one pod wait", n)
	}
	for i := range 2 * maxRememberedEvent {
		q.add(event{about: about(fmt.Sprint(i)), reason: eventEnabled, at: now, note: strings.Repeat("x", 2*maxEventNote)})
	}
	if len(q.waiting) > maxEvents || len(q.sent) > maxRememberedEvent || len(q.objects) > maxRememberedEvent {
		t.Errorf("%d wait, %d and %d are remembered", len(q.waiting), len(q.sent), len(q.objects))
	}
	if n := len(q.waiting[len(q.waiting)-1].note); n > maxEventNote {
		t.Errorf("a note of %d bytes", n)
	}
	sent := 0
	for ; ; sent++ {
		if e, _ := q.next(now); e == nil {
			break
		}
		q.done()
	}
	if sent != eventsBurst {
		t.Errorf("%d events at once", sent)
	}
	if e, again := q.next(now.Add(maxEventAge + 1)); e != nil || !again.IsZero() || len(q.waiting) != 0 {
		t.Errorf("old events: %+v, again %v", e, again)
	}
}

func TestNotable(t *testing.T) {
	tests := []struct {
		was, is int64
		want    bool
	}{
		{0, 0, false},
		{0, 1, true},
		{1, 0, true},
		{1, 1, false},
		{2, 3, false},
		{2, 4, true},
		{4, 2, true},
		{100, 199, false},
	}
	for _, tt := range tests {
		if got := notable([]int64{5, tt.was}, []int64{5, tt.is}); got != tt.want {
			t.Errorf("from %d to %d: %v", tt.was, tt.is, got)
		}
	}
}

// TestQueue_order: what has to wait is written by its class, then by its age.
func TestQueue_order(t *testing.T) {
	q := newQueue(rand.New(rand.NewPCG(1, 2)))
	q.held = false
	now := began()
	set := func(k key, state string, n int64) {
		q.want(k, target{present: true, state: state, counters: []int64{n}}, now)
		now = now.Add(time.Millisecond)
	}
	counters, podB, podA := key{kindLink, "", "counters"}, key{kindPod, "ns", "b"}, key{kindPod, "ns", "a"}
	link, smcrNode := key{kindLink, "", "link"}, key{kindNode, "", "n"}
	q.known(counters, target{present: true, state: "x", counters: []int64{1}}, now)
	set(counters, "x", 10)
	for _, k := range []key{podB, podA, link, smcrNode} {
		set(k, "x", 0)
	}
	var got []key
	for {
		e, _ := q.next(now)
		if e == nil {
			break
		}
		got = append(got, e.key)
		q.wrote(e.key, e.want, "", now)
	}
	if diff := cmp.Diff([]key{smcrNode, link, podB, podA, counters}, got, cmp.AllowUnexported(key{})); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

// TestQueue_spacing: the first change is written at once, the next ones of the
// same object later, and of those only the last.
func TestQueue_spacing(t *testing.T) {
	q := newQueue(rand.New(rand.NewPCG(1, 2)))
	q.held = false
	k := key{kindLink, "", "link"}
	now := began()
	var writes []string
	for i := range 100 { // 10 s
		now = now.Add(100 * time.Millisecond)
		q.want(k, target{present: true, state: fmt.Sprint(i)}, now)
		if e, _ := q.next(now); e != nil {
			writes = append(writes, e.want.state.(string))
			q.wrote(k, e.want, "", now)
		}
	}
	if diff := cmp.Diff([]string{"0", "10", "20", "30", "40", "50", "60", "70", "80", "90"}, writes); diff != "" {
		t.Errorf("writes (-want +got):\n%s", diff)
	}
	e, again := q.next(now)
	if e != nil || again.Sub(now) > objectPause || again.Before(now) {
		t.Errorf("the last change is due at %v", again)
	}
}

func TestStamp(t *testing.T) {
	was := []metav1.Condition{{Type: "A", Status: "True", LastTransitionTime: metav1.Time{Time: began()}}, {Type: "B", Status: "True", LastTransitionTime: metav1.Time{Time: began()}}}
	is := []metav1.Condition{{Type: "A", Status: "True", Message: "new"}, {Type: "B", Status: "False"}, {Type: "C", Status: "True"}}
	now := began().Add(90*time.Second + 7)
	stamp(is, was, now)
	want := []time.Time{began(), began().Add(90 * time.Second), began().Add(90 * time.Second)}
	for i := range is {
		if !is[i].LastTransitionTime.Time.Equal(want[i]) {
			t.Errorf("%s since %v, want %v", is[i].Type, is[i].LastTransitionTime, want[i])
		}
	}
}
