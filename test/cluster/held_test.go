// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
)

// tryConnect is what connect() in a pod came to, and in how many milliseconds. It is for any goroutine.
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
		podSpec{name: "client", node: c.n[1], annotations: optedIn(), labels: map[string]string{"app": "client"}},
		podSpec{name: "full", node: c.n[0], args: []string{"full", ":7001"}},
	)
	server, plainServer, neighbour, plain, client, full := pods[0], pods[1], pods[2], pods[3], pods[4], pods[5]
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

	before := c.onTCP(client.node)
	server6 := net.JoinHostPort(c.kubectl("get", "pod", "-n", ns, server.name, "-o", "jsonpath={.status.podIPs[1].ip}"), fmt.Sprint(port))
	c.unreachable(client.node)
	const short = "--timeout=900ms"
	c.sameConnect(plain, client, []connectRow{
		{"a server with SMC-R", server.address(), nil},
		{"a server with SMC-R, blocking", server.address(), []string{"--blocking"}},
		{"a server with SMC-R, v4-mapped", server.address(), []string{"--mapped"}},
		{"a server with SMC-R, IPv6", server6, nil},
		{"a server without SMC-R", plainServer.address(), nil},
		{"refused", net.JoinHostPort(server.ip, "9"), nil},
		{"refused, blocking", net.JoinHostPort(server.ip, "9"), []string{"--blocking"}},
		{"REJECT: a Service without endpoints", vip("nobody"), nil},
		{"REJECT, blocking", vip("nobody"), []string{"--blocking"}},
		{"host unreachable", unreachableHost + ":80", nil},
		{"prohibited", prohibitedHost + ":80", nil},
		{"a pod's address that nobody has", strings.TrimSuffix(server.ip, server.ip[strings.LastIndexByte(server.ip, '.')+1:]) + "250:80", []string{"--timeout=5s"}},
		{"full backlog, own timeout", net.JoinHostPort(full.ip, "7001"), []string{short}},
		{"filtered, own timeout", "10.99.99.99:80", []string{short}},
		{"filtered, own timeout, blocking", "10.99.99.99:80", []string{short, "--blocking"}},
		{"filtered, gives up at once", "10.99.99.99:80", []string{"--timeout=100ms"}},
		{"on one node", neighbour.address(), nil},
		{"a Service on one node", vip("neighbour"), nil},
	})
	c.sameCrossed(
		crossingPods{plain: [2]pod{plain, plainServer}, both: [2]pod{client, server}, first: [2]pod{client, plainServer}, second: [2]pod{plain, server}},
		crossingPods{plain: [2]pod{full, plainServer}, both: [2]pod{client, neighbour}, first: [2]pod{client, plain}, second: [2]pod{plain, neighbour}},
	)
	c.eventually("the reason SAME_NODE", soon, func() error {
		e, err := c.explain(client, neighbour.address())
		if err == nil && e.Code != agentapi.CodeSameNode {
			err = fmt.Errorf("explain says %s: %s", cmp.Or(string(e.Code), "SMC-R"), e.Verdict)
		}
		return err
	})
	if after := c.onTCP(client.node); after != before {
		c.Errorf("the agent had %d connections on TCP, and now %d: it carries what is not SMC-R", before, after)
	}
	// Where SMC-R is required, a server without is refused at connect().
	c.policy(ns, "must", "{mode: Required, podSelector: {matchLabels: {app: client}}}")
	c.refuses(client, plainServer.address())
	c.refusedCrossed(client, plainServer)
	c.onSMCR(client, server.address())
	c.kubectl("delete", "smcrpolicy", "-n", ns, "must")
	for _, values := range [][]string{append(slices.Clone(installed), "agent.holdSYNs=false"), installed} {
		c.must(c.p.Install(c.Context(), image.ProductTag, values...))
		c.must(c.p.WaitReady(c.Context()))
		c.onSMCR(client, server.address())
	}
}

// onTCP is how many connections a node's agent has carried on TCP, those that are over included.
func (c *cluster) onTCP(n *lab.Node) uint64 {
	c.Helper()
	var s agentapi.Status
	c.must(c.p.Ask(c.Context(), n.Name, &s, "status"))
	return s.Conns.TotalTCP
}

// connectRow is a case of connect().
type connectRow struct {
	name, address string
	flags         []string
}

// sameConnect prints what each case comes to in a pod that is not opted in, and in one that is, and fails
// if that differs.
func (c *cluster) sameConnect(plain, client pod, rows []connectRow) {
	c.Helper()
	type result struct {
		what [2]string
		took [2]int
		err  [2]error
	}
	results := make([]result, len(rows))
	var group errgroup.Group
	group.SetLimit(4) // most wait; more at a time would make this machine what is measured
	for i, r := range rows {
		for k, p := range []pod{plain, client} {
			group.Go(func() error {
				x := &results[i]
				x.what[k], x.took[k], x.err[k] = c.tryConnect(p, r.address, r.flags...)
				return x.err[k]
			})
		}
	}
	c.must(group.Wait())
	var table strings.Builder
	for i, r := range rows {
		x := &results[i]
		fmt.Fprintf(&table, "%-36s %-30s %s\n", r.name, fmt.Sprintf("%s after %d ms", x.what[0], x.took[0]), fmt.Sprintf("%s after %d ms", x.what[1], x.took[1]))
		if x.what[0] != x.what[1] || x.took[1] > x.took[0]+held {
			c.Errorf("%s: %s after %d ms, in a pod that is not opted in %s after %d ms", r.name, x.what[1], x.took[1], x.what[0], x.took[0])
		}
	}
	c.Logf("connect() in a pod that is not opted in, and in one that is:\n%s", table.String())
}

// Addresses that a node answers for, by ICMP.
const unreachableHost, prohibitedHost = "10.99.98.1", "10.99.98.2"

// unreachable makes routes on a node for them, and lets it send each of its ICMP errors: by itself it sends a
// pod one a second. The rate is left alone, since routes' errors draw from the same bucket, which
// icmp_ratelimit=0 empties each time: after a REJECT a route would say nothing for a second.
func (c *cluster) unreachable(n *lab.Node) {
	c.Helper()
	const limited = "net.ipv4.icmp_ratemask" // the types of messages
	before, err := n.Run(c.Context(), "sysctl", "-n", limited)
	c.must(err)
	set := func(ctx context.Context, value string) error {
		_, err := n.Run(ctx, "sysctl", "-q", "-w", limited+"="+strings.TrimSpace(value))
		return err
	}
	c.must(set(c.Context(), "0"))
	c.Cleanup(func() {
		if err := set(context.Background(), before); err != nil {
			c.Error(err)
		}
	})
	for kind, host := range map[string]string{"unreachable": unreachableHost, "prohibit": prohibitedHost} {
		_, err := n.Run(c.Context(), "ip", "route", "add", kind, host)
		c.must(err)
		c.Cleanup(func() {
			if _, err := n.Run(context.Background(), "ip", "route", "del", kind, host); err != nil {
				c.Error(err)
			}
		})
	}
}

// held is how much longer connect() may take, in milliseconds: a SYN is held for 0.5 s at most, and this machine is busy.
const held = int(1500 * time.Millisecond / time.Millisecond)
