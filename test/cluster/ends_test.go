// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// loads are two opted-in pods on one node that make connections without a pause worth
// mentioning, while an agent or another node ends: to a server with SMC-R, and to one without.
type loads struct {
	c              *cluster
	carried, plain pod
}

// loadOn is the label of the pods of loads, whose value is "smcr" if they connect to the server with SMC-R.
const loadOn = "load-on"

// startLoads starts loads of a node on server, and on a server beside it that is not opted in.
func (c *cluster) startLoads(server pod, node *lab.Node) *loads {
	c.Helper()
	n := c.Name()[strings.LastIndexByte(c.Name(), '/')+1:]
	suffix := fmt.Sprintf("%s-%d", strings.ToLower(n), time.Now().UnixMilli()%1e6)
	plain := c.start(server.ns, podSpec{name: "plain-server-" + suffix, node: c.n[0], annotations: map[string]string{v1alpha1.AnnotationEnabled: "false"}})[0]
	args := func(to pod) []string { return []string{"load", to.address(), "--interval=10ms", "--workers=4"} }
	pods := c.start(server.ns,
		podSpec{name: "to-smcr-" + suffix, node: node, args: args(server), labels: map[string]string{loadOn: "smcr"}},
		podSpec{name: "to-plain-" + suffix, node: node, args: args(plain), labels: map[string]string{loadOn: "plain"}})
	l := &loads{c: c, carried: pods[0], plain: pods[1]}
	c.onSMCR(l.carried, server.address())
	for _, p := range pods {
		c.grows(p, sum{}, 50)
	}
	return l
}

// end waits until both go on, prints what became of their connections, and fails if one to the
// plain server failed, or if connect() failed. It returns how many of those to the server with SMC-R were
// reset.
func (l *loads) end(what string) (reset int) {
	l.c.Helper()
	carried, plain := l.became(what, "SMC-R", l.carried), l.became(what, "plain", l.plain)
	if plain.Reset > 0 {
		l.c.Errorf("%s, plain: %v", what, plain.Errors)
	}
	return carried.Reset
}

// became waits until one of the loads goes on, and says what became of its connections.
func (l *loads) became(what, name string, p pod) sum {
	l.c.Helper()
	s := l.c.goesOn(p, 100)
	l.c.Logf("%-24s %-6s %5d connections, %d failed, %d reset, slowest %d ms %v", what, name, s.OK+s.Failed, s.Failed-s.Reset, s.Reset, s.WorstMillis, s.Errors)
	if s.Failed > s.Reset {
		l.c.Errorf("%s, %s: %v", what, name, s.Errors)
	}
	return s
}

// drainTimeout is how long an agent drains.
const drainTimeout = 5 * time.Second

// agentEnds: an agent that is deleted or evicted leaves no connection unanswered, and there is
// another one soon; while it drains, beside it.
func agentEnds(c *cluster) {
	server, client := c.pair("load")
	for _, end := range []struct {
		name string
		do   func(agent string) error
	}{
		{"agent deleted", func(agent string) error {
			return c.p.Clientset.CoreV1().Pods(product.Namespace).Delete(c.Context(), agent, metav1.DeleteOptions{})
		}},
		{"agent evicted", func(agent string) error {
			return c.p.Clientset.PolicyV1().Evictions(product.Namespace).Evict(c.Context(), &policyv1.Eviction{
				ObjectMeta: metav1.ObjectMeta{Namespace: product.Namespace, Name: agent},
			})
		}},
	} {
		l := c.startLoads(server, c.n[1])
		holder := "holder-" + strings.ReplaceAll(end.name, " ", "-") // the agent drains for as long as it may
		c.start(server.ns, podSpec{name: holder, node: c.n[1], args: []string{"hold", server.address()}})
		old, err := c.p.AgentPod(c.Context(), c.n[1].Name)
		c.must(err)
		began := time.Now()
		c.must(end.do(old.Name))
		next := c.successor(c.n[1], old.Name)
		took := time.Since(began)
		drains := c.p.Client.Get(c.Context(), types.NamespacedName{Namespace: old.Namespace, Name: old.Name}, &corev1.Pod{}) == nil
		c.onSMCR(client, server.address())
		c.Logf("%s: %s is Ready after %v, on SMC-R after %v, the one before it still drained: %t", end.name, next,
			took.Round(100*time.Millisecond), time.Since(began).Round(100*time.Millisecond), drains)
		if !drains && took < drainTimeout { // a slow machine may not have the next one ready before
			c.Errorf("%s: the one before had ended when %s was Ready", end.name, next)
		}
		c.rolledOut()
		c.must(c.p.WaitNode(c.Context(), c.n[1].Name))
		if reset := l.end(end.name); reset > 0 {
			c.Errorf("%s: %d connections with SMC-R were reset", end.name, reset)
		}
	}
	c.drained(server)
}

// drained: a node is drained, as kubectl does it, and opened again, while pods there that a drain leaves alone
// are under load: as those of a DaemonSet. The agent stays, and the pods that go take nothing with them.
func (c *cluster) drained(server pod) {
	c.Helper()
	n := c.n[1]
	l := c.startLoads(server, n)
	opened := false
	c.Cleanup(func() {
		if !opened {
			_, _ = c.p.Lab.Kubectl(context.Background(), "uncordon", n.Name)
		}
	})
	agent, err := c.p.AgentPod(c.Context(), n.Name)
	c.must(err)
	began := time.Now()
	c.kubectl("drain", n.Name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s", "--pod-selector=!"+loadOn)
	took := time.Since(began)
	c.kubectl("uncordon", n.Name)
	opened = true
	back := c.start(server.ns, podSpec{name: "back", node: n})[0]
	c.onSMCR(back, server.address())
	c.Logf("node drained in %v, a new pod there on SMC-R after %v", took.Round(100*time.Millisecond), time.Since(began).Round(100*time.Millisecond))
	if now, err := c.p.AgentPod(c.Context(), n.Name); err != nil || now.UID != agent.UID {
		c.Errorf("the drained node had agent %s, and has another one: %v", agent.Name, err)
	}
	if reset := l.end("node drained"); reset > 0 {
		c.Errorf("%d connections with SMC-R were reset while their node was drained", reset)
	}
}

// successor waits until another agent of the node is Ready, and returns its pod's name.
func (c *cluster) successor(n *lab.Node, old string) (name string) {
	c.Helper()
	c.eventually("another agent on "+n.Name, soon, func() error {
		pods, err := c.p.AgentPods(c.Context(), n.Name)
		for i := range pods {
			if p := &pods[i]; p.Name != old && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			}) {
				name = p.Name
				return nil
			}
		}
		return errors.Join(err, errors.New("no pod is Ready"))
	})
	return name
}
