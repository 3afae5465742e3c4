// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/smcr-io/kube-smcr/internal/testenv/debian"
)

// A builder builds one image in a directory of its own.
type builder struct {
	began    time.Time
	tmp, out string

	mu       sync.Mutex // kernel and userland are made side by side, and both say how far they are
	progress io.Writer
}

func (b *builder) root() string      { return filepath.Join(b.tmp, "root") }
func (b *builder) kernel() string    { return filepath.Join(b.tmp, "kernel") }
func (b *builder) downloads() string { return filepath.Join(b.tmp, "downloads") }

func (b *builder) say(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, _ = fmt.Fprintf(b.progress, "vm: %5.1fs %s\n", time.Since(b.began).Seconds(), fmt.Sprintf(format, args...))
}

// run downloads kernel and userland side by side, and puts them together.
func (b *builder) run(ctx context.Context, kernel Kernel) error {
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		b.say("download the kernel %s", kernel)
		for _, p := range kernels[kernel].packages {
			deb, err := b.download(gctx, p)
			if err != nil {
				return err
			}
			b.say("unpack %s", p.Name)
			if err := unpack(gctx, deb, b.kernel()); err != nil {
				return err
			}
		}
		return nil
	})
	g.Go(func() error {
		b.say("download %d packages of Debian %s and what they need", len(packages), suite)
		debs, err := b.downloadUserland(gctx)
		if err != nil {
			return err
		}
		b.say("unpack %d packages", len(debs))
		return b.userland(gctx, debs)
	})
	if err := g.Wait(); err != nil {
		return err
	}
	b.say("choose the kernel's modules")
	if err := b.modules(ctx, kernel); err != nil {
		return err
	}
	b.say("write the disk")
	if err := b.disk(ctx); err != nil {
		return err
	}
	b.say("unpack the kernel proper")
	if err := b.vmlinux(ctx, kernel); err != nil {
		return fmt.Errorf("unpack the kernel proper: %w", err)
	}
	b.say("done")
	return nil
}

// vmlinux takes the kernel out of its compressed form: QEMU starts an ELF file by
// the PVH protocol, and a guest that is emulated would unpack it for seconds, after a
// reset for many. Offsets and lengths are those of Linux' boot protocol for x86.
func (b *builder) vmlinux(ctx context.Context, kernel Kernel) error {
	const setupSectors, payloadOffset, payloadLength, sector = 0x1f1, 0x248, 0x24c, 512
	text, err := os.ReadFile(filepath.Join(b.kernel(), "boot", "vmlinuz-"+string(kernel)))
	if errors.Is(err, fs.ErrNotExist) { // since 7.2
		text, err = os.ReadFile(filepath.Join(b.kernel(), "usr", "lib", "modules", string(kernel), "vmlinuz"))
	}
	if err != nil {
		return err
	}
	if len(text) < sector*2 {
		return errors.New("the boot image has no header")
	}
	from := (int(text[setupSectors])+1)*sector + int(binary.LittleEndian.Uint32(text[payloadOffset:]))
	size := int(binary.LittleEndian.Uint32(text[payloadLength:]))
	const trailer = 4 // the size when unpacked, for who unpacks it at boot
	if size < trailer || from < 0 || from+size > len(text) {
		return fmt.Errorf("its header names %d bytes at %d of %d", size, from, len(text))
	}
	packed := filepath.Join(b.tmp, "vmlinux.zst")
	if err := os.WriteFile(packed, text[from:from+size-trailer], 0o644); err != nil {
		return err
	}
	return command(ctx, b.tmp, "zstd", "-q", "-d", packed, "-o", filepath.Join(b.out, "vmlinux"))
}

// download gets a package from the first place that has it.
func (b *builder) download(ctx context.Context, p debian.File) (string, error) {
	file, err := p.Download(ctx, b.downloads())
	if err != nil {
		err = fmt.Errorf("%w; if it is gone, take another version in test/vm/lab/image/list.go", err)
	}
	return file, err
}

// downloadUserland gets the packages, and what they depend on, from the first mirror
// that has them.
func (b *builder) downloadUserland(ctx context.Context) ([]string, error) {
	var errs []error
	for _, m := range debian.Mirrors() {
		debs, err := b.downloadFrom(ctx, m)
		if err == nil {
			return debs, nil
		}
		errs = append(errs, fmt.Errorf("from %s: %w", m, err))
	}
	return nil, fmt.Errorf("download the programs: %w", errors.Join(errs...))
}

