// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

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
		"hardware.enabled=true",
		"agent.devices[0].rdma.name=rxe0", "agent.devices[0].rdma.address=node",
		"agent.devices[1].rdma.name=rxe1", "agent.devices[1].rdma.address=eth1",
		"agent.devicesOfNode.n1[0].soft.address=node",
		"agent.resources.cpu=900m", "agent.drainTimeout=5s", "agent.negativeCacheTTL=2s",
		"controller.replicas=1",
		`controller.nodeSelector.kubernetes\.io/hostname=n1`, `hooks.nodeSelector.kubernetes\.io/hostname=n1`,
		// Addresses of VFs that pods claim. Each node has its own, as host-local knows of no other node.
		"dra.enabled=true",
		"dra.ipamOfNode.n2.type=host-local", "dra.ipamOfNode.n2.ranges[0][0].subnet=10.1.0.0/24",
		"dra.ipamOfNode.n2.ranges[0][0].rangeStart=10.1.0.20", "dra.ipamOfNode.n2.ranges[0][0].rangeEnd=10.1.0.29",
		"dra.ipamOfNode.n3.type=host-local", "dra.ipamOfNode.n3.ranges[0][0].subnet=10.1.0.0/24",
		"dra.ipamOfNode.n3.ranges[0][0].rangeStart=10.1.0.30", "dra.ipamOfNode.n3.ranges[0][0].rangeEnd=10.1.0.39",
	}
}

// Parts implements [terminal.Demo].
func (d *demo) Parts() []terminal.Part {
	return []terminal.Part{
		{Title: "A Kubernetes whose nodes have RDMA devices", Do: d.up},
		{Title: "helm install", Do: d.install},
		{Title: "Applications opt in by an annotation", Do: d.applications},
		{Title: "Their connections are on RNICs", Do: d.links},
		{Title: "A cable is pulled", Do: d.cut},
		{Title: "Pods claim NICs of their own", Do: d.claims},
		{Title: "A node without RNICs takes part", Do: d.plain},
	}
}

func (d *demo) up(ctx context.Context) (err error) {
	if d.dir, err = os.MkdirTemp("", "demo-rdma-"); err != nil {
		return err
	}
	d.Say("Programs are built, and images packed without docker.")
	images, err := product.Build(ctx, d.dir, image.Product, image.Redis)
	if err != nil {
		return err
	}
	cfg := guest.Config{Config: lab.Config{Name: "demo-rdma", Nodes: 1, Images: images.Archives, Progress: d.Out}, Guests: 2, VFs: 1}
	if d.cluster, err = guest.Up(ctx, cfg); err != nil {
		return err
	}
	if d.P, err = product.New(d.cluster.Cluster, images); err != nil {
		return err
	}
	fmt.Fprintln(d.Out)
	if _, err := d.Kubectl(ctx, "get", "nodes", "-o", "wide"); err != nil {
		return err
	}
	out, err := d.cluster.Guests[0].Run(ctx, "rdma", "link", "show")
	if err != nil {
		return err
	}
	d.Say("$ rdma link show     # on %s\n%s", d.cluster.Guests[0].Name, out)
	return nil
}

func (d *demo) install(ctx context.Context) error {
	d.Say("$ helm install kube-smcr charts/kube-smcr --namespace kube-smcr --create-namespace --wait \\\n    --set %s\n", strings.Join(values()[:6], ","))
	began := time.Now()
	if err := d.P.Install(ctx, image.ProductTag, values()...); err != nil {
		return err
	}
	d.Eventually(ctx, "all nodes accelerate", func() (string, error) { return "", d.P.WaitReady(ctx) })
	d.Say("\ninstalled in %.0f s\n", time.Since(began).Seconds())
	out, err := d.Kubectl(ctx, "get", "smcrnodes")
	if err != nil {
		return err
	}
	d.Check("two nodes have RNICs and one has software", strings.Count(out, "Hardware") == 2 && strings.Count(out, "SoftwareRoCE") == 1,
		"agent.devices, and agent.devicesOfNode for n1")
	return nil
}

// applications starts servers on one node with RNICs and clients on the other one.
func (d *demo) applications(ctx context.Context) error {
	if err := d.OptIn(ctx); err != nil {
		return err
	}
	d.Say("Then ordinary pods, without a device, a capability or a memlock limit; nothing in them is about SMC-R:\n")
	plain, a, b := d.cluster.Nodes[0], d.cluster.Guests[0].Node, d.cluster.Guests[1].Node
	for _, pods := range [][]string{
		{terminal.Pod("redis", a, image.Redis), terminal.Pod("echo", a, product.Traffic, "/usr/bin/traffic", "serve", ":7000")},
		{terminal.Pod("client", b, image.Redis, "sleep", "infinity"), terminal.Pod("plain-client", plain, image.Redis, "sleep", "infinity")},
	} {
		if err := d.P.Lab.Apply(ctx, strings.Join(pods, "---\n")); err != nil {
			return err
		}
	}
	return d.Enabled(ctx, 4)
}

