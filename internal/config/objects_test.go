// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

const clusterText = "node:\n  devices: [{soft: {address: node}}]\n"

func clusterBase(t testing.TB, more string) *Node {
	t.Helper()
	n, err := ParseOn(Machine{Cluster: true, Name: "n1", Address: netip.MustParseAddr("192.0.2.7")}, "t", []byte(clusterText+more))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func ptr[T any](v T) *T { return &v }

// smcrPolicy makes a policy of namespace shop that is so many minutes old.
func smcrPolicy(name string, age int, change func(*v1alpha1.SMCRPolicySpec)) v1alpha1.SMCRPolicy {
	p := v1alpha1.SMCRPolicy{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: name, CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).Add(-time.Duration(age) * time.Minute)),
	}}
	if change != nil {
		change(&p.Spec)
	}
	return p
}

func shopPod(labels ...string) PodObject {
	p := PodObject{Namespace: "shop", Name: "web-0", UID: "u1", Enabled: ptr("true"), Labels: map[string]string{}}
	for _, l := range labels {
		k, v, _ := strings.Cut(l, "=")
		p.Labels[k] = v
	}
	return p
}

func TestFromObjects_optIn(t *testing.T) {
	tests := []struct {
		name           string
		pod, namespace *string
		host, claimed  bool
		want           bool
		because        string
		bad            bool
	}{
		{name: "nothing", because: "neither the pod nor its namespace has the annotation smcr.io/enabled"},
		{name: "pod", pod: ptr("true"), want: true, because: "annotation of the pod"},
		{name: "namespace", namespace: ptr("true"), want: true, because: "annotation of namespace shop"},
		{name: "pod wins with true", pod: ptr("true"), namespace: ptr("false"), want: true, because: "annotation of the pod"},
		{name: "pod wins with false", pod: ptr("false"), namespace: ptr("true"), because: "annotation of the pod"},
		{name: "namespace false", namespace: ptr("false"), because: "annotation of namespace shop"},
		{name: "junk on the pod", pod: ptr("yes"), namespace: ptr("true"), because: `smcr.io/enabled of the pod is "yes", want "true"`, bad: true},
		{name: "junk on the namespace", namespace: ptr("on"), because: `of namespace shop is "on"`, bad: true},
		{name: "capitals are junk", pod: ptr("True"), because: `"True"`, bad: true},
		{name: "empty is junk", pod: ptr(""), because: `""`, bad: true},
		{name: "long junk is cut", pod: ptr(strings.Repeat("é", 100_000)), because: "...", bad: true},
		{name: "host network", pod: ptr("true"), host: true, because: "in the node's network only datapath Kernel"},
		{name: "claim", claimed: true, want: true, because: "the pod claims an RDMA device"},
		{name: "claim wins over the namespace", claimed: true, namespace: ptr("false"), want: true, because: "claims"},
		{name: "pod wins over its claim", claimed: true, pod: ptr("false"), namespace: ptr("true"), because: "annotation of the pod"},
		{name: "claim and junk", claimed: true, pod: ptr("on"), because: `"on"`, bad: true},
		{name: "host network and claim", claimed: true, host: true, because: "in the node's network only datapath Kernel"},
		{name: "host network and junk", pod: ptr("1"), host: true, because: `smcr.io/enabled of the pod is "1", want "true"`, bad: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pod := PodObject{Namespace: "shop", Name: "web-0", UID: "u1", Enabled: tt.pod, HostNetwork: tt.host, Claimed: tt.claimed}
			n, vs, bad := FromObjects(clusterBase(t, ""), Objects{Pods: []PodObject{pod}, Namespaces: []NamespaceObject{{Name: "shop", Enabled: tt.namespace}, {Name: "other", Enabled: ptr("true")}}})
			if len(vs) != 1 || len(bad) != 0 {
				t.Fatalf("verdicts %+v, bad policies %v", vs, bad)
			}
			v := vs[0]
			if v.OptedIn != tt.want || v.BadAnnotation != tt.bad || !strings.Contains(v.Because, tt.because) || len(v.Because) > 300 {
				t.Errorf("verdict %+v", v)
			}
			id := Pod{Namespace: "shop", Name: "web-0", UID: "u1"}
			d := n.Decide(id, netip.MustParseAddrPort("10.1.2.3:80"))
			want := Decision{Accelerate: true, Policy: DefaultPolicy, Reason: ReasonMatch}
			if !tt.want {
				want = Decision{Reason: ReasonOptedOut}
			}
			if diff := cmp.Diff(want, d); diff != "" {
				t.Errorf("decision (-want +got):\n%s", diff)
			}
		})
	}
}

// TestFromObjects_static: what attachments have as the UID of a static pod with a network of its own.
func TestFromObjects_static(t *testing.T) {
	for _, tt := range []struct {
		name, hash string
		want       string
	}{
		{"no static pod", "", "u1"},
		{"a checksum", "d41d8cd98f00b204e9800998ecf8427e", "d41d8cd98f00b204e9800998ecf8427e"},
		{"none that kubelet makes", "../d4", "u1"},
		{"too long", strings.Repeat("d", maxConfigHash+1), "u1"},
	} {
		pod := PodObject{Namespace: "shop", Name: "web-0", UID: "u1", Enabled: ptr("true"), ConfigHash: tt.hash}
		other := PodObject{Namespace: "bank", Name: "b", UID: "u2", Enabled: ptr("false"), ConfigHash: tt.hash}
		n, vs, _ := FromObjects(clusterBase(t, ""), Objects{Pods: []PodObject{pod, other}})
		if vs[0].UID != "u1" || vs[0].NodeUID != tt.want {
			t.Errorf("%s: verdict %+v", tt.name, vs[0])
		}
		for _, uid := range []string{"u1", tt.hash, ""} {
			id := Pod{Namespace: "shop", Name: "web-0", UID: uid}
			if got, want := len(n.PoliciesFor(id)) > 0, uid == tt.want || uid == ""; got != want {
				t.Errorf("%s: UID %q has policies: %v", tt.name, uid, got)
			}
			if id.Namespace, id.Name = "bank", "b"; len(n.PoliciesFor(id)) > 0 {
				t.Errorf("%s: UID %q of another pod has policies", tt.name, uid)
			}
		}
	}
}

