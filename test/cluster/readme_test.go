// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// A reader types the commands of documents in the checkout, with kubectl and helm in the PATH and rights on
// the cluster. He is root, for whom sudo does nothing. What he puts into /usr/local/bin only he finds there.
type reader struct {
	*cluster
	bin, instead string // his /usr/local/bin, and where the machine's is for him
}

func newReader(c *cluster) *reader {
	c.Helper()
	return &reader{c, c.TempDir(), c.TempDir()}
}

// checkout is the top of the repository.
const checkout = "../.."

// types runs a line of a document as it is, and returns what it prints.
func (r *reader) types(line string) (string, error) {
	kubectl := r.p.Lab.Command(r.Context(), "kubectl")
	const script = `mount --bind /usr/local/bin "$0" && mount --bind "$1" /usr/local/bin
		sudo() { "$@"; }
		eval "$2"`
	cmd := exec.CommandContext(r.Context(), "unshare", "--mount", "--propagation=private", "sh", "-ec", script, r.instead, r.bin, line)
	cmd.Dir = checkout
	// Beside PATH only what says who he is, how Go finds modules here, and which cluster is his.
	for _, v := range kubectl.Env {
		name, _, _ := strings.Cut(v, "=")
		if slices.Contains([]string{"HOME", "KUBECONFIG"}, name) || strings.HasPrefix(name, "HELM_") || strings.HasPrefix(name, "GO") || strings.HasSuffix(strings.ToLower(name), "_proxy") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, "PATH="+strings.Join([]string{filepath.Dir(kubectl.Path), os.Getenv("PATH"), r.instead}, string(filepath.ListSeparator)))
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w\n%s", line, err, out)
	}
	return string(out), nil
}

// loads runs what the commands have for clusters of make cluster-up instead of a line of kind, which needs
// docker. The test's cluster has another name.
func (r *reader) loads(line, commands string) error {
	_, instead, found := strings.Cut(commands, "# or for make cluster-up: ")
	instead, _, _ = strings.Cut(instead, "\n")
	if !found {
		return fmt.Errorf("nothing is said of clusters of make cluster-up in:\n%s", commands)
	}
	line, _, _ = strings.Cut(line, "#")
	words := strings.Fields(line)
	_, err := r.types(strings.ReplaceAll(instead, "FILE", words[len(words)-1]) + " --name=" + r.p.Lab.Name)
	return err
}

// asREADME installs kube-smcr with the commands of README.md, until its last one shows a connection on SMC-R.
func (c *cluster) asREADME(r *reader) {
	c.Helper()
	c.kubectl("create", "namespace", "shop")
	c.Cleanup(func() {
		if _, err := c.p.Lab.Kubectl(context.Background(), "delete", "namespace", "shop", "--wait=false"); err != nil {
			c.Error(err)
		}
	})
	c.apply(`{apiVersion: v1, kind: Service, metadata: {name: redis, namespace: shop}, spec: {selector: {app: redis}, ports: [{port: 6379}]}}`)
	vip := c.kubectl("get", "service", "redis", "-n", "shop", "-o", "jsonpath={.spec.clusterIP}")
	pods := c.start("shop",
		podSpec{name: "redis-0", node: c.n[0], labels: map[string]string{"app": "redis"}, args: []string{"serve", ":6379"}},
		podSpec{name: "web-0", node: c.n[1], args: []string{"load", vip + ":6379"}},
	)
	began := time.Now()
	commands := strings.Join(documented(c, filepath.Join(checkout, "README.md"), "## Use it"), "")
	var said string
	for line := range strings.Lines(commands) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "kind "):
			c.must(r.loads(line, commands))
		case strings.HasPrefix(line, "kubectl "):
			// What it asks for takes a moment, and where the client's agent asked before the server's
			// pod was attached, the chart's negativeCacheTTL.
			c.must(product.Eventually(c.Context(), "README.md's "+line, time.Minute+soon, func() (err error) {
				said, err = r.types(line)
				return err
			}))
		default:
			_, err := r.types(line)
			c.must(err)
		}
		if strings.HasPrefix(line, "helm install ") {
			c.must(c.p.WaitReady(c.Context()))
		}
	}
	c.contains(said, "on SMC-R")
	c.Logf("what README.md says took %v", time.Since(began).Round(100*time.Millisecond))
	for _, p := range pods {
		c.status(p, v1alpha1.PodStatusEnabled, soon)
		c.active(p)
	}
}
