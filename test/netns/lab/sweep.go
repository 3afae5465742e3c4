// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv/place"
)

// Sweep removes the processes, namespaces and directories of labs whose own
// process was killed before it could. It returns what it removed, and as an error
// what it could not remove, which does not hinder a new lab.
func Sweep() ([]string, error) {
	var s sweep
	err := s.run()
	return s.removed, errors.Join(append(s.errs, err)...)
}

// A sweep is one call of Sweep.
type sweep struct {
	removed []string
	errs    []error
	// living says of labs, by prefix, whether the lock of their directory is held.
	living map[string]bool
}

func (s *sweep) run() error {
	names, err := namespaces()
	if err != nil {
		return err
	}
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), namePrefix+"*"))
	if err != nil {
		return err
	}
	s.living = map[string]bool{}
	for _, d := range dirs {
		s.directory(d)
	}
	for _, n := range names {
		if s.dead(n) {
			s.namespace(n)
		}
	}
	return nil
}

// directory removes a directory and the processes in it, if it is of a dead lab.
func (s *sweep) directory(dir string) {
	name := filepath.Base(dir)
	if _, ok := labPID(name); !ok || !ours(dir) {
		return // anybody may make one of this name in the directory for temporary files
	}
	if _, err := os.Lstat(filepath.Join(dir, place.LockFile)); err == nil {
		lock, err := place.TryLock(dir)
		s.living[prefixOf(name)] = err != nil
		if err == nil {
			defer func() { _ = lock.Close() }()
		}
	}
	if !s.dead(name) {
		return
	}
	procs, err := processesIn(dir)
	if err != nil {
		s.errs = append(s.errs, err)
	}
	for _, p := range procs {
		if p.kill(dir) {
			s.removed = append(s.removed, p.String())
		}
	}
	if err := place.Remove(dir); err != nil {
		s.errs = append(s.errs, err)
		return
	}
	s.removed = append(s.removed, "directory "+dir)
}

// kill ends the process if it still works in dir: its id may be another's by now.
func (p process) kill(dir string) bool {
	held, err := os.FindProcess(p.pid) // by pidfd: it stays this one
	if err != nil {
		return false
	}
	defer func() { _ = held.Release() }()
	cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", p.pid))
	return err == nil && isIn(cwd, dir) && held.Kill() == nil
}

// namespace removes the name of a namespace, unless it is in use as a mount point
// where nobody can see it: who mounts over the directory of names, as "ip netns"
// does when it is used first, leaves below what was mounted there before.
func (s *sweep) namespace(name string) {
	removed, err := removeNamed(name)
	switch {
	case err != nil:
		s.errs = append(s.errs, fmt.Errorf("remove network namespace %s: %w", name, err))
	case removed:
		s.removed = append(s.removed, "network namespace "+name)
	}
}

func removeNamed(name string) (removed bool, err error) {
	path := filepath.Join(nsDir, name)
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break // nothing is mounted here, or not any more
		}
		if err != nil {
			return false, err
		}
		removed = true
	}
	err = os.Remove(path)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.EBUSY): // another sweep was faster; mounted below
		return removed, nil
	default:
		return removed, err
	}
}

// dead says whether a name is of a lab that nobody owns any more. Labs hold a lock
// in their directory. Where there is none, the process id in the name decides,
// which another process may have by now.
func (s *sweep) dead(name string) bool {
	pid, ok := labPID(name)
	if !ok {
		return false
	}
	if living, known := s.living[prefixOf(name)]; known {
		return !living
	}
	return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
}

// ours says whether a directory is one, and this user's.
func ours(dir string) bool {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == os.Geteuid()
}

// prefixOf returns the prefix of a lab's name such as ks-1234-5f3a-node1.
func prefixOf(name string) string {
	pid, _, _ := strings.Cut(strings.TrimPrefix(name, namePrefix), "-")
	return name[:len(namePrefix)+len(pid)+len("-")+hexDigits]
}

// labPID reads the process id from a name such as ks-1234-5f3a-node1.
func labPID(name string) (int, bool) {
	rest, ok := strings.CutPrefix(name, namePrefix)
	id, after, more := strings.Cut(rest, "-")
	pid, err := strconv.Atoi(id)
	if !ok || !more || err != nil || pid <= 1 || len(after) < hexDigits {
		return 0, false
	}
	_, err = strconv.ParseUint(after[:hexDigits], 16, 16)
	return pid, err == nil
}
