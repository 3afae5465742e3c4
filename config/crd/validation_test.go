// SPDX-License-Identifier: Apache-2.0

package crd_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	yamlv3 "sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

var server apiserver.Shared

func TestMain(m *testing.M) { os.Exit(server.Main(m)) }

// refusal is an object that the API server must not take.
type refusal struct {
	name string
	// covers are the constraints of the schema that the row is for, as
	// constraints names them.
	covers []string
	kind   string // SMCRPolicy if empty
	spec   string // YAML under spec, or under status of the other kinds
	object string // YAML of the top level, instead
	want   []string
}

// words is a JSON list with n different words, each made by format from its number.
func words(n int, format string) string {
	var out []string
	for i := range n {
		out = append(out, strconv.Quote(fmt.Sprintf(format, i)))
	}
	return "[" + strings.Join(out, ", ") + "]"
}

// repeat is a JSON list with n times the same item.
func repeat(n int, item string) string {
	return "[" + strings.TrimSuffix(strings.Repeat(item+", ", n), ", ") + "]"
}

const (
	wantLabel = "want a name such as app, or a domain and a name such as example.com/app"
	wantValue = "want letters, digits, '-', '_' and '.'"
)

func refusals() []refusal {
	selector := func(field, body string) string { return field + ": " + body }
	peer := func(field, body string) string { return "peers: {selectors: [{" + field + ": " + body + "}]}" }
	var rows []refusal
	for _, s := range []struct {
		where, path string
		spec        func(string) string
	}{
		{"pods", "spec.podSelector", func(b string) string { return selector("podSelector", b) }},
		{"peer pods", "spec.peers.selectors[0].podSelector", func(b string) string { return peer("podSelector", b) }},
		{"peer namespaces", "spec.peers.selectors[0].namespaceSelector", func(b string) string { return peer("namespaceSelector", b) }},
	} {
		schema := strings.ReplaceAll(s.path, "[0]", "[]")
		rows = append(
			rows,
			refusal{
				name: s.where + ": a key that is no label", covers: []string{schema + ".matchLabels rule self.all("},
				spec: s.spec(`{matchLabels: {"a b": c}}`), want: []string{s.path + ".matchLabels", wantLabel},
			},
			refusal{
				name: s.where + ": too many labels", covers: []string{schema + ".matchLabels maxProperties"},
				spec: s.spec("{matchLabels: {" + strings.Join(numbered(33, "k%d: v"), ", ") + "}}"), want: []string{s.path + ".matchLabels", "must have at most 32 items"},
			},
			refusal{
				name: s.where + ": a value that is none", covers: []string{schema + ".matchLabels{} rule !format.labelValue()"},
				spec: s.spec(`{matchLabels: {app: "-web"}}`), want: []string{s.path + ".matchLabels[app]", wantValue},
			},
			refusal{
				name: s.where + ": a long value", covers: []string{schema + ".matchLabels{} maxLength"},
				spec: s.spec(`{matchLabels: {app: ` + strings.Repeat("x", 64) + `}}`), want: []string{s.path + ".matchLabels.app", "may not be more than 63 bytes"},
			},
			refusal{
				name: s.where + ": a requirement without key", covers: []string{schema + ".matchExpressions[] required key"},
				spec: s.spec(`{matchExpressions: [{operator: Exists}]}`), want: []string{s.path + ".matchExpressions[0].key", "Required value"},
			},
			refusal{
				name: s.where + ": a requirement without operator", covers: []string{schema + ".matchExpressions[] required operator"},
				spec: s.spec(`{matchExpressions: [{key: app}]}`), want: []string{s.path + ".matchExpressions[0].operator", "Required value"},
			},
			refusal{
				name: s.where + ": an unknown operator", covers: []string{schema + ".matchExpressions[].operator enum"},
				spec: s.spec(`{matchExpressions: [{key: app, operator: Gt}]}`),
				want: []string{s.path + ".matchExpressions[0].operator", `supported values: "In", "NotIn", "Exists", "DoesNotExist"`},
			},
			refusal{
				name: s.where + ": a requirement of what is no label", covers: []string{schema + ".matchExpressions[].key rule !format.qualifiedName()"},
				spec: s.spec(`{matchExpressions: [{key: "a/b/c", operator: Exists}]}`), want: []string{s.path + ".matchExpressions[0].key", wantLabel},
			},
			refusal{
				name: s.where + ": a long key", covers: []string{schema + ".matchExpressions[].key maxLength"},
				spec: s.spec(`{matchExpressions: [{key: ` + strings.Repeat("x", 318) + `, operator: Exists}]}`),
				want: []string{s.path + ".matchExpressions[0].key", "may not be more than 317 bytes"},
			},
			refusal{
				name: s.where + ": In without values", covers: []string{schema + ".matchExpressions[] rule self.operator in"},
				spec: s.spec(`{matchExpressions: [{key: app, operator: In}]}`), want: []string{s.path + ".matchExpressions[0]", "operators In and NotIn need values"},
			},
			refusal{
				name: s.where + ": Exists with values", spec: s.spec(`{matchExpressions: [{key: app, operator: Exists, values: [a]}]}`),
				want: []string{s.path + ".matchExpressions[0]", "Exists and DoesNotExist must have none"},
			},
			refusal{
				name: s.where + ": too many requirements", covers: []string{schema + ".matchExpressions maxItems"},
				spec: s.spec(`{matchExpressions: ` + repeat(17, "{key: app, operator: Exists}") + `}`), want: []string{s.path + ".matchExpressions", "must have at most 16 items"},
			},
			refusal{
				name: s.where + ": too many values", covers: []string{schema + ".matchExpressions[].values maxItems"},
				spec: s.spec(`{matchExpressions: [{key: app, operator: In, values: ` + words(33, "v%d") + `}]}`),
				want: []string{s.path + ".matchExpressions[0].values", "must have at most 32 items"},
			},
			refusal{
				name: s.where + ": a requirement of what is no value", covers: []string{schema + ".matchExpressions[].values[] rule !format.labelValue()"},
				spec: s.spec(`{matchExpressions: [{key: app, operator: In, values: ["a b"]}]}`), want: []string{s.path + ".matchExpressions[0].values[0]", wantValue},
			},
			refusal{
				name: s.where + ": a requirement of a long value", covers: []string{schema + ".matchExpressions[].values[] maxLength"},
				spec: s.spec(`{matchExpressions: [{key: app, operator: In, values: [` + strings.Repeat("x", 64) + `]}]}`),
				want: []string{s.path + ".matchExpressions[0].values[0]", "may not be more than 63 bytes"},
			},
		)
	}
	for _, list := range []string{"cidrs", "except"} {
		path := "spec.peers." + list
		one := func(item string) string { return "peers: {" + list + ": [" + item + "]}" }
		rows = append(
			rows,
			refusal{
				name: list + " is empty", covers: []string{path + " minItems"},
				spec: "peers: {" + list + ": []}", want: []string{path, "should have at least 1 items"},
			},
			refusal{
				name: "too many " + list, covers: []string{path + " maxItems"},
				spec: "peers: {" + list + ": " + words(65, "10.%d.0.0/16") + "}", want: []string{path, "must have at most 64 items"},
			},
			refusal{name: list + ": twice the same", spec: "peers: {" + list + ": [10.0.0.0/8, 10.0.0.0/8]}", want: []string{path + "[1]", "Duplicate value"}},
			refusal{name: list + ": an empty network", covers: []string{path + "[] minLength"}, spec: one(`""`), want: []string{path + "[0]", "should be at least 1 chars long"}},
			refusal{
				name: list + ": a long network", covers: []string{path + "[] maxLength"},
				spec: one(strings.Repeat("a", 44)), want: []string{path + "[0]", "may not be more than 43 bytes"},
			},
			refusal{name: list + ": a name", covers: []string{path + "[] rule isCIDR(self)"}, spec: one("redis"), want: []string{path + "[0]", "not a CIDR: want a network such as 10.0.0.0/8"}},
			refusal{name: list + ": an address", spec: one("10.1.2.3"), want: []string{path + "[0]", "a single address is 10.1.2.3/32"}},
			refusal{
				name: list + ": bits behind the prefix", covers: []string{path + "[] rule !isCIDR(self) || cidr(self).masked()"},
				spec: one("10.1.2.3/8"), want: []string{path + "[0]", "write the network address, such as 10.0.0.0/8"},
			},
			refusal{name: list + ": bits behind the prefix of IPv6", spec: one(`"2001:db8::1/64"`), want: []string{path + "[0]", "write the network address"}},
		)
	}
	return slices.Concat(rows, policyRefusals(), otherRefusals())
}

