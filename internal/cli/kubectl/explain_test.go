// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cli/kubectl/kubectltest"
)

// The WebSocket of a remote command has a heartbeat that ends with it, a moment
// later.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// objects is a cluster: two nodes with agents, one without, and a shop.
func objects() map[string]string {
	m := map[string]string{}
	ns := func(name, annotations string) {
		m["/api/v1/namespaces/"+name] = fmt.Sprintf(`{"metadata":{"name":%q,"annotations":{%s}}}`, name, annotations)
	}
	pod := func(namespace, name, node, ip, annotations, more string) {
		m["/api/v1/namespaces/"+namespace+"/pods/"+name] = fmt.Sprintf(`{"metadata":{"namespace":%q,"name":%q,"annotations":{%s}},
			"spec":{"nodeName":%q%s},"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%[6]q}]}}`, namespace, name, annotations, node, more, ip)
	}
	agent := func(name, node, phase, created, more string) {
		m["/api/v1/namespaces/kube-smcr/pods/"+name] = fmt.Sprintf(`{"metadata":{"namespace":"kube-smcr","name":%q,"creationTimestamp":%q,
			"labels":{"app.kubernetes.io/part-of":"kube-smcr","app.kubernetes.io/component":"agent"}%s},
			"spec":{"nodeName":%q,"hostNetwork":true},"status":{"phase":%q,"podIP":"192.0.2.1","conditions":[{"type":"Ready","status":"True"}]}}`, name, created, more, node, phase)
	}
	ns("shop", `"smcr.io/enabled":"true"`)
	ns("dull", ``)
	pod("shop", "web-0", "node-a", "10.1.0.5", `"smcr.io/status":"Enabled"`, "")
	pod("shop", "off", "node-a", "10.1.0.6", `"smcr.io/enabled":"false"`, "")
	pod("shop", "junk", "node-a", "10.1.0.7", `"smcr.io/enabled":"yes"`, "")
	pod("shop", "host", "node-a", "192.0.2.1", ``, `,"hostNetwork":true`)
	pod("shop", "host-on", "node-b", "192.0.2.2", `"smcr.io/enabled":"true","smcr.io/status":"Enabled: KERNEL"`, `,"hostNetwork":true`)
	pod("shop", "host-asks", "node-b", "192.0.2.2", `"smcr.io/enabled":"true"`, `,"hostNetwork":true`)
	pod("shop", "host-waits", "node-b", "192.0.2.2", `"smcr.io/enabled":"true","smcr.io/status":"Pending: NOT_ATTACHED"`, `,"hostNetwork":true`)
	pod("shop", "host-off", "node-b", "192.0.2.2", `"smcr.io/enabled":"false"`, `,"hostNetwork":true`)
	for name, ip := range map[string]string{"init": "10.1.0.8", "pulls": ""} {
		pod("shop", name, "node-a", ip, ``, "")
		m["/api/v1/namespaces/shop/pods/"+name] = strings.Replace(m["/api/v1/namespaces/shop/pods/"+name], "Running", "Pending", 1)
	}
	pod("shop", "far", "node-c", "10.3.0.5", ``, "")
	pod("shop", "far-kernel", "node-c", "10.3.0.6", `"smcr.io/status":"Enabled: KERNEL, no agent"`, "")
	pod("shop", "redis-0", "node-b", "10.2.0.9", ``, "")
	pod("dull", "db-0", "node-b", "10.2.0.10", ``, "")
	claiming := func(name, annotations, driver string) {
		m["/api/v1/namespaces/dull/pods/"+name] = fmt.Sprintf(`{"metadata":{"namespace":"dull","name":%q,"annotations":{%s}},
			"spec":{"nodeName":"node-b","resourceClaims":[{"name":"later","resourceClaimTemplateName":"t"},{"name":"nic","resourceClaimTemplateName":"t"}]},
			"status":{"phase":"Running","podIP":"10.2.0.11","resourceClaimStatuses":[{"name":"nic","resourceClaimName":"%[1]s-nic-x"}]}}`, name, annotations)
		m["/apis/resource.k8s.io/v1/namespaces/dull/resourceclaims/"+name+"-nic-x"] = fmt.Sprintf(`{"metadata":{"namespace":"dull","name":%q},
			"status":{"allocation":{"devices":{"results":[{"request":"nic","driver":%q,"pool":"node-b","device":"soft0"}]}}}}`, name+"-nic-x", driver)
	}
	claiming("rdma", `"smcr.io/status":"Enabled"`, v1alpha1.DRADriver)
	claiming("rdma-off", `"smcr.io/enabled":"false"`, v1alpha1.DRADriver)
	claiming("gpu", ``, "gpu.example.com")
	m["/api/v1/namespaces/dull/pods/extended"] = `{"metadata":{"namespace":"dull","name":"extended"},"spec":{"nodeName":"node-b"},
		"status":{"phase":"Running","podIP":"10.2.0.14","extendedResourceClaimStatus":{"resourceClaimName":"rdma-nic-x","requestMappings":[]}}}`
	// Nobody may read the namespace of these.
	pod("hidden", "web", "node-b", "10.2.0.12", ``, "")
	pod("hidden", "off", "node-b", "10.2.0.13", ``, "")
	pod("hidden", "old", "node-b", "10.2.0.15", ``, "")
	agent("agent-old", "node-a", "Running", "2026-01-01T00:00:00Z", `,"deletionTimestamp":"2026-01-03T00:00:00Z"`)
	agent("agent-a", "node-a", "Running", "2026-01-02T00:00:00Z", "")
	agent("agent-b", "node-b", "Running", "2026-01-02T00:00:00Z", "")
	agent("agent-d", "node-d", "Pending", "2026-01-02T00:00:00Z", "")
	svc := func(namespace, name, spec string) {
		m["/api/v1/namespaces/"+namespace+"/services/"+name] = fmt.Sprintf(`{"metadata":{"namespace":%q,"name":%q},"spec":{%s}}`, namespace, name, spec)
	}
	slice := func(namespace, service, pod, ip string) {
		m["/apis/discovery.k8s.io/v1/namespaces/"+namespace+"/endpointslices/"+service+"-x"] = fmt.Sprintf(`{"metadata":{"namespace":%q,"name":%q,
			"labels":{"kubernetes.io/service-name":%q}},"addressType":"IPv4","ports":[{"name":"redis","port":6379,"protocol":"TCP"}],
			"endpoints":[{"addresses":[%q],"conditions":{"ready":true},"targetRef":{"kind":"Pod","namespace":%[1]q,"name":%[5]q}}]}`,
			namespace, service+"-x", service, ip, pod)
	}
	ports := `"ports":[{"name":"redis","port":6380,"protocol":"TCP"},{"name":"dns","port":53,"protocol":"UDP"}]`
	svc("shop", "redis", `"clusterIP":"10.96.0.7","clusterIPs":["10.96.0.7"],`+ports)
	svc("shop", "headless", `"clusterIP":"None","clusterIPs":["None"],`+ports)
	svc("shop", "empty", `"clusterIP":"None","clusterIPs":["None"],`+ports)
	svc("shop", "dual", `"clusterIPs":["10.96.0.8","fd00:96::8"],"selector":{"app":"db"},`+ports)
	svc("dull", "redis", `"clusterIP":"10.96.1.7","clusterIPs":["10.96.1.7"],`+ports)
	svc("shop", "cidr", `"clusterIP":"10.96.0.66","clusterIPs":["10.96.0.66"],`+ports)
	svc("shop", "outside", `"type":"ExternalName","externalName":"example.com",`+ports)
	slice("shop", "redis", "redis-0", "10.2.0.9")
	slice("shop", "headless", "redis-0", "10.2.0.9")
	slice("shop", "dual", "redis-0", "10.2.0.9")
	slice("shop", "cidr", "redis-0", "10.2.0.9")
	m["/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices/dual-6"] = strings.NewReplacer("10.2.0.9", "fd00:2::9", "IPv4", "IPv6").Replace(
		m["/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices/dual-x"])
	// Pods of a Deployment and of a StatefulSet: those of the latter have names of their own.
	for name, node := range map[string]string{"db-0": "node-a", "db-1": "node-b"} {
		m["/api/v1/namespaces/shop/pods/"+name] = fmt.Sprintf(`{"metadata":{"namespace":"shop","name":%q,"labels":{"app":"db"}},
			"spec":{"nodeName":%q,"hostname":%[1]q,"subdomain":"headless"},
			"status":{"phase":"Running","podIP":"10.1.0.3%[3]s","podIPs":[{"ip":"10.1.0.3%[3]s"},{"ip":"fd00:1::3%[3]s"}]}}`, name, node, name[3:])
	}
	for path, name := range map[string]string{"deployments": "web", "statefulsets": "db"} {
		m["/apis/apps/v1/namespaces/shop/"+path+"/"+name] = fmt.Sprintf(`{"metadata":{"namespace":"shop","name":%q},"spec":{"selector":{"matchLabels":{"app":"db"}}}}`, name)
	}
	m["/apis/apps/v1/namespaces/shop/deployments/asleep"] = `{"metadata":{"namespace":"shop","name":"asleep"},"spec":{"selector":{"matchLabels":{"app":"asleep"}}}}`
	return m
}

