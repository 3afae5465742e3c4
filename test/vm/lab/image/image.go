// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv/kept"
)

// version is part of the hash: another one makes new images where the lists
// have not changed but what is done with them has.
const version = "5"

// Files are the files of an image.
type Files struct {
	Kernel  string // an ELF file with a PVH note
	Modules string // a cpio archive with the modules of the boot, for the initramfs
	Disk    string // an ext4 file system with everything else
}

// ErrNotBuilt says that nobody has built the image of this checkout yet.
var ErrNotBuilt = errors.New("the guests' image is not built; run: make vm-image")

// Get returns the image with a kernel and builds it if it is not there. It writes to progress
// what it builds.
func Get(ctx context.Context, kernel Kernel, progress io.Writer) (Files, error) {
	dir, err := locate(kernel)
	if err != nil {
		return Files{}, err
	}
	return get(ctx, dir, "the guests' image", progress, files, func(b *builder, ctx context.Context) error { return b.run(ctx, kernel) })
}

// locate returns the directory of the image.
func locate(kernel Kernel) (string, error) {
	if _, ok := kernels[kernel]; !ok {
		return "", fmt.Errorf("find the guests' image: no kernel %q; there are %s and %s", kernel, SMC, NetNS)
	}
	return kept.Dir("vm/image-", version, kernels[kernel], suite, packages, bootModules, modules)
}

// get returns what look finds in the directory, and makes that if it is not there.
func get[T any](ctx context.Context, dir, what string, progress io.Writer, look func(dir string) (T, error), run func(*builder, context.Context) error) (T, error) {
	if f, err := look(dir); err == nil {
		return f, nil
	}
	there := func() bool { _, err := look(dir); return err == nil }
	err := kept.Make(dir, "vm", what, progress, there, func(tmp string) (string, error) {
		return build(ctx, tmp, progress, run)
	})
	if err != nil {
		var none T
		return none, err
	}
	return look(dir)
}

// files returns the files of the image in a directory; an error that wraps [ErrNotBuilt] says that one is not there.
func files(dir string) (Files, error) {
	f := Files{Kernel: filepath.Join(dir, "vmlinux"), Modules: filepath.Join(dir, "modules.cpio"), Disk: filepath.Join(dir, "disk.ext4")}
	for _, name := range []string{f.Kernel, f.Modules, f.Disk} {
		if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
			return Files{}, fmt.Errorf("%w (%s is not there)", ErrNotBuilt, name)
		} else if err != nil {
			return Files{}, fmt.Errorf("look for the guests' image: %w", err)
		}
	}
	return f, nil
}

// build makes something in a directory, and returns where it is when it is complete.
func build(ctx context.Context, tmp string, progress io.Writer, run func(*builder, context.Context) error) (string, error) {
	b := builder{progress: progress, began: time.Now(), tmp: tmp, out: filepath.Join(tmp, "out")}
	for _, d := range []string{b.out, b.root(), b.kernel(), b.downloads()} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return "", err
		}
	}
	return b.out, run(&b, ctx)
}

// command runs a program that makes a part of the image. What it prints is for
// the error.
func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if text, err := cmd.CombinedOutput(); err != nil {
		const tail = 2000
		return fmt.Errorf("%s: %w\n%s", name, err, text[max(0, len(text)-tail):])
	}
	return nil
}