func policyRefusals() []refusal {
	return []refusal{
		{
			name: "a long name", covers: []string{" rule self.metadata.name.size()"},
			object: "metadata: {name: " + strings.Repeat("x", 64) + "}\nspec: {}", want: []string{"metadata.name is longer than 63 characters", "shorten it"},
		},
		{name: "an unknown field", spec: "prority: 5", want: []string{`unknown field "spec.prority"`}},
		{name: "a word where a list is wanted", spec: "ports: 80", want: []string{"spec.ports", "must be of type array"}},
		{name: "priority too high", covers: []string{"spec.priority maximum"}, spec: "priority: 1001", want: []string{"spec.priority", "should be less than or equal to 1000"}},
		{name: "priority too low", covers: []string{"spec.priority minimum"}, spec: "priority: -1001", want: []string{"spec.priority", "should be greater than or equal to -1000"}},
		{name: "an unknown mode", covers: []string{"spec.mode enum"}, spec: "mode: Always", want: []string{"spec.mode", `supported values: "Prefer", "Required"`}},
		{name: "a mode in lower case", spec: "mode: required", want: []string{"spec.mode", `supported values: "Prefer", "Required"`}},
		{name: "peers without anything", covers: []string{"spec.peers rule has(self.cidrs)"}, spec: "peers: {}", want: []string{"spec.peers", "peers is empty: leave it out for the default peers"}},
		{
			name: "an exclusion that excludes nothing", covers: []string{"spec.peers rule !has(self.except)"},
			spec: "peers: {cidrs: [10.0.0.0/8], except: [192.168.0.0/24]}", want: []string{"spec.peers", "except must lie inside cidrs"},
		},
		{name: "an exclusion larger than its network", spec: "peers: {cidrs: [10.1.0.0/16], except: [10.0.0.0/8]}", want: []string{"spec.peers", "except must lie inside cidrs"}},
		{name: "selectors is empty", covers: []string{"spec.peers.selectors minItems"}, spec: "peers: {selectors: []}", want: []string{"spec.peers.selectors", "should have at least 1 items"}},
		{
			name: "too many selectors", covers: []string{"spec.peers.selectors maxItems"},
			spec: "peers: {selectors: " + repeat(17, "{podSelector: {}}") + "}", want: []string{"spec.peers.selectors", "must have at most 16 items"},
		},
		{
			name: "a selector without anything", covers: []string{"spec.peers.selectors[] rule has(self.namespaceSelector)"},
			spec: "peers: {selectors: [{}]}", want: []string{"spec.peers.selectors[0]", "give namespaceSelector, podSelector or both"},
		},
		{name: "too many ports", covers: []string{"spec.ports maxItems"}, spec: "ports: " + repeat(65, "{port: 80}"), want: []string{"spec.ports", "must have at most 64 items"}},
		{name: "a port without number", covers: []string{"spec.ports[] required port"}, spec: "ports: [{endPort: 90}]", want: []string{"spec.ports[0].port", "Required value"}},
		{name: "port 0", covers: []string{"spec.ports[].port minimum"}, spec: "ports: [{port: 0}]", want: []string{"spec.ports[0].port", "should be greater than or equal to 1"}},
		{name: "port 65536", covers: []string{"spec.ports[].port maximum"}, spec: "ports: [{port: 65536}]", want: []string{"spec.ports[0].port", "should be less than or equal to 65535"}},
		{name: "a named port", spec: "ports: [{port: http}]", want: []string{"spec.ports[0].port", "must be of type integer"}},
		{name: "endPort 0", covers: []string{"spec.ports[].endPort minimum"}, spec: "ports: [{port: 1, endPort: 0}]", want: []string{"spec.ports[0].endPort", "should be greater than or equal to 1"}},
		{name: "endPort 65536", covers: []string{"spec.ports[].endPort maximum"}, spec: "ports: [{port: 1, endPort: 65536}]", want: []string{"spec.ports[0].endPort", "should be less than or equal to 65535"}},
		{
			name: "a range that runs backwards", covers: []string{"spec.ports[] rule !has(self.endPort)"},
			spec: "ports: [{port: 90, endPort: 80}]", want: []string{"spec.ports[0]", "endPort is less than port", "swap them"},
		},
		{
			name: "a receive buffer that is no power of two", covers: []string{"spec.buffers.rmbe enum"},
			spec: "buffers: {rmbe: 100Ki}", want: []string{"spec.buffers.rmbe", `supported values: "16Ki", "32Ki", "64Ki", "128Ki", "256Ki", "512Ki"`},
		},
		{
			name: "a receive buffer in bytes", covers: []string{"spec.buffers.rmbe maxLength"},
			spec: `buffers: {rmbe: "524288"}`, want: []string{"spec.buffers.rmbe", "may not be more than 5 bytes", `supported values: "16Ki"`},
		},
		{
			name: "a send buffer in bytes", covers: []string{"spec.buffers.send maxLength"},
			spec: `buffers: {send: "524288"}`, want: []string{"spec.buffers.send", "may not be more than 5 bytes", `supported values: "16Ki"`},
		},
		{
			name: "a send buffer that is too large", covers: []string{"spec.buffers.send enum"},
			spec: "buffers: {send: 1Mi}", want: []string{"spec.buffers.send", `supported values: "16Ki", "32Ki", "64Ki", "128Ki", "256Ki", "512Ki"`},
		},
		{name: "a budget without anything", covers: []string{"spec.budget rule has(self.memory)"}, spec: "budget: {}", want: []string{"spec.budget", "leave it out for the agents' setting"}},
		{
			name: "a budget that is no quantity", covers: []string{"spec.budget.memory pattern"},
			spec: "budget: {memory: much}", want: []string{"spec.budget.memory", "should match"},
		},
		{
			name: "a budget in bytes that is too small", covers: []string{"spec.budget.memory rule !string(self).matches("},
			spec: "budget: {memory: 4096}", want: []string{"spec.budget.memory", "memory is less than 1Mi"},
		},
		{
			name: "a budget whose exponent keeps the API server busy", covers: []string{"spec.budget.memory rule string(self).matches("},
			spec: `{budget: {memory: "1e3000000"}, buffers: {rmbe: 512Ki, send: 512Ki}}`, want: []string{"spec.budget.memory", "not an amount of memory: want bytes, such as 64Mi"},
		},
		{name: "a budget with a negative exponent that does", spec: `budget: {memory: "1e-3000000"}`, want: []string{"spec.budget.memory", "not an amount of memory"}},
		{name: "a budget with a broken exponent", spec: `budget: {memory: "1e1.5"}`, want: []string{"spec.budget.memory", "not an amount of memory"}},
		{name: "a budget with a space", spec: `budget: {memory: "64Mi "}`, want: []string{"spec.budget.memory", "such as 64Mi, 1.5Gi or 1e9, without spaces"}},
		{name: "a budget of nothing", spec: `budget: {memory: ""}`, want: []string{"spec.budget.memory", "not an amount of memory"}},
		{name: "a budget in milli-bytes", spec: `budget: {memory: "2000m"}`, want: []string{"spec.budget.memory", "memory is less than 1Mi"}},
		{name: "a negative budget", spec: `budget: {memory: -1Gi}`, want: []string{"spec.budget.memory", "memory is less than 1Mi"}},
		{
			name: "a budget without room for the buffers", covers: []string{"spec rule !has(self.budget)"},
			spec: `{budget: {memory: 2Mi}, buffers: {rmbe: 512Ki, send: 256Ki}}`, want: []string{"spec.budget.memory", "no room for any connection", "raise it, or lower the buffers"},
		},
		{name: "no connections", covers: []string{"spec.budget.connections minimum"}, spec: "budget: {connections: 0}", want: []string{"spec.budget.connections", "should be greater than or equal to 1"}},
		{
			name: "too many connections", covers: []string{"spec.budget.connections maximum"},
			spec: "budget: {connections: 65537}", want: []string{"spec.budget.connections", "should be less than or equal to 65536"},
		},
		{
			name: "an unknown redundancy", covers: []string{"spec.linkRedundancy enum"},
			spec: "linkRedundancy: Asymmetric", want: []string{"spec.linkRedundancy", `supported values: "Single", "Symmetric"`},
		},
		{name: "transports is empty", covers: []string{"spec.transports minItems"}, spec: "transports: []", want: []string{"spec.transports", "should have at least 1 items"}},
		{
			name: "too many transports", covers: []string{"spec.transports maxItems"},
			spec: "transports: [Hardware, SoftwareRoCE, TCP]", want: []string{"spec.transports", "must have at most 2 items"},
		},
		{name: "an unknown transport", covers: []string{"spec.transports[] enum"}, spec: "transports: [TCP]", want: []string{"spec.transports[0]", `supported values: "Hardware", "SoftwareRoCE"`}},
		{name: "twice the same transport", spec: "transports: [Hardware, Hardware]", want: []string{"spec.transports[1]", "Duplicate value"}},
		{name: "an unknown isolation", covers: []string{"spec.isolation enum"}, spec: "isolation: Cluster", want: []string{"spec.isolation", `supported values: "Pod", "Namespace", "Node"`}},
		{
			name: "an isolation of the kernel's on the agent", covers: []string{"spec rule self.datapath != 'Agent'"},
			spec: "isolation: Node", want: []string{"spec.isolation", "isolation Node is for datapath Kernel and KernelIfAvailable"},
		},
		{
			name: "an unknown datapath", covers: []string{"spec.datapath enum"},
			spec: "{datapath: kernel, isolation: Node}", want: []string{"spec.datapath", `supported values: "Agent", "Kernel", "KernelIfAvailable"`},
		},
		{
			name: "the kernel with the isolation that is the default", covers: []string{"spec rule self.datapath == 'Agent' || self.isolation"},
			spec: "datapath: Kernel", want: []string{"spec.isolation", "set isolation to Node if pods may share them, or use datapath Agent"},
		},
		{
			name: "the kernel for the pods of a namespace", spec: "{datapath: KernelIfAvailable, isolation: Namespace}",
			want: []string{"spec.isolation", "the kernel's link groups are those of the node"},
		},
		{
			name: "the kernel with mode Required", covers: []string{"spec rule self.datapath == 'Agent' || self.mode"},
			spec: "{datapath: Kernel, isolation: Node, mode: Required}", want: []string{"spec.mode", "mode Required needs datapath Agent"},
		},
		{
			name: "the kernel if available with mode Required", spec: "{datapath: KernelIfAvailable, isolation: Node, mode: Required}",
			want: []string{"spec.mode", "mode Required needs datapath Agent"},
		},
		{
			name: "the kernel with a budget", covers: []string{"spec rule self.datapath == 'Agent' || !has(self.budget)"},
			spec: "{datapath: KernelIfAvailable, isolation: Node, budget: {connections: 10}}", want: []string{"spec.budget", "a budget needs datapath Agent"},
		},
		{
			name: "the kernel with version 1 alone", covers: []string{"spec rule self.datapath == 'Agent' || !has(self.versions)"},
			spec: "{datapath: Kernel, isolation: Node, versions: [V1]}", want: []string{"spec.versions", "leave versions out, or use datapath Agent"},
		},
		{
			name: "the kernel with version 2 alone", spec: "{datapath: Kernel, isolation: Node, versions: [V2]}",
			want: []string{"spec.versions", "version 2 of SMC-R where the peer has it, and else version 1"},
		},
		{
			name: "the kernel on the agent's devices", covers: []string{"spec rule self.datapath == 'Agent' || !has(self.transports)"},
			spec: "{datapath: Kernel, isolation: Node, transports: [SoftwareRoCE]}", want: []string{"spec.transports", "SoftwareRoCE is the agent's: add Hardware, or use datapath Agent"},
		},
		{
			name: "the kernel with one link", covers: []string{"spec rule self.datapath == 'Agent' || self.linkRedundancy"},
			spec: "{datapath: Kernel, isolation: Node, linkRedundancy: Single}", want: []string{"spec.linkRedundancy", "linkRedundancy Single needs datapath Agent"},
		},
		{name: "versions is empty", covers: []string{"spec.versions minItems"}, spec: "versions: []", want: []string{"spec.versions", "should have at least 1 items"}},
		{name: "too many versions", covers: []string{"spec.versions maxItems"}, spec: "versions: [V1, V2, V3]", want: []string{"spec.versions", "must have at most 2 items"}},
		{name: "an unknown version", covers: []string{"spec.versions[] enum"}, spec: "versions: [V3]", want: []string{"spec.versions[0]", `supported values: "V1", "V2"`}},
	}
}

