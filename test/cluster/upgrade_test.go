// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// upgradeUnderLoad: helm upgrade replaces both agents, and no new connection
// fails.
func upgradeUnderLoad(c *cluster) {
	server, holder := c.pair("hold")
	c.must(c.p.TagNext(c.Context()))
	l := c.startLoads(server, c.n[1])
	old, err := c.p.AgentPod(c.Context(), holder.node.Name)
	c.must(err)
	drains := c.seesDrain(holder, old.Name)
	began := time.Now()
	c.must(c.p.Install(c.Context(), product.TagNext, installed...))
	c.rolledOut()
	took := time.Since(began)
	if err := drains(); err != nil {
		c.Errorf("the SMCRLinks of the agent that drains: %v", err)
	}
	if reset := l.end(fmt.Sprintf("agents updated in %v", took.Round(time.Second))); reset > 0 {
		c.Errorf("%d connections with SMC-R were reset", reset)
	}
	for _, n := range c.n {
		a, err := c.p.AgentPod(c.Context(), n.Name)
		c.must(err)
		if got := a.Spec.Containers[0].Image; !strings.HasSuffix(got, ":"+product.TagNext) {
			c.Errorf("agent of %s: image %s", n.Name, got)
		}
	}
	c.must(c.p.WaitReady(c.Context()))
	c.onSMCR(l.carried, server.address())
	c.active(l.carried)
	c.eventually("the end of the old agent's SMCRLinks", soon, func() error {
		links, err := c.links(holder)
		for _, l := range links {
			if l.Labels[v1alpha1.LabelAgent] == old.Name {
				err = fmt.Errorf("%s is there", l.Name)
			}
		}
		return err
	})
}

// seesDrain looks for an active SMCRLink of the pod that is the old agent's while
// another agent manages the node. The result ends that, and says why there was
// none.
func (c *cluster) seesDrain(p pod, old string) (result func() error) {
	ctx, cancel := context.WithCancel(c.Context())
	seen := make(chan error, 1)
	go func() {
		seen <- product.Eventually(ctx, "an active SMCRLink of "+old, 5*time.Minute, func() error {
			var n v1alpha1.SMCRNode
			if err := c.p.Client.Get(ctx, key("", p.node.Name), &n); err != nil {
				return err
			}
			if strings.HasSuffix(n.Status.AgentPod, "/"+old) {
				return errors.New("it manages the node")
			}
			links, err := c.links(p)
			if err != nil {
				return err
			}
			for _, l := range links {
				if l.Labels[v1alpha1.LabelAgent] == old && l.Status.State == v1alpha1.LinkActive {
					return nil
				}
			}
			return fmt.Errorf("among %d", len(links))
		})
	}()
	return func() error {
		cancel()
		return <-seen
	}
}

// churn: 100 pods come and go.
func churn(c *cluster) {
	const pods, batch = 100, 25
	ns := c.namespace(optedIn())
	server := c.start(ns, podSpec{name: "server", node: c.n[0]})[0]
	began := time.Now()
	for first := 0; first < pods; first += batch {
		var specs []podSpec
		for i := range batch {
			specs = append(specs, podSpec{
				name: fmt.Sprintf("p%d", first+i), node: c.n[i%2], labels: map[string]string{"app": "churn"},
				args: []string{"hold", server.address()},
			})
		}
		started := c.start(ns, specs...)
		for _, p := range started {
			c.status(p, v1alpha1.PodStatusEnabled, soon)
		}
		c.must(c.p.Client.DeleteAllOf(c.Context(), &corev1.Pod{}, client.InNamespace(ns), client.MatchingLabels{"app": "churn"}))
	}
	c.Logf("%d pods in %v", pods, time.Since(began).Round(100*time.Millisecond))
	c.eventually("the end of the pods", soon, func() error {
		if out := c.kubectl("get", "pods", "-n", ns, "-l", "app=churn", "-o", "name"); out != "" {
			return fmt.Errorf("there are %d", strings.Count(out, "\n"))
		}
		return nil
	})
	for _, n := range c.n {
		c.quiesced(n)
	}
	c.eventually("the end of the SMCRLinks", soon, func() error {
		var list v1alpha1.SMCRLinkList
		if err := c.p.Client.List(c.Context(), &list, client.MatchingLabels{v1alpha1.LabelNamespace: ns}); err != nil {
			return err
		}
		for _, l := range list.Items {
			if l.Status.Pod != server.String() {
				return fmt.Errorf("there is %s of %s", l.Name, l.Status.Pod)
			}
		}
		return nil
	})
}

