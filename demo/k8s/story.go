// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/smcr-io/kube-smcr/demo/terminal"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// values are for a demo that does not wait as long as a production cluster.
func values() []string {
	return []string{
		"agent.drainTimeout=5s", "agent.negativeCacheTTL=2s",
		"agent.devices[0].soft.interface=eth0", "agent.devices[1].soft.interface=eth1",
	}
}

// Parts implements [terminal.Demo].
func (d *demo) Parts() []terminal.Part {
	return []terminal.Part{
		{Title: "A real Kubernetes of three nodes", Do: d.up},
		{Title: "helm install", Do: d.install},
		{Title: "Applications opt in by an annotation", Do: d.applications},
		{Title: "Their connections", Do: d.traffic},
		{Title: "What Kubernetes shows", Do: d.look},
		{Title: "A policy that refuses what cannot be SMC-R", Do: d.policy},
		{Title: "An agent is restarted", Do: d.restart},
		{Title: "helm upgrade, under load", Do: d.upgrade},
		{Title: "A node is lost and deleted", Do: d.deleteNode},
		{Title: "The namespace opts out", Do: d.optOut},
		{Title: "helm uninstall", Do: d.uninstall},
	}
}

func (d *demo) up(ctx context.Context) (err error) {
	if d.dir, err = os.MkdirTemp("", "demo-k8s-"); err != nil {
		return err
	}
	d.Say("Programs are built, and images packed without docker.")
	images, err := product.Build(ctx, d.dir)
	if err != nil {
		return err
	}
	began := time.Now()
	if d.cluster, err = lab.Up(ctx, lab.Config{Name: "demo", Nodes: 3, Images: images.Archives}); err != nil {
		return err
	}
	d.Say("etcd, kube-apiserver, controller-manager, scheduler; kubelet, containerd, runc and kube-proxy on each node: up in %.0f s.\n",
		time.Since(began).Seconds())
	if d.P, err = product.New(d.cluster, images); err != nil {
		return err
	}
	_, err = d.Kubectl(ctx, "get", "nodes", "-o", "wide")
	return err
}

func (d *demo) install(ctx context.Context) error {
	d.Say("$ helm install kube-smcr charts/kube-smcr --namespace kube-smcr --create-namespace --wait")
	began := time.Now()
	if err := d.P.Install(ctx, image.ProductTag, values()...); err != nil {
		return err
	}
	if err := d.P.WaitReady(ctx); err != nil {
		return err
	}
	d.Say("installed in %.0f s\n", time.Since(began).Seconds())
	if _, err := d.Kubectl(ctx, "get", "pods", "-n", product.Namespace, "-o", "wide"); err != nil {
		return err
	}
	out, err := d.Kubectl(ctx, "get", "smcrnodes")
	if err != nil {
		return err
	}
	d.Check("all nodes accelerate", strings.Count(out, "SoftwareRoCE") == len(d.cluster.Nodes),
		"no RNIC in this machine, so the agents' own RoCEv2 over UDP carries the links")
	return nil
}

// applications starts servers on the first node and clients on the others.
func (d *demo) applications(ctx context.Context) error {
	if err := d.OptIn(ctx); err != nil {
		return err
	}
	d.Say("Then ordinary pods and Services; nothing in them is about SMC-R:\n")
	n := d.cluster.Nodes
	objects := []string{
		terminal.Pod("redis", n[0], image.Redis), service("redis", 6379),
		terminal.Pod("nginx", n[0], image.Nginx), service("nginx", 8080),
		terminal.Pod("redis-client", n[1], image.Redis, "sleep", "infinity"), terminal.Pod("nginx-client", n[1], image.Curl, "sleep", "infinity"),
		terminal.Pod("far-client", n[2], image.Redis, "sleep", "infinity"),
		terminal.Pod("echo", n[0], product.Traffic, "/usr/bin/traffic", "serve", ":7000"), service("echo", 7000),
	}
	if err := d.P.Lab.Apply(ctx, strings.Join(objects, "---\n")); err != nil {
		return err
	}
	return d.Enabled(ctx, 6)
}

func service(name string, port int) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: %s, namespace: %s}
spec:
  selector: {app: %s}
  ports: [{port: %d}]