// otherRefusals are of the objects that programs write.
func otherRefusals() []refusal {
	const link, node, slice = "SMCRLink", "SMCRNode", "SMCRPeerSlice"
	long := strings.Repeat("x", 1025)
	return []refusal{
		{name: "a link of no node", kind: link, covers: []string{"status required node"}, spec: "state: Active", want: []string{"status.node", "Required value"}},
		{name: "a peer with a name that is too long", kind: link, covers: []string{"status.peerClaimedName maxLength"}, spec: "{node: n, peerClaimedName: " + strings.Repeat("x", 33) + "}", want: []string{"status.peerClaimedName", "may not be more than 32 bytes"}},
		{name: "a peer with a name that no host has", kind: link, covers: []string{"status.peerClaimedName pattern"}, spec: `{node: n, peerClaimedName: "\e[31mx"}`, want: []string{"status.peerClaimedName", "should match"}},
		{name: "a link with an unknown role", kind: link, covers: []string{"status.role enum"}, spec: "{node: n, role: Both}", want: []string{"status.role", "supported values"}},
		{name: "a link with an unknown datapath", kind: link, covers: []string{"status.datapath enum"}, spec: "{node: n, datapath: KernelIfAvailable}", want: []string{"status.datapath", "supported values"}},
		{name: "a link with an unknown state", kind: link, covers: []string{"status.state enum"}, spec: "{node: n, state: Up}", want: []string{"status.state", "supported values"}},
		{name: "a link with an unknown redundancy", kind: link, covers: []string{"status.redundancy enum"}, spec: "{node: n, redundancy: Double}", want: []string{"status.redundancy", "supported values"}},
		{name: "a link with a long error", kind: link, covers: []string{"status.lastError maxLength"}, spec: "{node: n, lastError: " + long + "}", want: []string{"status.lastError", "may not be more than 1024 bytes"}},
		{
			name: "a link group with too many links", kind: link, covers: []string{"status.links maxItems"},
			spec: "{node: n, links: [" + strings.Join(numbered(9, "{id: %d, state: Active}"), ", ") + "]}", want: []string{"status.links", "must have at most 8 items"},
		},
		{name: "a link without number", kind: link, covers: []string{"status.links[] required id"}, spec: "{node: n, links: [{state: Active}]}", want: []string{"status.links[0].id", "Required value"}},
		{name: "a link without state", kind: link, covers: []string{"status.links[] required state"}, spec: "{node: n, links: [{id: 1}]}", want: []string{"status.links[0].state", "Required value"}},
		{name: "a negative link number", kind: link, covers: []string{"status.links[].id minimum"}, spec: "{node: n, links: [{id: -1, state: Active}]}", want: []string{"status.links[0].id", "greater than or equal to 0"}},
		{name: "link number 256", kind: link, covers: []string{"status.links[].id maximum"}, spec: "{node: n, links: [{id: 256, state: Active}]}", want: []string{"status.links[0].id", "less than or equal to 255"}},
		{name: "an unknown state of a link", kind: link, covers: []string{"status.links[].state enum"}, spec: "{node: n, links: [{id: 1, state: Up}]}", want: []string{"status.links[0].state", "supported values"}},

		{name: "a node with an unknown wire", kind: node, covers: []string{"status.wire.state enum"}, spec: "wire: {state: Closed}", want: []string{"status.wire.state", "supported values"}},
		{
			name: "a node with a long detail of its wire", kind: node, covers: []string{"status.wire.detail maxLength"},
			spec: "wire: {detail: " + long + "}", want: []string{"status.wire.detail", "may not be more than 1024 bytes"},
		},
		{name: "a node with an unknown transport", kind: node, covers: []string{"status.transport enum"}, spec: "transport: TCP", want: []string{"status.transport", "supported values"}},
		{
			name: "a node with too many devices", kind: node, covers: []string{"status.devices maxItems"},
			spec: "devices: [" + strings.Join(numbered(9, "{name: d%d}"), ", ") + "]", want: []string{"status.devices", "must have at most 8 items"},
		},
		{
			name: "a node with too many devices for pods", kind: node, covers: []string{"status.podDevices maxItems"},
			spec: "podDevices: [" + strings.Join(numbered(257, "{id: d%d}"), ", ") + "]", want: []string{"status.podDevices", "must have at most 256 items"},
		},
		{name: "a device for pods without ID", kind: node, covers: []string{"status.podDevices[] required id"}, spec: "podDevices: [{state: Up}]", want: []string{"status.podDevices[0].id", "Required value"}},
		{name: "a device for pods in an unknown state", kind: node, covers: []string{"status.podDevices[].state enum"}, spec: "podDevices: [{id: d, state: Free}]", want: []string{"status.podDevices[0].state", "supported values"}},
		{
			name: "a device for pods with a long detail", kind: node, covers: []string{"status.podDevices[].detail maxLength"},
			spec: "podDevices: [{id: d, detail: " + long + "}]", want: []string{"status.podDevices[0].detail", "may not be more than 1024 bytes"},
		},
		{name: "a device without name", kind: node, covers: []string{"status.devices[] required name"}, spec: "devices: [{port: Active}]", want: []string{"status.devices[0].name", "Required value"}},
		{name: "a device with an unknown transport", kind: node, covers: []string{"status.devices[].transport enum"}, spec: "devices: [{name: d, transport: TCP}]", want: []string{"status.devices[0].transport", "supported values"}},
		{name: "a device with an unknown port state", kind: node, covers: []string{"status.devices[].port enum"}, spec: "devices: [{name: d, port: Up}]", want: []string{"status.devices[0].port", "supported values"}},
		{
			name: "a device with a long detail", kind: node, covers: []string{"status.devices[].detail maxLength"},
			spec: "devices: [{name: d, detail: " + long + "}]", want: []string{"status.devices[0].detail", "may not be more than 1024 bytes"},
		},
		{
			name: "a device with too many other addresses", kind: node, covers: []string{"status.devices[].otherAddresses maxItems"},
			spec: "devices: [{name: d, otherAddresses: [" + strings.Join(numbered(17, "192.0.2.%d"), ", ") + "]}]", want: []string{"status.devices[0].otherAddresses", "must have at most 16 items"},
		},
		{
			name: "a device with another address that is too long", kind: node, covers: []string{"status.devices[].otherAddresses[] maxLength"},
			spec: `devices: [{name: d, otherAddresses: ["2001:db8:1:2:3::1"]}]`, want: []string{"status.devices[0].otherAddresses[0]", "may not be more than 15 bytes"},
		},
		{
			name: "a node with too many capabilities", kind: node, covers: []string{"status.capabilities maxItems"},
			spec: "capabilities: [" + strings.Join(numbered(65, "{name: c%d, state: Missing}"), ", ") + "]", want: []string{"status.capabilities", "must have at most 64 items"},
		},
		{name: "a capability without name", kind: node, covers: []string{"status.capabilities[] required name"}, spec: "capabilities: [{state: Missing}]", want: []string{"status.capabilities[0].name", "Required value"}},
		{name: "a capability without state", kind: node, covers: []string{"status.capabilities[] required state"}, spec: "capabilities: [{name: c}]", want: []string{"status.capabilities[0].state", "Required value"}},
		{name: "a capability with an unknown state", kind: node, covers: []string{"status.capabilities[].state enum"}, spec: "capabilities: [{name: c, state: Yes}]", want: []string{"status.capabilities[0].state", "supported values"}},
		{
			name: "a capability with a long reason", kind: node, covers: []string{"status.capabilities[].reason maxLength"},
			spec: "capabilities: [{name: c, state: Missing, reason: " + strings.Repeat("x", 65) + "}]", want: []string{"status.capabilities[0].reason", "may not be more than 64 bytes"},
		},
		{
			name: "a capability with a long detail", kind: node, covers: []string{"status.capabilities[].detail maxLength"},
			spec: "capabilities: [{name: c, state: Missing, detail: " + long + "}]", want: []string{"status.capabilities[0].detail", "may not be more than 1024 bytes"},
		},

		{name: "a slice of no policy", kind: slice, covers: []string{" required policy"}, object: "{metadata: {name: s}, addresses: [10.0.0.1]}", want: []string{"policy", "Required value"}},
		{
			name: "a slice with too many addresses", kind: slice, covers: []string{"addresses maxItems"},
			object: "{metadata: {name: s}, policy: p, addresses: " + words(257, "10.0.0.%d") + "}", want: []string{"addresses", "must have at most 256 items"},
		},
	}
}