// TestFromObjects_nodes: the addresses of other nodes' devices, and whether they
// are known at all.
func TestFromObjects_nodes(t *testing.T) {
	tests := []struct {
		name  string
		nodes []NodeObject
		want  []string
		known bool
	}{
		{"not known", nil, nil, false},
		{"none", []NodeObject{}, nil, true},
		{"one without devices", []NodeObject{{Name: "n2"}}, nil, true},
		{"several", []NodeObject{{"n2", []string{"192.0.2.9", "2001:db8::1"}}, {"n3", []string{"192.0.2.3"}}}, []string{"192.0.2.3", "192.0.2.9", "2001:db8::1"}, true},
		{"the same twice", []NodeObject{{"n2", []string{"192.0.2.9"}}, {"n3", []string{"::ffff:192.0.2.9"}}}, []string{"192.0.2.9"}, true},
		{"link-local", []NodeObject{{"n2", []string{"fe80::1"}}}, []string{"fe80::1"}, true},
		{
			"no addresses of devices",
			[]NodeObject{{"n2", []string{"", "x", "0.0.0.0", "127.0.0.1", "::1", "224.0.0.1", "255.255.255.255", "0.0.0.0/0", "fe80::1%eth0"}}},
			nil, true,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			base := clusterBase(t, "  wire: {peers: [198.51.100.0/24]}\n")
			n, _, _ := FromObjects(base, Objects{Nodes: tt.nodes})
			var got []string
			for _, a := range n.Wire.Nodes {
				got = append(got, a.String())
			}
			if diff := cmp.Diff(tt.want, got); diff != "" || n.Wire.NodesKnown != tt.known || len(n.Wire.Peers) != 1 || !n.Wire.Filter {
				t.Errorf("%+v, addresses (-want +got):\n%s", n.Wire, diff)
			}
			if base.Wire.NodesKnown || base.Wire.Nodes != nil {
				t.Errorf("the base was changed: %+v", base.Wire)
			}
		})
	}
	many := NodeObject{Name: "n2"}
	a := netip.MustParseAddr("10.0.0.1")
	for range 2 * maxNodeAddresses {
		many.Addresses, a = append(many.Addresses, a.String()), a.Next()
	}
	if n, _, _ := FromObjects(clusterBase(t, ""), Objects{Nodes: []NodeObject{many}}); len(n.Wire.Nodes) != maxNodeAddresses {
		t.Errorf("one node has %d addresses", len(n.Wire.Nodes))
	}
}

