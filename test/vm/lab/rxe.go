// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
)

// LoadRXE loads the module of soft RoCE whose devices work in network namespaces, too: see [image.GetRXE]. The kernel's own must
// not be loaded.
func (g *Guest) LoadRXE(ctx context.Context) error {
	module, err := image.GetRXE(ctx, g.lab.cfg.Log)
	if err != nil {
		return err
	}
	shared := filepath.Join(g.lab.Share(), "modules", g.Name())
	if err := os.MkdirAll(shared, 0o755); err != nil {
		return fmt.Errorf("share soft RoCE: %w", err)
	}
	if err := copyFile(module, filepath.Join(shared, filepath.Base(module))); err != nil {
		return fmt.Errorf("share soft RoCE: %w", err)
	}
	_, err = g.Shell(ctx, fmt.Sprintf("modprobe -a ib_core ib_uverbs udp_tunnel ip6_udp_tunnel; insmod /host/modules/%s/%s", g.Name(), filepath.Base(module)))
	return err
}