func numbered(n int, format string) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf(format, i))
	}
	return out
}

func (r refusal) build(t *testing.T) *unstructured.Unstructured {
	t.Helper()
	kind := r.kind
	if kind == "" {
		kind = "SMCRPolicy"
	}
	body := r.object
	if body == "" {
		var inner map[string]any
		if err := yamlv3.Unmarshal([]byte(r.spec), &inner); err != nil {
			t.Fatalf("the row's YAML: %v\n%s", err, r.spec)
		}
		field := "status"
		if kind == "SMCRPolicy" {
			field = "spec"
		}
		out, err := yamlv3.Marshal(map[string]any{"metadata": map[string]any{"name": "refused"}, field: inner})
		if err != nil {
			t.Fatal(err)
		}
		body = string(out)
	}
	u := &unstructured.Unstructured{}
	if err := yamlv3.Unmarshal([]byte(body), &u.Object); err != nil {
		t.Fatalf("the row's YAML: %v\n%s", err, body)
	}
	u.SetAPIVersion("smcr.io/v1alpha1")
	u.SetKind(kind)
	if kind == "SMCRPolicy" || kind == "SMCRPeerSlice" {
		u.SetNamespace("default")
	}
	return u
}

// A person who gets a policy wrong is told by the API server which field it is
// and what to write instead.
func TestRefused(t *testing.T) {
	c := newClient(t)
	for _, r := range refusals() {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			err := c.Create(t.Context(), r.build(t), client.DryRunAll, client.FieldValidation("Strict"))
			if err == nil {
				t.Fatalf("accepted:\n%s%s", r.spec, r.object)
			}
			for _, w := range r.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("the message lacks %q:\n%v", w, err)
				}
			}
		})
	}
}

