// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

const kernelPolicy = "policies:\n- {name: a, datapath: Kernel}\n"

// hostPodAt is the line of the file for pod shop/web at a cgroup.
func hostPodAt(cgroup string) string {
	return fmt.Sprintf("  - {namespace: shop, name: web, cgroup: %s}\n", cgroup)
}

// Pods in the node's network are sorted, whatever the order in the file, and no other setting that a reload takes over.
func TestParse_hostPods(t *testing.T) {
	const pods = "  hostPods:\n  - {namespace: shop, name: web, cgroup: '/system.slice/system-web.slice/web@1\\x2d2.service'}\n" +
		"  - {namespace: shop, name: db, cgroup: /a/b/c/d/e/f/g/h/i/j/k/l}\n  - {namespace: bank, name: x, cgroup: /web}\n"
	for _, datapath := range []string{"Kernel", "KernelIfAvailable"} {
		n := mustParse(t, minimal+pods+"policies:\n- {name: a, datapath: "+datapath+"}\n")
		want := []HostPod{
			{Namespace: "bank", Name: "x", Cgroup: "/web"},
			{Namespace: "shop", Name: "db", Cgroup: "/a/b/c/d/e/f/g/h/i/j/k/l"},
			{Namespace: "shop", Name: "web", Cgroup: `/system.slice/system-web.slice/web@1\x2d2.service`},
		}
		if diff := cmp.Diff(want, n.HostPods); diff != "" {
			t.Errorf("%s (-want +got):\n%s", datapath, diff)
		}
		if restart := mustParse(t, minimal).Immutable(n); len(restart) > 0 {
			t.Errorf("%v need a restart", restart)
		}
	}
}

func TestParse_hostPodErrors(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       []string // of each error, in order: a part that it has
	}{
		{"no pods in the node's network", minimal + "  hostPods: web\n", []string{"t:4:13: node.hostPods: is a single value, want a list"}},
		{"pods in the node's network without all that names them", minimal + "  hostPods: [{}, {namespace: a b, name: x, cgroup: /a, pid: 1}]\n", []string{
			"t:4:14: node.hostPods[0].namespace: \"\", want a namespace", "t:4:14: node.hostPods[0].name: \"\", want a name", "t:4:14: node.hostPods[0].cgroup: \"\", want the path of the pod's cgroup from the root",
			"t:4:30: node.hostPods[1].namespace: \"a b\"", "t:4:56: node.hostPods[1].pid: unknown field; known here: namespace, name, cgroup",
		}},
		{"cgroups that are none", minimal + "  hostPods:\n" + hostPodAt("/") + hostPodAt("a/b") + hostPodAt("/a/../b") + hostPodAt("/a/") + hostPodAt("//a") + hostPodAt("/a/./b") + hostPodAt(`"/a\nb"`), []string{
			"t:5:42: node.hostPods[0].cgroup: \"/\", want the path", "node.hostPods[1].cgroup: \"a/b\"", "node.hostPods[2].cgroup: \"/a/../b\"", "node.hostPods[3].cgroup: \"/a/\"",
			"node.hostPods[4].cgroup: \"//a\"", "node.hostPods[5].cgroup: \"/a/./b\"", `node.hostPods[6].cgroup: "/a\nb"`,
		}},
		{"cgroups that are too long and too deep", minimal + "  hostPods:\n" + hostPodAt("/"+strings.Repeat("x", 1024)) + hostPodAt(strings.Repeat("/x", 13)), []string{
			"node.hostPods[0].cgroup: is 1025 bytes long, at most 1024 are allowed", "node.hostPods[1].cgroup: is 13 cgroups deep, and sockets are told apart by the first 12",
		}},
		{"too many pods in the node's network", minimal + "  hostPods: [" + strings.Repeat("{}, ", 257) + "]\n", []string{"t:4:13: node.hostPods: has 257 pods, at most 256 are allowed"}},
		{"a pod in the node's network twice", minimal + "  hostPods:\n" + hostPodAt("/a") + hostPodAt("/b") + kernelPolicy, []string{"t:6:5: node.hostPods[1]: shop/web is given twice"}},
		{"a cgroup in another one", minimal + "  hostPods:\n" + hostPodAt("/a/b") + "  - {namespace: shop, name: above, cgroup: /a}\n  - {namespace: shop, name: beside, cgroup: /a/bc}\n" + kernelPolicy, []string{
			"t:6:5: node.hostPods[1]: cgroup /a of shop/above and /a/b of shop/web have sockets in common", "t:7:5: node.hostPods[2]: cgroup /a/bc of shop/beside and /a of shop/above",
		}},
		{"pods in the node's network of no policy", minimal + "  hostPods:\n" + hostPodAt("/a"), []string{"t:5:5: node.hostPods[0]: shop/web: in the node's network only datapath Kernel or KernelIfAvailable carries connections: no policy selects the pod: make one"}},
		{"a policy of an interface", minimal + "  hostPods:\n" + hostPodAt("/a") + "policies:\n- {name: a, datapath: Kernel, pods: {interfaces: [eth0]}}\n", []string{"no policy selects the pod: make one with this datapath (one with pods.interfaces selects no such pod)"}},
		{"pods in the node's network of the agent's datapath", minimal + "  hostPods:\n" + hostPodAt("/a") + "policies:\n- {name: a}\n", []string{"node.hostPods[0]: shop/web: in the node's network only datapath Kernel or KernelIfAvailable carries connections: policy a, the first that selects the pod, has datapath Agent"}},
	} {
		t.Run(tt.name, func(t *testing.T) { refused(t, tt.text, tt.want) })
	}
}

