// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"github.com/smcr-io/kube-smcr/internal/testenv/kept"
)

// An Emulator is a QEMU.
type Emulator struct {
	Program string
	Args    []string // that find its firmware
}

// Installed is the QEMU of this machine.
func Installed() Emulator { return Emulator{Program: "qemu-system-x86_64"} }

// GetIGB returns a QEMU that emulates igb, and downloads it if it is not there.
func GetIGB(ctx context.Context, progress io.Writer) (Emulator, error) {
	dir, err := kept.Dir("vm/qemu-", qemuPackages)
	if err != nil {
		return Emulator{}, err
	}
	return get(ctx, dir, "QEMU with igb", progress, emulator, (*builder).qemu)
}

func emulator(dir string) (Emulator, error) {
	e := Emulator{Program: filepath.Join(dir, "usr/bin/qemu-system-x86_64")}
	for _, firmware := range []string{"qemu", "seabios"} {
		e.Args = append(e.Args, "-L", filepath.Join(dir, "usr/share", firmware))
	}
	if _, err := os.Stat(e.Program); errors.Is(err, fs.ErrNotExist) {
		return Emulator{}, fmt.Errorf("%w (%s is not there)", ErrNotBuilt, e.Program)
	} else if err != nil {
		return Emulator{}, fmt.Errorf("look for QEMU with igb: %w", err)
	}
	return e, nil
}

// qemu unpacks the packages of QEMU.
func (b *builder) qemu(ctx context.Context) error {
	b.say("download QEMU with igb")
	var debs [len(qemuPackages)]string
	g, gctx := errgroup.WithContext(ctx)
	for i, p := range qemuPackages {
		g.Go(func() (err error) {
			debs[i], err = b.download(gctx, p)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, deb := range debs {
		if err := unpack(ctx, deb, b.out); err != nil {
			return err
		}
	}
	b.say("done")
	return nil
}
