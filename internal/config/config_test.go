// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

const minimal = "node:\n  name: n\n  devices: [{soft: {address: 192.0.2.1}}]\n"

var comparers = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{}, netip.Prefix{}),
}

func mustParse(t testing.TB, text string) *Node {
	t.Helper()
	n, err := Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func mustEID(t testing.TB, s string) clc.EID {
	t.Helper()
	e, err := clc.ParseUEID(s)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestParse_wire(t *testing.T) {
	tests := []struct {
		name, text string
		want       Wire
	}{
		{"nothing", "", Wire{Filter: true}},
		{"empty", "  wire: {}\n", Wire{Filter: true}},
		{"off", "  wire: {filter: false}\n", Wire{}},
		{"peers", "  wire: {peers: [192.0.2.2, 198.51.100.0/24, \"2001:db8::/64\"], interfaces: [eth1, bond0.7]}\n", Wire{
			Filter: true, Interfaces: []string{"eth1", "bond0.7"},
			Peers: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/32"), netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8::/64")},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := mustParse(t, minimal+tt.text)
			if diff := cmp.Diff(tt.want, n.Wire, comparers); diff != "" {
				t.Errorf("wire (-want +got):\n%s", diff)
			}
			if fields := mustParse(t, minimal).Immutable(n); len(fields) != 0 {
				t.Errorf("a reload refuses %v", fields)
			}
		})
	}
}

func TestParse_versions(t *testing.T) {
	for _, tc := range []struct {
		text string
		want Versions
		eids []clc.EID
	}{
		{"", VersionsBoth, []clc.EID{mustEID(t, DefaultEID)}},
		{"  versions: v1\n", VersionsV1, []clc.EID{mustEID(t, DefaultEID)}},
		{"  versions: v2\n  eids: [SHOP.EXAMPLE-7, ACME]\n", VersionsV2, []clc.EID{mustEID(t, "SHOP.EXAMPLE-7"), mustEID(t, "ACME")}},
		{"  eids: [0123456789ABCDEF0123456789ABCDEF]\n", VersionsBoth, []clc.EID{mustEID(t, "0123456789ABCDEF0123456789ABCDEF")}},
	} {
		n := mustParse(t, minimal+tc.text)
		if n.Versions != tc.want {
			t.Errorf("%q: versions %v, want %v", tc.text, n.Versions, tc.want)
		}
		if diff := cmp.Diff(tc.eids, n.EIDs); diff != "" {
			t.Errorf("%q: enterprise IDs (-want +got):\n%s", tc.text, diff)
		}
	}
}