// Every form of a quantity is taken, as everywhere in Kubernetes.
func TestQuantities(t *testing.T) {
	c := newClient(t)
	for _, memory := range []string{
		"1048576", "67108864", `"67108864"`, "1e9", `"1e9"`, `"1E9"`, `"1e+09"`, "1.5e9", "64Mi", "+64Mi", "0.5Gi", ".5Gi", "5.Mi", "1.000000001G", "1Ti",
		`"2000000000000m"`, "8Ei", "16E", `"1e30"`, `"9223372036854775808"`,
	} {
		t.Run(memory, func(t *testing.T) {
			t.Parallel()
			r := refusal{spec: "budget: {memory: " + memory + "}"}
			if err := c.Create(t.Context(), r.build(t), client.DryRunAll, client.FieldValidation("Strict")); err != nil {
				t.Error(err)
			}
		})
	}
}

// Each constraint of the schemas has a row above, and each row a constraint.
func TestEveryConstraintHasARefusal(t *testing.T) {
	defs, err := apiserver.Definitions()
	if err != nil {
		t.Fatal(err)
	}
	missing := map[string]bool{}
	for _, d := range defs {
		for _, c := range constraints(d) {
			missing[c] = true
		}
	}
	if len(missing) == 0 {
		t.Fatal("no constraint in any schema: this test tests nothing")
	}
	for _, r := range refusals() {
		kind := r.kind
		if kind == "" {
			kind = "SMCRPolicy"
		}
		for _, c := range r.covers {
			found := false
			for m := range missing {
				if strings.HasPrefix(m, kind+" "+c) {
					delete(missing, m)
					found = true
				}
			}
			if !found {
				t.Errorf("row %q covers %q, which no schema of %s has, or another row covers already", r.name, c, kind)
			}
		}
	}
	for _, m := range slices.Sorted(maps.Keys(missing)) {
		t.Errorf("no refused example for: %s", m)
	}
}

