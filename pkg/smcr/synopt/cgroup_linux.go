// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A cgroupDir is a directory of a cgroup v2, and what must stay open while it
// is used.
type cgroupDir struct {
	path  string
	mount *os.File // of a mount of our own, or nil
}

func (d cgroupDir) close() {
	if d.mount != nil {
		_ = d.mount.Close()
	}
}

// OwnCgroupID is the ID of the cgroup v2 of this process, whose sockets the program of [Open] sees unless
// configured otherwise: for other programs that are to leave these alone.
func OwnCgroupID() (uint64, error) {
	dir, err := openOwnCgroup()
	if err != nil {
		return 0, fmt.Errorf("find the cgroup v2 of this process: %w", err)
	}
	defer dir.close()
	var st unix.Stat_t
	if err := unix.Stat(dir.path, &st); err != nil {
		return 0, fmt.Errorf("ID of the cgroup of this process: %w", err)
	}
	return st.Ino, nil
}

// openCgroup finds the directory of the configured cgroup, "" being the
// process's own.
func openCgroup(configured string) (cgroupDir, error) {
	if configured != "" {
		if err := checkCgroupDir(configured); err != nil {
			return cgroupDir{}, &UnsupportedError{
				What: "use cgroup " + configured,
				Need: "the directory of an existing cgroup v2",
				Err:  err,
			}
		}
		return cgroupDir{path: configured}, nil
	}
	dir, err := openOwnCgroup()
	if err != nil {
		return cgroupDir{}, &UnsupportedError{
			What: "find the cgroup v2 of this process",
			Need: "a kernel with cgroup v2 and, in a container, its cgroup mounted at /sys/fs/cgroup or CAP_SYS_ADMIN to mount it; or the directory in the configuration",
			Err:  err,
		}
	}
	return dir, nil
}

// openOwnCgroup looks through the mounts, and makes a mount of its own, which
// nobody else sees, when none of them shows the process's cgroup. That is so
// in a cgroup namespace that inherited its mounts from outside, and on
// machines that use v1 alone.
func openOwnCgroup() (cgroupDir, error) {
	var problems []error
	own, err := readOwnCgroup()
	if err == nil {
		mountinfo, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			return cgroupDir{}, err
		}
		for _, dir := range cgroupDirs(string(mountinfo), own) {
			err := checkOwnCgroupDir(dir)
			if err == nil {
				return cgroupDir{path: dir}, nil
			}
			problems = append(problems, fmt.Errorf("%s: %w", dir, err))
		}
	}

	mount, err := mountCgroup()
	if err != nil {
		return cgroupDir{}, errors.Join(append(problems, fmt.Errorf("no mount shows it, and making one: %w", err))...)
	}
	dir, err := ownCgroupIn(mount)
	if err != nil {
		_ = mount.Close()
		return cgroupDir{}, errors.Join(append(problems, err)...)
	}
	return cgroupDir{path: dir, mount: mount}, nil
}

// ownCgroupIn returns the directory of the process's cgroup in a mount whose
// root is the root of the cgroup namespace.
func ownCgroupIn(mount *os.File) (string, error) {
	// Only now: a kernel that never had a v2 mount does not tell the v2 path.
	own, err := readOwnCgroup()
	if err != nil {
		return "", err
	}
	rest, ok := below("/", own)
	if !ok {
		return "", fmt.Errorf("cgroup %s is outside of the cgroup namespace", own)
	}
	dir := fmt.Sprintf("/proc/self/fd/%d%s", mount.Fd(), rest)
	if err := checkOwnCgroupDir(dir); err != nil {
		return "", fmt.Errorf("cgroup %s: %w", own, err)
	}
	return dir, nil
}

func readOwnCgroup() (string, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	return ownCgroup(string(text))
}

// checkCgroupDir returns an error unless dir is a directory of a cgroup v2.
func checkCgroupDir(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return err
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return errors.New("not a cgroup v2 file system")
	}
	return nil
}

// checkOwnCgroupDir returns an error unless dir is the cgroup v2 of this
// process: mounts can hide each other, and a program on the wrong cgroup would
// do nothing without a sign.
func checkOwnCgroupDir(dir string) error {
	if err := checkCgroupDir(dir); err != nil {
		return err
	}
	f, err := os.Open(dir + "/cgroup.procs")
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	procs, err := io.ReadAll(io.LimitReader(f, maxProcsBytes))
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil // a threaded cgroup does not list processes
	}
	if err != nil {
		return err
	}
	if !slices.Contains(strings.Fields(string(procs)), strconv.Itoa(os.Getpid())) {
		return errors.New("this process is not in its cgroup.procs")
	}
	return nil
}

// mountCgroup mounts cgroup v2 without attaching it anywhere: it goes away
// with the file.
func mountCgroup() (*os.File, error) {
	fs, err := unix.Fsopen("cgroup2", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen cgroup2: %w", err)
	}
	defer func() { _ = unix.Close(fs) }()
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("create cgroup2 file system: %w", err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("mount cgroup2: %w", err)
	}
	return os.NewFile(uintptr(mount), "cgroup2"), nil
}