// TestFromObjects_decide: which policy decides a connection of the pod.
func TestFromObjects_decide(t *testing.T) {
	cidrs := func(cs ...v1alpha1.CIDR) func(*v1alpha1.SMCRPolicySpec) {
		return func(s *v1alpha1.SMCRPolicySpec) { s.Peers = &v1alpha1.PolicyPeers{CIDRs: cs} }
	}
	and := func(fs ...func(*v1alpha1.SMCRPolicySpec)) func(*v1alpha1.SMCRPolicySpec) {
		return func(s *v1alpha1.SMCRPolicySpec) {
			for _, f := range fs {
				f(s)
			}
		}
	}
	required := func(s *v1alpha1.SMCRPolicySpec) { s.Mode = v1alpha1.ModeRequired }
	priority := func(n int32) func(*v1alpha1.SMCRPolicySpec) {
		return func(s *v1alpha1.SMCRPolicySpec) { s.Priority = n }
	}
	ports := func(ps ...int32) func(*v1alpha1.SMCRPolicySpec) {
		return func(s *v1alpha1.SMCRPolicySpec) {
			for _, p := range ps {
				s.Ports = append(s.Ports, v1alpha1.PolicyPort{Port: p})
			}
		}
	}
	selectors := func(s *v1alpha1.SMCRPolicySpec) {
		if s.Peers == nil {
			s.Peers = &v1alpha1.PolicyPeers{}
		}
		s.Peers.Selectors = []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{}}}
	}
	except := func(cs ...v1alpha1.CIDR) func(*v1alpha1.SMCRPolicySpec) {
		return func(s *v1alpha1.SMCRPolicySpec) {
			if s.Peers == nil {
				s.Peers = &v1alpha1.PolicyPeers{}
			}
			s.Peers.Except = cs
		}
	}
	only := func(label, value string) func(*v1alpha1.SMCRPolicySpec) {
		return func(s *v1alpha1.SMCRPolicySpec) {
			s.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{label: v1alpha1.LabelValue(value)}
		}
	}
	type connections map[string]Decision
	match := func(policy string) Decision { return Decision{Accelerate: true, Policy: policy, Reason: ReasonMatch} }
	must := func(policy string) Decision {
		return Decision{Accelerate: true, Required: true, Policy: policy, Reason: ReasonMatch}
	}
	not := func(r DecisionReason, policy string) Decision { return Decision{Reason: r, Policy: policy} }
	tests := []struct {
		name     string
		policies []v1alpha1.SMCRPolicy
		slices   []v1alpha1.SMCRPeerSlice
		want     connections
	}{
		{name: "built-in", want: connections{
			"10.1.1.1:80": match(DefaultPolicy), "172.31.0.1:1": match(DefaultPolicy), "[fd00::1]:9": match(DefaultPolicy),
			"8.8.8.8:53": not(ReasonPeer, DefaultPolicy), "[2001:db8::1]:9": not(ReasonPeer, DefaultPolicy),
		}},
		{
			name: "policy of another namespace", policies: []v1alpha1.SMCRPolicy{{ObjectMeta: metav1.ObjectMeta{Namespace: "bank", Name: "p"}}},
			want: connections{"10.1.1.1:80": match(DefaultPolicy)},
		},
		{
			name: "policy for other labels", policies: []v1alpha1.SMCRPolicy{smcrPolicy("p", 0, only("app", "db"))},
			want: connections{"10.1.1.1:80": match(DefaultPolicy)},
		},
		{name: "default peers", policies: []v1alpha1.SMCRPolicy{smcrPolicy("p", 0, and(ports(80), only("app", "web")))}, want: connections{
			"10.1.1.1:80": match("p"), "10.1.1.1:81": not(ReasonPort, "p"), "8.8.8.8:80": not(ReasonPeer, "p"),
		}},
		{name: "older first", policies: []v1alpha1.SMCRPolicy{smcrPolicy("a", 1, nil), smcrPolicy("b", 2, required)}, want: connections{"10.1.1.1:80": must("b")}},
		{name: "name decides", policies: []v1alpha1.SMCRPolicy{smcrPolicy("b", 1, required), smcrPolicy("a", 1, nil)}, want: connections{"10.1.1.1:80": match("a")}},
		{name: "priority beats age", policies: []v1alpha1.SMCRPolicy{smcrPolicy("a", 9, nil), smcrPolicy("b", 1, and(required, priority(1)))}, want: connections{"10.1.1.1:80": must("b")}},
		{name: "negative priority", policies: []v1alpha1.SMCRPolicy{smcrPolicy("a", 9, and(required, priority(-1))), smcrPolicy("b", 1, nil)}, want: connections{"10.1.1.1:80": match("b")}},
		{name: "the next that selects it", policies: []v1alpha1.SMCRPolicy{smcrPolicy("a", 9, and(required, ports(80))), smcrPolicy("b", 1, cidrs("8.8.8.0/24"))}, want: connections{
			"10.1.1.1:80": must("a"), "8.8.8.8:80": match("b"), "10.1.1.1:81": not(ReasonPort, "a"), "9.9.9.9:9": not(ReasonPeer, "a"),
		}},
		{name: "an exclusion only narrows its policy", policies: []v1alpha1.SMCRPolicy{
			smcrPolicy("a", 9, and(required, cidrs("10.0.0.0/8"), except("10.9.0.0/16"))), smcrPolicy("b", 1, nil),
		}, want: connections{"10.1.1.1:80": must("a"), "10.9.1.1:80": match("b")}},
		{name: "exclusion alone", policies: []v1alpha1.SMCRPolicy{smcrPolicy("a", 9, except("10.9.0.0/16"))}, want: connections{
			"10.1.1.1:80": match("a"), "10.9.1.1:80": not(ReasonExcluded, "a"), "8.8.8.8:80": not(ReasonPeer, "a"),
		}},
		{name: "selectors without a pod", policies: []v1alpha1.SMCRPolicy{smcrPolicy("a", 9, selectors)}, want: connections{"10.1.1.1:80": not(ReasonPeer, "a")}},
		{
			name: "selectors", policies: []v1alpha1.SMCRPolicy{smcrPolicy("a", 9, and(selectors, except("10.1.1.4/32")))},
			slices: []v1alpha1.SMCRPeerSlice{
				{ObjectMeta: metav1.ObjectMeta{Namespace: "shop"}, Policy: "a", Addresses: []string{"10.1.1.5", "junk", "10.1.1.1"}},
				{ObjectMeta: metav1.ObjectMeta{Namespace: "shop"}, Policy: "a", Addresses: []string{"fd00::1", "10.1.1.5", "10.1.1.4"}},
				{ObjectMeta: metav1.ObjectMeta{Namespace: "shop"}, Policy: "b", Addresses: []string{"10.1.1.2"}},
				{ObjectMeta: metav1.ObjectMeta{Namespace: "bank"}, Policy: "a", Addresses: []string{"10.1.1.3"}},
			},
			want: connections{
				"10.1.1.1:80": match("a"), "10.1.1.5:80": match("a"), "[fd00::1]:80": match("a"), "10.1.1.4:80": not(ReasonExcluded, "a"),
				"10.1.1.2:80": not(ReasonPeer, "a"), "10.1.1.3:80": not(ReasonPeer, "a"), "10.1.1.6:80": not(ReasonPeer, "a"),
			},
		},
		{
			name: "selectors and networks", policies: []v1alpha1.SMCRPolicy{smcrPolicy("a", 9, and(selectors, func(s *v1alpha1.SMCRPolicySpec) { s.Peers.CIDRs = []v1alpha1.CIDR{"8.8.0.0/16"} }))},
			slices: []v1alpha1.SMCRPeerSlice{{ObjectMeta: metav1.ObjectMeta{Namespace: "shop"}, Policy: "a", Addresses: []string{"10.1.1.1"}}},
			want:   connections{"10.1.1.1:80": match("a"), "8.8.8.8:80": match("a"), "10.1.1.2:80": not(ReasonPeer, "a")},
		},
		{name: "a policy that cannot be used", policies: []v1alpha1.SMCRPolicy{
			smcrPolicy("a", 9, and(required, only("a b", "c"))), smcrPolicy("b", 8, cidrs("ten")), smcrPolicy("c", 7, ports(0)),
		}, want: connections{"10.1.1.1:80": match(DefaultPolicy)}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n, vs, bad := FromObjects(clusterBase(t, ""), Objects{Pods: []PodObject{shopPod("app=web")}, Policies: tt.policies, PeerSlices: tt.slices})
			if (len(bad) > 0) != strings.Contains(tt.name, "cannot be used") {
				t.Errorf("bad policies: %v", bad)
			}
			if len(vs) != 1 || !vs[0].OptedIn {
				t.Fatalf("verdicts %+v", vs)
			}
			id := Pod{Namespace: "shop", Name: "web-0", UID: "u1"}
			for c, want := range tt.want {
				ap := netip.MustParseAddrPort(c)
				if diff := cmp.Diff(want, n.Decide(id, ap)); diff != "" {
					t.Errorf("%s (-want +got):\n%s", c, diff)
				}
				if got := diverted(n.Outbound(id), ap); got != want.Accelerate {
					t.Errorf("%s: diverted %t, want %t", c, got, want.Accelerate)
				}
			}
			for _, other := range []Pod{{Namespace: "shop", Name: "web-0", UID: "u2"}, {Namespace: "shop", Name: "web-1"}} {
				if d := n.Decide(other, netip.MustParseAddrPort("10.1.1.1:80")); d.Accelerate {
					t.Errorf("%+v is accelerated: %+v", other, d)
				}
			}
		})
	}
}