// constraints lists what the schema of a definition demands, as "KIND PATH WHAT".
// Conditions are left out: they are of apimachinery.
func constraints(d *apiextensionsv1.CustomResourceDefinition) []string {
	var out []string
	var walk func(path string, s *apiextensionsv1.JSONSchemaProps)
	walk = func(path string, s *apiextensionsv1.JSONSchemaProps) {
		add := func(what string) { out = append(out, d.Spec.Names.Kind+" "+path+" "+what) }
		for name, set := range map[string]bool{
			"enum": s.Enum != nil, "minimum": s.Minimum != nil, "maximum": s.Maximum != nil,
			"minLength": s.MinLength != nil, "maxLength": s.MaxLength != nil, "pattern": s.Pattern != "",
			"minItems": s.MinItems != nil, "maxItems": s.MaxItems != nil,
			"minProperties": s.MinProperties != nil, "maxProperties": s.MaxProperties != nil,
		} {
			if set {
				add(name)
			}
		}
		for _, r := range s.Required {
			if path == "status" && d.Spec.Names.Kind == "SMCRPolicy" || strings.HasPrefix(path, "status.") && d.Spec.Names.Kind == "SMCRPolicy" {
				break // its only writer is the controller, by the same types
			}
			add("required " + r)
		}
		for _, v := range s.XValidations {
			add("rule " + v.Rule)
		}
		for name := range s.Properties {
			if name == "conditions" {
				continue
			}
			p := s.Properties[name]
			walk(strings.TrimPrefix(path+"."+name, "."), &p)
		}
		if s.Items != nil && s.Items.Schema != nil {
			walk(path+"[]", s.Items.Schema)
		}
		if s.AdditionalProperties != nil && s.AdditionalProperties.Schema != nil {
			walk(path+"{}", s.AdditionalProperties.Schema)
		}
	}
	for i := range d.Spec.Versions {
		walk("", d.Spec.Versions[i].Schema.OpenAPIV3Schema)
	}
	return out
}

