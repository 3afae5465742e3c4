// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// refused: Helm says what is wrong with a setting that only agents can judge, and refuses
// a second release, before anything is changed.
func refused(c *cluster) {
	var before, after appsv1.DaemonSet
	c.must(c.p.Client.Get(c.Context(), key(product.Namespace, product.Agent), &before))
	for _, tt := range []struct{ release, set, want string }{
		{product.Release, "agent.drainTimeout=48h", `node.drainTimeout: "48h", want a duration`},
		{"pool-b", "nameOverride=b", "kube-smcr is in this cluster already: release " + product.Release},
	} {
		out, err := c.p.TryInstall(c.Context(), tt.release, image.ProductTag, time.Minute, append(append([]string{}, installed...), tt.set)...)
		if err == nil || !strings.Contains(out+err.Error(), tt.want) {
			c.Errorf("release %s with %s: %v, %s; want %q", tt.release, tt.set, err, out, tt.want)
		}
	}
	c.must(c.p.Client.Get(c.Context(), key(product.Namespace, product.Agent), &after))
	if before.Generation != after.Generation {
		c.Errorf("the DaemonSet is at generation %d, and was at %d: something was changed", after.Generation, before.Generation)
	}
	c.must(c.p.Install(c.Context(), image.ProductTag, installed...)) // Helm's release is whole again
}

// leave: kubectl smcr leave takes the product off one node, which says so, and lets it back, and
// so does a change of the nodes that agent.nodeSelector selects.
func leave(c *cluster) {
	server, client := c.pair("load")
	n := client.node
	out, err := c.p.KubectlSMCR(c.Context(), "leave", n.Name)
	c.must(err)
	c.contains(out, "node "+n.Name+" is clean")
	c.agentGone(n, client, metav1.ConditionFalse)
	c.contains(c.kubectl("get", "smcrnode", n.Name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].message}`), "left the node clean", v1alpha1.LabelLeave+"=true")
	c.clean(n)
	c.noTable(client)
	c.status(server, v1alpha1.PodStatusEnabled, soon)
	c.must(c.once(client, server.address()))
	late := c.start(client.ns, podSpec{name: "late", node: n})[0]
	c.status(late, v1alpha1.PodStatusNoAgent, soon)
	_, err = c.p.KubectlSMCR(c.Context(), "leave", n.Name, "--undo")
	c.must(err)
	c.must(c.p.WaitNode(c.Context(), n.Name))
	c.status(client, v1alpha1.PodStatusEnabled, soon)
	c.status(late, v1alpha1.PodStatusEnabled, soon)
	c.onSMCR(client, server.address())

	c.kubectl("label", "node", n.Name, agentLabel+"-")
	c.noAgents(n)
	c.agentGone(n, client, metav1.ConditionFalse)
	c.clean(n)
	c.noTable(client)
	c.kubectl("label", "node", n.Name, agentLabel+"=here")
	c.must(c.p.WaitNode(c.Context(), n.Name))
	c.status(client, v1alpha1.PodStatusEnabled, soon)
}

// prune: the rendered objects are applied, upgraded and pruned as Argo CD does it, without
// any hook, and nothing is left. Before that, an installation whose image is missing. After
// that, all objects are deleted at once, which leaves the nodes clean, and what the documents
// say takes the rest away.
func prune(c *cluster) {
	_, err := c.p.Uninstall(c.Context()) // unless uninstall did
	c.must(err)
	c.imageMissing()

	ns := c.namespace(optedIn())
	server := c.start(ns, podSpec{name: "server", node: c.n[0]})[0]
	client := c.start(ns, podSpec{name: "client", node: c.n[1], args: []string{"load", server.address()}})[0]
	var manifest string
	for _, more := range []string{"agent.logLevel=info", "agent.logLevel=debug"} { // the second is an upgrade
		manifest, err = c.p.Render(c.Context(), image.ProductTag, append(append([]string{}, installed...), "crds.install=Template", more)...)
		c.must(err)
		c.must(c.p.Lab.Apply(c.Context(), manifest))
		c.rolledOut()
		c.must(c.p.WaitReady(c.Context()))
		c.status(client, v1alpha1.PodStatusEnabled, soon)
		c.onSMCR(client, server.address())
	}

	waves := map[string]string{}
	for doc := range strings.SplitSeq("\n"+manifest, "\n---\n") {
		var o struct {
			Kind     string
			Metadata struct{ Annotations map[string]string }
		}
		c.must(yaml.Unmarshal([]byte(doc), &o))
		if o.Kind != "" && o.Kind != "CustomResourceDefinition" {
			waves[o.Metadata.Annotations["argocd.argoproj.io/sync-wave"]] += "\n---\n" + doc
		}
	}
	if len(waves) != 2 || !strings.Contains(waves["1"], "kind: DaemonSet") {
		c.Fatalf("%d sync waves; want the DaemonSet in wave 1, and all else in none", len(waves))
	}
	for _, wave := range []string{"1", ""} {
		c.must(c.p.Lab.Delete(c.Context(), waves[wave]))
	}
	nothing := func() {
		c.Helper()
		for _, p := range []pod{server, client} {
			c.status(p, "", soon)
			c.noTable(p)
		}
		for _, n := range c.n {
			c.clean(n)
		}
		c.nothingInTheAPI()
		c.must(c.once(client, server.address()))
	}
	nothing()

	c.must(c.p.Lab.Apply(c.Context(), manifest))
	c.must(c.p.WaitReady(c.Context()))
	c.onSMCR(client, server.address())
	c.must(c.p.Lab.Delete(c.Context(), waves[""]+waves["1"])) // the rights of the agents first
	for _, n := range c.n {
		c.noAgents(n)
		c.clean(n)
	}
	kubectl := c.p.Lab.Command(c.Context(), "kubectl")
	commands := exec.CommandContext(c.Context(), "sh", "-ec", documented(c, "../../docs/gitops.md", "## What may be left")[0])
	commands.Env = append(kubectl.Env, "PATH="+filepath.Dir(kubectl.Path)+string(filepath.ListSeparator)+os.Getenv("PATH"))
	if out, err := commands.CombinedOutput(); err != nil {
		c.Fatalf("what docs/gitops.md says of what may be left: %v\n%s", err, out)
	}
	leases, err := c.p.Lab.Command(c.Context(), "kubectl", "get", "lease", "-n", product.Namespace, "-o", "name").Output()
	if err != nil || len(leases) > 0 {
		c.Errorf("Leases that are left: %s, %v", leases, err)
	}
	nothing()
}

// noAgents waits until no agent of a node is left.
func (c *cluster) noAgents(n *lab.Node) {
	c.Helper()
	c.eventually("the end of the agents of "+n.Name, soon, func() error {
		pods, err := c.p.AgentPods(c.Context(), n.Name)
		if err == nil && len(pods) > 0 {
			err = fmt.Errorf("%s is there", pods[0].Name)
		}
		return err
	})
}

// documented are the blocks of commands under a heading.
func documented(c *cluster, file, heading string) (blocks []string) {
	c.Helper()
	text, err := os.ReadFile(file)
	c.must(err)
	_, rest, _ := strings.Cut(string(text), "\n"+heading+"\n")
	rest, _, _ = strings.Cut(rest, "\n## ")
	for _, part := range strings.Split(rest, "```sh\n")[1:] {
		block, _, _ := strings.Cut(part, "```")
		blocks = append(blocks, block)
	}
	if len(blocks) == 0 {
		c.Fatalf("%s has no commands under %q", file, heading)
	}
	return blocks
}

