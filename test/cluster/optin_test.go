// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// install: what helm install has made of a node.
func install(c *cluster) {
	for _, n := range c.n {
		var o v1alpha1.SMCRNode
		c.eventually("the conditions of SMCRNode "+n.Name, shown, func() error {
			c.must(c.p.Client.Get(c.Context(), client.ObjectKey{Name: n.Name}, &o))
			for _, want := range []string{
				v1alpha1.ConditionReady, v1alpha1.ConditionAccelerating, v1alpha1.ConditionDevicesHealthy,
				v1alpha1.ConditionCNIInstalled, v1alpha1.ConditionAgentAlive,
			} {
				if !meta.IsStatusConditionTrue(o.Status.Conditions, want) {
					return fmt.Errorf("%s is not True in %+v", want, o.Status.Conditions)
				}
			}
			return nil
		})
		if len(o.OwnerReferences) != 1 || o.OwnerReferences[0].Kind != "Node" {
			c.Errorf("SMCRNode %s: owned by %v, want the Node", n.Name, o.OwnerReferences)
		}
		a, err := c.p.AgentPod(c.Context(), n.Name)
		c.must(err)
		if a.Status.QOSClass != corev1.PodQOSGuaranteed {
			c.Errorf("agent of %s: QoS class %s, want Guaranteed", n.Name, a.Status.QOSClass)
		}
		if s := a.Spec.Containers[0].SecurityContext; s == nil || s.Privileged != nil && *s.Privileged || s.Capabilities == nil {
			c.Errorf("agent of %s: security context %+v, want no privileges", n.Name, s)
		}
		list, err := n.Run(c.Context(), "sh", "-c", "cat /etc/cni/net.d/*.conflist")
		c.must(err)
		var conf struct {
			Plugins []struct{ Type string }
		}
		c.must(json.Unmarshal([]byte(list), &conf))
		if last := conf.Plugins[len(conf.Plugins)-1].Type; last != "smcr-cni" {
			c.Errorf("the last plugin of %s is %s, want smcr-cni", n.Name, last)
		}
	}
	table := c.kubectl("get", "smcrnodes")
	for _, n := range c.n {
		c.contains(table, n.Name, "True", "SoftwareRoCE", "2/2")
	}
	out, err := c.p.KubectlSMCR(c.Context(), "status")
	c.must(err)
	for _, n := range c.n {
		c.contains(out, n.Name)
	}
	// A healthy node is warned of nothing, by the agent and beside it.
	for _, n := range c.n {
		var o v1alpha1.SMCRNode
		c.must(c.p.Client.Get(c.Context(), client.ObjectKey{Name: n.Name}, &o))
		for _, x := range o.Status.Capabilities {
			if x.State == "Degraded" && (x.Name == "RDMA devices" || x.Name == "software RoCE" || x.Name == "hardware verbs") {
				c.Errorf("SMCRNode %s: %s is %s: %s", n.Name, x.Name, x.State, x.Detail)
			}
		}
	}
	out, err = c.p.KubectlSMCR(c.Context(), "preflight")
	c.must(err)
	for line := range strings.Lines(out) {
		if strings.Contains(line, "WARN") {
			c.Errorf("kubectl smcr preflight: %s", line)
		}
	}
}

