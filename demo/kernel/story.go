// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/demo/terminal"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// values are what a platform team would write into its values.yaml, and how much of the small
// guests an agent may have.
func values() []string {
	return []string{
		"hardware.enabled=true", "kernelPath.enabled=true",
		"agent.devices[0].rdma.name=rxe0", "agent.devices[0].rdma.address=node",
		"agent.devices[1].rdma.name=rxe1", "agent.devices[1].rdma.address=eth1",
		"agent.resources.cpu=900m", "agent.drainTimeout=5s", "agent.negativeCacheTTL=2s",
		"controller.replicas=1",
		`controller.nodeSelector.kubernetes\.io/hostname=n1`, `hooks.nodeSelector.kubernetes\.io/hostname=n1`,
	}
}

// Parts implements [terminal.Demo].
func (d *demo) Parts() []terminal.Part {
	return []terminal.Part{
		{Title: "A Kubernetes whose kernels have SMC-R", Do: d.up},
		{Title: "helm install", Do: d.install},
		{Title: "Applications on TCP", Do: d.onTCP},
		{Title: "An annotation: the agents carry them", Do: d.byAgents},
		{Title: "A policy: the kernel's SMC-R, without the agents", Do: d.onKernel},
		{Title: "What the three ways do", Do: d.compare},
		{Title: "A connection is seen", Do: d.hold},
		{Title: "The agents are killed under load", Do: d.kill},
		{Title: "A pod in its node's network", Do: d.onHost},
		{Title: "The policy changes its mind", Do: d.revoke},
	}
}

func (d *demo) up(ctx context.Context) (err error) {
	if d.dir, err = os.MkdirTemp("", "demo-vm-kernel-"); err != nil {
		return err
	}
	d.Say("Programs are built, and images packed without docker.")
	images, err := product.Build(ctx, d.dir, image.Product, image.Redis)
	if err != nil {
		return err
	}
	cfg := guest.Config{Config: lab.Config{Name: "demo-kernel", Nodes: 1, Images: images.Archives, Progress: d.Out}, Guests: 2, KernelSMC: true}
	if d.cluster, err = guest.Up(ctx, cfg); err != nil {
		return err
	}
	if d.P, err = product.New(d.cluster.Cluster, images); err != nil {
		return err
	}
	fmt.Fprintln(d.Out)
	_, err = d.Kubectl(ctx, "get", "nodes", "-o", "wide")
	return err
}

func (d *demo) install(ctx context.Context) error {
	d.Say("$ helm install kube-smcr charts/kube-smcr --namespace kube-smcr --create-namespace --wait \\\n    --set %s\n", strings.Join(values()[:6], ","))
	if err := d.P.Install(ctx, image.ProductTag, values()...); err != nil {
		return err
	}
	const capabilities = `custom-columns=NODE:.metadata.name,KERNEL-PATH:.status.capabilities[?(@.name=="kernelPath")].state,WHY:.status.capabilities[?(@.name=="kernelPath")].detail`
	d.Eventually(ctx, "each node says whether its pods can be on its kernel's SMC-R, as it found by trying", func() (string, error) {
		out, err := d.P.Lab.Kubectl(ctx, "get", "smcrnodes", "--no-headers", "-o", capabilities)
		if err == nil && (strings.Count(out, " Available ") != 2 || strings.Count(out, " Unavailable ") != 1) {
			err = errors.New(out)
		}
		return "", err
	})
	if _, err := d.Kubectl(ctx, "get", "smcrnodes", "-o", capabilities); err != nil {
		return err
	}
	d.Say("The pods of n2 and n3 get an interface that is a child (macvlan) of the RNIC's, as in a cluster whose network is that of the RNICs.")
	for _, n := range d.cluster.Guests {
		if _, err := d.cluster.RNICPods(ctx, n); err != nil {
			return err
		}
	}
	d.Eventually(ctx, "the agents have chained their plugin there, too", func() (string, error) {
		for _, n := range d.cluster.Guests {
			if text, err := n.Run(ctx, "cat", guest.RNICNetwork); err != nil || !strings.Contains(text, "smcr-cni") {
				return "", errors.Join(fmt.Errorf("%s: %s", n.Name, text), err)
			}
		}
		return "", nil
	})
	ctx, cancel := context.WithTimeout(ctx, d.Patience)
	defer cancel()
	return d.cluster.KernelContact(ctx, d.cluster.Guests[0], d.cluster.Guests[1]) // see there: soft RoCE only
}