// diverted says what a redirection does with a connection.
func diverted(sel []Selection, dst netip.AddrPort) bool {
	in := false
	for _, s := range sel {
		pol := Policy{Ports: s.Ports}
		if !s.Prefix.Contains(dst.Addr()) || !pol.hasPort(dst.Port()) {
			continue
		}
		if s.Exclude {
			return false
		}
		in = true
	}
	return in
}

func TestFromObjects_settings(t *testing.T) {
	mem := func(s string) *resource.Quantity { return ptr(resource.MustParse(s)) }
	base := Settings{RMBEBytes: 512 << 10, SendBufferBytes: 512 << 10, Budget: Budget{512 << 20, 4096, 1024, 1024, 512 << 20}}
	with := func(change func(*Settings)) Settings {
		s := base
		change(&s)
		return s
	}
	tests := []struct {
		name string
		node string
		spec v1alpha1.SMCRPolicySpec
		want Settings
	}{
		{"none", "", v1alpha1.SMCRPolicySpec{}, base},
		{"of the node", "  rmbe: 64KiB\n  versions: v2\n", v1alpha1.SMCRPolicySpec{}, with(func(s *Settings) { s.RMBEBytes, s.Versions = 64<<10, VersionsV2 })},
		{"buffers", "", v1alpha1.SMCRPolicySpec{Buffers: &v1alpha1.PolicyBuffers{RMBE: "16Ki", Send: "128Ki"}}, with(func(s *Settings) { s.RMBEBytes, s.SendBufferBytes = 16<<10, 128<<10 })},
		{"one buffer", "", v1alpha1.SMCRPolicySpec{Buffers: &v1alpha1.PolicyBuffers{Send: "128Ki"}}, with(func(s *Settings) { s.SendBufferBytes = 128 << 10 })},
		{"junk buffer", "", v1alpha1.SMCRPolicySpec{Buffers: &v1alpha1.PolicyBuffers{Send: "3Ki", RMBE: "x"}}, base},
		{"budget", "", v1alpha1.SMCRPolicySpec{Budget: &v1alpha1.PolicyBudget{Memory: mem("64Mi"), Connections: ptr(int32(7))}}, with(func(s *Settings) { s.Budget.MemoryBytes, s.Budget.Conns = 64<<20, 7 })},
		{"budget beyond the ceiling", "", v1alpha1.SMCRPolicySpec{Budget: &v1alpha1.PolicyBudget{Memory: mem("1Ti"), Connections: ptr(int32(1 << 30))}}, with(func(s *Settings) { s.Budget.MemoryBytes, s.Budget.Conns = 2<<30, 16384 })},
		{"negative budget", "", v1alpha1.SMCRPolicySpec{Budget: &v1alpha1.PolicyBudget{Memory: mem("-1"), Connections: ptr(int32(-1))}}, with(func(s *Settings) { s.Budget.MemoryBytes, s.Budget.Conns = 0, 0 })},
		{"one link", "", v1alpha1.SMCRPolicySpec{LinkRedundancy: v1alpha1.LinksSingle}, with(func(s *Settings) { s.SingleLink = true })},
		{"two links", "", v1alpha1.SMCRPolicySpec{LinkRedundancy: v1alpha1.LinksSymmetric}, base},
		{"shared", "", v1alpha1.SMCRPolicySpec{Isolation: v1alpha1.IsolationNamespace}, with(func(s *Settings) { s.Shared = true })},
		{"transport", "", v1alpha1.SMCRPolicySpec{Transports: []v1alpha1.Transport{v1alpha1.TransportSoftwareRoCE}}, with(func(s *Settings) { s.MismatchOwn = MismatchTransport })},
		{"any transport", "", v1alpha1.SMCRPolicySpec{Transports: []v1alpha1.Transport{v1alpha1.TransportHardware, v1alpha1.TransportSoftwareRoCE}}, base},
		{"other transport", "", v1alpha1.SMCRPolicySpec{Transports: []v1alpha1.Transport{v1alpha1.TransportHardware}}, with(func(s *Settings) { s.Mismatch = MismatchTransport })},
		{"version", "", v1alpha1.SMCRPolicySpec{Versions: []v1alpha1.Version{v1alpha1.VersionV1}}, with(func(s *Settings) { s.Versions = VersionsV1 })},
		{"both versions", "  versions: v2\n", v1alpha1.SMCRPolicySpec{Versions: []v1alpha1.Version{v1alpha1.VersionV1, v1alpha1.VersionV2}}, with(func(s *Settings) { s.Versions = VersionsV2 })},
		{"no version in common", "  versions: v2\n", v1alpha1.SMCRPolicySpec{Versions: []v1alpha1.Version{v1alpha1.VersionV1}}, with(func(s *Settings) {
			s.Versions, s.Mismatch, s.MismatchOwn = VersionsV1, MismatchVersion, MismatchVersion
		})},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			first := smcrPolicy("first", 9, func(s *v1alpha1.SMCRPolicySpec) { *s = tt.spec })
			second := smcrPolicy("second", 1, func(s *v1alpha1.SMCRPolicySpec) { s.Isolation = v1alpha1.IsolationNamespace })
			n, vs, bad := FromObjects(clusterBase(t, tt.node), Objects{Pods: []PodObject{shopPod()}, Policies: []v1alpha1.SMCRPolicy{second, first}})
			if len(bad) > 0 {
				t.Fatal(bad)
			}
			got := n.SettingsFor(Pod{Namespace: "shop", Name: "web-0"})
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if diff := cmp.Diff([]string{"first", "second"}, vs[0].Policies); diff != "" || vs[0].Settings != got {
				t.Errorf("verdict %+v", vs[0])
			}
			if diff := cmp.Diff([]string{"shop/first", "shop/second"}, n.PolicyNames()); diff != "" {
				t.Errorf("names (-want +got):\n%s", diff)
			}
		})
	}
}

