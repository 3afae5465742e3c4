// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/internal/testenv/place"
)

// BuildOptions say how a program is built.
type BuildOptions struct {
	// CGO builds with cgo: what uses libibverbs.
	CGO bool
	// Test builds the package's tests.
	Test bool
	// Name is that of the file; by default the last part of the package's, with
	// .test if it is one.
	Name string
	// Tags are build tags.
	Tags []string

	dir string // of the module that has it, if that is another
}

// Build builds a package for the guests and returns the program's path as they
// see it. Commands find it by its name too.
func (l *Lab) Build(ctx context.Context, pkg string, opt BuildOptions) (string, error) {
	l.building.Lock()
	defer l.building.Unlock()
	if opt.Name == "" {
		opt.Name = path.Base(pkg)
		if opt.Test {
			opt.Name += ".test"
		}
	}
	out := filepath.Join(l.Share(), "bin", opt.Name)
	if err := goBuild(ctx, out+".new", pkg, opt); err != nil {
		return "", err
	}
	if err := checkLibc(out + ".new"); err != nil {
		return "", fmt.Errorf("build %s: %w", pkg, err)
	}
	if err := os.Rename(out+".new", out); err != nil { // the old one may be running
		return "", err
	}
	return "/host/bin/" + opt.Name, nil
}

// BuildNode builds what the product runs on a node: node-agent, smcrctl, and the CNI plugin under its name, smcr-cni.
func (l *Lab) BuildNode(ctx context.Context) error {
	const commands = "github.com/smcr-io/kube-smcr/cmd/"
	for _, program := range []struct {
		pkg string
		opt BuildOptions
	}{
		{"node-agent", BuildOptions{CGO: true}},
		{"smcrctl", BuildOptions{}},
		{"cni-plugin", BuildOptions{Name: "smcr-cni"}},
	} {
		if _, err := l.Build(ctx, commands+program.pkg, program.opt); err != nil {
			return err
		}
	}
	return nil
}

// GuestBin is where guests have copies of the programs that were built for them.
// Programs that start each other do so there: to start one from /host takes many
// times as long.
const GuestBin = "/run/bin"

// cniModule is the module that pins the reference plugins of CNI.
const cniModule = "tools/vm/tools"

// BuildCNIPlugins builds the reference plugins of CNI that one needs beside ours,
// and returns the directory in guests from which these are quick to start.
func (l *Lab) BuildCNIPlugins(ctx context.Context) (string, error) {
	l.building.Lock()
	defer l.building.Unlock()
	dir, err := checkoutDir(cniModule)
	if err != nil {
		return "", fmt.Errorf("build CNI plugins: %w", err)
	}
	for _, plugin := range []string{"main/host-device", "main/macvlan", "ipam/dhcp", "ipam/host-local", "ipam/static"} {
		out := filepath.Join(l.Share(), "bin", path.Base(plugin))
		pkg := "github.com/containernetworking/plugins/plugins/" + plugin
		if err := goBuild(ctx, out, pkg, BuildOptions{dir: dir}); err != nil {
			return "", err
		}
	}
	return GuestBin, nil
}

// checkLibc finds out whether the guests' C library has what a program was linked
// to on this machine.
func checkLibc(program string) error {
	f, err := elf.Open(program)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	symbols, err := f.ImportedSymbols()
	if errors.Is(err, elf.ErrNoSymbols) {
		return nil // static
	}
	if err != nil {
		return err
	}
	for _, s := range symbols {
		if minor, ok := glibcMinor(s.Version); ok && minor > guestGlibcMinor {
			return fmt.Errorf("it needs %s of %s, the guests have 2.%d: build it in Debian 12, as in a container golang:1.26-bookworm", s.Name, s.Version, guestGlibcMinor)
		}
	}
	return nil
}