// untouched: pods that did not opt in, and pods in the node's network that no policy puts on the
// kernel's datapath, have nothing of ours.
func untouched(c *cluster) {
	ns := c.namespace(nil)
	pods := c.start(ns,
		podSpec{name: "server", node: c.n[0]},
		podSpec{name: "client", node: c.n[1]},
		podSpec{name: "host", node: c.n[1], hostNetwork: true, annotations: optedIn()},
		podSpec{name: "no", node: c.n[1], annotations: map[string]string{v1alpha1.AnnotationEnabled: "false"}},
	)
	for _, from := range pods[1:] {
		c.must(c.once(from, pods[0].address()))
	}
	// The agents have seen these pods when they have carried out what later ones ask for.
	for i, n := range c.n {
		c.status(c.start(ns, podSpec{name: fmt.Sprintf("later%d", i), node: n, annotations: optedIn()})[0], v1alpha1.PodStatusEnabled, soon)
	}
	for _, p := range pods {
		if !strings.Contains(p.name, "host") {
			c.noTable(p)
		}
		var o corev1.Pod
		c.must(c.p.Client.Get(c.Context(), p.key(), &o))
		if status, ok := o.Annotations[v1alpha1.AnnotationStatus]; ok {
			c.Errorf("%s has the status %q", p, status)
		}
		links, err := c.links(p)
		c.must(err)
		if len(links) > 0 {
			c.Errorf("%s has %d SMCRLinks", p, len(links))
		}
	}
	for _, n := range c.n {
		rules, err := n.Run(c.Context(), "nft", "list", "tables")
		c.must(err)
		if ours := strings.Count(rules, "smcr"); ours != 1 || !strings.Contains(rules, "table inet kube-smcr-wire\n") {
			c.Errorf("the network of node %s has another table of ours than the filter of RoCE packets:\n%s", n.Name, rules)
		}
	}
}

// tables lists the nftables tables in a pod's namespace.
func (c *cluster) tables(p pod) string {
	c.Helper()
	ns, err := c.p.PodNetNS(c.Context(), p.node, p.ip)
	c.must(err)
	out, err := p.node.Run(c.Context(), "ip", "netns", "exec", ns, "nft", "list", "tables")
	c.must(err)
	return out
}

func (c *cluster) noTable(p pod) {
	c.Helper()
	if tables := c.tables(p); strings.Contains(tables, "smcr") {
		c.Errorf("the network of %s has a table of ours:\n%s", p, tables)
	}
}

// optIn: the main thing. Two pods of an annotated namespace, on two nodes.
func optIn(c *cluster) {
	ns := c.namespace(optedIn())
	server := c.start(ns, podSpec{name: "server", node: c.n[0], labels: map[string]string{"app": "server"}})[0]
	c.apply(fmt.Sprintf(`{apiVersion: v1, kind: Service, metadata: {name: server, namespace: %s},
		spec: {selector: {app: server}, ports: [{port: %d}]}}`, ns, port))
	client := c.start(ns, podSpec{name: "client", node: c.n[1], args: []string{"hold", server.address()}})[0]
	for _, p := range []pod{server, client} {
		c.status(p, v1alpha1.PodStatusEnabled, soon)
		c.event(ns, p.name, "SMCREnabled", "")
	}
	c.onSMCR(client, server.address())
	for _, side := range []struct {
		pod        pod
		role, peer string
	}{{client, "Client", c.n[0].Name}, {server, "Server", c.n[1].Name}} {
		l := c.redundancy(side.pod, v1alpha1.RedundancySymmetric)
		got := []any{l.Status.Node, l.Status.Peer, l.Status.Role, l.Status.Namespace, l.Status.Version}
		want := []any{side.pod.node.Name, side.peer, side.role, ns, int32(2)}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			c.Errorf("SMCRLink %s is %v, want %v", l.Name, got, want)
		}
		c.contains(c.kubectl("get", "smcrlinks"), l.Name, side.pod.String(), side.role, "Active", "Symmetric")
		c.contains(c.kubectl("get", "smcrlinks", "-o", "wide"), l.Name, c.n[0].Address().String(), c.n[1].Address().String())
	}
	// Through the Service, and through kubectl.
	vip := c.kubectl("get", "service", "server", "-n", ns, "-o", "jsonpath={.spec.clusterIP}")
	c.onSMCR(client, fmt.Sprintf("%s:%d", vip, port))
	for _, dst := range []string{
		server.address(), fmt.Sprintf("server.%s:%d", ns, port), fmt.Sprintf("svc/server.%s:%d", ns, port), fmt.Sprintf("server:%d", port), fmt.Sprintf("pod/server:%d", port),
	} {
		out, err := c.p.KubectlSMCR(c.Context(), "explain", client.String(), dst)
		c.must(err)
		c.contains(out, "on SMC-R")
	}
	out, err := c.p.KubectlSMCR(c.Context(), "links")
	c.must(err)
	c.contains(out, client.String(), "ACTIVE")

	// No longer: what is open ends with a reason, what is new is TCP.
	before := c.grows(client, sum{}, 1)
	if before.Failed > 0 {
		c.Errorf("the open connection has %+v before anything happened", before)
	}
	c.kubectl("annotate", "namespace", ns, v1alpha1.AnnotationEnabled+"-")
	c.ends(client, applied)
	for _, p := range []pod{server, client} {
		c.status(p, "", soon)
		c.eventually("the end of the diversion in "+p.String(), applied, func() error {
			if t := c.tables(p); strings.Contains(t, "smcr") {
				return errors.New(t)
			}
			return nil
		})
	}
	c.must(c.once(client, server.address()))
	c.eventually("the end of the SMCRLinks", soon, func() error { return c.noLinks(ns) })
}

