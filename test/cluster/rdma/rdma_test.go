// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// scenarios are in this order because each is cheaper while the ones before it did not break
// anything.
var scenarios = []scenario{
	{name: "links", run: links},
	{name: "cut", run: cut},
	{name: "deviceGone", run: deviceGone},
	{name: "fallback", run: fallback},
	{name: "transports", run: transports},
	{name: "policies", run: policies},
	{name: "ifAvailable", run: ifAvailable},
	{name: "kernelPeer", run: kernelPeer},
	{name: "hostNetwork", run: hostNetwork},
	{name: "datapath", run: datapath},
	{name: "update", run: update},
	{name: "mixed", run: mixed},
	{name: "reboot", run: reboot},
	{name: "uninstall", run: uninstall}, // the end: nothing is installed then
}

func TestRDMA(t *testing.T) {
	testenv.Builds("...")
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.ClusterTools, testenv.VM)
	b := bed{guests: guest.Config{KernelSMC: true}, logs: logDir("test-cluster-rdma"), values: installed}
	c, p := b.setUp(t)
	for _, s := range scenarios {
		s.play(t, c, p)
	}
}

// A scenario is one thing that must be true of a cluster.
type scenario struct {
	name     string
	run      func(*suite)
	patience time.Duration // how long what is waited for may take, if longer than soon
}

func (o scenario) play(t *testing.T, c *guest.Cluster, p *product.Product) {
	t.Run(o.name, func(t *testing.T) {
		began := time.Now()
		one := newSuite(t, c, p)
		one.patience = max(o.patience, soon)
		t.Cleanup(one.diagnose)
		o.run(one)
		t.Logf("took %v", time.Since(began).Round(100*time.Millisecond))
	})
}

// A bed is a cluster for scenarios.
type bed struct {
	guests  guest.Config       // what its guests have
	logs    string             // where the logs stay after a failure
	values  []string           // of the chart
	prepare func(*suite) error // what is there before kube-smcr is; may be nil
}

// logDir is a directory for logs.
func logDir(name string) string { return filepath.Join("..", "..", "..", "out", name) }

// clusterEnv names a cluster that is up already and stays up, for whoever works on a scenario:
// go run ./tools/cluster up --rdma --kernel-smc --name NAME, or with --vfs=2 instead of --kernel-smc, or --vfs=1 besides.
const clusterEnv = "KUBE_SMCR_TEST_CLUSTER"

// setUp makes a cluster with kube-smcr on it.
func (b bed) setUp(t *testing.T) (*guest.Cluster, *product.Product) {
	t.Helper()
	ctx := t.Context()
	if err := os.RemoveAll(b.logs); err != nil {
		t.Fatal(err)
	}
	images, err := product.Build(ctx, t.TempDir(), image.Product)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	c, err := b.upOrOpen(t, images)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.end(t, c) })
	t.Logf("the cluster is up after %v", time.Since(began).Round(100*time.Millisecond))
	p, err := product.New(c.Cluster, images)
	if err != nil {
		t.Fatal(err)
	}
	s := newSuite(t, c, p)
	if b.prepare != nil {
		if err := b.prepare(s); err != nil {
			t.Fatal(err)
		}
	}
	began = time.Now()
	err = p.Install(ctx, image.ProductTag, b.values...)
	if err == nil {
		err = s.accelerate(ctx)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, p.Diagnose(context.WithoutCancel(ctx)))
	}
	t.Logf("kube-smcr is installed after %v", time.Since(began).Round(100*time.Millisecond))
	return c, p
}

func (b bed) upOrOpen(t *testing.T, images *product.Images) (*guest.Cluster, error) {
	t.Helper()
	name := os.Getenv(clusterEnv)
	if name == "" {
		cfg := b.guests
		cfg.Config = lab.Config{Nodes: 1, Images: images.Archives, LogDir: b.logs, Progress: t.Output()}
		return guest.Up(t.Context(), cfg)
	}
	c, err := guest.Open(t.Context(), name)
	if err != nil {
		return nil, err
	}
	for _, a := range images.Archives {
		if err := c.LoadImage(t.Context(), a); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// end ends the cluster, unless somebody else made it, and fails the test if a guest's kernel
// complained.
func (b bed) end(t *testing.T, c *guest.Cluster) {
	for _, line := range c.Machines().Complaints() {
		t.Errorf("a kernel complained: %s", line)
	}
	if os.Getenv(clusterEnv) != "" {
		c.Close()
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if t.Failed() {
		if err := c.SaveLogs(ctx); err != nil {
			t.Errorf("save the logs: %v", err)
		}
	}
	if err := c.Down(ctx); err != nil {
		t.Error(err)
	}
	left, err := guest.Leftovers(c.Name)
	if err != nil || len(left) > 0 {
		t.Errorf("of the cluster there is still %q, %v", left, err)
	}
	if !t.Failed() {
		_ = os.RemoveAll(b.logs)
	}
}

// installed are the chart's values, besides those for the lab. Two agents, as in an update, find room on a
// guest's processor and in its memory, and nothing keeps them to that. What does not need to be on a guest is on n1.
var installed = []string{
	"hardware.enabled=true",
	"kernelPath.enabled=true",
	"agent.devices[0].rdma.name=rxe0", "agent.devices[0].rdma.address=node",
	"agent.devices[1].rdma.name=rxe1", "agent.devices[1].rdma.address=eth1",
	"agent.resources.cpu=450m", "agent.resources.memory=448Mi",
	"agent.budgets.node.memory=128MiB", "agent.budgets.node.sockets=64MiB", "agent.budgets.pod.memory=96MiB",
	"agent.drainTimeout=5s",
	"agent.negativeCacheTTL=2s",
	"controller.replicas=1",
	`controller.nodeSelector.kubernetes\.io/hostname=n1`,
	`hooks.nodeSelector.kubernetes\.io/hostname=n1`,
}
