// SPDX-License-Identifier: Apache-2.0

package place

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestTryLock(t *testing.T) {
	all := filepath.Join(t.TempDir(), "all")
	if names, err := Names(all); err != nil || len(names) > 0 {
		t.Errorf("Names() of nothing = %q, %v", names, err)
	}
	dir := filepath.Join(all, "one")
	lock, err := TryLock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := TryLock(dir); !errors.Is(err, ErrInUse) {
		t.Errorf("TryLock() of a locked directory: %v, want %v", err, ErrInUse)
	}
	if err := os.WriteFile(filepath.Join(all, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	names, err := Names(all)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"one"}, names); diff != "" {
		t.Errorf("Names() (-want +got):\n%s", diff)
	}
	// Who removes its directory gives it up, though it has the lock still.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	again, err := TryLock(dir)
	if err != nil {
		t.Fatalf("TryLock() of a directory that was removed: %v", err)
	}
	if err := errors.Join(lock.Close(), again.Close()); err != nil {
		t.Fatal(err)
	}
	lock, err = TryLock(dir)
	if err != nil {
		t.Fatalf("TryLock() of what a dead one left: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Error(err)
	}
}

// What others mounted in a directory is not removed with it.
func TestRemove_leavesMountsAlone(t *testing.T) {
	testenv.Need(t, testenv.Root)
	other := t.TempDir()
	kept := filepath.Join(other, "kept")
	dir := filepath.Join(t.TempDir(), "one")
	at := filepath.Join(dir, "in the way")
	if err := errors.Join(os.WriteFile(kept, nil, 0o600), os.MkdirAll(at, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(other, at, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	mounted := true
	t.Cleanup(func() {
		if mounted {
			_ = unix.Unmount(at, unix.MNT_DETACH)
		}
	})
	if err := Remove(dir); err == nil || !strings.Contains(err.Error(), at) {
		t.Errorf("Remove() of a directory with a mount: %v, want an error that names it", err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Fatalf("Remove() went through a mount: %v", err)
	}
	if err := unix.Unmount(at, 0); err != nil {
		t.Fatal(err)
	}
	mounted = false
	if err := Remove(dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Remove() left the directory: %v", err)
	}
}

func TestMountPoints(t *testing.T) {
	const mountinfo = `22 1 8:1 / / rw,relatime - ext4 /dev/vda rw
30 22 0:5 / /tmp/a rw - tmpfs x rw
31 22 0:5 / /tmp/ab rw - tmpfs x rw
32 22 0:5 / /tmp/a/b\040c rw shared:1 - tmpfs x rw
33
`
	if diff := cmp.Diff([]string{"/tmp/a", "/tmp/a/b c"}, mountPoints(mountinfo, "/tmp/a")); diff != "" {
		t.Errorf("mount points (-want +got):\n%s", diff)
	}
}
