// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

func (c *cluster) policy(ns, name, spec string) {
	c.Helper()
	c.apply(fmt.Sprintf("{apiVersion: smcr.io/v1alpha1, kind: SMCRPolicy, metadata: {name: %s, namespace: %s}, spec: %s}", name, ns, spec))
}

// policyChange: a policy that is made, changed and deleted reaches running
// pods in time, and its status says what it did.
func policyChange(c *cluster) {
	ns := c.namespace(optedIn())
	server := c.start(ns, podSpec{name: "server", node: c.n[0]})[0]
	c.policy(ns, "all", "{peers: {cidrs: [10.0.0.0/8]}}")
	client := c.start(ns, podSpec{name: "client", node: c.n[1], args: []string{"hold", server.address()}})[0]
	c.status(client, v1alpha1.PodStatusEnabled, soon)
	c.onSMCR(client, server.address())
	c.active(client)
	c.condition(ns, "all", v1alpha1.ConditionAccepted, "True")
	c.condition(ns, "all", v1alpha1.ConditionReady, "True")
	c.eventually("the policy's counts", shown, func() error {
		var o v1alpha1.SMCRPolicy
		c.must(c.p.Client.Get(c.Context(), key(ns, "all"), &o))
		if o.Status.Pods.OptedIn != 2 || o.Status.Pods.Accelerated != 2 || o.Status.LinkGroups.Total != 2 {
			return fmt.Errorf("pods %+v, link groups %+v", o.Status.Pods, o.Status.LinkGroups)
		}
		return nil
	})
	c.contains(c.kubectl("get", "smcrpolicy", "-n", ns), "all", "Prefer", "2", "True")

	// The server's address is taken out.
	c.policy(ns, "all", fmt.Sprintf("{peers: {cidrs: [10.0.0.0/8], except: [%s/32]}}", server.ip))
	c.ends(client, applied)
	c.must(c.once(client, server.address()))
	e, err := c.explain(client, server.address())
	c.must(err)
	if e.Code != agentapi.CodeNoPolicy {
		c.Errorf("explain says %s: %s, want %s", e.Code, e.Verdict, agentapi.CodeNoPolicy)
	}
	// And why the connection ended is known.
	if !slices.ContainsFunc(e.Recent, func(d agentapi.Decision) bool { return d.Reason == agentapi.CodePolicyChange }) {
		c.Errorf("explain does not know of the end of the connection: %+v", e.Recent)
	}

	// And back.
	c.policy(ns, "all", "{peers: {cidrs: [10.0.0.0/8]}}")
	c.onSMCR(client, server.address())

	// Without a policy the built-in one counts again.
	c.kubectl("delete", "smcrpolicy", "-n", ns, "all")
	c.onSMCR(client, server.address())
}

func key(ns, name string) client.ObjectKey { return client.ObjectKey{Namespace: ns, Name: name} }

// selectors: peers by labels, which the controller resolves, Services included.
func selectors(c *cluster) {
	ns := c.namespace(optedIn())
	c.policy(ns, "servers", "{podSelector: {matchLabels: {role: client}}, peers: {selectors: [{podSelector: {matchLabels: {role: server}}}]}}")
	c.policy(ns, "clients", "{podSelector: {matchLabels: {role: server}}}")
	pods := c.start(ns,
		podSpec{name: "server", node: c.n[0], labels: map[string]string{"role": "server"}},
		podSpec{name: "other", node: c.n[0], labels: map[string]string{"role": "other"}},
		podSpec{name: "client", node: c.n[1], labels: map[string]string{"role": "client"}},
	)
	c.apply(fmt.Sprintf(`{apiVersion: v1, kind: Service, metadata: {name: server, namespace: %s},
		spec: {selector: {role: server}, ports: [{port: %d}]}}`, ns, port))
	server, other, client := pods[0], pods[1], pods[2]
	vip := c.kubectl("get", "service", "server", "-n", ns, "-o", "jsonpath={.spec.clusterIP}")
	c.onSMCR(client, server.address())
	c.onSMCR(client, fmt.Sprintf("%s:%d", vip, port))
	c.must(c.once(client, other.address()))
	e, err := c.explain(client, other.address())
	c.must(err)
	if e.Code != agentapi.CodeNoPolicy {
		c.Errorf("explain of the pod that is not selected says %s: %s", e.Code, e.Verdict)
	}
	addresses := c.kubectl("get", "smcrpeerslices", "-n", ns, "-o", "jsonpath={.items[*].addresses[*]}")
	for _, a := range []string{server.ip, vip} {
		c.contains(addresses, a)
	}
	if strings.Contains(addresses, other.ip) {
		c.Errorf("the slices have %s, which is not selected: %s", other.ip, addresses)
	}
}

