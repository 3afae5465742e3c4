// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// scenarios are in this order because each is cheaper while the ones before it
// did not break anything; uninstalling is the end, after which nothing is installed.
var scenarios = []struct {
	name string
	run  func(*cluster)
}{
	{"install", install},
	{"refused", refused},
	{"untouched", untouched},
	{"optIn", optIn},
	{"optInOfARunningPod", optInRunning},
	{"junkAnnotation", junkAnnotation},
	{"policyChange", policyChange},
	{"selectors", selectors},
	{"required", required},
	{"heldSYNs", heldSYNs},
	{"isolation", isolation},
	{"railLost", railLost},
	{"claims", claims},
	{"allocation", allocation},
	{"agentKilled", agentKilled},
	{"agentEnds", agentEnds},
	{"delWithoutAgent", delWithoutAgent},
	{"podDeletedDuringADD", podDeletedDuringADD},
	{"churn", churn},
	{"upgradeUnderLoad", upgradeUnderLoad},
	{"apiServerHangs", apiServerHangs}, // first: who was refused waits twice as long after each time, up to 60 s
	{"apiServerAway", apiServerAway},
	{"nodeReboot", nodeReboot},
	{"noDevice", noDevice},
	{"leave", leave},
	{"uninstall", uninstall},
	{"prune", prune},
}

func TestCluster(t *testing.T) {
	testenv.Builds("...")
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.ClusterTools)
	p := setUp(t)
	for _, s := range scenarios {
		ok := t.Run(s.name, func(t *testing.T) {
			began := time.Now()
			s.run(newCluster(t, p))
			t.Logf("took %v", time.Since(began).Round(100*time.Millisecond))
		})
		if !ok && s.name == "install" {
			t.Fatal("nothing else can work")
		}
	}
}

// logDir is where the logs stay after a failure.
var logDir = filepath.Join("..", "..", "out", "test-cluster")

// setUp makes a cluster with kube-smcr on it.
func setUp(t *testing.T) *product.Product {
	t.Helper()
	ctx := t.Context()
	if err := os.RemoveAll(logDir); err != nil {
		t.Fatal(err)
	}
	images, err := product.Build(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	c, err := upOrOpen(ctx, images)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if os.Getenv(clusterEnv) != "" {
			return
		}
		if err := c.Down(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
		if !t.Failed() {
			_ = os.RemoveAll(logDir)
		}
	})
	t.Logf("the cluster is up after %v", time.Since(began).Round(100*time.Millisecond))
	p, err := product.New(c, images)
	if err != nil {
		t.Fatal(err)
	}
	rememberNodes(newCluster(t, p))
	for _, n := range c.Nodes {
		if _, err := c.Kubectl(ctx, "label", "node", "--overwrite", n.Name, agentLabel+"=here"); err != nil {
			t.Fatal(err)
		}
	}
	began = time.Now()
	if err := p.Install(ctx, image.ProductTag, installed...); err != nil {
		t.Fatalf("%v\n%s", err, p.Diagnose(context.WithoutCancel(ctx)))
	}
	if err := p.WaitReady(ctx); err != nil {
		t.Fatalf("%v\n%s", err, p.Diagnose(context.WithoutCancel(ctx)))
	}
	t.Logf("kube-smcr is installed after %v", time.Since(began).Round(100*time.Millisecond))
	return p
}

// clusterEnv names a cluster that is up already and stays up, for whoever works
// on a scenario: go run ./tools/cluster up --name NAME.
const clusterEnv = "KUBE_SMCR_TEST_CLUSTER"

func upOrOpen(ctx context.Context, images *product.Images) (*lab.Cluster, error) {
	name := os.Getenv(clusterEnv)
	if name == "" {
		return lab.Up(ctx, lab.Config{Images: images.Archives, LogDir: logDir})
	}
	c, err := lab.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	for _, a := range images.Archives {
		if err := c.LoadImage(ctx, a); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// agentLabel is on nodes that have an agent.
const agentLabel = "agent"

// installed are the chart's values, besides those for the lab.
var installed = []string{
	// Old agents end sooner, and what turned out to be TCP is tried again sooner.
	"agent.drainTimeout=" + drainTimeout.String(),
	"agent.negativeCacheTTL=2s",
	// Each node has two networks.
	"agent.devices[0].soft.interface=eth0",
	"agent.devices[1].soft.interface=eth1",
	// Agents run where nodes have a label.
	"agent.nodeSelector." + agentLabel + "=here",
	"devicePlugin.enabled=true",
	fmt.Sprintf("devicePlugin.slots=%d", slots),
	"dra.enabled=true",
}
