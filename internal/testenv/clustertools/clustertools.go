// SPDX-License-Identifier: Apache-2.0

package clustertools

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// DirEnv is the environment variable that names a directory of tools that
	// exists already.
	DirEnv = "KUBE_SMCR_TOOLS"
	// CacheEnv is the environment variable that says where this project keeps
	// what it builds for its tests.
	CacheEnv = "KUBE_SMCR_CACHE"
)

// ErrNotBuilt says that nobody has built the tools of this checkout yet.
var ErrNotBuilt = errors.New("the cluster's tools are not built; run: make cluster-tools")

// Built returns the directory of the tools if they are there, and an error that
// wraps [ErrNotBuilt] if Dir would have to build them.
func Built() (string, error) {
	if dir := os.Getenv(DirEnv); dir != "" {
		return dir, check(dir)
	}
	dir, _, err := locate()
	if err != nil {
		return "", err
	}
	return dir, check(dir)
}

// Dir returns the directory of the tools and builds them if they are not there.
// It writes to progress what it builds: that takes minutes.
func Dir(ctx context.Context, progress io.Writer) (string, error) {
	if dir := os.Getenv(DirEnv); dir != "" {
		return dir, check(dir)
	}
	dir, root, err := locate()
	if err != nil {
		return "", err
	}
	if err := check(dir); err == nil || !errors.Is(err, ErrNotBuilt) {
		return dir, err
	}
	unlock, err := lock(filepath.Dir(dir), progress)
	if err != nil {
		return "", err
	}
	defer unlock()
	if check(dir) == nil {
		return dir, nil // the one we waited for has built it
	}
	if err := build(ctx, root, dir, progress); err != nil {
		return "", err
	}
	return dir, nil
}

// locate returns the directory of the tools of this checkout, and the
// checkout's root.
func locate() (dir, root string, err error) {
	if root, err = checkout(); err != nil {
		return "", "", err
	}
	key, err := hash(root)
	if err != nil {
		return "", "", err
	}
	cache, err := CacheDir()
	if err != nil {
		return "", "", err
	}
	return filepath.Join(cache, "tools", key), root, nil
}

// CacheDir is where this project keeps what it builds for its tests and demos.
func CacheDir() (string, error) {
	if dir := os.Getenv(CacheEnv); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache directory (set %s): %w", CacheEnv, err)
	}
	return filepath.Join(dir, "kube-smcr"), nil
}

// checkout returns the root of the checkout that the working directory is in:
// `go run` and `go test` both run inside it.
func checkout() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the checkout: %w", err)
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(mod), "module github.com/smcr-io/kube-smcr\n") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is in no checkout of kube-smcr; run this in one, or set %s", start, DirEnv)
		}
	}
}

// check returns nil if all tools are in dir.
func check(dir string) error {
	for _, name := range append(programs(), runc) {
		info, err := os.Stat(filepath.Join(dir, name))
		switch {
		case errors.Is(err, fs.ErrNotExist) && name == runc:
			if _, err := os.Lstat(filepath.Join(dir, runc)); err == nil {
				return fmt.Errorf("the runc that %s points to is gone; install the package runc", filepath.Join(dir, runc))
			}
			return fmt.Errorf("%w (%s is not there)", ErrNotBuilt, filepath.Join(dir, runc))
		case errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("%w (%s is not there)", ErrNotBuilt, filepath.Join(dir, name))
		case err != nil:
			return fmt.Errorf("look for the cluster's tools: %w", err)
		case info.Mode()&0o111 == 0:
			return fmt.Errorf("%s cannot be executed", filepath.Join(dir, name))
		}
	}
	return nil
}

// lock makes sure that only one process builds under parent.
func lock(parent string, progress io.Writer) (unlock func(), err error) {
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of the cluster's tools: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(parent, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the cluster's tools: %w", err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		_, _ = fmt.Fprintln(progress, "cluster tools: another process is building them; waiting for it")
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock the cluster's tools: %w", err)
	}
	return func() { _ = f.Close() }, nil
}

// build builds all tools into a temporary directory and renames it to dir.
func build(ctx context.Context, root, dir string, progress io.Writer) (err error) {
	oci, err := exec.LookPath(runc)
	if err != nil {
		return fmt.Errorf("find runc (tools/deps.sh runtime installs it): %w", err)
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), ".building-")
	if err != nil {
		return fmt.Errorf("make the directory of the cluster's tools: %w", err)
	}
	defer func() { _ = os.RemoveAll(temp) }()
	if err := os.Chmod(temp, 0o755); err != nil { // the control plane may run as another user
		return fmt.Errorf("make the directory of the cluster's tools: %w", err)
	}

	began := time.Now()
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(progress, "cluster tools: "+format+"\n", args...) }
	say("building Kubernetes, etcd, helm, kwok and containerd into %s; on two cores this takes about seven minutes, once", dir)
	for i, s := range steps() {
		say("%d of %d: %s", i+1, len(steps()), s.what)
		stepBegan := time.Now()
		if err := s.run(ctx, root, temp); err != nil {
			return err
		}
		say("%d of %d: %s: %d s", i+1, len(steps()), s.what, int(time.Since(stepBegan).Seconds()))
	}
	for _, name := range kubeNames() {
		if err := os.Symlink("kube", filepath.Join(temp, name)); err != nil {
			return fmt.Errorf("name %s: %w", name, err)
		}
	}
	if err := os.Symlink(oci, filepath.Join(temp, runc)); err != nil {
		return fmt.Errorf("name runc: %w", err)
	}
	// What is there under the name is not complete, or we would not be here.
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove an incomplete directory of tools: %w", err)
	}
	if err := os.Rename(temp, dir); err != nil {
		return fmt.Errorf("put the cluster's tools in place: %w", err)
	}
	say("built in %d s", int(time.Since(began).Seconds()))
	return nil
}