// apply makes the applications' pods: servers on one guest, and on the other one what asks them.
func (d *demo) apply(ctx context.Context) error {
	a, b := d.cluster.Guests[0].Node, d.cluster.Guests[1].Node
	pods := []string{
		terminal.Pod("redis", a, image.Redis), terminal.Pod("echo", a, product.Traffic, "/usr/bin/traffic", "serve", ":7000"),
		terminal.Pod("client", b, image.Redis, "sleep", "infinity"),
	}
	return d.P.Lab.Apply(ctx, strings.Join(pods, "---\n"))
}

func (d *demo) onTCP(ctx context.Context) error {
	d.Say("Ordinary pods, without a device, a capability or a memlock limit, in a namespace that nobody has opted in:\n")
	if err := d.Apply(ctx, "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: shop\n"); err != nil {
		return err
	}
	d.Eventually(ctx, "pods can be made there", func() (string, error) {
		_, err := d.P.Lab.Kubectl(ctx, "get", "serviceaccount", "-n", terminal.Shop, "default")
		return "", err
	})
	if err := d.apply(ctx); err != nil {
		return err
	}
	if err := d.ready(ctx); err != nil {
		return err
	}
	return d.measure(ctx, "TCP")
}

// ready waits for the pods, and shows them with what the agents say of them.
func (d *demo) ready(ctx context.Context) error {
	if _, err := d.P.Lab.Kubectl(ctx, "wait", "pods", "-n", terminal.Shop, "--all", "--for=condition=Ready", "--timeout="+d.Patience.String()); err != nil {
		return err
	}
	_, err := d.Kubectl(ctx, "get", "pods", "-n", terminal.Shop, "-o",
		`custom-columns=NAME:.metadata.name,NODE:.spec.nodeName,IP:.status.podIP,STATUS:.status.phase,SMC-R:.metadata.annotations.smcr\.io/status`)
	return err
}

// status waits until the agents say so of all pods.
func (d *demo) status(ctx context.Context, what, want string) {
	d.Eventually(ctx, what, func() (string, error) {
		out, err := d.P.Lab.Kubectl(ctx, "get", "pods", "-n", terminal.Shop, "-o", `jsonpath={range .items[*]}{.metadata.name}{" "}{.metadata.annotations.smcr\.io/status}{"\n"}{end}`)
		if err == nil && strings.Count(out, " "+want+"\n") != strings.Count(out, "\n") {
			err = errors.New(out)
		}
		return "", err
	})
}

func (d *demo) byAgents(ctx context.Context) error {
	if _, err := d.Kubectl(ctx, "annotate", "namespace", terminal.Shop, "smcr.io/enabled=true"); err != nil {
		return err
	}
	d.status(ctx, "the agents carry the same pods, which are not restarted", v1alpha1.PodStatusEnabled)
	redis, err := d.Address(ctx, "redis")
	if err != nil {
		return err
	}
	d.Eventually(ctx, "its connections to redis are on SMC-R", func() (string, error) {
		out, err := d.Exec(ctx, "client", "redis-cli", "-h", redis, "ping")
		if err == nil && !strings.Contains(out, "PONG") {
			err = errors.New(out)
		}
		if err == nil { // the first rendezvous may be too late
			err = d.explains(ctx, "client", redis+":6379", "verdict      on SMC-R")
		}
		return "", err
	})
	if _, err := d.SMCR(ctx, "explain", terminal.Shop+"/client", redis+":6379"); err != nil {
		return err
	}
	return d.measure(ctx, "SMC-R by the agents")
}