// agents answers for smcrctl explain SRC DST and status. Several may be asked at
// once.
func agents(t testing.TB, asked *[]string) kubectltest.Exec {
	var mu sync.Mutex // guards asked
	return func(pod string, command []string) (string, string, int) {
		line := pod + ": " + strings.Join(command[1:], " ")
		mu.Lock()
		*asked = append(*asked, line)
		mu.Unlock()
		e := agentapi.Explanation{APIVersion: agentapi.Version, Verdict: "on SMC-R", Policy: "shop/fast"}
		switch {
		case command[1] == "status" && pod == "kube-smcr/agent-b":
			return "", "smcrctl: nothing answers\n", exitNotRunning
		case command[1] == "status":
			b, err := json.Marshal(agentapi.Status{Node: pod})
			must(t, err)
			return string(b), "", 0
		case strings.Contains(line, "explain hidden/web "):
			e.Pod = "hidden/web"
		case strings.Contains(line, "explain hidden/off "), strings.HasPrefix(line, "kube-smcr/agent-b: explain 10.1.0.5 10.2.0.13:"):
			e.Pod, e.Code, e.Verdict, e.Policy = "hidden/off", agentapi.CodeOptedOut, "plain TCP: the pod is not opted in", ""
		case strings.Contains(line, "explain dull/gpu "):
			e.Pod, e.Code, e.Verdict, e.Policy = "dull/gpu", agentapi.CodeOptedOut, "plain TCP: the pod is not opted in", ""
		case strings.Contains(line, "explain hidden/old "):
			e.Code, e.Verdict, e.Policy = agentapi.CodeNotAttached, "neither the source nor the destination is a pod attached on this node", ""
		case strings.Contains(line, "10.2.0.10"), strings.Contains(line, "10.2.0.13"):
			e.Code, e.Verdict, e.Advice = "PEERNOSMC", "plain TCP: the peer has no SMC-R", "look at the peer"
		case strings.Contains(line, "explain shop/host-asks"), strings.Contains(line, "explain shop/host-waits"):
			e.Code, e.Verdict, e.Policy = agentapi.CodeNotAttached, "neither the source nor the destination is a pod attached on this node", ""
		case strings.Contains(line, "explain shop/host-on 10.1.0.5:"):
			e.Code, e.Verdict, e.Advice = agentapi.CodeUnseen, "no such connection is open", "make one"
		case strings.HasPrefix(line, "kube-smcr/agent-b: explain 10.1.0.5 192.0.2.2:"):
			e.Pod = "shop/host-asks" // the agent cannot know which one is meant
			if strings.Contains(line, ":6380") {
				e.Pod, e.Verdict = "shop/host-on", "on SMC-R of the pod's kernel: 1 connection now"
			}
		case strings.Contains(line, " 192.0.2.2:6379"):
			e.Code, e.Verdict = "PEERNOSMC", "plain TCP: the peer has no SMC-R"
		case strings.HasPrefix(line, "kube-smcr/agent-a: explain shop/web-0 10.2.0.9:7777"):
			e.Code, e.Verdict, e.Policy = "MEM", "plain TCP: the peer declined: out of memory", "shop/fast"
		case strings.Contains(line, "10.2.0.9:7777"):
			e.Code, e.Verdict, e.Policy = agentapi.CodeBudgetMemory, "plain TCP", "shop/fast"
			e.Budget = &agentapi.FullBudget{Budget: "memory", Of: "pod shop/redis-0", Used: 4 << 20, Limit: 4 << 20, Bytes: true, Field: "agent.budgets.pod.memory of the chart"}
		case strings.Contains(line, "10.96.0.66"):
			e.Code, e.Verdict, e.Policy, e.Advice = agentapi.CodeNoPolicy, "plain TCP: no policy selects this connection", "", "add or widen a policy"
		case strings.Contains(line, ":9999"):
			return "", "smcrctl: odd thing\n", 1
		}
		b, err := json.Marshal(e)
		must(t, err)
		if e.Code != agentapi.CodeOK {
			return string(b), "", exitNot
		}
		return string(b), "", 0
	}
}

