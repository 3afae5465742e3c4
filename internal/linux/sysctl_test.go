// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// A container runtime gives a container that is not privileged a /proc/sys that
// is mounted read-only over itself.
func TestSetSysctl_containerThatIsNotPrivileged(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	var plain, err error
	var got []byte
	onDisposableThread(func() {
		err = func() error {
			if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWNET); err != nil {
				return err
			}
			const dir = "/proc/sys"
			for _, m := range []struct {
				source, target string
				flags          uintptr
			}{
				{"", "/", unix.MS_PRIVATE | unix.MS_REC},
				{dir, dir, unix.MS_BIND},
				{dir, dir, unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY},
			} {
				if err := unix.Mount(m.source, m.target, "", m.flags, ""); err != nil {
					return err
				}
			}
			plain = os.WriteFile("/proc/sys/"+fwmarkAccept.path(), []byte("1"), 0)
			if err := fwmarkAccept.write(1); err != nil {
				return err
			}
			var err error
			got, err = os.ReadFile("/proc/sys/" + fwmarkAccept.path())
			return err
		}()
	})
	if err != nil {
		t.Fatal(err)
	}
	if !errors.Is(plain, unix.EROFS) {
		t.Errorf("plain write: %v, want that the file system is read-only: the test shows nothing", plain)
	}
	if s := strings.TrimSpace(string(got)); s != "1" {
		t.Errorf("%s is %s, want 1", fwmarkAccept, s)
	}
	home, err := os.ReadFile("/proc/sys/" + fwmarkAccept.path())
	if err != nil {
		t.Fatal(err)
	}
	if s := strings.TrimSpace(string(home)); s != "0" {
		t.Errorf("%s of the test's own namespace is %s, want 0", fwmarkAccept, s)
	}
}