func TestParse_sample(t *testing.T) {
	b, err := os.ReadFile("../../config/samples/node-agent.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse("node-agent.yaml", b)
	if err != nil {
		t.Fatal(err)
	}
	want := &Node{
		Name:            "node-a",
		Devices:         []Device{{SoftAddress: netip.MustParseAddr("192.0.2.1")}},
		NodeBudget:      Budget{MemoryBytes: 4 << 30, Conns: 65536, Relays: 4096, Pending: 16384, SocketBytes: 2 << 30},
		PodBudget:       Budget{MemoryBytes: 512 << 20, Conns: 4096, Relays: 1024, Pending: 1024, SocketBytes: 512 << 20},
		PodMax:          Budget{MemoryBytes: 2 << 30, Conns: 16384},
		RMBEBytes:       512 << 10,
		SendBufferBytes: 512 << 10,
		EIDs:            []clc.EID{mustEID(t, "KUBE-SMCR")},
		DataDir:         "/run/kube-smcr",
		APISocket:       "/run/kube-smcr/agent.sock",
		MetricsAddress:  netip.MustParseAddrPort("127.0.0.1:9464"),
		Diversion:       Diversion{RedirectTTL: 2 * time.Second, NegativeCacheTTL: time.Minute, HoldSYNs: true},
		DrainTimeout:    30 * time.Second,
		AnswerPoll:      75 * time.Microsecond,
		CNI:             CNI{BinDir: "/opt/cni/bin", ConfDir: "/etc/cni/net.d"},
		DRA:             DRA{KubeletDir: "/var/lib/kubelet"},
		DevicePlugin: DevicePlugin{
			Slots: 100, Dir: "/var/lib/kubelet/device-plugins", PodResources: "/var/lib/kubelet/pod-resources/kubelet.sock",
			InfoDir: "/var/run/k8s.cni.cncf.io/devinfo/dp",
		},
		DefaultPeers: Peers{CIDRs: privateNetworks()},
		Wire:         Wire{Filter: true},
		Policies: []Policy{{
			Name:   "cache",
			Pods:   PodSelector{Namespaces: []string{"shop"}, Names: []string{"redis-*", "web-*"}, Interfaces: []string{"eth0"}},
			Peers:  []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")},
			Except: []netip.Prefix{netip.MustParsePrefix("192.0.2.53/32")},
			Ports:  []PortRange{{6379, 6379}, {16379, 16384}},
		}, {
			Name: "ledger", Mode: ModeRequired,
			Pods:  PodSelector{Namespaces: []string{"bank"}},
			Ports: []PortRange{{5432, 5432}},
		}},
	}
	if diff := cmp.Diff(want, got, comparers); diff != "" {
		t.Errorf("sample (-want +got):\n%s", diff)
	}

	// The sample shows the defaults: leaving the fields out means the same.
	def := mustParse(t, "node:\n  name: node-a\n  devices: [{soft: {address: 192.0.2.1}}]\n")
	if n := mustParse(t, "node:\n  name: node-a\n  devices: []\n"); len(n.Devices) != 0 {
		t.Errorf("devices %v", n.Devices)
	}
	got.Policies = nil
	if diff := cmp.Diff(got, def, comparers); diff != "" {
		t.Errorf("defaults differ from what the sample says they are (-sample +defaults):\n%s", diff)
	}
}

func TestParse_errors(t *testing.T) {
	tests := []struct {
		name, text string
		want       []string // of each error, in order: parts that it has
	}{
		{"empty", "", []string{"t:1:1: file: is empty"}},
		{"not yaml", "node: [", []string{"t:1:1: file: is not YAML"}},
		{"not a mapping", "- a", []string{"t:1:1: : is a list"}},
		{"no node", "policies: []", []string{"t:1:1: node: is missing"}},
		{"two documents", minimal + "---\nnode: {}\n", []string{"file: has a second document"}},
		{"unknown field at the top", minimal + "polices: []\n", []string{"t:4:1: polices: unknown field (did you mean policies?)"}},
		{"unknown field in node", minimal + "  redirectTtl: 2s\n", []string{"t:4:3: node.redirectTtl: unknown field (did you mean redirectTTL?)"}},
		{"unknown field in a policy", minimal + "policies:\n- name: a\n  port: [1]\n", []string{"t:6:3: policies[0].port: unknown field (did you mean ports?)"}},
		{"field twice", minimal + "  name: m\n", []string{"t:4:3: node.name: is given twice"}},
		{"alias", minimal + "policies:\n- name: &a x\n- name: *a\n", []string{
			"t:6:9: policies[1].name: is an alias", "t:6:9: policies[1].name: \"\", want a name",
		}},
		{"old name", "node:\n  name: n\n  device: {soft: {address: 192.0.2.1}}\n", []string{"t:3:3: node.device: is called node.devices now, and is a list: devices: [{soft: {address: ADDRESS}}]"}},
		{"old name and new", minimal + "  device: {}\n", []string{"t:4:3: node.device: is called node.devices"}},
		{"no devices", "node:\n  name: n\n", []string{"t:2:3: node.devices: is missing"}},
		{"devices are no list", "node:\n  name: n\n  devices: {soft: {address: 192.0.2.1}}\n", []string{"t:3:12: node.devices: is a mapping, want a list"}},
		{"too many devices", "node:\n  name: n\n  devices: [" + strings.Repeat("{rdma: x}, ", 9) + "]\n", []string{"t:3:12: node.devices: has 9 devices, at most 8"}},
		{"both kinds in one", "node:\n  name: n\n  devices: [{soft: {address: 192.0.2.1}, rdma: mlx5_0}]\n", []string{"t:3:48: node.devices[0].rdma: contradicts soft"}},
		{"neither kind", "node:\n  name: n\n  devices: [{}]\n", []string{"t:3:13: node.devices[0]: names no device"}},
		{"device is text", "node:\n  name: n\n  devices: [soft]\n", []string{"t:3:13: node.devices[0]: is a single value"}},
		{"soft without address", "node:\n  name: n\n  devices: [{soft: {mtu: 4096}}]\n", []string{"node.devices[0].soft.address"}},
		{"any address", "node:\n  name: n\n  devices: [{soft: {address: 0.0.0.0}}]\n", []string{"node.devices[0].soft.address"}},
		{"mtu", "node:\n  name: n\n  devices: [{soft: {address: 192.0.2.1, mtu: 1500}}]\n", []string{"node.devices[0].soft.mtu: 1500, want an InfiniBand path MTU"}},
		{"same address", "node:\n  name: n\n  devices:\n  - soft: {address: 192.0.2.1}\n  - soft: {address: 192.0.2.1, mtu: 1024}\n", []string{"t:5:5: node.devices[1]: 192.0.2.1 is given twice"}},
		{"same name of a device", "node:\n  name: n\n  devices: [{rdma: mlx5_0}, {rdma: mlx5_1}, {rdma: mlx5_0}]\n", []string{"t:3:45: node.devices[2]: mlx5_0 is given twice"}},
		{"address families", "node:\n  name: n\n  devices:\n  - soft: {address: 192.0.2.1}\n  - soft: {address: \"2001:db8::1\"}\n", []string{"t:5:5: node.devices[1]: 2001:db8::1 is of another address family than 192.0.2.1"}},
		{"no name of an RDMA device", "node:\n  name: n\n  devices: [{rdma: {port: 1}}]\n", []string{"t:3:20: node.devices[0].rdma.name: \"\", want the name of an RDMA device"}},
		{"bad port of an RDMA device", "node:\n  name: n\n  devices: [{rdma: {name: x, port: 256}}]\n", []string{"node.devices[0].rdma.port: \"256\", want a number from 1 to 255"}},
		{"bad GID address", "node:\n  name: n\n  devices: [{rdma: {name: x, address: eth7}}]\n", []string{"node.devices[0].rdma.address: \"eth7\", want an address of the device's"}},
		{"bad GID type", "node:\n  name: n\n  devices: [{rdma: {name: x, gidType: v2}}]\n", []string{"node.devices[0].rdma.gidType: \"v2\", want one of auto, RoCEv2, RoCEv1"}},
		{"bad traffic class", "node:\n  name: n\n  devices: [{rdma: {name: x, trafficClass: 256}}]\n", []string{"node.devices[0].rdma.trafficClass: \"256\", want a number from 0 to 255"}},
		{"two ports of one RDMA device", "node:\n  name: n\n  devices: [{rdma: {name: x, port: 1}}, {rdma: {name: x, port: 2}}]\n", []string{"node.devices[1]: x is given already, with another port of it"}},
		{"kinds", "node:\n  name: n\n  devices: [{soft: {address: 192.0.2.1}}, {rdma: mlx5_0}]\n", []string{"t:3:43: node.devices[1]: mlx5_0 is of another kind than 192.0.2.1"}},
		{"second device", "node:\n  name: n\n  devices:\n  - soft: {address: 192.0.2.1}\n  - soft: {Address: 192.0.2.2}\n", []string{"t:5:11: node.devices[1].soft.address: \"\"", "t:5:12: node.devices[1].soft.Address: unknown field (did you mean address?)"}},
		{"sizes", minimal + "  rmbe: 100KiB\n  sendBuffer: 1PB\n", []string{
			"t:4:9: node.rmbe: 102400 bytes, want a power of two", "t:5:15: node.sendBuffer: \"1PB\"",
		}},
		{"huge size", minimal + "  rmbe: 9999999999GiB\n", []string{"node.rmbe: \"9999999999GiB\": want a size"}},
		{"pod over node", minimal + "  budgets:\n    node: {memory: 8MiB, connections: 1}\n    pod: {memory: 9MiB, connections: 2}\n", []string{
			"t:6:10: node.budgets.pod: memory of a pod", "t:6:10: node.budgets.pod: connections of a pod",
		}},
		{"few relays", minimal + "  budgets: {node: {relays: 15}, pod: {pending: x}}\n", []string{
			"node.budgets.node.relays: \"15\", want a number from 16", "node.budgets.pod.pending",
		}},
		{"relays of a pod over node", minimal + "  budgets: {node: {relays: 16, pending: 17}, pod: {relays: 17, pending: 18}}\n", []string{
			"relays of a pod (17) is more than of the node (16)", "pending of a pod (18) is more than of the node (17)",
		}},
		{"ceiling over node", minimal + "  budgets: {podMax: {memory: 5GiB, connections: 65537}}\n", []string{
			"node.budgets.podMax: memory that policies may give to a pod", "node.budgets.podMax: connections that policies may give to a pod (65537)",
		}},
		{"ceiling under pod", minimal + "  budgets: {podMax: {memory: 64MiB}}\n", []string{"node.budgets.podMax: memory of a pod (536870912 bytes) is more than that policies may give to it"}},
		{"ceiling of relays", minimal + "  budgets: {podMax: {relays: 64}}\n", []string{"node.budgets.podMax.relays: unknown field"}},
		{"budget under one connection", minimal + "  budgets: {pod: {memory: 64KiB}}\n", []string{"node.budgets.pod: memory (65536 bytes) is less than"}},
		{"paths", minimal + "  dataDir: var\n  apiSocket: /run/../x\n", []string{"t:4:12: node.dataDir", "t:5:14: node.apiSocket"}},
		{"long socket", minimal + "  apiSocket: /" + strings.Repeat("x", 120) + "\n", []string{"node.apiSocket: is 121 bytes long; the kernel allows 107"}},
		{"metrics", minimal + "  metricsAddress: localhost\n", []string{"node.metricsAddress: \"localhost\""}},
		{"metrics for who may, without a cluster", minimal + "  metricsAuth: true\n", []string{"node.metricsAuth: true, but there is no cluster to ask"}},
		{"pods without a cluster", minimal + "  podsAsNode: true\n", []string{"node.podsAsNode: true, but there is no cluster"}},
		{"the kernel's datapath", minimal + "  kernelPath: {veth: maybe, revoke: true}\n", []string{"node.kernelPath.veth: \"maybe\"", "node.kernelPath.revoke: unknown field"}},
		{"a certificate that is not used", minimal + "  metricsTLS: /etc/x\n", []string{"node.metricsTLS: a certificate without metricsAuth"}},
		{"durations", minimal + "  redirectTTL: 10\n  drainTimeout: -1s\n  answerPoll: 1ms\n", []string{"node.redirectTTL: \"10\"", "node.drainTimeout: \"-1s\"", "node.answerPoll: \"1ms\""}},
		{"words", minimal + "  dialects: rfc\n  logLevel: loud\n  anyPrefix: maybe\n", []string{"node.dialects", "node.logLevel", "node.anyPrefix"}},
		{"versions", minimal + "  versions: 2\n", []string{"t:4:13: node.versions: \"2\", want one of both, v1, v2"}},
		{"enterprise IDs", minimal + "  eids: [kube-smcr, A_B, .A, \"\", A, A, " + strings.Repeat("X", 33) + "]\n", []string{
			"t:4:10: node.eids[0]: \"kube-smcr\", want 1 to 32 capital letters, digits, dots and hyphens, the first a letter or digit (did you mean KUBE-SMCR?)",
			"t:4:21: node.eids[1]: \"A_B\"", "t:4:26: node.eids[2]: \".A\"", "t:4:30: node.eids[3]: \"\"", "t:4:37: node.eids[5]: \"A\" is given twice",
			"t:4:40: node.eids[6]",
		}},
		{"no enterprise ID", minimal + "  eids: []\n", []string{"t:4:9: node.eids: is empty: want 1 to 8 enterprise IDs"}},
		{"too many enterprise IDs", minimal + "  eids: [A, B, C, D, E, F, G, H, I]\n", []string{"t:4:9: node.eids: has 9 entries, at most 8"}},
		{"enterprise ID is text", minimal + "  eids: ACME\n", []string{"t:4:9: node.eids: is a single value, want a list"}},
		{"wire", minimal + "  wire: {filter: on, peers: [10.0.0.1/8, x], interfaces: [eth1, eth1, a b, abcdefghijklmnop], nodes: []}\n", []string{
			"node.wire.filter: \"on\", want true or false", "node.wire.peers[0]: \"10.0.0.1/8\" has bits set", "node.wire.peers[1]: \"x\", want a CIDR",
			"node.wire.interfaces[1]: \"eth1\" is given twice", "node.wire.interfaces[2]: \"a b\", want the name", "node.wire.interfaces[3]: \"abcdefghijklmnop\"",
			"node.wire.nodes: unknown field",
		}},
		{"wire of too many interfaces", minimal + "  wire: {interfaces: [" + strings.Repeat("x, ", 65) + "]}\n", []string{"node.wire.interfaces: has 65 entries, at most 64"}},
		{"policy words", minimal + "policies:\n- {name: a, mode: Must}\n", []string{"t:5:19: policies[0].mode: \"Must\", want one of Prefer, Required"}},
		{"cidrs", minimal + "policies:\n- name: a\n  peers:\n    cidrs: [10.0.0.1/8, 10.0.0.0/8, 10.1.0.0/16, ten]\n", []string{
			"t:7:13: policies[0].peers.cidrs[0]: \"10.0.0.1/8\" has bits set behind its length: did you mean 10.0.0.0/8?",
			"t:7:37: policies[0].peers.cidrs[2]: 10.1.0.0/16 overlaps with 10.0.0.0/8", "cidrs[3]",
		}},
		{"useless exclusion", minimal + "policies:\n- name: a\n  peers: {cidrs: [10.0.0.0/8], except: [192.0.2.0/24]}\n", []string{"192.0.2.0/24 is not inside any of the peers' cidrs"}},
		{"an exclusion larger than its network", minimal + "policies:\n- name: a\n  peers: {cidrs: [10.1.0.0/16], except: [10.0.0.0/8]}\n", []string{"10.0.0.0/8 is not inside any", "nothing is left of 10.1.0.0/16"}},
		{"nothing left", minimal + "policies:\n- name: a\n  peers: {cidrs: [10.0.0.0/31], except: [10.0.0.0, 10.0.0.1]}\n", []string{"nothing is left of 10.0.0.0/31"}},
		{"ports", minimal + "policies:\n- name: a\n  ports: [0, 70000, 9-8, 1-5, 3, http]\n", []string{
			"ports[0]", "ports[1]", "ports[2]: \"9-8\": runs backwards: did you mean 8-9?", "ports[4]: \"3\" overlaps with 1-5", "ports[5]",
		}},
		{"patterns", minimal + "policies:\n- name: a\n  pods: {names: [\"a b\", x, x]}\n", []string{"names[0]", "names[2]: \"x\" is given twice"}},
		{"policy without name", minimal + "policies:\n- mode: Prefer\n", []string{"t:5:3: policies[0].name"}},
		{"same name", minimal + "policies:\n- {name: a, ports: [1]}\n- {name: a, ports: [2]}\n", []string{"t:6:3: policies[1]: the name \"a\" is taken"}},
		{"overlap", minimal + "policies:\n- {name: a, ports: [1-9]}\n- {name: b, ports: [5], mode: Required}\n", []string{"t:6:3: policies[1]: policy \"b\" overlaps with policy \"a\" (peer 0.0.0.0/0, port 5)"}},
		{"datapath of unknown name", minimal + "policies:\n- {name: a, datapath: Kernal}\n", []string{"t:5:23: policies[0].datapath: \"Kernal\", want one of Agent, Kernel, KernelIfAvailable"}},
		{"required of the kernel", minimal + "policies:\n- {name: a, datapath: Kernel, mode: Required}\n", []string{"policies[0].datapath: Kernel, and mode is Required"}},
		{"required of the kernel if available", minimal + "policies:\n- {name: a, datapath: KernelIfAvailable, mode: Required}\n", []string{"policies[0].datapath: KernelIfAvailable, and mode is Required"}},
		{"version 1 of the kernel if available", minimal + "  versions: v1\npolicies:\n- {name: a, datapath: KernelIfAvailable}\n", []string{"policies[0]: policy \"a\" has datapath KernelIfAvailable, which needs version 2"}},
		{"version 1 of the kernel", minimal + "  versions: v1\npolicies:\n- {name: a, datapath: Kernel}\n", []string{"policies[0]: policy \"a\" has datapath Kernel, which needs version 2"}},
		{"two datapaths", minimal + "policies:\n- {name: a, datapath: Kernel, ports: [1], pods: {names: [x-*]}}\n- {name: b, ports: [2], pods: {names: [x-1]}}\n", []string{"policies[1]: policy \"b\" has datapath Agent, and policy \"a\", which selects pods that this one selects, Kernel: a pod has one datapath"}},
		{"several at once", "node:\n  nam: n\n  rmbe: 1\npolicies: 5\n", []string{"t:2:3: node.nam:", "t:2:3: node.name:", "t:2:3: node.devices", "t:3:9: node.rmbe", "t:4:11: policies"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { refused(t, tt.text, tt.want) })
	}
}

// refused parses a file that has errors; want are parts of each, in their order.
func refused(t *testing.T, text string, want []string) {
	t.Helper()
	n, err := Parse("t", []byte(text))
	var errs Errors
	if n != nil || !errors.As(err, &errs) {
		t.Fatalf("Parse = %v, %v; want Errors", n, err)
	}
	if len(errs) != len(want) {
		t.Fatalf("%d errors, want %d:\n%v", len(errs), len(want), err)
	}
	for i, e := range errs {
		if !strings.Contains(e.Error(), want[i]) {
			t.Errorf("error %d = %q, want it to have %q", i, e, want[i])
		}
	}
}

const policies = minimal + `policies:
- {name: db, mode: Required, pods: {namespaces: [bank]}, peers: {cidrs: [10.0.0.0/8], except: [10.9.0.0/16]}, ports: [5432, 6000-6010]}
- {name: excepted, pods: {namespaces: [bank]}, peers: {cidrs: [10.9.0.0/16]}, ports: [80]}
- {name: six, pods: {namespaces: [bank]}, peers: {cidrs: ["2001:db8::/32"]}}
- {name: any, pods: {names: ["web-*"], namespaces: [shop]}}
`

func TestNode_Decide(t *testing.T) {
	n := mustParse(t, policies)
	bank, web := Pod{Namespace: "bank", Name: "a"}, Pod{Namespace: "shop", Name: "web-1"}
	tests := []struct {
		name string
		pod  Pod
		peer string
		want Decision
	}{
		{"required", bank, "10.1.2.3:5432", Decision{true, true, "db", ReasonMatch}},
		{"last of a range", bank, "10.1.2.3:6010", Decision{true, true, "db", ReasonMatch}},
		{"mapped address", bank, "[::ffff:10.1.2.3]:5432", Decision{true, true, "db", ReasonMatch}},
		{"other port", bank, "10.1.2.3:6011", Decision{false, false, "db", ReasonPort}},
		{"excluded", bank, "10.9.2.3:5432", Decision{false, false, "excepted", ReasonPort}},
		{"the other policy", bank, "10.9.2.3:80", Decision{true, false, "excepted", ReasonMatch}},
		{"other peer", bank, "192.0.2.1:5432", Decision{false, false, "db", ReasonPeer}},
		{"ipv6", bank, "[2001:db8::1]:1", Decision{true, false, "six", ReasonMatch}},
		{"zone", bank, "[2001:db8::1%eth0]:1", Decision{true, false, "six", ReasonMatch}},
		{"everything", web, "198.51.100.7:1", Decision{true, false, "any", ReasonMatch}},
		{"pod not selected", Pod{Namespace: "shop", Name: "db"}, "10.1.2.3:5432", Decision{Reason: ReasonNoPolicy}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, n.Decide(tt.pod, netip.MustParseAddrPort(tt.peer))); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

func TestNode_Outbound(t *testing.T) {
	p := netip.MustParsePrefix
	single := mustParse(t, minimal+"policies:\n- {name: a, peers: {cidrs: [10.0.0.0/8], except: [10.9.0.0/16]}, ports: [80]}\n")
	want := []Selection{{Prefix: p("10.0.0.0/8"), Ports: []PortRange{{80, 80}}}, {Prefix: p("10.9.0.0/16"), Exclude: true}}
	if diff := cmp.Diff(want, single.Outbound(Pod{}), comparers); diff != "" {
		t.Errorf("one policy (-want +got):\n%s", diff)
	}

	// With several policies the selections must say exactly what Decide says.
	n := mustParse(t, policies)
	pod := Pod{Namespace: "bank"}
	sel := n.Outbound(pod)
	for _, peer := range []string{"10.1.0.1:5432", "10.8.255.255:5432", "10.9.0.0:5432", "10.9.0.0:80", "10.10.0.0:6005", "9.0.0.0:80", "[2001:db8::]:9", "10.0.0.0:80"} {
		ap := netip.MustParseAddrPort(peer)
		got := false
		for _, s := range sel {
			if s.Exclude {
				t.Fatalf("exclusion %v although several policies select the pod", s.Prefix)
			}
			pol := Policy{Ports: s.Ports}
			got = got || s.Prefix.Contains(ap.Addr()) && pol.hasPort(ap.Port())
		}
		if want := n.Decide(pod, ap).Accelerate; got != want {
			t.Errorf("%s: selected %t, decided %t", peer, got, want)
		}
	}
	if got := n.Outbound(Pod{Namespace: "other"}); len(got) != 0 {
		t.Errorf("pod without policy has selections %v", got)
	}
}

func TestNode_DatapathFor(t *testing.T) {
	n, err := Parse("t", []byte(minimal+"policies:\n- {name: a, datapath: Kernel, pods: {names: [x]}}\n- {name: b, pods: {names: [y]}}\n- {name: c, datapath: KernelIfAvailable, pods: {names: [w]}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]Datapath{"w": DatapathKernelIfAvailable, "x": DatapathKernel, "y": DatapathAgent, "z": DatapathAgent} {
		if got, overruled := n.DatapathFor(Pod{Name: name}); got != want || overruled != "" {
			t.Errorf("datapath of %s is %v (%s), want %v", name, got, overruled, want)
		}
	}
}

// What is too large to be told exactly is an error, and not more than the policies select.
func TestNode_Exactly(t *testing.T) {
	n, err := Parse("t", []byte(minimal+"policies:\n- {name: a, peers: {cidrs: [10.0.0.0/8], except: [10.1.0.0/16]}, ports: [80]}\n"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := n.Exactly(Pod{})
	want := []Selection{{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Ports: []PortRange{{80, 80}}}, {Prefix: netip.MustParsePrefix("10.1.0.0/16"), Exclude: true}}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" || err != nil {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
	for i := range maxSelections + 1 {
		n.Policies[0].Addresses = append(n.Policies[0].Addresses, netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}))
	}
	if got, err := n.Exactly(Pod{Name: "x"}); !errors.Is(err, ErrTooMany) || len(got) != maxSelections+3 {
		t.Errorf("of too much: %d selections, want all, %v", len(got), err)
	}
	if got := n.Outbound(Pod{}); len(got) == 0 || len(got) > maxSelections {
		t.Errorf("Outbound has %d selections", len(got))
	}
}

func TestNode_OutboundRequired(t *testing.T) {
	n := mustParse(t, minimal+"policies:\n- {name: a, peers: {cidrs: [10.0.0.0/8], except: [10.1.0.0/16]}}\n- {name: b, mode: Required, peers: {cidrs: [10.1.0.0/16]}, ports: [80]}\n")
	want := []Selection{{Prefix: netip.MustParsePrefix("10.1.0.0/16"), Ports: []PortRange{{80, 80}}}}
	if diff := cmp.Diff(want, n.OutboundRequired(Pod{}), comparers); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := len(n.PoliciesFor(Pod{})); got != 2 {
		t.Errorf("%d policies are left, want 2", got)
	}
}

func TestNode_InboundPorts(t *testing.T) {
	n := mustParse(t, minimal+"policies:\n"+
		"- {name: a, pods: {names: [x]}, peers: {cidrs: [10.0.0.0/8]}, ports: [80, 90-95]}\n"+
		"- {name: b, pods: {names: [x]}, peers: {cidrs: [11.0.0.0/8]}, ports: [93-99]}\n"+
		"- {name: d, pods: {names: [x]}, peers: {cidrs: [12.0.0.0/8]}, ports: [81], mode: Required}\n"+
		"- {name: c, pods: {names: [y]}}\n")
	ports, all := n.InboundPorts(Pod{Name: "x"})
	if diff := cmp.Diff([]PortRange{{80, 81}, {90, 99}}, ports); diff != "" || all {
		t.Errorf("all = %t (-want +got):\n%s", all, diff)
	}
	if ports, all := n.InboundPorts(Pod{Name: "y"}); !all || ports != nil {
		t.Errorf("InboundPorts = %v, %t, want all", ports, all)
	}
	if ports, all := n.InboundPortsRequired(Pod{Name: "x"}); len(ports) != 1 || ports[0] != (PortRange{81, 81}) || all {
		t.Errorf("InboundPortsRequired = %v, %t, want 81", ports, all)
	}
	if ports, all := n.InboundPortsRequired(Pod{Name: "y"}); len(ports) > 0 || all {
		t.Errorf("InboundPortsRequired = %v, %t, want none", ports, all)
	}
}

func TestPatterns(t *testing.T) {
	tests := []struct {
		a, b string
		want bool // some string matches both
	}{
		{"a", "a", true},
		{"a", "b", false},
		{"*", "b", true},
		{"*", "*", true},
		{"a*", "*b", true},
		{"a*", "b*", false},
		{"*a", "*b", false},
		{"a*c", "ab*", true},
		{"web-*", "web-", true},
		{"web-*", "web", false},
		{"a*b*c", "a*d*c", true},
		{"ab", "a*b*", true},
		{"ab", "a*c*", false},
	}
	for _, tt := range tests {
		if got := patternIntersects(tt.a, tt.b); got != tt.want {
			t.Errorf("patternIntersects(%q, %q) = %t", tt.a, tt.b, got)
		}
		if got := patternIntersects(tt.b, tt.a); got != tt.want {
			t.Errorf("patternIntersects(%q, %q) = %t", tt.b, tt.a, got)
		}
		if !strings.Contains(tt.a, "*") {
			if got := matchPattern(tt.b, tt.a); got != tt.want {
				t.Errorf("matchPattern(%q, %q) = %t", tt.b, tt.a, got)
			}
		}
	}
}

// TestOverlap_brute compares overlap with trying every address and port of a
// small world.
func TestOverlap_brute(t *testing.T) {
	world := netip.MustParsePrefix("10.0.0.0/29")
	lists := [][]netip.Prefix{
		nil,
		{netip.MustParsePrefix("10.0.0.0/30")},
		{netip.MustParsePrefix("10.0.0.4/30")},
		{netip.MustParsePrefix("10.0.0.2/31"), netip.MustParsePrefix("10.0.0.7/32")},
		{netip.MustParsePrefix("10.0.0.0/31")},
	}
	var all []Policy
	for _, peers := range lists[1:] {
		for _, except := range lists {
			for _, ports := range [][]PortRange{{{1, 2}}, {{2, 3}}, {{4, 4}}} {
				all = append(all, Policy{Peers: peers, Except: except, Ports: ports})
			}
		}
	}
	for i := range all {
		for j := range all {
			a, b := &all[i], &all[j]
			want := false
			for addr := world.Addr(); world.Contains(addr); addr = addr.Next() {
				for port := range uint16(6) {
					na, nb := Node{Policies: []Policy{*a}}, Node{Policies: []Policy{*b}}
					ap := netip.AddrPortFrom(addr, port)
					want = want || na.Decide(Pod{}, ap).Accelerate && nb.Decide(Pod{}, ap).Accelerate
				}
			}
			if got := overlap(a, b); (got != "") != want {
				t.Errorf("overlap(%+v, %+v) = %q, want overlap %t", a, b, got, want)
			}
		}
	}
}

func TestParse_devices(t *testing.T) {
	a := netip.MustParseAddr
	tests := []struct {
		name, text string
		want       []Device
	}{
		{"one", "[{soft: {address: 192.0.2.1}}]", []Device{{SoftAddress: a("192.0.2.1")}}},
		{"two", "[{soft: {address: 192.0.2.1, mtu: 4096}}, {soft: {address: 198.51.100.1}}]", []Device{{SoftAddress: a("192.0.2.1"), SoftMTU: 4096}, {SoftAddress: a("198.51.100.1")}}},
		{"IPv6", "[{soft: {address: \"2001:db8::1\"}}, {soft: {address: \"2001:db8:1::1\"}}]", []Device{{SoftAddress: a("2001:db8::1")}, {SoftAddress: a("2001:db8:1::1")}}},
		{"of the kernel, in detail", "[{rdma: {name: mlx5_0, port: 2, address: 192.0.2.1, gidType: RoCEv1, trafficClass: 106}}, {rdma: {name: mlx5_1, gidType: auto}}]", []Device{
			{RDMA: "mlx5_0", Port: 2, GIDAddress: netip.MustParseAddr("192.0.2.1"), GIDType: rdma.GIDTypeRoCEv1, TrafficClass: 106}, {RDMA: "mlx5_1"},
		}},
		{"of the kernel", "[{rdma: mlx5_0}, {rdma: mlx5_1}]", []Device{{RDMA: "mlx5_0"}, {RDMA: "mlx5_1"}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := mustParse(t, "node:\n  name: n\n  devices: "+tt.text+"\n")
			if diff := cmp.Diff(tt.want, n.Devices, comparers); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParse_devicesOfNode(t *testing.T) {
	const text = `node:
  devices: [{rdma: mlx5_0}, {rdma: {name: mlx5_1, address: eth9}}]
  devicesOfNode:
    "*-old": [{rdma: mlx4_0}]
    db-old: []
    general-*: [{soft: {address: node}}, {soft: {interface: eth1}}]
`
	m := Machine{
		Cluster: true, Address: netip.MustParseAddr("192.0.2.7"),
		Interfaces: map[string][]netip.Addr{"eth1": {netip.MustParseAddr("198.51.100.7")}},
	}
	on := func(name string) (*Node, error) {
		m := m
		m.Name = name
		if name == "fast-1" {
			m.Interfaces = map[string][]netip.Addr{"eth9": {netip.MustParseAddr("203.0.113.7")}}
		}
		return ParseOn(m, "t", []byte(text))
	}
	for name, want := range map[string][]Device{
		"fast-1":    {{RDMA: "mlx5_0"}, {RDMA: "mlx5_1", GIDAddress: netip.MustParseAddr("203.0.113.7"), Interface: "eth9"}},
		"slow-1":    {{RDMA: "mlx5_0"}, {RDMA: "mlx5_1", Interface: "eth9"}}, // which has no address yet
		"web-old":   {{RDMA: "mlx4_0"}},
		"db-old":    nil,
		"general-3": {{SoftAddress: netip.MustParseAddr("192.0.2.7")}, {SoftAddress: netip.MustParseAddr("198.51.100.7"), Interface: "eth1"}},
	} {
		n, err := on(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if diff := cmp.Diff(want, n.Devices, comparers); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if _, err := on("general-old"); err == nil || !strings.Contains(err.Error(), `t:6:16: node.devicesOfNode.general-*: "*-old" and "general-*" are both about node general-old`) {
		t.Errorf("two lists for one node: %v", err)
	}
	if _, err := ParseOn(Machine{Cluster: true, Any: true}, "t", []byte(text)); err != nil {
		t.Errorf("for any node: %v", err)
	}
	for list, want := range map[string]string{
		`{"a b": []}`:                  `node.devicesOfNode.a b: "a b", want a node's name`,
		`{b: [{soft: {address: x}}]}`:  `node.devicesOfNode.b[0].soft.address: "x", want a local unicast address`,
		`{b: [{rdma: a}, {soft: {}}]}`: `node.devicesOfNode.b[1]`,
		`{b: [{rdma: a}], b: []}`:      `node.devicesOfNode.b: is given twice`,
		`{b: [{rdma: a}, {rdma: a}]}`:  `node.devicesOfNode.b[1]: a is given twice`,
		`[{nodes: [a], devices: []}]`:  `node.devicesOfNode: is a list, want a mapping`,
		`{b: {soft: {address: node}}}`: `node.devicesOfNode.b: is a mapping, want a list`,
	} {
		m := m
		m.Name = "a"
		_, err := ParseOn(m, "t", []byte("node:\n  devices: []\n  devicesOfNode: "+list+"\n"))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", list, err, want)
		}
	}
}

func TestParseOn(t *testing.T) {
	m := Machine{
		Cluster: true, Name: "n1", Address: netip.MustParseAddr("192.0.2.7"),
		Interfaces: map[string][]netip.Addr{"eth1": {netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("2001:db8::7")}},
	}
	n, err := ParseOn(m, "t", []byte("node:\n  devices: [{soft: {address: node}}, {soft: {interface: eth1, mtu: 1024}}]\n"+
		"  takeover: true\n  defaultPeers: {cidrs: [10.0.0.0/8], except: [10.96.0.0/12]}\n  cni: {install: true, binDir: /host/bin, reportStatus: true}\n"))
	if err != nil {
		t.Fatal(err)
	}
	got := []any{n.Name, n.Devices, n.Takeover, n.DefaultPeers, n.CNI, n.InCluster()}
	want := []any{
		"n1",
		[]Device{{SoftAddress: m.Address}, {Interface: "eth1", SoftAddress: m.Interfaces["eth1"][0], SoftMTU: 1024}},
		true,
		Peers{[]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}},
		CNI{Install: true, BinDir: "/host/bin", ConfDir: "/etc/cni/net.d", ReportStatus: true},
		true,
	}
	if diff := cmp.Diff(want, got, comparers); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := mustParse(t, "node:\n  name: m\n  devices: [{soft: {address: 192.0.2.1}}]\n"); n.InCluster() {
		t.Error("a file alone makes a cluster")
	}
	for _, tt := range []struct{ name, text, want string }{
		{"policies", minimal + "policies:\n- {name: p}\n", "t:5:1: policies: are SMCRPolicy objects in a cluster"},
		{"both", "node:\n  devices: [{soft: {interface: eth1, address: node}}]\n", "node.devices[0].soft.interface: contradicts address"},
		{"default peers", minimal + "  defaultPeers: {cidrs: []}\n", "node.defaultPeers.cidrs: is empty"},
		{"default exclusion", minimal + "  defaultPeers: {except: [8.8.8.8]}\n", "8.8.8.8/32 is not inside any"},
		{"paths", minimal + "  cni: {binDir: bin, confDir: /etc/../x}\n", "node.cni.binDir: \"bin\", want an absolute path"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := ParseOn(m, "t", []byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
	if _, err := Parse("t", []byte("node:\n  name: n\n  devices: [{soft: {address: node}}]\n")); err == nil || !strings.Contains(err.Error(), "run with --kubernetes") {
		t.Errorf("address of an unknown node: %v", err)
	}
	if _, err := Parse("t", []byte("node:\n  devices: [{soft: {interface: eth9}}]\n  name: n\n")); err == nil ||
		!strings.Contains(err.Error(), `t:2:32: node.devices[0].soft.interface: "eth9" is no network interface of this machine with an address`) {
		t.Errorf("interface that is not there: %v", err)
	}
}

func TestParse_dra(t *testing.T) {
	n := mustParse(t, minimal+"  dra: {enabled: true, kubeletDir: /var/lib/k0s/kubelet}\n")
	if want := (DRA{Enabled: true, KubeletDir: "/var/lib/k0s/kubelet"}); n.DRA != want {
		t.Errorf("got %+v, want %+v", n.DRA, want)
	}
	if diff := cmp.Diff([]string{"node.dra"}, n.Immutable(mustParse(t, minimal))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, tt := range []struct{ name, text, want string }{
		{"relative path", "{kubeletDir: kubelet}", `node.dra.kubeletDir: "kubelet", want an absolute path`},
		{"too long for sockets", "{kubeletDir: /" + strings.Repeat("x", 60) + "}", "node.dra.kubeletDir: is too long for sockets"},
		{"unknown field", "{enable: true}", "node.dra.enable: unknown field (did you mean enabled?)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := Parse("t", []byte(minimal+"  dra: "+tt.text+"\n")); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestParse_devicePlugin(t *testing.T) {
	n := mustParse(t, minimal+"  devicePlugin: {enabled: true, vfs: true, slots: 20, dir: /host/dp, podResources: /host/pr.sock, infoDir: /host/info, otherResources: [intel.com/sriov_rdma, 'mellanox.com/*']}\n")
	want := DevicePlugin{
		Enabled: true, VFs: true, Slots: 20, Dir: "/host/dp", PodResources: "/host/pr.sock", InfoDir: "/host/info",
		OtherResources: []string{"intel.com/sriov_rdma", "mellanox.com/*"},
	}
	if diff := cmp.Diff(want, n.DevicePlugin); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, tt := range []struct {
		name, text string
		asks       bool
		err        string
	}{
		{"off", "{}", false, ""},
		{"of others only", "{otherResources: [intel.com/a]}", true, ""},
		{"enabled", "{enabled: true}", true, ""},
		{"VFs alone", "{vfs: true}", false, "node.devicePlugin.vfs: needs enabled: true"},
		{"no slots", "{slots: 0}", false, `node.devicePlugin.slots: "0", want a number`},
		{"too many slots", "{slots: 1001}", false, `node.devicePlugin.slots: "1001", want a number`},
		{"relative path", "{dir: dp}", false, `node.devicePlugin.dir: "dp", want an absolute path`},
		{"too long for sockets", "{dir: /" + strings.Repeat("x", 90) + "}", false, "node.devicePlugin.dir: is too long for a socket"},
		{"no vendor", "{otherResources: [sriov]}", false, `node.devicePlugin.otherResources[0]: "sriov", want a resource`},
		{"half a pattern", "{otherResources: [intel.com/sriov*]}", false, `node.devicePlugin.otherResources[0]: "intel.com/sriov*", want a resource`},
		{"twice", "{otherResources: [a/b, a/b]}", false, `node.devicePlugin.otherResources[1]: "a/b" is given twice`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, err := Parse("t", []byte(minimal+"  devicePlugin: "+tt.text+"\n"))
			switch {
			case tt.err == "" && err != nil, tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
				t.Errorf("error %v, want %q", err, tt.err)
			case err == nil && n.DevicePlugin.Asks() != tt.asks:
				t.Errorf("Asks() = %v", n.DevicePlugin.Asks())
			}
		})
	}
	o := mustParse(t, minimal+"  devicePlugin: {enabled: true, slots: 21}\n")
	if diff := cmp.Diff([]string{"node.devicePlugin"}, n.Immutable(o)); diff != "" {
		t.Errorf("Immutable (-want +got):\n%s", diff)
	}
}

func TestNode_Immutable(t *testing.T) {
	a := mustParse(t, minimal)
	b := mustParse(t, minimal+"  dataDir: /x\n  redirectTTL: 9s\npolicies:\n- {name: p}\n")
	if diff := cmp.Diff([]string{"node.dataDir"}, a.Immutable(b)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	c := mustParse(t, strings.Replace(minimal, "}}]", "}}, {soft: {address: 192.0.2.2}}]", 1))
	if diff := cmp.Diff([]string{"node.devices"}, a.Immutable(c)); diff != "" {
		t.Errorf("another device (-want +got):\n%s", diff)
	}
}

func FuzzParse(f *testing.F) {
	b, err := os.ReadFile("../../config/samples/node-agent.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(policies))
	f.Add([]byte("node:\n  name: n\n  devices:\n  - soft: {address: 192.0.2.1, mtu: 1024}\n  - soft: {address: 198.51.100.1}\n"))
	f.Add([]byte("node:\n  name: n\n  devices: [{rdma: mlx5_0}, {rdma: mlx5_0}, {soft: {address: \"::1\"}}]\n"))
	f.Add([]byte(minimal + "  hostPods:\n" + hostPodAt("/a/b") + kernelPolicy))
	f.Add([]byte("node:\n  name: n\n  device: {soft: {address: 192.0.2.1}}\n"))
	f.Add(withIPAM("{ipam: {type: whereabouts, range: 192.0.2.1-192.0.2.9/24}, ipamOfNode: {n: {type: host-local, ranges: [[{subnet: 192.0.2.0/24}]]}}}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := Parse("f", b)
		if (n == nil) == (err == nil) {
			t.Fatalf("Parse = %v, %v", n, err)
		}
		var errs Errors
		if err != nil && !errors.As(err, &errs) {
			t.Fatalf("error %T has no lines", err)
		}
		if n != nil {
			pod := Pod{Namespace: "shop", Name: "web-1", Interface: "eth0"}
			n.Outbound(pod)
			n.Decide(pod, netip.MustParseAddrPort("192.0.2.1:80"))
		}
	})
}

// TestParseOn_missingInterface: in a cluster one file is for all nodes, and not
// each has every interface.
func TestParseOn_missingInterface(t *testing.T) {
	m := Machine{Cluster: true, Name: "n1", Interfaces: map[string][]netip.Addr{"eth1": {netip.MustParseAddr("192.0.2.1")}}}
	n, err := ParseOn(m, "t", []byte("node:\n  devices: [{soft: {interface: eth9}}, {soft: {interface: eth1}}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []Device{{Interface: "eth9"}, {Interface: "eth1", SoftAddress: netip.MustParseAddr("192.0.2.1")}}
	if !slices.Equal(n.Devices, want) || n.Devices[0].String() != "eth9" {
		t.Errorf("devices %+v, want %+v", n.Devices, want)
	}
	if _, err := ParseOn(m, "t", []byte("node:\n  devices: [{soft: {interface: eth9}}, {soft: {interface: eth9}}]\n")); err == nil || !strings.Contains(err.Error(), "eth9 is given twice") {
		t.Errorf("err = %v", err)
	}
	if _, err := ParseOn(m, "t", []byte("node:\n  devices: [{soft: {interface: \"a b\"}}]\n")); err == nil || !strings.Contains(err.Error(), "no name of a network interface") {
		t.Errorf("err = %v", err)
	}
}

// Sizes are those of this project, and the quantities of Kubernetes as they are.
func TestParse_sizes(t *testing.T) {
	for _, tt := range []struct {
		size string
		want int // 0: it is refused
	}{
		{"64MiB", 64 << 20},
		{"64 MiB", 64 << 20},
		{"67108864", 64 << 20},
		{"64Mi", 64 << 20},
		{"0.5Gi", 512 << 20},
		{"1.5Gi", 1536 << 20},
		{"100M", 100e6},
		{"1e9", 1e9},
		{"2E8", 2e8},
		{"100000000500m", 100000001},
		{"1Ei", 0},
		{"-1Gi", 0},
		{"64 Mi", 0},
		{"1.5GiB", 0},
		{"64MB", 0},
		{"Mi", 0},
		{"", 0},
	} {
		t.Run(tt.size, func(t *testing.T) {
			n, err := Parse("t", []byte(minimal+"  budgets: {node: {memory: '"+tt.size+"'}, pod: {memory: 16Mi}}\n"))
			switch {
			case tt.want == 0 && err == nil:
				t.Errorf("taken as %d bytes", n.NodeBudget.MemoryBytes)
			case tt.want != 0 && err != nil:
				t.Error(err)
			case tt.want != 0 && n.NodeBudget.MemoryBytes != tt.want:
				t.Errorf("%d bytes, want %d", n.NodeBudget.MemoryBytes, tt.want)
			}
		})
	}
}

func TestNode_RoomOf(t *testing.T) {
	n, small := &Node{RMBEBytes: 512 << 10, SendBufferBytes: 512 << 10}, &Node{RMBEBytes: 256 << 10, SendBufferBytes: 512 << 10}
	for _, tt := range []struct {
		name string
		n    *Node
		b    Budget
		want Room
	}{
		{"memory", n, Budget{MemoryBytes: 1 << 30, Conns: 65536, SocketBytes: 1 << 30}, Room{1024, 554}},
		{"sockets", n, Budget{MemoryBytes: 1 << 30, Conns: 65536, SocketBytes: 128 << 20}, Room{512, 512}},
		{"connections", n, Budget{MemoryBytes: 1 << 30, Conns: 700, SocketBytes: 1 << 30}, Room{700, 554}},
		{"smaller buffers", small, Budget{MemoryBytes: 1 << 30, Conns: 65536, SocketBytes: 1 << 30}, Room{1365, 1024}},
		{"none", n, Budget{}, Room{}},
	} {
		if got := tt.n.RoomOf(tt.b); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}