// required: no SMC-R, no connection; and the user learns why.
func required(c *cluster) {
	ns := c.namespace(nil)
	c.policy(ns, "strict", "{mode: Required, podSelector: {matchLabels: {app: strict}}}")
	pods := c.start(ns,
		podSpec{name: "plain", node: c.n[0]},
		podSpec{name: "peer", node: c.n[0], annotations: optedIn()},
		podSpec{name: "other", node: c.n[1], annotations: optedIn(), labels: map[string]string{"app": "strict"}},
	)
	plain, peer, other := pods[0], pods[1], pods[2]
	client := c.start(ns, podSpec{name: "client", node: c.n[1], annotations: optedIn(), labels: map[string]string{"app": "strict"}, args: []string{"hold", peer.address()}})[0]
	c.status(client, v1alpha1.PodStatusEnabled, soon)
	c.status(peer, v1alpha1.PodStatusEnabled, soon)
	c.onSMCR(client, peer.address())
	c.condition(ns, "strict", v1alpha1.ConditionAccepted, "True")
	c.refuses(client, plain.address())
	c.event(ns, client.name, "SMCRRefused", plain.ip)
	e, err := c.explain(client, plain.address())
	c.must(err)
	if !e.Required || e.Code != agentapi.CodeRequired && e.Code != "PEERNOSMC" {
		c.Errorf("explain says %s (required: %v): %s", e.Code, e.Required, e.Verdict)
	}
	out, err := c.p.KubectlSMCR(c.Context(), "explain", client.String(), plain.address())
	c.must(err)
	c.contains(out, "strict")

	// A pod of which all connections are refused is not on plain TCP, and nothing of that is
	// left when there is no such policy.
	const refused = v1alpha1.PodStatusRefused + ": REQUIRED"
	c.refuses(other, plain.address())
	c.eventually("the status "+refused, soon, func() error {
		if c.once(other, plain.address()) == nil {
			c.Fatal("the connection without SMC-R worked")
		}
		var o corev1.Pod
		c.must(c.p.Client.Get(c.Context(), other.key(), &o))
		if got := o.Annotations[v1alpha1.AnnotationStatus]; got != refused {
			return fmt.Errorf("the status is %q", got)
		}
		return nil
	})
	// One that has an older connection on SMC-R says both.
	c.status(client, refused+v1alpha1.PodStatusOlder, shown)
	c.eventually("the policy to count both", shown, func() error {
		if got := c.kubectl("get", "smcrpolicy", "strict", "-n", ns, "-o", "jsonpath={.status.pods.refused} {.status.pods.fallback}"); got != "2 0" {
			return fmt.Errorf("refused and fallback are %q", got)
		}
		return nil
	})
	c.kubectl("delete", "smcrpolicy", "-n", ns, "strict")
	c.status(other, v1alpha1.PodStatusEnabled, shown)
	c.status(client, v1alpha1.PodStatusEnabled, shown)
}

// refuses waits until the agent requires SMC-R to an address, and for as long as a policy may take to be in force, and fails the
// test if the next connection is not refused.
func (c *cluster) refuses(from pod, address string) {
	c.Helper()
	c.eventually("SMC-R to be required to "+address, soon, func() error {
		e, err := c.explain(from, address)
		if err == nil && !e.Required {
			err = fmt.Errorf("explain says %s: %s", e.Code, e.Verdict)
		}
		return err
	})
	<-time.After(applied)
	if what, took, err := c.tryConnect(from, address); err != nil || what != "connection refused" || took > held {
		c.Errorf("%s to %s, where SMC-R is required: %s after %d ms, %v", from, address, what, took, err)
	}
}

// isolation: with isolation Namespace the pods of a namespace share a stack, in which
// each has link groups of its own, and with Pod, from then on, each has its own stack.
func isolation(c *cluster) {
	ns := c.namespace(optedIn())
	c.policy(ns, "all", "{isolation: Namespace}")
	server := c.start(ns, podSpec{name: "server", node: c.n[0]})[0]
	hold := []string{"hold", server.address()}
	clients := c.start(ns, podSpec{name: "one", node: c.n[1], args: hold}, podSpec{name: "two", node: c.n[1], args: hold})
	shared := pod{ns: ns, name: "*", node: c.n[1]}
	for _, p := range clients {
		c.status(p, v1alpha1.PodStatusEnabled, soon)
		c.onSMCR(p, server.address())
	}
	c.eventually("an SMCRLink of the shared stack for each client", soon, func() error {
		links, err := c.links(shared)
		c.must(err)
		links = slices.DeleteFunc(links, func(l v1alpha1.SMCRLink) bool { return l.Status.Node != c.n[1].Name })
		good := func(l v1alpha1.SMCRLink) bool {
			return l.Status.State == v1alpha1.LinkActive && l.Status.Policy == "all"
		}
		if len(links) != len(clients) || slices.ContainsFunc(links, func(l v1alpha1.SMCRLink) bool { return !good(l) }) {
			return fmt.Errorf("there are %+v", links)
		}
		return nil
	})
	for _, p := range clients {
		links, err := c.links(p)
		c.must(err)
		if len(links) > 0 {
			c.Errorf("%s has %d SMCRLinks of its own", p, len(links))
		}
	}

	c.policy(ns, "all", "{isolation: Pod}")
	for _, p := range clients {
		c.ends(p, applied)
		c.onSMCR(p, server.address())
		c.active(p)
	}
	c.eventually("the end of what was shared", soon, func() error {
		links, err := c.links(shared)
		c.must(err)
		if len(links) > 0 {
			return fmt.Errorf("there are %d SMCRLinks", len(links))
		}
		return nil
	})
}