// ping lets a client ask redis, until the agent says that its connections are on SMC-R, and shows why.
func (d *demo) ping(ctx context.Context, client string) error {
	redis, err := d.Address(ctx, "redis")
	if err != nil {
		return err
	}
	return d.pingAt(ctx, client, redis)
}

// pingAt is ping of a redis by its address.
func (d *demo) pingAt(ctx context.Context, client, redis string) error {
	d.Eventually(ctx, client+"'s connections to redis are on SMC-R", func() (string, error) {
		out, err := d.Exec(ctx, client, "redis-cli", "-h", redis, "ping")
		if err != nil || !strings.Contains(out, "PONG") {
			return "", errors.Join(err, errors.New(out))
		}
		out, err = d.P.KubectlSMCR(ctx, "explain", terminal.Shop+"/"+client, redis+":6379")
		if err == nil && !strings.HasPrefix(out, "verdict      on SMC-R") { // the first rendezvous may be too late
			err = errors.New(out)
		}
		return "", err
	})
	_, err := d.SMCR(ctx, "explain", terminal.Shop+"/"+client, redis+":6379")
	return err
}

// links shows the link groups, to users and to the kernel.
func (d *demo) links(ctx context.Context) error {
	if err := d.ping(ctx, "client"); err != nil {
		return err
	}
	d.Eventually(ctx, "each side has a link on each of its two RNICs", func() (string, error) {
		out, err := d.P.Lab.Kubectl(ctx, "get", "smcrlinks", "--no-headers", "-o", "wide")
		if err == nil && strings.Count(out, "rxe0,rxe1") < 2 {
			err = errors.New(out)
		}
		return "", err
	})
	if _, err := d.Kubectl(ctx, "get", "smcrlinks", "-o", "wide"); err != nil {
		return err
	}
	n := d.cluster.Guests[1]
	out, err := n.Run(ctx, "sh", "-c", "rdma resource show qp | grep 'type RC'")
	d.Say("$ rdma resource show qp | grep 'type RC'     # on %s\n%s", n.Name, out)
	d.Check("the kernel says so, too", err == nil && strings.Contains(out, "rxe0/") && strings.Contains(out, "rxe1/") && strings.Contains(out, "comm node-agent"),
		"reliable connections of the agent on both devices, and none of the pods'")
	return nil
}

// cut pulls the cable of a NIC under load, and puts it back.
func (d *demo) cut(ctx context.Context) error {
	if err := d.Hold(ctx, d.cluster.Guests[1].Node); err != nil {
		return err
	}
	var seen terminal.Load
	d.LoadGrows(ctx, "a connection is under load", &seen)
	n := d.cluster.Guests[1]
	for _, to := range []struct {
		up                bool
		redundancy, event string
	}{{false, "Single", "RedundancyLost"}, {true, "Symmetric", "RedundancyRestored"}} {
		what := "pulled"
		if to.up {
			what = "put back"
		}
		d.Say("\nThe cable of eth1 of %s is %s:\n", n.Name, what)
		if err := n.Guest.SetLink(1, to.up); err != nil {
			return err
		}
		d.Eventually(ctx, "the link groups are "+strings.ToLower(to.redundancy), func() (string, error) {
			out, err := d.P.Lab.Kubectl(ctx, "get", "smcrlinks", "-l", "smcr.io/node="+n.Name, "--no-headers")
			if err == nil && strings.Count(out, " "+to.redundancy+" ") != strings.Count(out, "\n") {
				err = errors.New(out)
			}
			return "", err
		})
		if _, err := d.Kubectl(ctx, "get", "smcrlinks"); err != nil {
			return err
		}
		d.Eventually(ctx, "an event says so", func() (string, error) {
			out, err := d.P.Lab.Kubectl(ctx, "get", "events", "-A", "--field-selector", "reason="+to.event, "-o", "jsonpath={.items[0].message}")
			if err == nil && out == "" {
				err = fmt.Errorf("no event %s", to.event)
			}
			return out, err
		})
		d.LoadGrows(ctx, "the connection goes on, and no byte is wrong", &seen)
	}
	return nil
}