// explains returns nil if connections of a pod have a verdict that begins so.
func (d *demo) explains(ctx context.Context, pod, to, verdict string) error {
	out, err := d.P.KubectlSMCR(ctx, "explain", terminal.Shop+"/"+pod, to)
	if err == nil && !strings.HasPrefix(out, verdict) {
		err = errors.New(out)
	}
	return err
}

// kernelVerdict begins what explain says of a connection on the kernel's SMC-R.
const kernelVerdict = "verdict      on SMC-R of the pod's kernel"

// policy is of the kernel's SMC-R, to these ports.
func policy(ports string) string {
	return `apiVersion: smcr.io/v1alpha1
kind: SMCRPolicy
metadata:
  name: kernel
  namespace: shop
spec:
  datapath: Kernel
  isolation: Node
  peers: {cidrs: [10.0.0.0/8]}
  ports: ` + ports + "\n"
}

func (d *demo) onKernel(ctx context.Context) error {
	if err := d.Apply(ctx, policy("[]")); err != nil {
		return err
	}
	d.Say("Sockets that are there already stay what they are. Programs that start anew have sockets of the kernel's SMC:\n")
	if _, err := d.Kubectl(ctx, "delete", "pods", "-n", terminal.Shop, "--all"); err != nil {
		return err
	}
	if err := d.apply(ctx); err != nil {
		return err
	}
	if err := d.ready(ctx); err != nil {
		return err
	}
	d.status(ctx, "the agents say that the pods are on their kernel's SMC-R", v1alpha1.PodStatusKernel)
	return d.measure(ctx, "SMC-R of the kernel")
}

// rate is what redis did.
type rate struct{ perSecond, p50Millis float64 }

// measure asks redis on one connection, one question after the other.
func (d *demo) measure(ctx context.Context, way string) error {
	redis, err := d.Address(ctx, "redis")
	if err != nil {
		return err
	}
	command := []string{"redis-benchmark", "-h", redis, "-c", "1", "-n", "1000", "-t", "ping_mbulk", "--csv"}
	out, err := d.Exec(ctx, "client", command...)
	if err != nil {
		return errors.Join(err, errors.New(out))
	}
	d.Say("$ kubectl exec -n shop client -- %s\n%s", strings.Join(command, " "), out)
	r, err := parse(out)
	if err != nil {
		return err
	}
	d.numbers[way] = r
	d.Check("redis answers on "+way, r.perSecond > 0, "%.0f requests per second, half of them within %.2f ms", r.perSecond, r.p50Millis)
	return nil
}

// parse reads redis-benchmark's CSV: a line of names, and one of values.
func parse(out string) (r rate, err error) {
	all, err := csv.NewReader(strings.NewReader(out)).ReadAll()
	if err != nil || len(all) < 2 {
		return r, fmt.Errorf("redis-benchmark said %q: %w", out, err)
	}
	for i, name := range all[0] {
		switch name {
		case "rps":
			r.perSecond, err = strconv.ParseFloat(all[1][i], 64)
		case "p50_latency_ms":
			r.p50Millis, err = strconv.ParseFloat(all[1][i], 64)
		}
		if err != nil {
			return r, err
		}
	}
	if r.perSecond == 0 {
		return r, fmt.Errorf("redis-benchmark said %q", out)
	}
	return r, nil
}

func (d *demo) compare(context.Context) error {
	tcp, agents, kernel := d.numbers["TCP"], d.numbers["SMC-R by the agents"], d.numbers["SMC-R of the kernel"]
	for _, way := range []string{"TCP", "SMC-R by the agents", "SMC-R of the kernel"} {
		d.Say("%-22s %6.0f requests per second, %.2f of TCP", way, d.numbers[way].perSecond, d.numbers[way].perSecond/tcp.perSecond)
	}
	d.Check("without the agents' two hops there is more", kernel.perSecond > agents.perSecond, "%.1f times the requests per second", kernel.perSecond/agents.perSecond)
	return nil
}