// The first policy of the rank says which datapath a pod has, and one with mode Required, of any rank, that it
// is the agent's.
func TestFromObjects_datapath(t *testing.T) {
	policy := func(name string, age int, d v1alpha1.Datapath, mode v1alpha1.PolicyMode) v1alpha1.SMCRPolicy {
		return smcrPolicy(name, age, func(s *v1alpha1.SMCRPolicySpec) { s.Datapath, s.Mode = d, mode })
	}
	const agent, kernel, optional, required = v1alpha1.DatapathAgent, v1alpha1.DatapathKernel, v1alpha1.DatapathKernelIfAvailable, v1alpha1.ModeRequired
	for _, tt := range []struct {
		name      string
		policies  []v1alpha1.SMCRPolicy // the oldest first
		want      Datapath
		overruled string
	}{
		{"none", nil, DatapathAgent, ""},
		{"of an older API", []v1alpha1.SMCRPolicy{policy("a", 9, "", "")}, DatapathAgent, ""},
		{"kernel", []v1alpha1.SMCRPolicy{policy("a", 9, kernel, "")}, DatapathKernel, ""},
		{"kernel if available", []v1alpha1.SMCRPolicy{policy("a", 9, optional, "")}, DatapathKernelIfAvailable, ""},
		{"the first says it", []v1alpha1.SMCRPolicy{policy("a", 9, kernel, ""), policy("b", 8, agent, "")}, DatapathKernel, ""},
		{"and the second does not", []v1alpha1.SMCRPolicy{policy("a", 9, agent, ""), policy("b", 8, kernel, "")}, DatapathAgent, ""},
		{
			"another one requires SMC-R",
			[]v1alpha1.SMCRPolicy{policy("a", 9, kernel, ""), policy("b", 8, agent, ""), policy("c", 7, agent, required)},
			DatapathAgent, "policy a wants datapath Kernel, and policy c, which selects the pod too, has mode Required",
		},
		{"itself, which the API server refuses", []v1alpha1.SMCRPolicy{policy("a", 9, optional, required)}, DatapathAgent, "policy a wants datapath KernelIfAvailable"},
		{"the first requires it", []v1alpha1.SMCRPolicy{policy("a", 9, agent, required), policy("b", 8, kernel, "")}, DatapathAgent, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, _, bad := FromObjects(clusterBase(t, ""), Objects{Pods: []PodObject{shopPod()}, Policies: tt.policies})
			if len(bad) > 0 {
				t.Fatal(bad)
			}
			got, overruled := n.DatapathFor(Pod{Namespace: "shop", Name: "web-0"})
			if got != tt.want || (overruled == "") != (tt.overruled == "") || !strings.Contains(overruled, tt.overruled) {
				t.Errorf("datapath %v, overruled %q; want %v, %q", got, overruled, tt.want, tt.overruled)
			}
		})
	}
}