// The samples are what people copy.
func TestSamplesAreAccepted(t *testing.T) {
	c := newClient(t)
	files, err := filepath.Glob("../samples/*policy*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no samples of policies: %v", err)
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		d := yaml.NewYAMLOrJSONDecoder(f, 4096)
		for n := 0; ; n++ {
			u := &unstructured.Unstructured{}
			if err := d.Decode(&u.Object); err != nil {
				if errors.Is(err, io.EOF) && n > 0 {
					break
				}
				t.Fatalf("%s: document %d: %v", name, n, err)
			}
			if u.GetKind() != "SMCRPolicy" {
				continue // a Namespace or a Pod that goes with it
			}
			t.Run(filepath.Base(name)+"/"+u.GetName(), func(t *testing.T) {
				u.SetNamespace("default")
				if err := c.Create(context.WithoutCancel(t.Context()), u, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// What a policy leaves out is visible in the object that is stored.
func TestDefaults(t *testing.T) {
	c := newClient(t)
	r := refusal{object: "{metadata: {name: defaults}}"}
	u := r.build(t)
	u.Object["spec"] = map[string]any{}
	if err := c.Create(t.Context(), u, client.DryRunAll); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"mode": "Prefer", "datapath": "Agent", "priority": "0", "linkRedundancy": "Symmetric", "isolation": "Pod"}
	spec, _, _ := unstructured.NestedMap(u.Object, "spec")
	got := map[string]string{}
	for k, v := range spec {
		got[k] = fmt.Sprint(v)
	}
	if !maps.Equal(got, want) {
		t.Errorf("an empty spec is stored as %v, want %v", got, want)
	}
}

func newClient(t *testing.T) client.Client {
	t.Helper()
	c, err := client.New(server.Config(t), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}