// What else is wrong in a file is said alone: it may be the policy that the pods have.
func TestParse_hostPodsOfWrongPolicies(t *testing.T) {
	_, err := Parse("t", []byte(minimal+"  hostPods:\n"+hostPodAt("/a")+"policies:\n- {name: a, datapath: kernel}\n"))
	var errs Errors
	if !errors.As(err, &errs) || len(errs) != 1 || errs[0].Field != "policies[0].datapath" {
		t.Errorf("errors:\n%v", err)
	}
}

func TestParseOn_hostPodsInCluster(t *testing.T) {
	_, err := ParseOn(Machine{Cluster: true, Name: "n"}, "t", []byte("node:\n  devices: []\n  hostPods: []\n"))
	if want := "t:3:13: node.hostPods: are pods in a cluster, which the annotation smcr.io/enabled opts in: remove them"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}
}

// TestFromObjects_hostPods: a pod in the node's network is opted in by its own annotation and the kernel's datapath, both. What is
// missing is said, and nothing else.
func TestFromObjects_hostPods(t *testing.T) {
	policy := func(name string, age int, d v1alpha1.Datapath, mode v1alpha1.PolicyMode) v1alpha1.SMCRPolicy {
		return smcrPolicy(name, age, func(s *v1alpha1.SMCRPolicySpec) { s.Datapath, s.Mode = d, mode })
	}
	const agent, kernel, optional, required = v1alpha1.DatapathAgent, v1alpha1.DatapathKernel, v1alpha1.DatapathKernelIfAvailable, v1alpha1.ModeRequired
	const annotate, selectPod, first, hash = "annotate the pod itself", "no SMCRPolicy selects the pod", "has datapath Agent: change that", "config.hash"
	hidden := policy("hidden", 9, kernel, "")
	hidden.Spec.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{"app": "db"}
	elsewhere := policy("elsewhere", 9, kernel, "")
	elsewhere.Namespace = "bank"
	all := []v1alpha1.SMCRPolicy{policy("a", 9, kernel, "")}
	for _, tt := range []struct {
		name           string
		pod, namespace *string
		claimed        bool
		hash           string
		others         []PodObject
		policies       []v1alpha1.SMCRPolicy
		want           bool
		because        []string // parts
		bad            bool
		ineffective    bool
	}{
		{name: "both", pod: ptr("true"), policies: all, want: true, because: []string{"annotation of the pod"}},
		{name: "if available", pod: ptr("true"), policies: []v1alpha1.SMCRPolicy{policy("a", 9, optional, "")}, want: true},
		{name: "the first of the rank says it", pod: ptr("true"), policies: []v1alpha1.SMCRPolicy{policy("a", 9, kernel, ""), policy("b", 8, agent, "")}, want: true},
		{name: "neither", because: []string{annotate, selectPod}},
		{name: "the namespace's annotation", namespace: ptr("true"), policies: all, because: []string{annotate}},
		{name: "a claim", claimed: true, policies: all, because: []string{annotate}},
		{name: "the namespace's annotation and no policy", namespace: ptr("true"), because: []string{annotate, selectPod}},
		{name: "no policy", pod: ptr("true"), because: []string{selectPod}, ineffective: true},
		{name: "a policy of others", pod: ptr("true"), policies: []v1alpha1.SMCRPolicy{hidden, elsewhere}, because: []string{selectPod}, ineffective: true},
		{name: "another datapath", pod: ptr("true"), policies: []v1alpha1.SMCRPolicy{policy("a", 9, agent, ""), policy("b", 8, kernel, "")}, because: []string{"SMCRPolicy a, the first", first}, ineffective: true},
		{
			name: "another one requires SMC-R", pod: ptr("true"), policies: []v1alpha1.SMCRPolicy{policy("a", 9, kernel, ""), policy("b", 8, agent, required)},
			because: []string{"policy b, which selects the pod too, has mode Required, which needs datapath Agent: let that one select other pods"}, ineffective: true,
		},
		{name: "opted out", pod: ptr("false"), namespace: ptr("true"), policies: all, because: []string{"annotation of the pod"}},
		{name: "junk", pod: ptr("yes"), policies: all, because: []string{`annotation smcr.io/enabled of the pod is "yes", want "true"`}, bad: true},
		{name: "junk of the namespace", namespace: ptr("yes"), policies: all, because: []string{annotate}},
		{name: "a static pod", pod: ptr("true"), hash: "d41d8cd98f00b204e9800998ecf8427e", policies: all, want: true},
		{name: "a static pod with a UID of its own", pod: ptr("true"), hash: "6f2d9a5e-0001-4000-8000-000000000001", policies: all, want: true},
		{name: "a hash that leads elsewhere", pod: ptr("true"), hash: "a/../../x", policies: all, because: []string{hash}, ineffective: true},
		{name: "a hash that is as one with hyphens", pod: ptr("true"), hash: "6f2d9a5e_0001", policies: all, because: []string{hash}, ineffective: true},
		{name: "a long hash", pod: ptr("true"), hash: strings.Repeat("a", 65), policies: all, because: []string{hash}, ineffective: true},
		{name: "the hash of another pod", pod: ptr("true"), hash: "d4", others: []PodObject{{Namespace: "kube-system", Name: "etcd", UID: "u9", ConfigHash: "d4"}}, policies: all, because: []string{hash}, ineffective: true},
		{name: "the UID of another pod", pod: ptr("true"), hash: "u9", others: []PodObject{{Namespace: "bank", Name: "b", UID: "u9"}}, policies: all, because: []string{hash}, ineffective: true},
		{name: "another pod that gives itself the UID of this one", pod: ptr("true"), others: []PodObject{{Namespace: "bank", Name: "b", UID: "u9", ConfigHash: "u1", HostNetwork: true}}, policies: all, want: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pod := PodObject{Namespace: "shop", Name: "web-0", UID: "u1", Enabled: tt.pod, HostNetwork: true, Claimed: tt.claimed, ConfigHash: tt.hash}
			n, vs, _ := FromObjects(clusterBase(t, ""), Objects{
				Pods: append(tt.others, pod), Policies: tt.policies, Namespaces: []NamespaceObject{{Name: "shop", Enabled: tt.namespace}},
			})
			v := vs[len(vs)-1]
			if v.OptedIn != tt.want || v.BadAnnotation != tt.bad || v.Ineffective != tt.ineffective || !v.HostNetwork {
				t.Errorf("verdict %+v", v)
			}
			for _, part := range []string{annotate, selectPod, first, hash} {
				if strings.Contains(v.Because, part) && !strings.Contains(strings.Join(tt.because, " "), part) {
					t.Errorf("%q says %q, which is not missing", v.Because, part)
				}
			}
			for _, part := range tt.because {
				if !strings.Contains(v.Because, part) {
					t.Errorf("%q does not say %q", v.Because, part)
				}
			}
			var want []HostPod
			if tt.want {
				want = []HostPod{{Namespace: "shop", Name: "web-0", UID: "u1", CgroupUID: "u1"}}
				if tt.hash != "" {
					want[0].CgroupUID = tt.hash
				}
			}
			if diff := cmp.Diff(want, n.HostPods); diff != "" {
				t.Errorf("pods in the node's network (-want +got):\n%s", diff)
			}
			if c, ok := n.Pods[PodName{"shop", "web-0"}]; ok != tt.want || ok && (c.UID != "u1" || len(c.Policies) != len(tt.policies)) {
				t.Errorf("configuration %+v, %t", c, ok)
			}
		})
	}
}

