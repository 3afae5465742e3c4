// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// disk mounts a small file system at dir.
func disk(t *testing.T, dir string) {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	must(t, syscall.Mount("ks-disk", dir, "tmpfs", 0, "size=64k,mode=755"))
	t.Cleanup(func() { must(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
}

// fill leaves no space in dir, and returns a function that makes some.
func fill(t *testing.T, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "ballast")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill %s: %v, want ENOSPC", dir, err)
	}
	return func() { must(t, os.Remove(path)) }
}

func TestFullDisk(t *testing.T) {
	h := newHost(t)
	disk(t, h.etc)
	kindnet := readTestdata(t, "10-kindnet.conflist")
	must(t, os.WriteFile(h.conf("10-kindnet.conflist"), []byte(kindnet), 0o644))
	free := fill(t, h.etc)
	in := h.installer()
	in.pass()
	if s := in.Status(); s.State != StateBroken || !strings.Contains(s.Detail, "no space left") || !strings.Contains(s.Detail, "10-kindnet.conflist") {
		t.Errorf("%+v", s)
	}
	if diff := cmp.Diff([]string{"bin/smcr-cni", "net.d/10-kindnet.conflist", "net.d/ballast"}, h.names()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(kindnet, string(mustRead(t, h.conf("10-kindnet.conflist")))); diff != "" {
		t.Error(diff)
	}
	free()
	in.pass()
	if s := in.Status(); !s.Working() || h.types("10-kindnet.conflist") != "ptp portmap smcr-cni" {
		t.Errorf("with space: %+v", s)
	}
}

func TestFullDisk_binary(t *testing.T) {
	h := newHost(t)
	disk(t, h.bin)
	h.write("10-x.conflist", string(short(t, "a")))
	must(t, os.Remove(h.source))
	must(t, os.WriteFile(h.source, make([]byte, 20<<10), 0o755))
	in := h.installer()
	in.pass()
	if s := in.Status(); !s.Working() {
		t.Fatalf("%+v", s)
	}
	// The next version's does not fit: the old one stays, and goes on working.
	must(t, os.WriteFile(h.source, slices.Repeat([]byte("v2"), 10<<10), 0o755))
	old := mustRead(t, filepath.Join(h.bin, "smcr-cni"))
	free := fill(t, h.bin)
	in = h.installer()
	in.pass()
	if s := in.Status(); s.State != StateBroken || !strings.Contains(s.Detail, "no space left") || !strings.Contains(s.Detail, "free space there") {
		t.Errorf("%+v", s)
	}
	if diff := cmp.Diff(old, mustRead(t, filepath.Join(h.bin, "smcr-cni"))); diff != "" || h.types("10-x.conflist") != "a smcr-cni" {
		t.Errorf("the old installation does not stand: %s", h.types("10-x.conflist"))
	}
	// Without any binary the plugin must not be in the list.
	must(t, os.Remove(filepath.Join(h.bin, "smcr-cni")))
	fill(t, h.bin)
	in.pass()
	if s := in.Status(); s.State != StateBroken || h.types("10-x.conflist") != "a" {
		t.Errorf("without a binary: %+v, plugins %s", s, h.types("10-x.conflist"))
	}
	if diff := cmp.Diff([]string{"bin/ballast", "net.d/10-x.conflist"}, h.names()); diff != "" {
		t.Error(diff)
	}
	free()
	in.pass()
	if s := in.Status(); !s.Working() || h.types("10-x.conflist") != "a smcr-cni" {
		t.Errorf("with space: %+v", s)
	}
}

func TestReadOnly(t *testing.T) {
	h := newHost(t)
	disk(t, h.etc)
	must(t, os.WriteFile(h.conf("10-x.conflist"), short(t, "a"), 0o644))
	must(t, syscall.Mount("", h.etc, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	in := h.installer()
	stop := h.run(in)
	h.wait("broken", func() bool { return in.Status().State == StateBroken })
	if s := in.Status(); !strings.Contains(s.Detail, "read-only file system") || !strings.Contains(s.Detail, "cni.confDir") {
		t.Errorf("%+v", s)
	}
	stop()
	must(t, in.Uninstall(t.Context())) // nothing of ours is there
}