// glibcMinor is 36 of GLIBC_2.36 and of GLIBC_2.36.1.
func glibcMinor(version string) (int, bool) {
	rest, ok := strings.CutPrefix(version, "GLIBC_2.")
	if !ok {
		return 0, false
	}
	first, _, _ := strings.Cut(rest, ".")
	minor, err := strconv.Atoi(first)
	return minor, err == nil
}

// GoTest builds the tests of a package and runs them in the guest, in a copy of
// the package's directory as far as that is testdata. Arguments are those of a
// test binary, as -test.run=X. What it prints goes to out.
func (g *Guest) GoTest(ctx context.Context, pkg string, opt BuildOptions, out io.Writer, args ...string) error {
	opt.Test = true
	program, err := g.lab.Build(ctx, pkg, opt)
	if err != nil {
		return err
	}
	list := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", pkg)
	source, err := list.Output()
	if err != nil {
		return fmt.Errorf("find the directory of %s: %w", pkg, err)
	}
	dir := filepath.Join("tests", filepath.Base(program))
	if err := copyTestdata(strings.TrimSpace(string(source)), filepath.Join(g.lab.Share(), dir)); err != nil {
		return fmt.Errorf("copy the testdata of %s: %w", pkg, err)
	}
	p, err := g.StartIn(ctx, filepath.Join("/host", dir), nil, append([]string{program}, args...)...)
	if err != nil {
		return err
	}
	return p.Stream(nil, out, out)
}

func copyTestdata(from, to string) error {
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	data := filepath.Join(from, "testdata")
	if _, err := os.Stat(data); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return os.CopyFS(filepath.Join(to, "testdata"), os.DirFS(data))
}

// goBuild builds a program. go links one anew unless the file that it is to write is
// there and up to date, and linking all takes guests' processors for many seconds: so
// programs are kept in the cache directory, and out is a copy.
func goBuild(ctx context.Context, out, pkg string, opt BuildOptions) error {
	if opt.Test {
		testenv.Builds(pkg + ".test")
	} else {
		testenv.Builds(pkg)
	}
	kept, lock, err := keep(pkg, opt)
	if err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	defer func() { _ = lock.Close() }()
	args := []string{"build"}
	if opt.Test {
		args = []string{"test", "-c"}
	}
	args = append(args, "-ldflags=-s -w", "-buildvcs=false", "-tags="+strings.Join(opt.Tags, ","), "-o", kept, pkg)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = opt.dir
	cgo := "CGO_ENABLED=0"
	if opt.CGO {
		cgo = "CGO_ENABLED=1"
	}
	cmd.Env = append(os.Environ(), cgo, "GOOS=linux", "GOARCH=amd64")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, text)
	}
	_, err = lock.WriteAt([]byte(whole), 0)
	if err == nil {
		err = copyFile(kept, out)
	}
	if err == nil {
		err = os.Chmod(out, 0o755)
	}
	if err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	return nil
}

// whole is in the lock of a program that was written to its end.
const whole = "whole"

// keep is where a program is kept that is built so. The lock says that it is not whole
// until it is: go looks at the beginning of a file only.
func keep(pkg string, opt BuildOptions) (file string, lock *os.File, err error) {
	cache, err := clustertools.CacheDir()
	if err != nil {
		return "", nil, err
	}
	name := sha256.Sum256(fmt.Appendln(nil, pkg, opt.CGO, opt.Test, opt.Tags))
	dir := filepath.Join(cache, "vm", "programs", hex.EncodeToString(name[:8]))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", nil, err
	}
	file = filepath.Join(dir, path.Base(pkg))
	if lock, err = os.OpenFile(filepath.Join(dir, place.LockFile), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return "", nil, err
	}
	state := make([]byte, len(whole))
	if err = unix.Flock(int(lock.Fd()), unix.LOCK_EX); err == nil {
		if n, _ := lock.ReadAt(state, 0); string(state[:n]) != whole {
			err = os.RemoveAll(file)
		}
	}
	if err == nil {
		err = lock.Truncate(0)
	}
	if err != nil {
		return "", nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), lock.Close())
	}
	return file, lock, nil
}