// TestAttack_policyBeyondTheCeiling: a namespace's policy gives its pods no more
// than the operator lets it, and says so to who looks at the pod.
func TestAttack_policyBeyondTheCeiling(t *testing.T) {
	const ceiling = "  budgets: {pod: {memory: 64MiB, connections: 10}, podMax: {memory: 128MiB, connections: 20}}\n"
	for _, tt := range []struct {
		name    string
		memory  string
		conns   int32
		want    Budget
		limited []string // all of it is in Verdict.Limited
	}{
		{"within", "128Mi", 20, Budget{MemoryBytes: 128 << 20, Conns: 20}, nil},
		{"memory", "1Gi", 20, Budget{MemoryBytes: 128 << 20, Conns: 20}, []string{"SMCRPolicy greedy", "1Gi of memory", "134217728 bytes", "budgets.podMax"}},
		{"connections", "1Mi", 65536, Budget{MemoryBytes: 1 << 20, Conns: 20}, []string{"65536 connections, and gets 20"}},
		{"more than a number holds", "9E", 1<<31 - 1, Budget{MemoryBytes: 128 << 20, Conns: 20}, []string{"9E of memory", "connections"}},
		{"as much as a number of 64 bits does not hold", "16E", 20, Budget{MemoryBytes: 128 << 20, Conns: 20}, []string{"16E of memory", "134217728 bytes"}},
		{"a power of ten", "1e30", 20, Budget{MemoryBytes: 128 << 20, Conns: 20}, []string{"1e30 of memory"}},
		{"a power of ten that no number holds", "1e10000000", 20, Budget{MemoryBytes: 128 << 20, Conns: 20}, []string{"10e9999999 of memory"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := smcrPolicy("greedy", 9, func(s *v1alpha1.SMCRPolicySpec) {
				s.Budget = &v1alpha1.PolicyBudget{Memory: ptr(resource.MustParse(tt.memory)), Connections: &tt.conns}
			})
			n, vs, _ := FromObjects(clusterBase(t, ceiling), Objects{Pods: []PodObject{shopPod()}, Policies: []v1alpha1.SMCRPolicy{p}})
			b := n.PodBudget // policies say nothing of these
			tt.want.Relays, tt.want.Pending, tt.want.SocketBytes = b.Relays, b.Pending, b.SocketBytes
			if got := n.SettingsFor(Pod{Namespace: "shop", Name: "web-0"}).Budget; got != tt.want {
				t.Errorf("budget %+v, want %+v", got, tt.want)
			}
			if limited := vs[0].Limited; (limited != "") != (tt.limited != nil) {
				t.Errorf("limited: %q", limited)
			}
			for _, text := range tt.limited {
				if !strings.Contains(vs[0].Limited, text) {
					t.Errorf("%q does not say %q", vs[0].Limited, text)
				}
			}
		})
	}
}

// TestObjects_survive: what is written to a file and read back means the same.
func TestObjects_survive(t *testing.T) {
	o := Objects{
		Pods:       []PodObject{shopPod("app=web"), {Namespace: "bank", Name: "b", HostNetwork: true}, {Namespace: "shop", Name: "h", UID: "u2", Enabled: ptr("true"), HostNetwork: true, ConfigHash: "d4"}},
		Namespaces: []NamespaceObject{{Name: "bank", Enabled: ptr("true")}},
		Policies: []v1alpha1.SMCRPolicy{smcrPolicy("p", 3, func(s *v1alpha1.SMCRPolicySpec) {
			s.Budget = &v1alpha1.PolicyBudget{Memory: ptr(resource.MustParse("64Mi"))}
			s.Ports = []v1alpha1.PolicyPort{{Port: 80, EndPort: ptr(int32(90))}}
		}), smcrPolicy("q", 4, func(s *v1alpha1.SMCRPolicySpec) { s.Datapath = v1alpha1.DatapathKernel })},
		PeerSlices: []v1alpha1.SMCRPeerSlice{{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "x"}, Policy: "p", Addresses: []string{"10.0.0.1"}}},
	}
	b, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	var back Objects
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	base := clusterBase(t, "")
	want, wantVerdicts, _ := FromObjects(base, o)
	got, gotVerdicts, _ := FromObjects(base, back)
	if diff := cmp.Diff(want, got, comparers); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(wantVerdicts, gotVerdicts); diff != "" {
		t.Errorf("verdicts (-want +got):\n%s", diff)
	}
}

// TestFromObjects_rules: a verdict tells by its Rules that the policies of the pod are others.
func TestFromObjects_rules(t *testing.T) {
	rules := func(policies ...v1alpha1.SMCRPolicy) string {
		_, vs, _ := FromObjects(clusterBase(t, ""), Objects{Pods: []PodObject{shopPod("app=web")}, Policies: policies})
		return vs[0].Rules
	}
	one, other := smcrPolicy("one", 2, nil), smcrPolicy("other", 1, nil)
	one.UID, other.UID, one.Generation, other.Generation = "u1", "u2", 1, 1
	changed, anew := one, one
	changed.Generation = 2
	anew.UID = "u3"
	elsewhere := smcrPolicy("elsewhere", 3, func(s *v1alpha1.SMCRPolicySpec) {
		s.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{"app": "db"}
	})
	want := rules(one, other)
	if got := rules(other, one, elsewhere); got != want {
		t.Errorf("the same policies, and one of other pods: %q, want %q", got, want)
	}
	seen := map[string]string{want: "as they were"}
	for what, got := range map[string]string{
		"changed": rules(changed, other), "made anew": rules(anew, other), "deleted": rules(other), "all deleted": rules(),
	} {
		if was, ok := seen[got]; ok {
			t.Errorf("%s: the rules are those %s", what, was)
		}
		seen[got] = what
	}
}