// downloadFrom lets apt-get find out what the packages depend on, as if nothing was
// installed, with a configuration of its own.
func (b *builder) downloadFrom(ctx context.Context, mirror string) ([]string, error) {
	apt := filepath.Join(b.tmp, "apt")
	if err := os.RemoveAll(apt); err != nil { // what another mirror left
		return nil, err
	}
	for _, d := range []string{"lists/partial", "cache/archives/partial", "etc"} {
		if err := os.MkdirAll(filepath.Join(apt, d), 0o755); err != nil {
			return nil, err
		}
	}
	if _, err := os.Stat(keyring); err != nil {
		return nil, fmt.Errorf("find the keys of Debian's archive (install debian-archive-keyring): %w", err)
	}
	sources := fmt.Sprintf("deb [arch=amd64 signed-by=%s] %s %s main\n", keyring, mirror, suite)
	for name, text := range map[string]string{"sources.list": sources, "status": ""} {
		if err := os.WriteFile(filepath.Join(apt, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	options := []string{
		"-q", "-y", "-o", "Dir::Etc=" + apt + "/etc", "-o", "Dir::Etc::sourcelist=" + apt + "/sources.list",
		"-o", "Dir::State::lists=" + apt + "/lists", "-o", "Dir::State::status=" + apt + "/status", "-o", "Dir::State=" + apt,
		"-o", "Dir::Cache=" + apt + "/cache", "-o", "Dir::Cache::archives=archives", "-o", "APT::Sandbox::User=root", "-o", "APT::Architecture=amd64", "-o", "APT::Architectures=amd64",
		"-o", "APT::Install-Recommends=false", "-o", "Debug::NoLocking=true", "-o", "Acquire::Languages=none",
		"-o", "Binary::apt-get::APT::Keep-Downloaded-Packages=true", "-o", "DPkg::Post-Invoke=", "-o", "APT::Update::Post-Invoke=",
	}
	if err := command(ctx, apt, "apt-get", append(options, "update")...); err != nil {
		return nil, err
	}
	if err := command(ctx, apt, "apt-get", append(append(options, "--download-only", "install"), packages[:]...)...); err != nil {
		return nil, err
	}
	debs, err := filepath.Glob(filepath.Join(apt, "cache", "archives", "*.deb"))
	if err == nil && len(debs) < len(packages) {
		err = fmt.Errorf("apt-get left %d packages of at least %d", len(debs), len(packages))
	}
	return debs, err
}

// unpack unpacks a package, without what a guest has no reader for. A directory
// that is a link stays one: /bin is usr/bin since Debian 12.
func unpack(ctx context.Context, deb, dir string) error {
	const script = `dpkg-deb --fsys-tarfile "$1" | tar -x --keep-directory-symlink --no-same-owner \
		--exclude=./usr/share/doc/?* --exclude=./usr/share/man/?* --exclude=./usr/share/locale/?* --exclude=./usr/share/info/?* --exclude=./usr/lib/systemd/?*`
	return command(ctx, dir, "sh", "-c", script, "sh", deb)
}

// userland unpacks the packages and does what their scripts would.
func (b *builder) userland(ctx context.Context, debs []string) error {
	root := b.root()
	for _, d := range []string{
		"usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "dev", "proc", "sys", "run", "tmp", "host", "root", "etc", "mnt",
		"var/lib/redis", "var/log/redis", "var/log/nginx", "var/lib/nginx", "var/cache/nginx",
	} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+d, filepath.Join(root, d)); err != nil {
			return err
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.NumCPU())
	for _, deb := range debs {
		g.Go(func() error { return unpack(gctx, deb, root) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(root, "var/run")); err != nil {
		return err
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			return err
		}
	}
	for name, text := range configuration {
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// links are the symbolic links that the packages' scripts or an installer would make. A directory /var/run
// comes with packages that have one in it; what containerd keeps there must be in /run.
var links = map[string]string{"usr/bin/awk": "mawk", "usr/bin/nc": "nc.openbsd", "etc/mtab": "/proc/self/mounts", "var/run": "../run"}

// configuration is what the packages' scripts or an installer would write.
var configuration = map[string]string{
	"etc/passwd": strings.Join([]string{
		"root:x:0:0:root:/root:/bin/sh", "www-data:x:33:33:www-data:/var/www:/bin/sh", "redis:x:100:100::/var/lib/redis:/bin/sh",
		"nobody:x:65534:65534:nobody:/nonexistent:/bin/sh", "",
	}, "\n"),
	"etc/group":         "root:x:0:\nadm:x:4:\nwww-data:x:33:\nredis:x:100:\nnogroup:x:65534:\n",
	"etc/hosts":         "127.0.0.1 localhost\n::1 localhost\n",
	"etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
	"etc/resolv.conf":   "",
	"etc/os-release":    "ID=debian\nVERSION_ID=12\nPRETTY_NAME=\"Debian 12 (kube-smcr guest)\"\n",
}

// disk writes the root file system as an image that any number of guests read
// at a time.
func (b *builder) disk(ctx context.Context) error {
	const sizeMiB = 1024 // sparse; what is in it is about a third
	image := filepath.Join(b.out, "disk.ext4")
	return command(
		ctx, b.tmp, "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0", "-E", "root_owner=0:0,lazy_itable_init=1",
		"-d", b.root(), image, fmt.Sprintf("%dM", sizeMiB),
	)
}
