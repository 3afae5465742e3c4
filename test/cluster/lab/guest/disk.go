// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/internal/testenv/kept"
)

// diskVersion is part of the name of a disk: another one makes new disks of the same files.
const diskVersion = "2"

const (
	diskPrefix = "vm/node-"
	diskFile   = "disk.ext4"
)

// programs are the tools that a node has a copy of; others are links to them. runc is linked with
// libraries of its system: the guests' image has it.
var programs = []string{"kube", "containerd", "containerd-shim-runc-v2", "ctr"}

// links are the links among the tools.
var links = map[string]string{"kubelet": "kube", "kube-proxy": "kube", "runc": "/usr/sbin/runc"}

// disk returns the image of a node's disk, an ext4 file system: opt/tools, opt/cni/bin, and
// var/lib/containerd with the images of these archives. It makes that if it is not kept.
func disk(ctx context.Context, tools string, archives []string, progress io.Writer) (string, error) {
	dir, err := diskDir(tools, archives)
	if err != nil {
		return "", fmt.Errorf("make the disk of nodes: %w", err)
	}
	file := filepath.Join(dir, diskFile)
	there := func() bool { _, err := os.Stat(file); return err == nil }
	if !there() {
		err := kept.Make(dir, "nodes", "the disk of nodes", progress, there, func(tmp string) (string, error) {
			return makeDisk(ctx, tmp, tools, archives)
		})
		if err != nil {
			return "", err
		}
	}
	now := time.Now()
	if err := os.Chtimes(dir, now, now); err != nil {
		return "", fmt.Errorf("mark the disk of nodes as used: %w", err)
	}
	return file, forgetDisks()
}

// diskDir is where that disk is kept.
func diskDir(tools string, archives []string) (string, error) {
	files := slices.Clone(archives)
	for _, p := range programs {
		files = append(files, filepath.Join(tools, p))
	}
	parts := []any{diskVersion, diskMiB}
	for _, name := range files {
		sum, err := hash(name)
		if err != nil {
			return "", err
		}
		parts = append(parts, filepath.Base(name), sum)
	}
	return kept.Dir(diskPrefix, parts...)
}

func hash(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// forgetDisks removes the disks that were not used for longest: each change of the product
// makes a new one. A QEMU that has one open goes on with it.
func forgetDisks() error {
	cache, err := clustertools.CacheDir()
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(cache, diskPrefix+"*", diskFile))
	if err != nil {
		return err
	}
	used := map[string]time.Time{}
	for _, f := range files {
		info, err := os.Stat(filepath.Dir(f))
		if err != nil {
			return fmt.Errorf("look for disks of nodes: %w", err)
		}
		used[f] = info.ModTime()
	}
	slices.SortFunc(files, func(a, b string) int { return used[b].Compare(used[a]) })
	errs := []error{forgetUnfinished(cache)}
	for _, f := range files[min(keptDisks, len(files)):] {
		errs = append(errs, os.RemoveAll(filepath.Dir(f)), os.RemoveAll(filepath.Dir(f)+".lock"))
	}
	return errors.Join(errs...)
}

// forgetUnfinished removes what was left of disks that were not finished.
func forgetUnfinished(cache string) error {
	dirs, err := filepath.Glob(filepath.Join(cache, diskPrefix+"*.new"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		if info, err := os.Stat(dir); err == nil && time.Since(info.ModTime()) > unfinishedAge {
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}

// makeDisk makes a disk in a directory of its own, and returns the directory with it.
func makeDisk(ctx context.Context, tmp, tools string, archives []string) (string, error) {
	root, made := filepath.Join(tmp, "root"), filepath.Join(tmp, "made")
	for _, d := range []string{made, filepath.Join(root, "opt/tools"), filepath.Join(root, "var/lib"), filepath.Join(root, "opt/cni/bin")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return "", err
		}
	}
	for _, p := range programs {
		if err := copyProgram(filepath.Join(tools, p), filepath.Join(root, "opt/tools", p)); err != nil {
			return "", err
		}
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(root, "opt/tools", name)); err != nil {
			return "", err
		}
	}
	if err := os.CopyFS(filepath.Join(root, "opt/cni/bin"), os.DirFS(filepath.Join(tools, "cni"))); err != nil {
		return "", err
	}
	if err := importImages(ctx, tmp, tools, filepath.Join(root, "var/lib/containerd"), archives); err != nil {
		return "", fmt.Errorf("import images: %w", err)
	}
	cmd := exec.CommandContext(
		ctx, "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0", "-E", "root_owner=0:0,lazy_itable_init=1",
		"-d", root, filepath.Join(made, diskFile), fmt.Sprintf("%dM", diskMiB),
	)
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("make the file system (install e2fsprogs): %w\n%s", err, text)
	}
	return made, nil
}

func copyProgram(from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, text, 0o755)
}

// importImages lets a containerd of this machine import archives into its root directory, which
// is one that a node's containerd finds its images in.
func importImages(ctx context.Context, tmp, tools, root string, archives []string) error {
	ctx, cancel := context.WithTimeout(ctx, importTimeout)
	defer cancel()
	config, socket := filepath.Join(tmp, "config.toml"), filepath.Join(tmp, "sock")
	text := fmt.Sprintf(`version = 3
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images"]
[grpc]
  address = %q
`, root, filepath.Join(tmp, "state"), socket)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return err
	}
	var log bytes.Buffer
	server := exec.Command(filepath.Join(tools, "containerd"), "--config", config)
	server.Stdout, server.Stderr = &log, &log
	server.SysProcAttr = &syscall.SysProcAttr{
		Setsid:       true,                // Ctrl-C is for this program, which ends it
		Pdeathsig:    syscall.SIGKILL,     // or the kernel does, when it has ended, or this thread
		Unshareflags: syscall.CLONE_NEWNS, // what it mounts goes with it
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := server.Start(); err != nil {
		return err
	}
	err := importInto(ctx, filepath.Join(tools, "ctr"), socket, archives)
	_ = server.Process.Signal(syscall.SIGTERM) // it ends by itself only if something is wrong, which err says
	if ended := server.Wait(); err != nil {
		return fmt.Errorf("%w; containerd: %w\n%s", err, ended, tail(log.String()))
	}
	// What it mounts images' layers on: the directories of other plugins are a node's, too.
	left, err := filepath.Glob(filepath.Join(root, "io.containerd.mount*"))
	for _, dir := range left {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

func importInto(ctx context.Context, ctr, socket string, archives []string) error {
	for {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			_ = conn.Close()
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for containerd: %w (last: %w)", ctx.Err(), err)
		case <-time.After(pollInterval):
		}
	}
	for _, a := range archives {
		cmd := exec.CommandContext(ctx, ctr, "--address", socket, "--namespace=k8s.io", "images", "import", "--snapshotter=overlayfs", a)
		if text, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", a, err, text)
		}
	}
	return nil
}

// tail is the end of a log.
func tail(text string) string {
	const lines = 20
	all := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
