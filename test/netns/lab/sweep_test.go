// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/internal/testenv/place"
)

// ended returns the id of a process that has ended. The kernel gives the id to no other process for a good
// while.
func ended(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("true")
	must(t, cmd.Run())
	return cmd.Process.Pid
}

// start starts a process whose working directory is dir, and ends the process with the test.
func start(t *testing.T, dir string) *os.Process {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	cmd.Dir = dir
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process
}

// die lets go the lock of a lab, as if the lab's process had been killed.
func die(t *testing.T, l *Lab) {
	t.Helper()
	must(t, l.lock.Close())
}

func TestSweep_removesLabsOfDeadProcesses(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	l := &Lab{Prefix: fmt.Sprintf("%s%d-00ff", namePrefix, ended(t))}
	ns, err := l.makeNS("node1")
	must(t, err)
	must(t, ns.Close())
	must(t, l.makeDir())
	die(t, l)
	start(t, l.Dir)
	if _, err := Sweep(); err != nil {
		t.Error(err)
	}
	left, err := l.Leftovers()
	if err != nil || len(left) > 0 {
		t.Errorf("left: %q, %v", left, err)
	}
}

// The process id in a lab's name may be that of another process by now. So the lock decides: a lab whose lock
// is free is dead, and a lab whose lock is taken lives.
func TestSweep_goesByTheLock(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	living := &Lab{Prefix: fmt.Sprintf("%s%d-00fd", namePrefix, ended(t))}
	must(t, living.makeDir())
	t.Cleanup(func() { must(t, living.removeDir()) })
	reused := &Lab{Prefix: fmt.Sprintf("%s%d-00fe", namePrefix, start(t, t.TempDir()).Pid)}
	ns, err := reused.makeNS("node1")
	must(t, err)
	must(t, ns.Close())
	must(t, reused.makeDir())
	die(t, reused)
	if _, err := Sweep(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(living.Dir, place.LockFile)); err != nil {
		t.Errorf("a lab that lives: %v", err)
	}
	left, err := reused.Leftovers()
	if err != nil || len(left) > 0 {
		t.Errorf("left of a lab whose process id another process has: %q, %v", left, err)
	}
}

// Whoever may write into the directory for temporary files must not make root's
// Sweep end processes and remove what a link points to.
func TestSweep_leavesOthersAlone(t *testing.T) {
	testenv.Need(t, testenv.Root)
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	name := fmt.Sprintf("%s%d-00fc-", namePrefix, ended(t))
	theirs, linked, link := filepath.Join(tmp, name+"1"), filepath.Join(tmp, "linked"), filepath.Join(tmp, name+"2")
	must(t, errors.Join(os.Mkdir(theirs, 0o755), os.Mkdir(linked, 0o755), os.Symlink(linked, link)))
	must(t, os.Chown(theirs, nobody, nobody))
	process := start(t, theirs)
	if removed, err := Sweep(); err != nil || slices.ContainsFunc(removed, func(s string) bool { return strings.Contains(s, tmp) }) {
		t.Errorf("removed %q, %v", removed, err)
	}
	for _, dir := range []string{theirs, linked, link} {
		if _, err := os.Lstat(dir); err != nil {
			t.Error(err)
		}
	}
	if err := process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process in another user's directory: %v", err)
	}
}

// inMountNamespace calls f on a thread with a mount namespace of its own, so that no other process sees what
// f mounts over the directory of names.
func inMountNamespace(t *testing.T, f func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends here
		err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	must(t, <-done)
}

// mount binds a file to a name, as one binds a network namespace.
func mount(name string) error {
	err := os.WriteFile(filepath.Join(nsDir, name), nil, 0o444)
	if err != nil {
		return err
	}
	return unix.Mount("/proc/self/ns/net", filepath.Join(nsDir, name), "", unix.MS_BIND, "")
}

func TestRemoveNamed(t *testing.T) {
	testenv.Need(t, testenv.Root)
	must(t, os.MkdirAll(nsDir, 0o755))
	const name = "removenamed-test"
	path := filepath.Join(nsDir, name)
	for _, c := range []struct {
		name    string
		make    func() error
		removed bool
		left    bool
	}{
		{name: "mounted", make: func() error { return mount(name) }, removed: true},
		{name: "mounted twice", make: func() error {
			return errors.Join(mount(name), unix.Mount("/proc/self/ns/net", path, "", unix.MS_BIND, ""))
		}, removed: true},
		{name: "not mounted", make: func() error { return os.WriteFile(path, nil, 0o444) }, removed: true},
		{name: "not there", make: func() error { return nil }},
		{
			// The mount of the name is hidden below the mount of the directory, where nobody can unmount it.
			name: "hidden", left: true,
			make: func() error { return errors.Join(mount(name), unix.Mount(nsDir, nsDir, "", unix.MS_BIND, "")) },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Cleanup(func() { // the file is in the machine's own directory
				if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
					t.Error(err)
				}
			})
			inMountNamespace(t, func() error {
				if err := c.make(); err != nil {
					return err
				}
				removed, err := removeNamed(name)
				if err != nil || removed != c.removed {
					t.Errorf("removeNamed() = %v, %v; want %v", removed, err, c.removed)
				}
				if _, err := os.Lstat(path); (err == nil) != c.left {
					t.Errorf("afterwards: %v", err)
				}
				return nil
			})
		})
	}
}

func TestLabPID(t *testing.T) {
	for _, tc := range []struct {
		name string
		pid  int
		ok   bool
	}{
		{"ks-1234-5f3a-node1", 1234, true},
		{"ks-1234-5f3a", 1234, true},
		{"ks-1-5f3a-node1", 0, false},
		{"ks-0a1b2c3d", 0, false},
		{"ks--5f3a", 0, false},
		{"ks-1234-xyza-node1", 0, false},
		{"other-1234-5f3a-node1", 0, false},
	} {
		pid, ok := labPID(tc.name)
		if ok != tc.ok || ok && pid != tc.pid {
			t.Errorf("%s: %d, %v", tc.name, pid, ok)
		}
	}
}
