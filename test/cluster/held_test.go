// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
)

// connected is what connect() in a pod came to, and in how many milliseconds.
func (c *cluster) connected(from pod, address, timeout string) (what string, took int) {
	c.Helper()
	what, took, err := c.tryConnect(from, address, "--timeout="+timeout)
	c.must(err)
	return what, took
}

// tryConnect is connected for any goroutine.
func (c *cluster) tryConnect(from pod, address string, flags ...string) (what string, took int, err error) {
	args := append([]string{"exec", "-n", from.ns, from.name, "--", "/usr/bin/traffic", "connect", address}, flags...)
	out, err := c.p.Lab.Kubectl(c.Context(), args...)
	if err != nil {
		return "", 0, err
	}
	what, ms, _ := strings.Cut(strings.TrimSpace(out), " after ")
	if _, err := fmt.Sscanf(ms, "%d ms", &took); err != nil {
		return "", 0, fmt.Errorf("traffic connect said %q", out)
	}
	return what, took, nil
}

// heldSYNs: connect() of an opted-in pod ends as that of one that is not, and what is not SMC-R passes
// no agent. Connections are on SMC-R without agent.holdSYNs, too.
func heldSYNs(c *cluster) {
	ns := c.namespace(nil)
	pods := c.start(ns,
		podSpec{name: "server", node: c.n[0], annotations: optedIn()},
		podSpec{name: "plain-server", node: c.n[0]},
		podSpec{name: "neighbour", node: c.n[1], annotations: optedIn(), labels: map[string]string{"app": "neighbour"}},
		podSpec{name: "plain", node: c.n[1]},
		podSpec{name: "client", node: c.n[1], annotations: optedIn()},
	)
	server, plainServer, neighbour, plain, client := pods[0], pods[1], pods[2], pods[3], pods[4]
	for _, s := range []string{"neighbour", "nobody"} {
		c.apply(fmt.Sprintf(`{apiVersion: v1, kind: Service, metadata: {name: %s, namespace: %s},
			spec: {selector: {app: %s}, ports: [{port: %d}]}}`, s, ns, s, port))
	}
	vip := func(name string) string {
		return net.JoinHostPort(c.kubectl("get", "service", name, "-n", ns, "-o", "jsonpath={.spec.clusterIP}"), fmt.Sprint(port))
	}
	for _, p := range []pod{server, neighbour, client} {
		c.status(p, v1alpha1.PodStatusEnabled, soon)
	}
	c.onSMCR(client, server.address())

	var table strings.Builder
	for _, r := range []struct{ name, address, timeout string }{
		{"a server with SMC-R", server.address(), "15s"},
		{"a server without SMC-R", plainServer.address(), "15s"},
		{"refused", net.JoinHostPort(server.ip, "9"), "15s"},
		{"a Service without endpoints", vip("nobody"), "15s"},
		{"filtered, own timeout", "10.99.99.99:80", "900ms"},
		{"on one node", neighbour.address(), "15s"},
		{"a Service on one node", vip("neighbour"), "15s"},
	} {
		want, least := c.connected(plain, r.address, r.timeout)
		got, took := c.connected(client, r.address, r.timeout)
		fmt.Fprintf(&table, "%-30s %-30s %s\n", r.name, fmt.Sprintf("%s after %d ms", want, least), fmt.Sprintf("%s after %d ms", got, took))
		if got != want || took > least+held {
			c.Errorf("%s: %s after %d ms, in a pod that is not opted in %s after %d ms", r.name, got, took, want, least)
		}
	}
	c.Logf("connect() in a pod that is not opted in, and in one that is:\n%s", table.String())
	c.eventually("the reason SAME_NODE", soon, func() error {
		e, err := c.explain(client, neighbour.address())
		if err == nil && e.Code != agentapi.CodeSameNode {
			err = fmt.Errorf("explain says %s: %s", cmp.Or(string(e.Code), "SMC-R"), e.Verdict)
		}
		return err
	})
	var conns agentapi.Conns
	text, err := c.p.SMCRCtl(c.Context(), client.node.Name, "conns", "-o", "json")
	c.must(err)
	c.must(json.Unmarshal([]byte(text), &conns))
	if slices.ContainsFunc(conns.Conns, func(k agentapi.Conn) bool { return k.Mode == smcr.ModeTCP.String() }) {
		c.Errorf("the agent has connections on TCP: %+v", conns)
	}
	for _, values := range [][]string{append(slices.Clone(installed), "agent.holdSYNs=false"), installed} {
		c.must(c.p.Install(c.Context(), image.ProductTag, values...))
		c.must(c.p.WaitReady(c.Context()))
		c.onSMCR(client, server.address())
	}
}

// held is how much longer connect() may take, in milliseconds: a SYN is held for 0.5 s at most, and this machine is busy.
const held = int(1500 * time.Millisecond / time.Millisecond)