// hold shows a connection that is held, to users.
func (d *demo) hold(ctx context.Context) error {
	if err := d.Hold(ctx, d.cluster.Guests[1].Node); err != nil {
		return err
	}
	echo, err := d.Address(ctx, "echo")
	if err != nil {
		return err
	}
	d.LoadGrows(ctx, "a connection is under load", &d.seen)
	d.Eventually(ctx, "the agents show it, who do not touch it", func() (string, error) {
		return "", d.explains(ctx, "load", echo+":7000", kernelVerdict)
	})
	if _, err := d.SMCR(ctx, "explain", terminal.Shop+"/load", echo+":7000"); err != nil {
		return err
	}
	d.Eventually(ctx, "the link group of the two kernels is an SMCRLink of each of them", func() (string, error) {
		out, err := d.P.Lab.Kubectl(ctx, "get", "smcrlinks", "-o", `jsonpath={range .items[*]}{.status.datapath}-{.status.peer}{"\n"}{end}`)
		if err == nil && (!strings.Contains(out, "Kernel-n2") || !strings.Contains(out, "Kernel-n3")) {
			err = errors.New(out)
		}
		return "", err
	})
	_, err = d.Kubectl(ctx, "get", "smcrlinks")
	return err
}

func (d *demo) kill(ctx context.Context) error {
	for _, n := range d.cluster.Guests {
		a, err := d.P.AgentPod(ctx, n.Name)
		if err != nil {
			return err
		}
		if _, err := d.Kubectl(ctx, "delete", "pod", "-n", product.Namespace, a.Name, "--wait=false"); err != nil {
			return err
		}
		d.Eventually(ctx, "another agent of "+n.Name+" is ready", func() (string, error) {
			now, err := d.P.AgentPod(ctx, n.Name)
			if err == nil && now.Name == a.Name {
				err = errors.New("it is the same")
			}
			if err == nil { // the conditions of its SMCRNode may still be of the former one
				_, err = d.P.Lab.Kubectl(ctx, "wait", "pod", "-n", product.Namespace, now.Name, "--for=condition=Ready", "--timeout=2s")
			}
			return "", err
		})
	}
	d.LoadGrows(ctx, "the connection went on meanwhile, and no byte is wrong", &d.seen)
	return nil
}

// onHost holds a connection from the network of a node, as ingress proxies and monitors do.
func (d *demo) onHost(ctx context.Context) error {
	d.Say("Such a pod is carried by no agent: it has no network of its own. By an annotation of its own it is on its node's SMC-R, by its cgroup:\n")
	echo, err := d.Address(ctx, "echo")
	if err != nil {
		return err
	}
	pod := terminal.Pod("monitor", d.cluster.Guests[1].Node, product.Traffic, "/usr/bin/traffic", "hold", echo+":7000", "--interval=50ms")
	pod = strings.Replace(pod, "\nspec:\n", "\n  annotations: {smcr.io/enabled: \"true\"}\nspec:\n  hostNetwork: true\n", 1)
	if err := d.Apply(ctx, pod); err != nil {
		return err
	}
	d.Eventually(ctx, "its connection is on SMC-R", func() (string, error) {
		return "", d.explains(ctx, "monitor", echo+":7000", kernelVerdict)
	})
	_, err = d.SMCR(ctx, "explain", terminal.Shop+"/monitor", echo+":7000")
	return err
}

func (d *demo) revoke(ctx context.Context) error {
	d.Say("The policy is for redis only now, and no longer for the connection under load:\n")
	if err := d.Apply(ctx, policy("[{port: 6379}]")); err != nil {
		return err
	}
	d.Eventually(ctx, "that connection ends", func() (string, error) {
		now, err := d.Load(ctx)
		if err == nil && !now.Ended {
			err = fmt.Errorf("%d exchanges so far", now.OK)
		}
		return "", err
	})
	echo, err := d.Address(ctx, "echo")
	if err != nil {
		return err
	}
	out, err := d.SMCR(ctx, "explain", terminal.Shop+"/load", echo+":7000")
	d.Check("explain says why", err == nil && strings.Contains(out, "POLICY_CHANGE"), "and new ones are plain TCP")
	return d.measure(ctx, "SMC-R of the kernel")
}