// TestFromObjects_version: what changes the version of a policy with peer selectors, and who has it.
func TestFromObjects_version(t *testing.T) {
	selecting := func(generation int64) v1alpha1.SMCRPolicy {
		p := smcrPolicy("p", 1, func(s *v1alpha1.SMCRPolicySpec) {
			s.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{"app": "web"}
			s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{}}}}
		})
		p.UID, p.Generation = "u", generation
		return p
	}
	slice := func(name string, generation int64, addrs ...string) v1alpha1.SMCRPeerSlice {
		return v1alpha1.SMCRPeerSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Policy: "p", PolicyGeneration: generation, Addresses: addrs}
	}
	node := func(label string, p v1alpha1.SMCRPolicy, peers ...v1alpha1.SMCRPeerSlice) *Node {
		n, _, _ := FromObjects(clusterBase(t, ""), Objects{Pods: []PodObject{shopPod(label)}, Policies: []v1alpha1.SMCRPolicy{p}, PeerSlices: peers})
		return n
	}
	pod := Pod{Namespace: "shop", Name: "web-0", UID: "u1"}
	was := node("app=web", selecting(1), slice("p-0", 1, "10.0.0.1"), slice("p-1", 1, "10.0.0.2"))
	version := was.VersionOf(pod, "p")
	if version == "" || was.VersionOf(pod, "q") != "" || was.VersionOf(Pod{Namespace: "shop", Name: "other"}, "p") != "" {
		t.Errorf("versions: %q, of a policy that is not there %q", version, was.VersionOf(pod, "q"))
	}
	plain := smcrPolicy("p", 1, nil)
	plain.UID, plain.Generation = "u", 1
	anew := selecting(1)
	anew.UID = "v"
	for _, tt := range []struct {
		name string
		n    *Node
		want bool
	}{
		{"as before", was, true},
		{"other peers", node("app=web", selecting(1), slice("p-0", 1, "10.0.0.3")), true},
		{"no peers", node("app=web", selecting(1)), true},
		{"a changed spec, and the peers of the old one", node("app=web", selecting(2), slice("p-0", 1)), false},
		{"a changed spec", node("app=web", selecting(2), slice("p-0", 2)), false},
		{"peers of a changed spec that is not known yet", node("app=web", selecting(1), slice("p-0", 2), slice("p-1", 1)), false},
		{"another policy of the name", node("app=web", anew), false},
		{"the pod is not selected", node("app=db", selecting(1)), false},
		{"no peer selectors", node("app=web", plain), false},
	} {
		if got := tt.n.HasVersion(pod, version); got != tt.want {
			t.Errorf("%s: has the version: %t", tt.name, got)
		}
		if tt.n.HasVersion(pod, "") {
			t.Errorf("%s: has a version that is none", tt.name)
		}
	}
	old, now := node("app=web", selecting(2), slice("p-0", 1)), node("app=web", selecting(2), slice("p-0", 2))
	if old.VersionOf(pod, "p") == now.VersionOf(pod, "p") {
		t.Errorf("version %q also with the peers of an older spec", now.VersionOf(pod, "p"))
	}
}

// TestNode_Outbound_bounded: however much policies select, the redirection gets
// what it can hold, and nothing that is selected is missing.
func TestNode_Outbound_bounded(t *testing.T) {
	var many []netip.Addr
	for i := range 3000 {
		many = append(many, netip.AddrFrom4([4]byte{10, byte(i % 7), byte(i / 7), byte(i * 11)}))
	}
	for i := range 600 {
		many = append(many, netip.AddrFrom16([16]byte{0xfd, 0, 14: byte(i >> 8), 15: byte(i)}))
	}
	var ports []PortRange
	for i := range uint16(64) {
		ports = append(ports, PortRange{1000 + 3*i, 1000 + 3*i})
	}
	sort := func(as []netip.Addr) []string {
		out := make([]string, len(as))
		for i, a := range as {
			out[i] = a.String()
		}
		return out
	}
	for _, tt := range []struct {
		name      string
		addresses []netip.Addr
		ports     []PortRange
		policies  int
		exact     bool
	}{
		{"few", many[:100], nil, 1, true},
		{"one network", many[3000:3512], nil, 1, true},
		{"many", many, nil, 1, false},
		{"few with ports", many[:3], ports, 1, true},
		{"many with ports", many, ports, 1, false},
		{"several policies", many, ports, 12, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var policies []v1alpha1.SMCRPolicy
			var peers []v1alpha1.SMCRPeerSlice
			for i := range tt.policies {
				name := fmt.Sprint("p", i)
				policies = append(policies, smcrPolicy(name, i, func(s *v1alpha1.SMCRPolicySpec) {
					s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{}}}
					for _, p := range tt.ports {
						s.Ports = append(s.Ports, v1alpha1.PolicyPort{Port: int32(p.First) + int32(i)})
					}
				}))
				peers = append(peers, v1alpha1.SMCRPeerSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop"}, Policy: name, Addresses: sort(tt.addresses)})
			}
			n, _, _ := FromObjects(clusterBase(t, ""), Objects{Pods: []PodObject{shopPod()}, Policies: policies, PeerSlices: peers})
			id := Pod{Namespace: "shop", Name: "web-0"}
			sel := n.Outbound(id)
			ranges := 0
			for _, s := range sel {
				ranges += len(s.Ports)
			}
			if len(sel) > maxSelections || ranges > maxSelectionRanges {
				t.Errorf("%d selections with %d ranges of ports", len(sel), ranges)
			}
			for _, a := range tt.addresses {
				if dst := netip.AddrPortFrom(a, 1000); !n.Decide(id, dst).Accelerate || !diverted(sel, dst) {
					t.Fatalf("%v is not diverted", dst)
				}
			}
			for _, other := range []string{"9.1.1.1:1000", "10.0.0.1:7"} {
				if tt.exact && diverted(sel, netip.MustParseAddrPort(other)) {
					t.Errorf("%s is diverted", other)
				}
			}
			if ports, all := n.InboundPorts(id); len(ports) > maxInboundPorts || len(tt.ports) == 0 && !all {
				t.Errorf("%d inbound ports", len(ports))
			}
		})
	}
}

