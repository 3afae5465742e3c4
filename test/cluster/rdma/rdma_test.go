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
var scenarios = []struct {
	name string
	run  func(*suite)
}{
	{"links", links},
	{"cut", cut},
	{"deviceGone", deviceGone},
	{"fallback", fallback},
	{"transports", transports},
	{"policies", policies},
	{"ifAvailable", ifAvailable},
	{"kernelPeer", kernelPeer},
	{"datapath", datapath},
	{"update", update},
	{"mixed", mixed},
	{"reboot", reboot},
	{"uninstall", uninstall}, // the end: nothing is installed then
}

func TestRDMA(t *testing.T) {
	testenv.Builds("...")
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.ClusterTools, testenv.VM)
	c, p := setUp(t)
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			began := time.Now()
			one := newSuite(t, c, p)
			t.Cleanup(one.diagnose)
			s.run(one)
			t.Logf("took %v", time.Since(began).Round(100*time.Millisecond))
		})
	}
}

// logDir is where the logs stay after a failure.
var logDir = filepath.Join("..", "..", "..", "out", "test-cluster-rdma")

// clusterEnv names a cluster that is up already and stays up, for whoever works on a scenario:
// go run ./tools/cluster up --rdma --kernel-smc --name NAME.
const clusterEnv = "KUBE_SMCR_TEST_CLUSTER"

// setUp makes a cluster with kube-smcr on it.
func setUp(t *testing.T) (*guest.Cluster, *product.Product) {
	t.Helper()
	ctx := t.Context()
	if err := os.RemoveAll(logDir); err != nil {
		t.Fatal(err)
	}
	images, err := product.Build(ctx, t.TempDir(), image.Product)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	c, err := upOrOpen(t, images)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(t, c) })
	t.Logf("the cluster is up after %v", time.Since(began).Round(100*time.Millisecond))
	p, err := product.New(c.Cluster, images)
	if err != nil {
		t.Fatal(err)
	}
	s := newSuite(t, c, p)
	began = time.Now()
	err = p.Install(ctx, image.ProductTag, installed...)
	if err == nil {
		err = s.accelerate(ctx)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, p.Diagnose(context.WithoutCancel(ctx)))
	}
	t.Logf("kube-smcr is installed after %v", time.Since(began).Round(100*time.Millisecond))
	return c, p
}

func upOrOpen(t *testing.T, images *product.Images) (*guest.Cluster, error) {
	t.Helper()
	name := os.Getenv(clusterEnv)
	if name == "" {
		return guest.Up(t.Context(), guest.Config{
			Config: lab.Config{Nodes: 1, Images: images.Archives, LogDir: logDir, Progress: t.Output()}, Guests: 2, KernelSMC: true,
		})
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
func end(t *testing.T, c *guest.Cluster) {
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
		_ = os.RemoveAll(logDir)
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