// claims gives two pods a VF each, by a claim, and shows that their connections are on these.
func (d *demo) claims(ctx context.Context) error {
	d.Say("Nodes offer their virtual functions with what a scheduler wants to know of them:\n")
	_, err := d.Kubectl(ctx, "get", "resourceslices", "-o", "custom-columns=NODE:.spec.nodeName,DEVICE:.spec.devices[*].name,"+
		"KIND:.spec.devices[*].attributes.kind.string,RAIL:.spec.devices[*].attributes.rail.int,NUMA:.spec.devices[*].attributes.numaNode.int")
	if err != nil {
		return err
	}
	d.Say("A pod that claims one needs no annotation, no Multus and no right (chart values dra.enabled, and dra.ipam for addresses):\n")
	err = d.Apply(ctx, `apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: vf-of-rail-0
  namespace: shop
spec:
  spec:
    devices:
      requests:
      - name: nic
        exactly:
          deviceClassName: roce.smcr.io
          selectors:
          - cel: {expression: 'device.attributes["roce.smcr.io"].kind == "vf" && device.attributes["roce.smcr.io"].rail == 0'}
`)
	if err != nil {
		return err
	}
	a, b := d.cluster.Guests[0].Node, d.cluster.Guests[1].Node
	pods := []string{
		claiming(terminal.Pod("vf-redis", a, image.Redis), a, "vf-of-rail-0"),
		claiming(terminal.Pod("vf-client", b, image.Redis, "sleep", "infinity"), b, "vf-of-rail-0"),
	}
	if err := d.P.Lab.Apply(ctx, strings.Join(pods, "---\n")); err != nil {
		return err
	}
	if err := d.Enabled(ctx, 7); err != nil { // with the five from before
		return err
	}
	_, err = d.Kubectl(ctx, "get", "resourceclaims", "-n", terminal.Shop, "-o", "custom-columns=POD:.status.reservedFor[0].name,"+
		"DEVICE:.status.devices[0].device,INTERFACE:.status.devices[0].networkData.interfaceName,ADDRESS:.status.devices[0].networkData.ips[0]")
	if err != nil {
		return err
	}
	redis := ""
	d.Eventually(ctx, "the claim's status has the address of the server's VF", func() (string, error) {
		out, err := d.P.Lab.Kubectl(ctx, "get", "resourceclaims", "-n", terminal.Shop, "-o",
			`jsonpath={.items[?(@.status.reservedFor[0].name=="vf-redis")].status.devices[0].networkData.ips[0]}`)
		redis, _, _ = strings.Cut(out, "/")
		if err == nil && redis == "" {
			err = errors.New("it has none")
		}
		return redis, err
	})
	if err := d.pingAt(ctx, "vf-client", redis); err != nil {
		return err
	}
	out, err := d.Kubectl(ctx, "get", "smcrlinks", "-o",
		"custom-columns=POD:.status.pod,PEER-POD:.status.peerPod,STATE:.status.state,DEVICE:.status.devices,PCI:.status.pciAddresses,GIDS:.status.gids")
	d.Check("their link group is on their VFs", err == nil && strings.Count(out, redis) == 2, "and on no device of the node; the pods have no device file")
	return err
}

// claiming has a pod claim a device by a template. The scheduler gives it to the pod, and so puts the pod on its node.
func claiming(pod string, n *lab.Node, template string) string {
	at := "  nodeName: " + n.Name + "\n"
	return strings.Replace(pod, at, fmt.Sprintf(`  nodeSelector: {kubernetes.io/hostname: %s}
  resourceClaims: [{name: nic, resourceClaimTemplateName: %s}]
`, n.Name, template), 1) + "    resources: {claims: [{name: nic}]}\n"
}

// plain lets a pod of the node without RNICs use software ones, with the other's RNICs.
func (d *demo) plain(ctx context.Context) error {
	if err := d.ping(ctx, "plain-client"); err != nil {
		return err
	}
	d.Say("Who wants RNICs only says so in a policy:\n")
	err := d.Apply(ctx, `apiVersion: smcr.io/v1alpha1
kind: SMCRPolicy
metadata:
  name: rnics-only
  namespace: shop
spec:
  transports: [Hardware]
`)
	if err != nil {
		return err
	}
	redis, err := d.Address(ctx, "redis")
	if err != nil {
		return err
	}
	d.Eventually(ctx, "the pod of n1 is on TCP, with the reason", func() (string, error) {
		out, err := d.P.KubectlSMCR(ctx, "explain", terminal.Shop+"/plain-client", redis+":6379")
		if err == nil && !strings.Contains(out, "TRANSPORT") {
			err = errors.New(out)
		}
		return "", err
	})
	if _, err := d.SMCR(ctx, "explain", terminal.Shop+"/plain-client", redis+":6379"); err != nil {
		return err
	}
	return d.ping(ctx, "client")
}