`, name, terminal.Shop, name, port)
}

// traffic runs the applications and shows which way their bytes went.
func (d *demo) traffic(ctx context.Context) error {
	redis, err := d.Address(ctx, "redis")
	if err != nil {
		return err
	}
	nginx, err := d.P.Lab.Kubectl(ctx, "get", "service", "-n", terminal.Shop, "nginx", "-o", "jsonpath={.spec.clusterIP}")
	if err != nil {
		return err
	}
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "APPLICATION\tCONNECTIONS\tON SMC-R\tBY RDMA\tBY TCP")
	for _, run := range []struct {
		name, pod, words string
		args             []string
	}{
		{"redis, to its pod", "redis-client", "20000 SETs and GETs of 1 kB", []string{"redis-benchmark", "-h", redis, "-t", "set,get", "-n", "20000", "-d", "1000", "-c", "20", "-q"}},
		{"nginx, by its Service", "nginx-client", "60 files of 1 MiB, a connection each", []string{"sh", "-c", "for i in $(seq 60); do curl -sf http://" + nginx + ":8080/1M || exit 1; done | wc -c"}},
	} {
		ip, err := d.Address(ctx, run.pod)
		if err != nil {
			return err
		}
		before, err := d.count(ctx, d.cluster.Nodes[1], ip)
		if err != nil {
			return err
		}
		out, err := d.Exec(ctx, run.pod, run.args...)
		if err != nil {
			return err
		}
		d.Say("%s: %s: %s", run.name, run.words, lastLine(out))
		after, err := d.count(ctx, d.cluster.Nodes[1], ip)
		if err != nil {
			return err
		}
		t := after.sub(before)
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\n", run.name, t.conns, t.onSMCR, size(t.byRDMA), size(t.byTCP))
		defer d.Check(run.name+": all connections on SMC-R, hardly a byte by TCP",
			t.conns > 0 && t.onSMCR == t.conns && t.byTCP < t.byRDMA/10, "%d of %d, %s of %s", t.onSMCR, t.conns, size(t.byTCP), size(t.byRDMA+t.byTCP))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	d.Say("\n%s", table.String())
	return nil
}

// lastLine is the last line of text, also where \r makes lines.
func lastLine(text string) string {
	lines := strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' })
	for len(lines) > 0 {
		if l := strings.TrimSpace(lines[len(lines)-1]); l != "" {
			return l
		}
		lines = lines[:len(lines)-1]
	}
	return ""
}

// look shows the objects and the plugin.
func (d *demo) look(ctx context.Context) error {
	d.Eventually(ctx, "each link group has an object on both sides", func() (string, error) {
		out, err := d.P.Lab.Kubectl(ctx, "get", "smcrlinks", "--no-headers")
		if n := strings.Count(out, "Active"); err == nil && n < 4 {
			err = fmt.Errorf("%d active: %s", n, out)
		}
		return "", err
	})
	for _, args := range [][]string{{"get", "smcrlinks"}, {"get", "smcrlinks", "-o", "wide"}} {
		if _, err := d.Kubectl(ctx, args...); err != nil {
			return err
		}
	}
	out, err := d.SMCR(ctx, "explain", "shop/nginx-client", "nginx.shop:8080")
	if err != nil {
		return err
	}
	d.Check("kubectl smcr explain gives the verdict", strings.HasPrefix(out, "verdict      on SMC-R"), "by the names of a pod and a Service")
	return nil
}

// policy makes a policy of mode Required.
func (d *demo) policy(ctx context.Context) error {
	err := d.Apply(ctx, `apiVersion: smcr.io/v1alpha1
kind: SMCRPolicy
metadata:
  name: fast-redis
  namespace: shop
spec:
  mode: Required
  podSelector:
    matchLabels: {app: redis-client}
  ports: [{port: 6379}]
