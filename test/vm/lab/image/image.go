// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

// version is part of the hash: another one makes new images where the lists
// have not changed but what is done with them has.
const version = "4"

// Files are the files of an image.
type Files struct {
	Kernel  string // an ELF file with a PVH note
	Modules string // a cpio archive with the modules of the boot, for the initramfs
	Disk    string // an ext4 file system with everything else
}

// ErrNotBuilt says that nobody has built the image of this checkout yet.
var ErrNotBuilt = errors.New("the guests' image is not built; run: make vm-image")

// Built returns the image with a kernel if it is there, and an error that wraps [ErrNotBuilt]
// if Get would have to build it.
func Built(kernel Kernel) (Files, error) {
	dir, err := locate(kernel)
	if err != nil {
		return Files{}, err
	}
	return files(dir)
}

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
	return cached("image-", version, kernels[kernel], suite, packages, bootModules, modules)
}

// cached returns the directory of the cache for what is made of these things.
func cached(prefix string, of ...any) (string, error) {
	cache, err := clustertools.CacheDir()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	_, _ = fmt.Fprintln(h, of...)
	return filepath.Join(cache, "vm", prefix+hex.EncodeToString(h.Sum(nil))[:16]), nil
}

// get returns what look finds in the directory, and makes that if it is not there.
func get[T any](ctx context.Context, dir, what string, progress io.Writer, look func(dir string) (T, error), run func(*builder, context.Context) error) (T, error) {
	if f, err := look(dir); err == nil {
		return f, nil
	}
	var none T
	unlock, err := lock(dir+".lock", what, progress)
	if err != nil {
		return none, err
	}
	defer unlock()
	if f, err := look(dir); err == nil {
		return f, nil // the one we waited for has built it
	}
	if err := build(ctx, dir, progress, run); err != nil {
		return none, fmt.Errorf("build %s: %w", what, err)
	}
	return look(dir)
}

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

// lock makes sure that only one process builds.
func lock(name, what string, progress io.Writer) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of %s: %w", what, err)
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", what, err)
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		_, _ = fmt.Fprintf(progress, "vm: waiting for another process that builds %s\n", what)
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", name, err), f.Close())
		}
	}
	return func() { _ = f.Close() }, nil
}

// build makes something beside dir and moves it there when it is complete.
func build(ctx context.Context, dir string, progress io.Writer, run func(*builder, context.Context) error) error {
	tmp := dir + ".new"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	b := builder{progress: progress, began: time.Now(), tmp: tmp, out: filepath.Join(tmp, "out")}
	for _, d := range []string{b.out, b.root(), b.kernel(), b.downloads()} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := run(&b, ctx); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	if err := os.Rename(b.out, dir); err != nil {
		return err
	}
	return os.RemoveAll(tmp)
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
