// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/smcr-io/kube-smcr/internal/testenv/kept"
)

const (
	// rxeVersion is another one when what is done to the sources changes.
	rxeVersion = "1"
	rxeDir     = "drivers/infiniband/sw/rxe"
	rxeModule  = "rdma_rxe.ko"
)

// rxeChanges are what soft RoCE of the kernel [SMC] lacks for a device in a network namespace, as an RNIC's function is one, and as that of
// later kernels can: it sends and receives in the host's alone.
var rxeChanges = [...]struct{ file, was, is string }{
	{"rxe_net.c", "ip_route_output_key(&init_net,", "ip_route_output_key(dev_net(ndev),"},
	// The socket keeps the namespace, as nothing ends it: a namespace in a guest of tests, which ends soon.
	{"rxe_net.c", "int rxe_net_add(const char *ibdev_name, struct net_device *ndev)\n{", `int rxe_net_add(const char *ibdev_name, struct net_device *ndev)
{
	if (!net_eq(dev_net(ndev), &init_net) && !IS_ERR(rxe_setup_udp_tunnel(dev_net(ndev), htons(ROCE_V2_UDP_DPORT), false)))
		get_net(dev_net(ndev));
`},
	{"rxe_qp.c", "sock_create_kern(&init_net,", `sock_create_kern(({
		struct net_device *ndev = ib_device_get_netdev(&rxe->ib_dev, 1);
		struct net *net = ndev ? dev_net(ndev) : &init_net;
		dev_put(ndev);
		net;
	}),`},
}

// GetRXE returns the path of the module with soft RoCE for the kernel [SMC] that works in network namespaces, too. It is built if it is not
// in the cache.
func GetRXE(ctx context.Context, progress io.Writer) (string, error) {
	dir, err := kept.Dir("vm/rxe-", rxeVersion, SMC, modulePackages, rxeChanges)
	if err != nil {
		return "", err
	}
	return get(ctx, dir, "soft RoCE in namespaces", progress, rxe, (*builder).rxe)
}

func rxe(dir string) (string, error) {
	name := filepath.Join(dir, rxeModule)
	if _, err := os.Stat(name); err != nil {
		return "", fmt.Errorf("%w (%s is not there)", ErrNotBuilt, name)
	}
	return name, nil
}

// rxe builds the module.
func (b *builder) rxe(ctx context.Context) error {
	dir := filepath.Join(b.tmp, "rxe")
	headers, err := b.moduleSources(ctx, rxeDir, dir)
	if err != nil {
		return err
	}
	if err := changeRXE(dir); err != nil {
		return fmt.Errorf("change soft RoCE: %w", err)
	}
	b.say("compile soft RoCE")
	if err := b.compileModule(ctx, headers, dir, "CONFIG_RDMA_RXE=m", rxeModule, rxeModule); err != nil {
		return err
	}
	b.say("done")
	return nil
}

// changeRXE makes the changes in a copy of the sources.
func changeRXE(dir string) error {
	for _, c := range rxeChanges {
		name := filepath.Join(dir, c.file)
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if n := bytes.Count(text, []byte(c.was)); n != 1 {
			return fmt.Errorf("%s has %q %d times, want it once", c.file, c.was, n)
		}
		if err := os.WriteFile(name, bytes.Replace(text, []byte(c.was), []byte(c.is), 1), 0o644); err != nil {
			return err
		}
	}
	return nil
}