// The pods in the node's network are in the order of their names, and not those with a network of their own.
func TestFromObjects_hostPodsSorted(t *testing.T) {
	o := Objects{Policies: []v1alpha1.SMCRPolicy{smcrPolicy("a", 9, func(s *v1alpha1.SMCRPolicySpec) { s.Datapath = v1alpha1.DatapathKernel })}}
	for _, name := range []string{"c", "a", "d", "b"} {
		o.Pods = append(o.Pods, PodObject{Namespace: "shop", Name: name, UID: name, Enabled: ptr("true"), HostNetwork: name != "d"})
	}
	base := clusterBase(t, "")
	n, _, _ := FromObjects(base, o)
	var got []string
	for _, p := range n.HostPods {
		got = append(got, p.Name)
	}
	if diff := cmp.Diff([]string{"a", "b", "c"}, got); diff != "" || len(n.Pods) != 4 || base.HostPods != nil {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A file of objects of an earlier version has no hashes, and pods in the node's network all the same.
func TestObjects_beforeHostPods(t *testing.T) {
	const was = `{"pods":[{"namespace":"shop","name":"web-0","uid":"u1","enabled":"true","hostNetwork":true}],"namespaces":null,
		"policies":[{"metadata":{"namespace":"shop","name":"p"},"spec":{"datapath":"Kernel"}}],"peerSlices":null,"nodes":null}`
	var o Objects
	if err := json.Unmarshal([]byte(was), &o); err != nil {
		t.Fatal(err)
	}
	n, _, _ := FromObjects(clusterBase(t, ""), o)
	if diff := cmp.Diff([]HostPod{{Namespace: "shop", Name: "web-0", UID: "u1", CgroupUID: "u1"}}, n.HostPods); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