// imageMissing: 30 s after helm install a user can see which image is missing, and can
// take the failed installation away.
func (c *cluster) imageMissing() {
	const tag = "nowhere"
	began := time.Now()
	failed := make(chan error, 1)
	go func() {
		_, err := c.p.TryInstall(c.Context(), product.Release, tag, 40*time.Second, installed...)
		failed <- err
	}()
	c.eventually("the name of the missing image", 30*time.Second, func() error {
		_, err := c.p.KubectlSMCR(c.Context(), "status")
		if err == nil || !strings.Contains(err.Error(), "does not start: image "+image.ProductRepository+":"+tag) {
			return fmt.Errorf("kubectl smcr status: %w", err)
		}
		return nil
	})
	c.Logf("the missing image is named after %v", time.Since(began).Round(100*time.Millisecond))
	if err := <-failed; err == nil {
		c.Error("an installation without its image succeeds")
	}
	_, err := c.p.Lab.Helm(c.Context(), "uninstall", product.Release, "--namespace", product.Namespace, "--no-hooks")
	c.must(err)
	c.kubectl("delete", "jobs,configmaps,serviceaccounts,roles,rolebindings", "-n", product.Namespace, "-l", "app.kubernetes.io/part-of=kube-smcr")
	c.kubectl("delete", "clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/part-of=kube-smcr")
	c.nothingInTheAPI()
	for _, n := range c.n {
		c.clean(n)
	}
}