`)
	if err != nil {
		return err
	}
	d.Eventually(ctx, "the policy is ready", func() (string, error) {
		out, err := d.P.Lab.Kubectl(ctx, "get", "smcrpolicy", "-n", terminal.Shop, "fast-redis", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			err = fmt.Errorf("it is %q", out)
		}
		return "", err
	})
	if _, err := d.Kubectl(ctx, "get", "smcrpolicy", "-n", terminal.Shop); err != nil {
		return err
	}
	redis, err := d.Address(ctx, "redis")
	if err != nil {
		return err
	}
	out, err := d.Exec(ctx, "redis-client", "redis-cli", "-h", redis, "ping")
	d.Check("redis answers over SMC-R", err == nil && strings.Contains(out, "PONG"), "%s", out)
	d.Say("\nNow redis opts out. Its client may not fall back to TCP:\n")
	if _, err := d.Kubectl(ctx, "annotate", "pod", "-n", terminal.Shop, "redis", "smcr.io/enabled=false"); err != nil {
		return err
	}
	d.Eventually(ctx, "the client is refused", func() (string, error) {
		out, err := d.Exec(ctx, "redis-client", "redis-cli", "-h", redis, "ping")
		if err == nil && strings.Contains(out, "PONG") {
			return "", errors.New("it got an answer")
		}
		return "", nil
	})
	d.Eventually(ctx, "an event of the pod says why", func() (string, error) {
		return d.event(ctx, "redis-client", "SMCRRefused")
	})
	if _, err := d.SMCR(ctx, "explain", "shop/redis-client", redis+":6379"); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"annotate", "pod", "-n", terminal.Shop, "redis", "smcr.io/enabled-"},
		{"delete", "smcrpolicy", "-n", terminal.Shop, "fast-redis"},
	} {
		if _, err := d.Kubectl(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

// event is the message of an event of a pod.
func (d *demo) event(ctx context.Context, pod, reason string) (string, error) {
	out, err := d.P.Lab.Kubectl(ctx, "get", "events", "-n", terminal.Shop, "--field-selector", "involvedObject.name="+pod+",reason="+reason,
		"-o", "jsonpath={.items[0].message}")
	if err == nil && out == "" {
		err = fmt.Errorf("no event %s", reason)
	}
	return out, err
}

// startLoad makes a pod that makes connections, one after the other.
func (d *demo) startLoad(ctx context.Context) error {
	echo, err := d.Address(ctx, "echo")
	if err != nil {
		return err
	}
	load := terminal.Pod("load", d.cluster.Nodes[1], product.Traffic, "/usr/bin/traffic", "load", echo+":7000")
	if err := d.P.Lab.Apply(ctx, load); err != nil {
		return err
	}
	return product.Eventually(ctx, "the load", d.Patience, func() error {
		s, err := d.Load(ctx)
		if err == nil && s.OK < 50 {
			err = fmt.Errorf("%+v", s)
		}
		return err
	})
}

// noFailure checks what became of the load's connections since before.
func (d *demo) noFailure(ctx context.Context, what string, before terminal.Load) {
	d.Eventually(ctx, what, func() (string, error) {
		s, err := d.Load(ctx)
		switch {
		case err != nil:
			return "", err
		case s.Failed > before.Failed:
			return "", fmt.Errorf("%v", s.Errors)
		case s.OK < before.OK+50:
			return "", fmt.Errorf("only %d connections so far", s.OK-before.OK)
		}
		return fmt.Sprintf("%d connections, the slowest took %d ms", s.OK-before.OK, s.WorstMillis), nil
	})
}

// restart replaces one agent.
func (d *demo) restart(ctx context.Context) error {
	if err := d.startLoad(ctx); err != nil {
		return err
	}
	before, err := d.Load(ctx)
	if err != nil {
		return err
	}
	node := d.cluster.Nodes[1].Name
	a, err := d.P.AgentPod(ctx, node)
	if err != nil {
		return err
	}
	if _, err := d.Kubectl(ctx, "delete", "pod", "-n", product.Namespace, a.Name); err != nil {
		return err
	}
	if err := d.P.WaitNode(ctx, node); err != nil {
		return err
	}
	if _, err := d.Kubectl(ctx, "get", "pods", "-n", product.Namespace, "-o", "wide"); err != nil {
		return err
	}
	d.noFailure(ctx, "no connection of a client on its node failed", before)
	return nil
}

// upgrade installs another tag of the image.
func (d *demo) upgrade(ctx context.Context) error {
	if err := d.P.TagNext(ctx); err != nil {
		return err
	}
	before, err := d.Load(ctx)
	if err != nil {
		return err
	}
	d.Say("$ helm upgrade kube-smcr charts/kube-smcr --namespace kube-smcr --reuse-values --set image.tag=%s --wait", product.TagNext)
	if err := d.P.Install(ctx, product.TagNext, values()...); err != nil {
		return err
	}
	if _, err := d.Kubectl(ctx, "rollout", "status", "daemonset", "-n", product.Namespace, product.Agent, "--timeout=2m"); err != nil {
		return err
	}
	if err := d.P.WaitReady(ctx); err != nil {
		return err
	}
	d.noFailure(ctx, "all agents were replaced and no new connection failed", before)
	d.Eventually(ctx, "the load is on SMC-R with the new agents", func() (string, error) {
		echo, err := d.Address(ctx, "echo")
		if err != nil {
			return "", err
		}
		out, err := d.P.KubectlSMCR(ctx, "explain", "shop/load", echo+":7000")
		if err == nil && !strings.Contains(out, "on SMC-R") {
			err = errors.New(out)
		}
		return "", err
	})
	return nil
}

// deleteNode switches a node off and deletes it.
func (d *demo) deleteNode(ctx context.Context) error {
	far := d.cluster.Nodes[2]
	redis, err := d.Address(ctx, "redis")
	if err != nil {
		return err
	}
	if _, err := d.Exec(ctx, "far-client", "redis-cli", "-h", redis, "ping"); err != nil {
		return err
	}
	d.Eventually(ctx, "there is a link group with "+far.Name, func() (string, error) {
		return "", d.linksOf(ctx, far.Name, true)
	})
	d.Say("%s loses its power:", far.Name)
	if err := far.PowerOff(ctx); err != nil {
		return err
	}
	d.Eventually(ctx, "its SMCRLinks go", func() (string, error) {
		out, err := d.P.Lab.Kubectl(ctx, "get", "smcrlinks", "-l", "smcr.io/node="+far.Name, "--no-headers")
		if err == nil && strings.Contains(out, "Active") {
			err = errors.New(out)
		}
		return "", err
	})
	if _, err := d.Kubectl(ctx, "get", "smcrlinks"); err != nil {
		return err
	}
	if _, err := d.Kubectl(ctx, "delete", "node", far.Name); err != nil {
		return err
	}
	d.Eventually(ctx, "its SMCRNode and SMCRLinks are gone", func() (string, error) {
		if out, err := d.P.Lab.Kubectl(ctx, "get", "smcrnodes", "-o", "name"); err != nil || strings.Contains(out, far.Name) {
			return "", errors.Join(err, errors.New(out))
		}
		return "", d.linksOf(ctx, far.Name, false)
	})
	_, err = d.Kubectl(ctx, "get", "smcrnodes")
	return err
}

// linksOf wants SMCRLinks of a node to be there, or not.
func (d *demo) linksOf(ctx context.Context, node string, want bool) error {
	out, err := d.P.Lab.Kubectl(ctx, "get", "smcrlinks", "-l", "smcr.io/node="+node, "-o", "name")
	if err == nil && (out != "") != want {
		err = fmt.Errorf("there are %q", out)
	}
	return err
}

// optOut takes the annotation away.
func (d *demo) optOut(ctx context.Context) error {
	if _, err := d.Kubectl(ctx, "annotate", "namespace", terminal.Shop, "smcr.io/enabled-"); err != nil {
		return err
	}
	d.Eventually(ctx, "the pods are on plain TCP", func() (string, error) {
		out, err := d.P.Lab.Kubectl(ctx, "get", "pods", "-n", terminal.Shop, "--field-selector=spec.nodeName="+d.cluster.Nodes[1].Name,
			"-o", `jsonpath={.items[*].metadata.annotations.smcr\.io/status}`)
		if err == nil && strings.TrimSpace(out) != "" {
			err = errors.New(out)
		}
		return "", err
	})
	redis, err := d.Address(ctx, "redis")
	if err != nil {
		return err
	}
	out, err := d.Exec(ctx, "redis-client", "redis-cli", "-h", redis, "ping")
	d.Check("redis answers over TCP", err == nil && strings.Contains(out, "PONG"), "%s", out)
	_, err = d.SMCR(ctx, "explain", "shop/redis-client", redis+":6379")
	return err
}

// uninstall removes the release and looks for what it left.
func (d *demo) uninstall(ctx context.Context) error {
	before, err := d.Load(ctx)
	if err != nil {
		return err
	}
	d.Say("$ helm uninstall kube-smcr --namespace kube-smcr --wait")
	out, err := d.P.Uninstall(ctx)
	if err != nil {
		return err
	}
	d.Say("%s", out)
	for _, n := range d.cluster.Nodes[:2] {
		out, err := n.Run(ctx, "sh", "-c", "grep -l smcr /etc/cni/net.d/*; ls /opt/cni/bin/smcr-cni; find /run/kube-smcr -type f; for n in $(ls /run/netns); do ip netns exec $n nft list tables; done; true")
		if err != nil {
			return err
		}
		d.Check(n.Name+" is as before", strings.TrimSpace(out) == "", "no plugin, file, configuration or nftables table: %q", out)
	}
	objects, err := d.P.Lab.Kubectl(ctx, "get", "smcrnodes,smcrlinks", "-o", "name")
	d.Check("no object is left but users' own", err == nil && objects == "", "%s", objects)
	d.noFailure(ctx, "clients did not notice", before)
	return nil
}