func FuzzFromObjects(f *testing.F) {
	for _, o := range []Objects{
		{},
		{Pods: []PodObject{shopPod("a=b")}, Policies: []v1alpha1.SMCRPolicy{smcrPolicy("p", 1, nil)}},
	} {
		b, err := json.Marshal(o)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"pods":[{"namespace":"shop","name":"a","uid":"u","enabled":"true","hostNetwork":true,"configHash":"d4"},{"uid":"d4"}],"policies":[{"metadata":{"namespace":"shop","name":"p"},"spec":{"datapath":"Kernel"}}]}`))
	f.Add([]byte(`{"pods":[{"namespace":"shop","name":"a","enabled":"true","labels":{"x":"y"}}],"policies":[{"metadata":{"namespace":"shop","name":"p"},"spec":{"podSelector":{"matchExpressions":[{"key":"x","operator":"In","values":["y"]}]},"peers":{"cidrs":["10.0.0.0/8"],"except":["10.1.0.0/16"],"selectors":[{}]},"ports":[{"port":1,"endPort":9}],"buffers":{"rmbe":"64Ki"}}}],"peerSlices":[{"metadata":{"namespace":"shop","name":"s"},"policy":"p","addresses":["10.0.0.1"]}]}`))
	base := clusterBase(f, "")
	f.Fuzz(func(t *testing.T, b []byte) {
		var o Objects
		if json.Unmarshal(b, &o) != nil {
			return
		}
		n, vs, _ := FromObjects(base, o)
		if len(vs) != len(o.Pods) {
			t.Fatalf("%d verdicts for %d pods", len(vs), len(o.Pods))
		}
		hosts := 0
		for _, v := range vs {
			if v.OptedIn && v.HostNetwork {
				hosts++
			}
			if d, _ := n.DatapathFor(Pod{Namespace: v.Namespace, Name: v.Name}); v.OptedIn && v.HostNetwork && d == DatapathAgent && len(vs) == 1 {
				t.Fatalf("%+v is in the node's network, on the agent's datapath", v)
			}
			id := Pod{Namespace: v.Namespace, Name: v.Name, UID: v.UID}
			for _, dst := range []string{"10.0.0.1:1", "10.1.0.1:9", "[fd00::1]:80"} {
				ap := netip.MustParseAddrPort(dst)
				if d := n.Decide(id, ap); d.Accelerate && (!v.OptedIn || !diverted(n.Outbound(id), ap)) {
					t.Fatalf("%+v: %s is accelerated (%+v), but not diverted", v, dst, d)
				}
			}
			n.InboundPorts(id)
			if s := n.SettingsFor(id); s.Budget.MemoryBytes > base.PodMax.MemoryBytes || s.Budget.Conns > base.PodMax.Conns || s.RMBEBytes < minBufferBytes {
				t.Fatalf("settings %+v", s)
			}
		}
		if hosts != len(n.HostPods) {
			t.Fatalf("%d pods in the node's network, %d of them opted in", len(n.HostPods), hosts)
		}
	})
}

// TestFromObjects_sample: with all policies of the sample in force, the destinations that its words say are left alone
// are, and their neighbours are not.
func TestFromObjects_sample(t *testing.T) {
	text, err := os.ReadFile("../../config/samples/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var o Objects
	except := map[string][]netip.Prefix{} // by namespace, of policies for all of its pods
	for _, doc := range strings.Split(string(text), "\n---\n")[1:] {
		var p v1alpha1.SMCRPolicy
		if err := yaml.UnmarshalStrict([]byte(doc), &p); err != nil {
			t.Fatal(err)
		}
		o.Policies = append(o.Policies, p)
		if p.Spec.Peers != nil && len(p.Spec.PodSelector.MatchLabels)+len(p.Spec.PodSelector.MatchExpressions) == 0 {
			prefixes, err := prefixesOf("except", p.Spec.Peers.Except)
			if err != nil {
				t.Fatal(err)
			}
			except[p.Namespace] = append(except[p.Namespace], prefixes...)
		}
	}
	for _, namespace := range []string{"shop", "billing"} {
		o.Pods = append(o.Pods, PodObject{Namespace: namespace, Name: "p", UID: "u", Enabled: ptr("true")})
	}
	n, _, bad := FromObjects(clusterBase(t, ""), o)
	if len(bad) > 0 || len(except) == 0 {
		t.Fatalf("policies that are refused: %v; exceptions %v", bad, except)
	}
	decide := func(namespace, peer string) Decision {
		return n.Decide(Pod{Namespace: namespace, Name: "p", UID: "u"}, netip.MustParseAddrPort(peer))
	}
	for namespace, prefixes := range except {
		for _, e := range prefixes {
			if d := decide(namespace, netip.AddrPortFrom(e.Addr().Next(), 443).String()); d.Reason != ReasonExcluded {
				t.Errorf("%s is excepted in namespace %s, and the decision is %+v", e, namespace, d)
			}
		}
		if d := decide(namespace, "10.1.2.3:443"); !d.Accelerate {
			t.Errorf("a peer of namespace %s that is not excepted: %+v", namespace, d)
		}
		if d := decide(namespace, "169.254.169.254:80"); d.Accelerate {
			t.Errorf("the metadata service, of namespace %s: %+v", namespace, d)
		}
	}
}