// uninstall: helm uninstall leaves nothing but users' own objects, also if the release is that of somebody
// who typed what README.md says.
func uninstall(c *cluster) {
	server, holder := c.pair("hold")
	c.policy(server.ns, "mine", "{}")
	out, err := c.p.Uninstall(c.Context())
	c.must(err)
	c.Log(out)
	c.ends(holder, soon)
	c.must(c.once(holder, server.address()))
	for _, p := range []pod{server, holder} {
		c.status(p, "", soon)
		c.noTable(p)
		ns, err := c.p.PodNetNS(c.Context(), p.node, p.ip)
		c.must(err)
		rules, err := p.node.Run(c.Context(), "ip", "-n", ns, "rule", "list")
		c.must(err)
		if n := strings.Count(rules, "\n"); n != 3 {
			c.Errorf("the network of %s has rules of ours:\n%s", p, rules)
		}
		sysctl, err := p.node.Run(c.Context(), "ip", "netns", "exec", ns, "cat", "/proc/sys/net/ipv4/tcp_fwmark_accept")
		c.must(err)
		if strings.TrimSpace(sysctl) != "0" {
			c.Errorf("tcp_fwmark_accept of %s is %s", p, sysctl)
		}
	}
	for _, n := range c.n {
		c.clean(n)
	}
	c.nothingInTheAPI()
	c.kubectl("get", "smcrpolicy", "-n", server.ns, "mine") // users' objects stay

	// And again, with the pods that are there: they are older than the plugin, and
	// one never was anything else.
	older := c.start(server.ns, podSpec{name: "older", node: c.n[1]})[0]
	r := newReader(c)
	c.asREADME(r)
	c.status(older, v1alpha1.PodStatusEnabled, soon)
	c.onSMCR(older, server.address())
	c.active(older)
	c.kubectl("delete", "pod", "-n", older.ns, older.name)
	c.quiesced(older.node)
	c.status(server, v1alpha1.PodStatusEnabled, soon)
	c.status(holder, v1alpha1.PodStatusEnabled, soon)
	c.onSMCR(holder, server.address())

	said, err := r.types(strings.TrimSpace(documented(c, filepath.Join(checkout, "docs/operations.md"), "## Remove")[0]))
	c.must(err)
	c.Log(said)
	for _, n := range c.n {
		c.clean(n)
	}
	c.nothingInTheAPI()
	for _, p := range []pod{server, holder} {
		c.status(p, "", soon)
		c.noTable(p)
	}
}

// nothingInTheAPI looks for objects that the release made.
func (c *cluster) nothingInTheAPI() {
	c.Helper()
	for _, kind := range []string{"smcrlinks", "smcrnodes", "smcrpeerslices"} {
		if out := c.kubectl("get", kind, "-A", "-o", "name"); out != "" {
			c.Errorf("there are still %s:\n%s", kind, out)
		}
	}
	kinds := "pods,daemonsets,deployments,jobs,configmaps,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings," +
		"validatingadmissionpolicies,validatingadmissionpolicybindings,poddisruptionbudgets"
	c.eventually("the end of the objects of the release", soon, func() error {
		if out := c.kubectl("get", kinds, "-A", "-o", "name", "-l", "app.kubernetes.io/part-of=kube-smcr"); out != "" {
			return errors.New(out)
		}
		return nil
	})
	var crds struct {
		Items []struct {
			Metadata struct {
				Name       string
				Finalizers []string
			}
		}
	}
	c.must(json.Unmarshal([]byte(c.kubectl("get", "crds", "-o", "json")), &crds))
	ours := 0
	for _, d := range crds.Items {
		if !strings.HasSuffix(d.Metadata.Name, "."+v1alpha1.Group) {
			continue
		}
		ours++
		for _, f := range d.Metadata.Finalizers {
			c.Errorf("CRD %s has the finalizer %s", d.Metadata.Name, f)
		}
	}
	if ours != 4 {
		c.Errorf("%d CRDs of ours, want 4: they keep users' policies", ours)
	}
}

// clean compares a node with what it was before the installation.
func (c *cluster) clean(n *lab.Node) {
	c.Helper()
	if diff := cmp.Diff(before[n.Name], nodeState(c, n)); diff != "" {
		c.Errorf("node %s is not what it was before the installation:\n%s", n.Name, diff)
	}
}

// before is what the nodes had before kube-smcr was installed.
var before = map[string]map[string]string{}

func rememberNodes(c *cluster) {
	c.Helper()
	for _, n := range c.n {
		before[n.Name] = nodeState(c, n)
	}
}

// nodeState is what we could leave behind on a node.
func nodeState(c *cluster, n *lab.Node) map[string]string {
	c.Helper()
	state := map[string]string{}
	for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/run/kube-smcr", "/var/lib/kube-smcr"} {
		top, err := n.Path(c.Context(), dir)
		c.must(err)
		err = filepath.WalkDir(top, func(name string, d fs.DirEntry, err error) error {
			if os.IsNotExist(err) {
				return nil
			}
			if err != nil || d.IsDir() {
				return err
			}
			rel, _ := filepath.Rel(top, name)
			text := "(a file)"
			if strings.HasPrefix(dir, "/etc") {
				b, err := os.ReadFile(name)
				if err != nil {
					return err
				}
				text = string(b)
			}
			state[filepath.Join(dir, rel)] = text
			return nil
		})
		c.must(err)
	}
	for _, args := range [][]string{
		{"nft", "list", "tables"},
		{"ip", "rule", "list"},
		{"ip", "-brief", "address", "show", "scope", "global", "up"},
		{"sysctl", "-n", "net.ipv4.tcp_fwmark_accept"},
		{"ls", "/sys/fs/bpf"},
	} {
		out, err := n.Run(c.Context(), args...)
		c.must(err)
		state[strings.Join(args, " ")] = lines(out)
	}
	return state
}

// peerIndex is the number of the other end of an interface, another one after
// each boot.
var peerIndex = regexp.MustCompile(`@if\d+`)

// lines sorts lines, and leaves out the pods' interfaces and the pods'
// bridge, which comes with the first of them.
func lines(out string) string {
	var kept []string
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "veth") && !strings.HasPrefix(line, "cni0") {
			kept = append(kept, peerIndex.ReplaceAllString(line, ""))
		}
	}
	slices.Sort(kept)
	return strings.Join(kept, "")
}
