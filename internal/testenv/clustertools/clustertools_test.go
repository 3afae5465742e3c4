// SPDX-License-Identifier: Apache-2.0

package clustertools

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fake makes a checkout with the files that hash reads, enters it, and gives it
// an empty cache.
func fake(t *testing.T) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, text := range map[string]string{
		"go.mod":                  "module github.com/smcr-io/kube-smcr\n",
		toolsModule + "/go.mod":   "module tools\n",
		toolsModule + "/go.sum":   "",
		toolsModule + "/main.go":  "package main\n\nfunc main() {}\n",
		runtimeModule + "/go.mod": "module runtime\n",
		runtimeModule + "/go.sum": "",
		"some/package/x.go":       "package x\n",
	} {
		write(t, filepath.Join(root, name), text, 0o644)
	}
	t.Chdir(filepath.Join(root, "some", "package"))
	t.Setenv(DirEnv, "")
	t.Setenv(CacheEnv, filepath.Join(root, "cache"))
	return root
}

func write(t *testing.T, name, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

func TestBuilt(t *testing.T) {
	root := fake(t)
	if _, err := Built(); !errors.Is(err, ErrNotBuilt) {
		t.Fatalf("Built() in an empty cache: %v, want %v", err, ErrNotBuilt)
	}

	dir, found, err := locate()
	if err != nil || found != root {
		t.Fatalf("locate() = %q, %q, %v; want the checkout %q", dir, found, err, root)
	}
	for _, name := range append(programs(), runc) {
		write(t, filepath.Join(dir, name), "", 0o755)
	}
	if got, err := Built(); err != nil || got != dir {
		t.Errorf("Built() = %q, %v; want %q", got, err, dir)
	}
	if got, err := Dir(t.Context(), io.Discard); err != nil || got != dir {
		t.Errorf("Dir() = %q, %v; want %q", got, err, dir)
	}

	if err := os.Remove(filepath.Join(dir, "kubelet")); err != nil {
		t.Fatal(err)
	}
	if _, err := Built(); !errors.Is(err, ErrNotBuilt) || !strings.Contains(err.Error(), "kubelet") {
		t.Errorf("Built() without kubelet: %v, want %v that names it", err, ErrNotBuilt)
	}
}

func TestDirOfTheEnvironment(t *testing.T) {
	fake(t)
	given := t.TempDir()
	t.Setenv(DirEnv, given)
	if _, err := Built(); err == nil || !strings.Contains(err.Error(), given) {
		t.Errorf("Built() of an empty directory: %v, want an error that names it", err)
	}
	for _, name := range append(programs(), runc) {
		write(t, filepath.Join(given, name), "", 0o755)
	}
	if got, err := Built(); err != nil || got != given {
		t.Errorf("Built() = %q, %v; want %q", got, err, given)
	}
}

func TestHashChanges(t *testing.T) {
	root := fake(t)
	before, err := hash(root)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(root, runtimeModule, "go.sum"), "example.com v1.0.0 h1:x\n", 0o644)
	after, err := hash(root)
	if err != nil {
		t.Fatal(err)
	}
	if before == after {
		t.Errorf("hash() = %s before and after go.sum changed", before)
	}
}

// A module that does not compile must leave nothing behind, and say why.
func TestBuildFails(t *testing.T) {
	root := fake(t)
	bin := t.TempDir()
	write(t, filepath.Join(bin, runc), "", 0o755)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	var progress strings.Builder
	_, err := Dir(t.Context(), &progress)
	if err == nil || !strings.Contains(err.Error(), "build containerd in") {
		t.Errorf("Dir() without the modules: %v, want an error that names the step", err)
	}
	if !strings.Contains(progress.String(), "1 of ") {
		t.Errorf("progress %q names no step", progress.String())
	}
	entries, err := os.ReadDir(filepath.Join(root, "cache", "tools"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != ".lock" {
			t.Errorf("%s is left behind", e.Name())
		}
	}
}

func TestVersionIsTheModules(t *testing.T) {
	root, err := checkout()
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile(filepath.Join(root, toolsModule, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "k8s.io/kubernetes v" + kubernetes + "\n"; !strings.Contains(string(mod), want) {
		t.Errorf("%s/go.mod does not require %q", toolsModule, want)
	}
}