func newCluster(t *testing.T, s *kubectltest.Server) *Cluster {
	t.Helper()
	c, err := NewCluster(s.Start(t), "shop")
	must(t, err)
	return c
}

func TestExplain(t *testing.T) {
	for _, tt := range []struct {
		name, src, dst string
		code           agentapi.Code
		verdict        string
		advice         []string // parts
		dest           string
		peers          []string
		asked          []string
		forbidden      []string
		notes          []string
		optIn          string // a part
	}{
		{
			name: "a Service", src: "web-0", dst: "redis:6380", verdict: "on SMC-R", dest: "10.96.0.7:6380 (service shop/redis)",
			peers: []string{"shop/redis-0 node-b"},
			asked: []string{
				"kube-smcr/agent-a: explain shop/web-0 10.96.0.7:6380 -o json",
				"kube-smcr/agent-b: explain 10.1.0.5 10.2.0.9:6379 -o json",
			},
		},
		{
			name: "a Service by its full name, a port by name", src: "pod/web-0", dst: "redis.shop.svc.cluster.local:redis", verdict: "on SMC-R",
			dest: "10.96.0.7:6380 (service shop/redis)", peers: []string{"shop/redis-0 node-b"},
		},
		{
			name: "a Service by its address", src: "10.1.0.5", dst: "10.96.0.7:6380", verdict: "on SMC-R",
			dest: "10.96.0.7:6380 (service shop/redis)", peers: []string{"shop/redis-0 node-b"},
		},
		{
			name: "a headless Service", src: "shop/web-0", dst: "svc/headless:redis", verdict: "on SMC-R",
			dest: "10.2.0.9:6379 (service shop/headless)", peers: []string{"shop/redis-0 node-b"},
		},
		{
			name: "svc/NAME.NAMESPACE", src: "web-0", dst: "svc/redis.dull:6380", verdict: "on SMC-R", dest: "10.96.1.7:6380 (service dull/redis)",
		},
		{
			name: "svc/NAME.NAMESPACE.svc", src: "web-0", dst: "svc/redis.dull.svc:6380", verdict: "on SMC-R", dest: "10.96.1.7:6380 (service dull/redis)",
		},
		{
			name: "the namespace is that of the source", src: "dull/rdma", dst: "redis:6380", verdict: "on SMC-R", dest: "10.96.1.7:6380 (service dull/redis)",
		},
		{
			name: "the namespace of a pod is that of the source", src: "dull/rdma", dst: "pod/db-0:5432", code: "PEERNOSMC", verdict: "no SMC-R",
			dest: "10.2.0.10:5432 (pod dull/db-0)", peers: []string{"dull/db-0 node-b"}, advice: []string{"look at the peer", "the peer dull/db-0 is not opted in"},
		},
		{
			name: "a pod of a StatefulSet", src: "dull/rdma", dst: "db-0.headless.shop:5432", verdict: "on SMC-R",
			dest: "10.1.0.30:5432, [fd00:1::30]:5432 (pod shop/db-0)", peers: []string{"shop/db-0 node-a"},
			asked: []string{"kube-smcr/agent-b: explain dull/rdma 10.1.0.30:5432 -o json", "kube-smcr/agent-a: explain 10.2.0.11 10.1.0.30:5432 -o json"},
		},
		{
			name: "a pod of a StatefulSet by its full name", src: "web-0", dst: "db-1.headless.shop.svc.cluster.local:5432", verdict: "on SMC-R",
			dest: "10.1.0.31:5432, [fd00:1::31]:5432 (pod shop/db-1)", peers: []string{"shop/db-1 node-b"},
		},
		{
			name: "a pod of a StatefulSet in the namespace of the source", src: "web-0", dst: "db-0.headless:5432", verdict: "on SMC-R",
			dest: "10.1.0.30:5432, [fd00:1::30]:5432 (pod shop/db-0)", peers: []string{"shop/db-0 node-a"},
		},
		{
			name: "second addresses of pods", src: "fd00:1::30", dst: "[fd00:1::31]:5432", verdict: "on SMC-R",
			dest: "[fd00:1::31]:5432 (pod shop/db-1)", peers: []string{"shop/db-1 node-b"},
			asked: []string{"kube-smcr/agent-a: explain shop/db-0 [fd00:1::31]:5432 -o json", "kube-smcr/agent-b: explain fd00:1::30 [fd00:1::31]:5432 -o json"},
		},
		{
			name: "a Deployment to a StatefulSet", src: "deploy/web", dst: "sts/db:5432", verdict: "on SMC-R",
			dest:  "10.1.0.30:5432, [fd00:1::30]:5432, 10.1.0.31:5432, [fd00:1::31]:5432 (statefulset shop/db)",
			peers: []string{"shop/db-0 node-a", "shop/db-1 node-b"}, notes: []string{"db-0 is one of 2 pods of deployment shop/web"},
		},
		{
			name: "the pods of a Service as the source", src: "svc/dual.shop", dst: "203.0.113.9:443", verdict: "on SMC-R", dest: "203.0.113.9:443",
			notes: []string{"db-0 is one of 2 pods of service shop/dual"},
		},
		{
			name: "a Service of two families", src: "web-0", dst: "dual:redis", verdict: "on SMC-R",
			dest: "10.96.0.8:6380, [fd00:96::8]:6380 (service shop/dual)", peers: []string{"shop/redis-0 node-b"},
			asked: []string{
				"kube-smcr/agent-a: explain shop/web-0 10.96.0.8:6380 -o json",
				"kube-smcr/agent-b: explain 10.1.0.5 10.2.0.9:6379 -o json",
			},
		},
		{
			name: "a policy selects the pods, and not the address of their Service", src: "web-0", dst: "cidr:6380", code: agentapi.CodeNoPolicy, verdict: "no policy",
			dest: "10.96.0.66:6380 (service shop/cidr)", peers: []string{"shop/redis-0 node-b"},
			advice: []string{"policy shop/fast selects the pods behind Service shop/cidr, but the connection is made to the address of the Service, and that decides: add 10.96.0.66/32 to peers.cidrs"},
		},
		{
			name: "the same by the Service's address", src: "web-0", dst: "10.96.0.66:6380", code: agentapi.CodeNoPolicy, verdict: "no policy",
			dest: "10.96.0.66:6380 (service shop/cidr)", peers: []string{"shop/redis-0 node-b"}, advice: []string{"add 10.96.0.66/32 to peers.cidrs"},
		},
		{
			name: "the same by svc/NAME", src: "web-0", dst: "svc/cidr:redis", code: agentapi.CodeNoPolicy, verdict: "no policy",
			dest: "10.96.0.66:6380 (service shop/cidr)", peers: []string{"shop/redis-0 node-b"}, advice: []string{"add 10.96.0.66/32 to peers.cidrs"},
		},
		{
			name: "the same by the Service's full name", src: "web-0", dst: "cidr.shop.svc.cluster.local:6380", code: agentapi.CodeNoPolicy, verdict: "no policy",
			dest: "10.96.0.66:6380 (service shop/cidr)", peers: []string{"shop/redis-0 node-b"}, advice: []string{"add 10.96.0.66/32 to peers.cidrs"},
		},
		{
			name: "a full budget of the peer", src: "web-0", dst: "pod/redis-0:7777", code: "MEM", verdict: "the peer declined", dest: "10.2.0.9:7777 (pod shop/redis-0)",
			peers:  []string{"shop/redis-0 node-b"},
			advice: []string{"the peer shop/redis-0: memory of pod shop/redis-0: 4.0 MiB of 4.0 MiB used now; raise agent.budgets.pod.memory of the chart"},
		},
		{
			name: "a pod", src: "web-0", dst: "pod/redis-0:6379", verdict: "on SMC-R", dest: "10.2.0.9:6379 (pod shop/redis-0)",
			peers: []string{"shop/redis-0 node-b"},
		},
		{
			name: "a pod that is not opted in", src: "web-0", dst: "dull/db-0:5432", code: "PEERNOSMC", verdict: "the peer has no SMC-R",
			dest: "10.2.0.10:5432 (pod dull/db-0)", peers: []string{"dull/db-0 node-b"},
			advice: []string{"look at the peer", "the peer dull/db-0 is not opted in: kubectl annotate pod -n dull db-0 smcr.io/enabled=true"},
			asked:  []string{"kube-smcr/agent-a: explain shop/web-0 10.2.0.10:5432 -o json"},
		},
		{
			name: "an address outside", src: "web-0", dst: "203.0.113.9:443", verdict: "on SMC-R", dest: "203.0.113.9:443",
			asked: []string{"kube-smcr/agent-a: explain shop/web-0 203.0.113.9:443 -o json"},
		},
		{
			name: "opted out", src: "off", dst: "redis:6380", code: agentapi.CodeOptedOut, verdict: "pod shop/off is not opted in",
			advice: []string{"kubectl annotate pod --overwrite -n shop off smcr.io/enabled=true"}, dest: "10.96.0.7:6380 (service shop/redis)",
			peers: []string{"shop/redis-0 node-b"}, asked: []string{"kube-smcr/agent-b: explain 10.1.0.6 10.2.0.9:6379 -o json"},
		},
		{
			name: "a junk annotation", src: "junk", dst: "203.0.113.9:443", code: agentapi.CodeOptedOut, verdict: "not opted in",
			advice: []string{"--overwrite"}, dest: "203.0.113.9:443", asked: []string{},
		},
		{
			name: "nothing said", src: "dull/db-0", dst: "203.0.113.9:443", code: agentapi.CodeOptedOut, verdict: "not opted in",
			advice: []string{"kubectl annotate pod -n dull db-0"}, dest: "203.0.113.9:443",
		},
		{
			name: "a claim", src: "dull/rdma", dst: "203.0.113.9:443", verdict: "on SMC-R", dest: "203.0.113.9:443",
			asked: []string{"kube-smcr/agent-b: explain dull/rdma 203.0.113.9:443 -o json"},
		},
		{
			name: "a claim that one may not read", src: "dull/rdma", dst: "203.0.113.9:443", forbidden: []string{"/resourceclaims"}, verdict: "on SMC-R",
			dest: "203.0.113.9:443",
		},
		{
			name: "a claim, and opted out", src: "dull/rdma-off", dst: "203.0.113.9:443", code: agentapi.CodeOptedOut, verdict: "not opted in",
			advice: []string{"kubectl annotate pod --overwrite -n dull rdma-off"}, dest: "203.0.113.9:443",
		},
		{
			name: "a claim of another driver", src: "dull/gpu", dst: "203.0.113.9:443", code: agentapi.CodeOptedOut, verdict: "not opted in",
			advice: []string{"kubectl annotate pod -n dull gpu"}, dest: "203.0.113.9:443",
		},
		{
			name: "a claim of another driver that one may not read", src: "dull/gpu", dst: "203.0.113.9:443", forbidden: []string{"/resourceclaims"}, code: agentapi.CodeOptedOut,
			verdict: "not opted in", advice: []string{"kubectl annotate pod -n dull gpu"}, dest: "203.0.113.9:443", asked: []string{"kube-smcr/agent-b: explain dull/gpu 203.0.113.9:443 -o json"},
		},
		{
			name: "a claim for extended resources", src: "dull/extended", dst: "203.0.113.9:443", verdict: "on SMC-R", dest: "203.0.113.9:443", optIn: "yes: the pod claims an RDMA device",
		},
		{
			name: "a namespace that one may not read", src: "hidden/web", dst: "203.0.113.9:443", verdict: "on SMC-R", dest: "203.0.113.9:443",
			asked: []string{"kube-smcr/agent-b: explain hidden/web 203.0.113.9:443 -o json"}, optIn: "yes: its agent says so",
		},
		{
			name: "a namespace that one may not read, and the pod's agent says no", src: "hidden/off", dst: "203.0.113.9:443", code: agentapi.CodeOptedOut, verdict: "pod hidden/off is not opted in",
			advice: []string{"kubectl annotate pod -n hidden off"}, dest: "203.0.113.9:443", optIn: "no: its agent says so",
		},
		{
			name: "a namespace that one may not read, and the pod's agent does not know", src: "hidden/old", dst: "203.0.113.9:443", code: agentapi.CodeNotAttached, verdict: "neither the source",
			advice: []string{"made before the plugin"}, dest: "203.0.113.9:443", optIn: "not known: the annotations of namespace hidden are not known",
		},
		{
			name: "a peer in a namespace that one may not read", src: "web-0", dst: "pod/hidden/off:6379", code: "PEERNOSMC", verdict: "the peer has no SMC-R", dest: "10.2.0.13:6379 (pod hidden/off)",
			peers: []string{"hidden/off node-b"}, advice: []string{"look at the peer", "the peer hidden/off is not opted in: kubectl annotate pod -n hidden off"},
		},
		{
			name: "the node's network", src: "host", dst: "203.0.113.9:443", code: CodeHostNetwork, verdict: "plain TCP: pod shop/host is in its node's network, and not opted in there", dest: "203.0.113.9:443",
			advice: []string{"kubectl annotate pod -n shop host smcr.io/enabled=true, if the first SMCRPolicy that selects it has datapath Kernel or KernelIfAvailable"}, asked: []string{},
		},
		{
			name: "the node's network, opted out", src: "host-off", dst: "203.0.113.9:443", code: CodeHostNetwork, verdict: "not opted in there", dest: "203.0.113.9:443",
			advice: []string{"kubectl annotate pod --overwrite -n shop host-off smcr.io/enabled=true, if"}, asked: []string{},
		},
		{
			name: "the node's network, annotated in vain", src: "host-asks", dst: "203.0.113.9:443", code: CodeHostNetwork, verdict: "not opted in there", dest: "203.0.113.9:443",
			advice: []string{"it is annotated, but that takes effect only if the first SMCRPolicy that selects it has datapath Kernel or KernelIfAvailable, and no other one has mode Required: kubectl get smcrpolicies -n shop"},
			asked:  []string{"kube-smcr/agent-b: explain shop/host-asks 203.0.113.9:443 -o json"},
		},
		{
			name: "the node's network, of a pod that its agent has not yet", src: "host-waits", dst: "203.0.113.9:443", code: agentapi.CodeNotAttached, verdict: "neither the source", dest: "203.0.113.9:443",
		},
		{
			name: "the node's network, opted in", src: "host-on", dst: "pod/redis-0:6379", verdict: "on SMC-R", dest: "10.2.0.9:6379 (pod shop/redis-0)", peers: []string{"shop/redis-0 node-b"},
			asked: []string{"kube-smcr/agent-b: explain shop/host-on 10.2.0.9:6379 -o json", "kube-smcr/agent-b: explain 192.0.2.2 10.2.0.9:6379 -o json"},
		},
		{
			name: "a peer in its node's network", src: "web-0", dst: "pod/host-on:6379", code: "PEERNOSMC", verdict: "the peer has no SMC-R", dest: "192.0.2.2:6379 (pod shop/host-on)", peers: []string{"shop/host-on node-b"},
			asked: []string{
				"kube-smcr/agent-a: explain shop/web-0 192.0.2.2:6379 -o json", "kube-smcr/agent-b: explain shop/host-on 10.1.0.5:6379 -o json",
				"kube-smcr/agent-b: explain 10.1.0.5 192.0.2.2:6379 -o json",
			},
		},
		{
			name: "a peer in its node's network that is not opted in", src: "web-0", dst: "pod/host-off:6379", code: "PEERNOSMC", verdict: "the peer has no SMC-R", dest: "192.0.2.2:6379 (pod shop/host-off)",
			peers: []string{"shop/host-off node-b"}, advice: []string{"the peer shop/host-off is in its node's network, and not opted in there: kubectl annotate pod --overwrite -n shop host-off"},
		},
		{
			name: "a peer in its node's network that is annotated in vain", src: "web-0", dst: "pod/host-asks:6379", code: "PEERNOSMC", verdict: "the peer has no SMC-R", dest: "192.0.2.2:6379 (pod shop/host-asks)",
			peers: []string{"shop/host-asks node-b"}, advice: []string{"the peer shop/host-asks is in its node's network, and not opted in there: it is annotated, but"},
		},
		{
			name: "the address of a node", src: "web-0", dst: "192.0.2.2:6379", code: "PEERNOSMC", verdict: "the peer has no SMC-R", dest: "192.0.2.2:6379",
			notes: []string{"192.0.2.2 is the address of a node: name the pod that listens there, as pod/NAME:6379"}, asked: []string{"kube-smcr/agent-a: explain shop/web-0 192.0.2.2:6379 -o json"},
		},
		{
			name: "no agent on the node", src: "far", dst: "203.0.113.9:443", code: agentapi.CodeNoAgent, verdict: "plain TCP: node node-c: no kube-smcr agent runs there",
			dest: "203.0.113.9:443",
		},
		{
			name: "no agent on the node, of a pod whose kernel carries on", src: "far-kernel", dst: "203.0.113.9:443", code: CodeUnknown,
			verdict: "not known: the pod's kernel carries its connections on, and there is no agent to ask: node node-c", dest: "203.0.113.9:443",
		},
		{
			name: "a pod whose init containers run", src: "init", dst: "10.2.0.9:6379", verdict: "on SMC-R", dest: "10.2.0.9:6379 (pod shop/redis-0)", peers: []string{"shop/redis-0 node-b"},
			asked: []string{"kube-smcr/agent-a: explain shop/init 10.2.0.9:6379 -o json", "kube-smcr/agent-b: explain 10.1.0.8 10.2.0.9:6379 -o json"},
		},
		{
			name: "the address of a pod whose init containers run", src: "10.1.0.5", dst: "10.1.0.8:6379", verdict: "on SMC-R", dest: "10.1.0.8:6379 (pod shop/init)", peers: []string{"shop/init node-a"},
		},
		{
			name: "a pod whose image is not there yet", src: "pulls", dst: "203.0.113.9:443", code: CodeUnknown, verdict: "the pod is Pending", dest: "203.0.113.9:443", asked: []string{},
		},
		{
			name: "an agent that fails", src: "web-0", dst: "203.0.113.9:9999", code: CodeUnknown, verdict: "code 1: odd thing", dest: "203.0.113.9:9999",
		},
		{
			name: "no right to exec", src: "web-0", dst: "203.0.113.9:443", forbidden: []string{"/exec"}, code: CodeUnknown,
			verdict: "agent-a/exec is forbidden", dest: "203.0.113.9:443",
		},
		{
			name: "no right to see Services", src: "web-0", dst: "203.0.113.9:443", forbidden: []string{"/services"}, verdict: "on SMC-R",
			dest: "203.0.113.9:443", notes: []string{"look for the Service of 203.0.113.9"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			asked := []string{}
			c := newCluster(t, &kubectltest.Server{Objects: objects(), Exec: agents(t, &asked), Forbidden: tt.forbidden})
			a, err := c.Explain(t.Context(), tt.src, tt.dst)
			must(t, err)
			if a.Code != tt.code || !strings.Contains(a.Verdict, tt.verdict) {
				t.Errorf("verdict %q, code %q; want %q, %q", a.Verdict, a.Code, tt.verdict, tt.code)
			}
			parts(t, "advice", a.Advice, tt.advice)
			parts(t, "notes", a.Notes, tt.notes)
			if got := a.Source.OptIn.String(); !strings.Contains(got, tt.optIn) {
				t.Errorf("opted in %q, want %q", got, tt.optIn)
			}
			if diff := cmp.Diff(tt.dest, describe(a.Destination)); diff != "" {
				t.Errorf("destination: %s", diff)
			}
			var peers []string
			for _, p := range a.Peers {
				peers = append(peers, p.Pod+" "+p.Node)
			}
			if diff := cmp.Diff(tt.peers, peers); diff != "" {
				t.Errorf("peers: %s", diff)
			}
			if tt.asked != nil {
				if diff := cmp.Diff(tt.asked, asked); diff != "" {
					t.Errorf("asked: %s", diff)
				}
			}
			var b bytes.Buffer
			must(t, PrintAnswer(&b, a))
			if !strings.Contains(b.String(), a.Verdict) || !strings.Contains(b.String(), "from pod "+a.Source.Pod) {
				t.Errorf("printed:\n%s", b.String())
			}
		})
	}
}

