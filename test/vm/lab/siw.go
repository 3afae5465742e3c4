// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
)

// AddSIW makes a software iWARP device siw<n> on each of these NICs, from 0. It is active
// when AddSIW returns. One that is there already is what was wanted. If no module is
// loaded, AddSIW loads the one that is as Linux has it; see [Guest.LoadSIW].
func (g *Guest) AddSIW(ctx context.Context, nics ...int) error {
	loaded, err := g.Shell(ctx, "if test -d /sys/module/siw; then echo yes; fi")
	if err == nil && loaded == "" {
		err = g.LoadSIW(ctx)
	}
	if err != nil {
		return err
	}
	there, err := g.Run(ctx, "rdma", "link")
	if err != nil {
		return err
	}
	for _, n := range nics {
		if strings.Contains(there, fmt.Sprintf("link siw%d/", n)) {
			continue
		}
		if _, err := g.Run(ctx, "rdma", "link", "add", fmt.Sprintf("siw%d", n), "type", "siw", "netdev", g.NetDev(n)); err != nil {
			return err
		}
	}
	return poll(ctx, "software iWARP of "+g.Name(), bootTimeout, func() error {
		out, err := g.Run(ctx, "rdma", "link")
		for _, n := range nics {
			if active := fmt.Sprintf("link siw%d/1 state ACTIVE", n); err == nil && !strings.Contains(out, active) {
				err = fmt.Errorf("there is no %q: %s", active, out)
			}
		}
		return err
	})
}

// LoadSIW loads the module of software iWARP in the place of one that is loaded, whose
// devices go. Without settings it is the one that is as Linux has it. With settings, as
// "peer_to_peer=1", it is the one of which these are parameters: see [image.SIW]. Those can
// be written later, too, in /sys/module/siw/parameters.
func (g *Guest) LoadSIW(ctx context.Context, settings ...string) error {
	modules, err := image.GetSIW(ctx, g.lab.cfg.Log)
	if err != nil {
		return err
	}
	file := modules.Plain
	if len(settings) > 0 {
		file = modules.Settable
	}
	shared := filepath.Join(g.lab.Share(), "modules", g.Name())
	if err := os.MkdirAll(shared, 0o755); err != nil {
		return fmt.Errorf("share software iWARP: %w", err)
	}
	if err := copyFile(file, filepath.Join(shared, filepath.Base(file))); err != nil {
		return fmt.Errorf("share software iWARP: %w", err)
	}
	// What siw depends on, what it asks for by name, and what makes /dev/infiniband.
	_, err = g.Shell(ctx, fmt.Sprintf(`
		if test -d /sys/module/siw; then rmmod siw; fi
		modprobe -a ib_core ib_uverbs rdma_ucm iw_cm libcrc32c crc32c_generic
		insmod /host/modules/%s/%s %s`, g.Name(), filepath.Base(file), strings.Join(settings, " ")))
	return err
}