// ends waits until the connection of a client that holds one has ended, and
// fails if that took longer than limit from now on.
func (c *cluster) ends(p pod, limit time.Duration) {
	c.Helper()
	began := time.Now()
	c.eventually("the end of the connection of "+p.String(), soon, func() error {
		s, err := c.last(p)
		if err == nil && !s.Ended {
			err = fmt.Errorf("it goes on: %+v", s)
		}
		return err
	})
	if took := time.Since(began); took > limit {
		c.Errorf("the connection of %s went on for %v, at most %v are allowed", p, took, limit)
	} else {
		c.Logf("the connection of %s ended after %v", p, took.Round(10*time.Millisecond))
	}
}

func (c *cluster) noLinks(ns string) error {
	var list v1alpha1.SMCRLinkList
	if err := c.p.Client.List(c.Context(), &list, client.MatchingLabels{v1alpha1.LabelNamespace: ns}); err != nil {
		return err
	}
	for _, l := range list.Items {
		if l.Status.State == v1alpha1.LinkActive {
			return fmt.Errorf("%s is active, of %s", l.Name, l.Status.Pod)
		}
	}
	return nil
}

// optInRunning: the annotation reaches pods that run already.
func optInRunning(c *cluster) {
	ns := c.namespace(nil)
	pods := c.start(ns, podSpec{name: "server", node: c.n[0]}, podSpec{name: "client", node: c.n[1]})
	c.must(c.once(pods[1], pods[0].address()))
	for _, p := range pods {
		c.kubectl("annotate", "pod", "-n", ns, p.name, v1alpha1.AnnotationEnabled+"=true")
	}
	for _, p := range pods {
		c.status(p, v1alpha1.PodStatusEnabled, soon)
	}
	c.onSMCR(pods[1], pods[0].address())
}

// junkAnnotation: anything but true and false is off, and said so.
func junkAnnotation(c *cluster) {
	ns := c.namespace(optedIn())
	pods := c.start(ns,
		podSpec{name: "server", node: c.n[0]},
		podSpec{name: "junk", node: c.n[1], annotations: map[string]string{v1alpha1.AnnotationEnabled: "yes please"}},
	)
	c.event(ns, "junk", "SMCRBadAnnotation", "yes please")
	c.must(c.once(pods[1], pods[0].address()))
	c.noTable(pods[1])
	c.status(pods[1], "", soon)
	out, err := c.p.KubectlSMCR(c.Context(), "explain", pods[1].String(), pods[0].address())
	if err == nil && !strings.Contains(out, v1alpha1.AnnotationEnabled) || err != nil && !strings.Contains(err.Error(), v1alpha1.AnnotationEnabled) {
		c.Errorf("kubectl smcr explain does not name the annotation: %s %v", out, err)
	}
}