func parts(t *testing.T, what string, got, want []string) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s %q, want %q", what, got, want)
		return
	}
	for i := range want {
		if !strings.Contains(got[i], want[i]) {
			t.Errorf("%s %q, want %q", what, got[i], want[i])
		}
	}
}

func TestExplain_mistakes(t *testing.T) {
	for _, tt := range []struct{ name, src, dst, want string }{
		{"no such pod", "nobody", "10.0.0.1:1", "there is no pod nobody in namespace shop"},
		{"no pod has the address", "10.9.9.9", "10.0.0.1:1", "no running pod of the cluster has the address 10.9.9.9"},
		{"the address of a node", "192.0.2.2", "10.0.0.1:1", "a pod in its node's network is named, as NAMESPACE/NAME"},
		{"a name of three parts", "a/b/c", "10.0.0.1:1", `"a/b/c" is no pod`},
		{"no port", "web-0", "redis", `destination "redis": want HOST:PORT`},
		{"a port of 0", "web-0", "10.0.0.1:0", `port "0"`},
		{"a name outside", "web-0", "www.example.com:80", "names outside the cluster"},
		{"no such Service", "web-0", "nothing:80", "there is no Service nothing in namespace shop"},
		{"no such port", "web-0", "redis:1", "Service shop/redis has no port 1; it has 6380 redis, 53 dns"},
		{"UDP", "web-0", "redis:dns", "is UDP; SMC-R carries TCP"},
		{"an ExternalName", "web-0", "outside:6380", "stands for the name example.com"},
		{"no endpoints", "web-0", "empty:6380", "no endpoint that is ready"},
		{"a pod that is not of the Service", "web-0", "redis-0.headless.shop:1", `destination "redis-0.headless.shop" is no Service and no pod of one`},
		{"no such pod of a Service", "web-0", "db-7.headless.shop.svc:1", "there is no pod db-7 in namespace shop"},
		{"no such Deployment", "deploy/none", "10.0.0.1:1", "there is no deployment none in namespace shop"},
		{"a Deployment without pods", "deploy/asleep", "10.0.0.1:1", "no pod of deployment shop/asleep runs"},
		{"a Deployment without pods as destination", "web-0", "deploy/asleep:80", "no pod of deployment shop/asleep runs"},
		{"a port by name of a Deployment", "web-0", "deploy/web:http", `port "http"`},
		{"a Service without selector", "svc/redis", "10.0.0.1:1", "Service shop/redis selects no pods"},
		{"no such peer", "web-0", "pod/nobody:1", "there is no pod nobody"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster(t, &kubectltest.Server{Objects: objects()})
			_, err := c.Explain(t.Context(), tt.src, tt.dst)
			if !IsUsage(err) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestPrintAnswer(t *testing.T) {
	asked := []string{}
	c := newCluster(t, &kubectltest.Server{Objects: objects(), Exec: agents(t, &asked)})
	a, err := c.Explain(t.Context(), "web-0", "dull/db-0:5432")
	must(t, err)
	var b bytes.Buffer
	must(t, PrintAnswer(&b, a))
	want := `verdict      plain TCP: the peer has no SMC-R
reason       PEERNOSMC
what to do   look at the peer
             the peer dull/db-0 is not opted in: kubectl annotate pod -n dull db-0 smcr.io/enabled=true
policy       shop/fast
destination  10.2.0.10:5432 (pod dull/db-0)

from pod shop/web-0 on node node-a
opted in  yes: smcr.io/enabled="true" on the namespace
status    Enabled
verdict     plain TCP: the peer has no SMC-R
reason      PEERNOSMC
what to do  look at the peer
policy      shop/fast

to pod dull/db-0 (10.2.0.10:5432) on node node-b
opted in  no: neither the pod nor its namespace has the annotation smcr.io/enabled
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

// The other end in its node's network is asked about by its name, and so the question is turned round: what it says of connections that the pod
// opens itself is not passed on. If the agent finds the pod behind the address, its answer to the question itself is.
func TestPrintAnswer_hostPeer(t *testing.T) {
	asked := []string{}
	c := newCluster(t, &kubectltest.Server{Objects: objects(), Exec: agents(t, &asked)})
	for port, want := range map[string]string{
		"6379": `pod shop/host-on (192.0.2.2:6379) on node node-b
opted in  yes: smcr.io/enabled="true" on the pod, which is in its node's network
status    Enabled: KERNEL
verdict  policy shop/fast selects connections of this client; kubectl smcr conns --pod shop/host-on has those that are open
reason   UNSEEN
policy   shop/fast
`,
		"6380": `pod shop/host-on (192.0.2.2:6380) on node node-b
opted in  yes: smcr.io/enabled="true" on the pod, which is in its node's network
status    Enabled: KERNEL
verdict  on SMC-R of the pod's kernel: 1 connection now
pod      shop/host-on
policy   shop/fast
`,
	} {
		a, err := c.Explain(t.Context(), "web-0", "pod/host-on:"+port)
		must(t, err)
		var b bytes.Buffer
		must(t, PrintAnswer(&b, a))
		_, got, _ := strings.Cut(b.String(), "\n\nto ")
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
}

func TestAskNodes(t *testing.T) {
	asked := []string{}
	s := &kubectltest.Server{Objects: objects(), Exec: agents(t, &asked)}
	c := newCluster(t, s)
	for _, tt := range []struct {
		name  string
		nodes []string
		want  []string
	}{
		{"all", nil, []string{
			"node-a kube-smcr/agent-a kube-smcr/agent-a",
			"node-b kube-smcr/agent-b  ask the agent of node node-b (pod kube-smcr/agent-b): it does not answer yet: nothing answers",
			"node-d   node node-d: no kube-smcr agent runs there: its pod kube-smcr/agent-d is Pending; kubectl describe pod -n kube-smcr agent-d",
		}},
		{"one", []string{"node-a"}, []string{"node-a kube-smcr/agent-a kube-smcr/agent-a"}},
		{"one without agent", []string{"node-c"}, []string{"node-c   node node-c: no kube-smcr agent runs there: does the DaemonSet tolerate the node's taints and match its labels, and may it have pods? kubectl describe daemonset -A -l " + agentLabels}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			answers, err := AskNodes[agentapi.Status](t.Context(), c, slices.Clone(tt.nodes), "status")
			must(t, err)
			var got []string
			for _, a := range answers {
				line := a.Node + " " + a.Agent + " "
				if a.Answer != nil {
					line += a.Answer.Node
				}
				if a.Error != "" {
					line += " " + a.Error
				}
				got = append(got, line)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("nothing installed", func(t *testing.T) {
		c := newCluster(t, &kubectltest.Server{Objects: map[string]string{}})
		if _, err := AskNodes[agentapi.Status](t.Context(), c, nil, "status"); !errors.Is(err, ErrNoAgent) || !strings.Contains(err.Error(), "is kube-smcr installed") {
			t.Errorf("error %v", err)
		}
	})
}

func TestLimited(t *testing.T) {
	l := &limited{most: 5}
	for _, s := range []string{"abc", "def", "ghi"} {
		if n, err := l.Write([]byte(s)); n != 3 || err != nil {
			t.Errorf("write: %d, %v", n, err)
		}
	}
	if l.b.String() != "abcde" || !l.cut {
		t.Errorf("%q, cut %v", l.b.String(), l.cut)
	}
}

// The second address of a pod is found on whatever page of the cluster's pods the pod is.
func TestExplain_manyPods(t *testing.T) {
	m := objects()
	for i := range listLimit {
		name := fmt.Sprintf("many-%03d", i)
		m["/api/v1/namespaces/dull/pods/"+name] = fmt.Sprintf(`{"metadata":{"namespace":"dull","name":%q},"status":{"phase":"Running","podIP":"10.9.0.1"}}`, name)
	}
	var asked []string
	c := newCluster(t, &kubectltest.Server{Objects: m, Exec: agents(t, &asked)})
	a, err := c.Explain(t.Context(), "fd00:1::31", "203.0.113.9:443")
	must(t, err)
	if a.Source.Pod != "shop/db-1" {
		t.Errorf("the source is %+v", a.Source)
	}
}

// The pods of a Job that run are found behind any number of those that ended, and on every page of the list.
func TestPodsOf_manyPods(t *testing.T) {
	m := objects()
	m["/apis/batch/v1/namespaces/shop/jobs/many"] = `{"metadata":{"namespace":"shop","name":"many"},"spec":{"selector":{"matchLabels":{"job":"many"}}}}`
	for i := range 2*listLimit + 1 {
		phase := "Succeeded"
		if i >= listLimit {
			phase = "Running"
		}
		name := fmt.Sprintf("many-%04d", i)
		m["/api/v1/namespaces/shop/pods/"+name] = fmt.Sprintf(`{"metadata":{"namespace":"shop","name":%q,"labels":{"job":"many"}},"status":{"phase":%q}}`, name, phase)
	}
	pods, err := newCluster(t, &kubectltest.Server{Objects: m}).podsOf(t.Context(), ref{"shop", "many"}, kindJob)
	must(t, err)
	if len(pods) != listLimit+1 {
		t.Errorf("%d pods run, want %d", len(pods), listLimit+1)
	}
}
