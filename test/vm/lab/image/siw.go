// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
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

// SIW are modules of kernel [SMC] with software iWARP (siw), which Debian builds no
// kernel with. A kernel takes one of them.
type SIW struct {
	// Plain is what Linux' sources make.
	Plain string
	// Settable is the same but for the constants among them that its authors mean as
	// settings: here they are parameters of the module, which can be written at any time, with
	// the same defaults.
	Settable string
}

const (
	siwVersion = "1"
	// siwDir is where the sources of the kernel have it.
	siwDir = "drivers/infiniband/sw/siw"
)

// siwParameters are the parameters of the siw module that we build to be settable, and their types.
var siwParameters = [...][2]string{
	{"mpa_crc_required", "bool"},
	{"mpa_crc_strict", "bool"},
	{"peer_to_peer", "bool"},
	{"try_gso", "bool"},
	{"siw_tcp_nagle", "bool"},
	{"mpa_version", "byte"},
}

// GetSIW returns the modules and builds them if they are not there, of Debian's sources
// and with the C compiler of this machine. That is 25 s of two processors.
func GetSIW(ctx context.Context, progress io.Writer) (SIW, error) {
	dir, err := kept.Dir("vm/siw-", siwVersion, SMC, modulePackages, siwParameters)
	if err != nil {
		return SIW{}, err
	}
	return get(ctx, dir, "software iWARP", progress, siw, (*builder).siw)
}

func siw(dir string) (SIW, error) {
	m := SIW{Plain: filepath.Join(dir, "siw.ko"), Settable: filepath.Join(dir, "siw-settable.ko")}
	for _, name := range []string{m.Plain, m.Settable} {
		if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
			return SIW{}, fmt.Errorf("%w (%s is not there)", ErrNotBuilt, name)
		} else if err != nil {
			return SIW{}, fmt.Errorf("look for software iWARP: %w", err)
		}
	}
	return m, nil
}

// siw builds the modules.
func (b *builder) siw(ctx context.Context) error {
	plain, settable := filepath.Join(b.tmp, "plain"), filepath.Join(b.tmp, "settable")
	headers, err := b.moduleSources(ctx, siwDir, plain)
	if err != nil {
		return err
	}
	if err := os.CopyFS(settable, os.DirFS(plain)); err != nil {
		return err
	}
	if err := siwSettable(settable); err != nil {
		return fmt.Errorf("make siw's settings parameters: %w", err)
	}
	b.say("compile software iWARP twice")
	g, gctx := errgroup.WithContext(ctx)
	for dir, name := range map[string]string{plain: "siw.ko", settable: "siw-settable.ko"} {
		g.Go(func() error { return b.compileModule(gctx, headers, dir, "CONFIG_RDMA_SIW=m", "siw.ko", name) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	b.say("done")
	return nil
}

// moduleSources downloads the sources of the kernel [SMC] and what its modules are built with, and copies a directory of the sources. It
// returns that of the headers.
func (b *builder) moduleSources(ctx context.Context, wanted, to string) (headers string, err error) {
	b.say("download sources and headers of the kernel %s", SMC)
	var debs [len(modulePackages)]string
	g, gctx := errgroup.WithContext(ctx)
	for i, p := range modulePackages {
		g.Go(func() (err error) {
			debs[i], err = b.download(gctx, p)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return "", err
	}
	b.say("unpack them")
	for _, deb := range debs {
		if err := unpack(ctx, deb, b.kernel()); err != nil {
			return "", err
		}
	}
	if headers, err = b.moduleHeaders(); err != nil {
		return "", fmt.Errorf("prepare the kernel's headers: %w", err)
	}
	if err := os.Mkdir(to, 0o755); err != nil {
		return "", err
	}
	// The archive is read to its end: what is wanted may be anywhere.
	const script = `xz -dc "$1" | tar -x --strip-components=5 -C "$2" --wildcards "*/$3/*"`
	return headers, command(ctx, b.tmp, "sh", "-c", script, "sh", filepath.Join(b.kernel(), "usr", "src", moduleSource), to, wanted)
}

// compileModule compiles the sources in a directory, with an option of the kernel's, and puts the module among what was made.
func (b *builder) compileModule(ctx context.Context, headers, dir, option, module, as string) error {
	// A make that has started us would tell this one its own options.
	if err := command(ctx, dir, "env", "-u", "MAKEFLAGS", "-u", "MFLAGS", "make", "-C", headers, "M="+dir, option, "CC=gcc", "modules"); err != nil {
		return fmt.Errorf("compile %s: %w", module, err)
	}
	return command(ctx, dir, "strip", "--strip-debug", "-o", filepath.Join(b.out, as), module)
}

// moduleHeaders makes the headers usable where they are, and returns their directory: they
// expect to be in /usr/src. Without the kernel's type information that is beside them the
// module is built without its own, which takes a program that few machines have.
func (b *builder) moduleHeaders() (string, error) {
	src := filepath.Join(b.kernel(), "usr", "src")
	headers := filepath.Join(src, "linux-headers-"+string(SMC))
	makefile := filepath.Join(headers, "Makefile")
	text, err := os.ReadFile(makefile)
	if err != nil {
		return "", err
	}
	text = bytes.ReplaceAll(text, []byte(" /usr/src/"), []byte(" "+src+"/"))
	return headers, errors.Join(os.WriteFile(makefile, text, 0o644), os.Remove(filepath.Join(headers, "vmlinux")))
}

// siwSettable makes parameters of the constants in a copy of the sources.
func siwSettable(dir string) error {
	for _, name := range [...]string{"siw.h", "siw_main.c"} {
		file := filepath.Join(dir, name)
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		for _, p := range siwParameters {
			text = bytes.ReplaceAll(text, []byte("const bool "+p[0]), []byte("bool "+p[0]))
		}
		if name == "siw_main.c" {
			for _, p := range siwParameters {
				text = fmt.Appendf(text, "module_param(%s, %s, 0644);\n", p[0], p[1])
			}
		}
		if err := os.WriteFile(file, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
