// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	cgroupRoot = "/sys/fs/cgroup"

	// leaf is the cgroup of a machine's own processes: version 2 wants none in
	// a cgroup that has controllers for its children.
	leaf = "init"
)

// A hierarchy is one mount of cgroups of the host: all of version 2, or some
// controllers of version 1.
type hierarchy struct {
	path    string // where it is mounted
	v2      bool
	options string // which controllers, for version 1
}

// hostHierarchies are the mounts of cgroups under /sys/fs/cgroup.
func hostHierarchies() ([]hierarchy, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("look for mounts of cgroups: %w", err)
	}
	all := parseHierarchies(string(text))
	if len(all) == 0 {
		return nil, errors.New("no cgroups are mounted under " + cgroupRoot)
	}
	return all, nil
}

func parseHierarchies(mountinfo string) []hierarchy {
	var all []hierarchy
	for line := range strings.Lines(mountinfo) {
		head, tail, ok := strings.Cut(line, " - ")
		where, how := strings.Fields(head), strings.Fields(tail)
		if !ok || len(where) < 5 || len(how) < 3 || !strings.HasPrefix(where[4], cgroupRoot) {
			continue
		}
		h := hierarchy{path: where[4]}
		switch how[0] {
		case "cgroup2":
			h.v2 = true
		case "cgroup":
			h.options = controllerOptions(how[2])
		default:
			continue
		}
		all = append(all, h)
	}
	return all
}

// controllerOptions are the options of a mount of version 1 that say which
// hierarchy it is; the others belong to the first mount of it only.
func controllerOptions(options string) string {
	var keep []string
	named := false
	for o := range strings.SplitSeq(options, ",") {
		name, _, hasValue := strings.Cut(o, "=")
		switch {
		case name == "name":
			named = true
			keep = append(keep, o)
		case hasValue, slices.Contains([]string{"rw", "ro", "xattr", "clone_children", "cpuset_v2_mode", "noprefix", "none"}, o):
		default:
			keep = append(keep, o)
		}
	}
	if named && len(keep) == 1 {
		keep = append([]string{"none"}, keep...)
	}
	return strings.Join(keep, ",")
}

// makeCgroup makes the cgroup name, and those above it, in each hierarchy. The first
// of them yields to other processes of the host as this process does.
func makeCgroup(name string) error {
	all, err := hostHierarchies()
	if err != nil {
		return err
	}
	nice, err := niceness()
	if err != nil {
		return err
	}
	for _, h := range all {
		dir := h.path
		for i, part := range strings.Split(name, "/") {
			if h.v2 {
				enableControllers(dir)
			}
			dir = filepath.Join(dir, part)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("make cgroup: %w", err)
			}
			if err := inheritCPUs(dir); err != nil {
				return err
			}
			if i > 0 || nice == 0 {
				continue
			}
			if err := weigh(dir, nice); err != nil {
				return err
			}
		}
	}
	return nil
}

// niceness returns the nice value of this process.
func niceness() (int, error) {
	const zero = 20 // the system call returns this for niceness 0, and less for more
	priority, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return 0, fmt.Errorf("read the niceness: %w", err)
	}
	return zero - priority, nil
}

// weigh gives the processes of a cgroup together the weight of one process of that
// niceness. Linux does not look at niceness across cgroups. A cgroup without the
// controller of processors is left as it is.
func weigh(dir string, nice int) error {
	// Each level is a quarter more or less, as among processes; 1024 is level 0.
	shares := max(2, int(math.Round(1024/math.Pow(1.25, float64(nice)))))
	for file, text := range map[string]string{"cpu.weight.nice": strconv.Itoa(nice), "cpu.shares": strconv.Itoa(shares)} {
		f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY|os.O_TRUNC, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue // of another version, or another controller
		}
		if err != nil {
			return fmt.Errorf("weigh cgroup: %w", err)
		}
		_, err = f.WriteString(text)
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("weigh cgroup: %w", err)
		}
	}
	return nil
}

// inheritCPUs gives a cgroup of the cpuset controller, version 1, what its
// parent has: it begins with nothing and takes no process.
func inheritCPUs(dir string) error {
	for _, name := range [...]string{"cpuset.cpus", "cpuset.mems"} {
		own, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || strings.TrimSpace(string(own)) != "" {
			continue // another controller, or filled already
		}
		parent, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if err != nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, "cgroup.subtree_control")); err == nil {
			continue // version 2 inherits by itself
		}
		if err := os.WriteFile(filepath.Join(dir, name), parent, 0o644); err != nil {
			return fmt.Errorf("give cgroup its processors: %w", err)
		}
	}
	return nil
}

// enableControllers lets the children of a cgroup of version 2 have every
// controller that it has. One that is refused is not needed by all: kubelet
// names those that it misses.
func enableControllers(dir string) {
	text, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return
	}
	for _, c := range strings.Fields(string(text)) {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0o644)
	}
}

// joinCgroup moves a process into the cgroup name of each hierarchy.
func joinCgroup(name string, pid int) error {
	all, err := hostHierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		if err := os.WriteFile(filepath.Join(h.path, name, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644); err != nil {
			return fmt.Errorf("enter cgroup: %w", err)
		}
	}
	return nil
}

// cgroups mounts the host's hierarchies in the machine, whose cgroup namespace
// shows its own part of each.
func (b *builder) cgroups(all []hierarchy) {
	if len(all) > 1 || all[0].path != cgroupRoot {
		b.mount("tmpfs", cgroupRoot, "tmpfs", "mode=755")
	}
	for _, h := range all {
		if h.v2 {
			b.mount("cgroup2", h.path, "cgroup2", "")
		} else {
			b.mount("cgroup", h.path, "cgroup", h.options)
		}
	}
	// Controllers that are mounted together have links by their single names.
	entries, _ := os.ReadDir(cgroupRoot)
	for _, e := range entries {
		name := filepath.Join(cgroupRoot, e.Name())
		if target, err := os.Readlink(name); err == nil && len(all) > 1 {
			b.link(target, name)
		}
	}
}

// leaveCgroupRoot moves this process, the machine's first, out of the root of
// its cgroups.
func leaveCgroupRoot(all []hierarchy) error {
	for _, h := range all {
		dir := filepath.Join(h.path, leaf)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make cgroup: %w", err)
		}
		if err := inheritCPUs(dir); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0o644); err != nil {
			return fmt.Errorf("enter cgroup %s: %w", dir, err)
		}
		if h.v2 {
			enableControllers(h.path)
		}
	}
	return nil
}

// RemoveCgroup removes the cgroup name of each hierarchy and those below it. It
// waits for processes that are ending.
func RemoveCgroup(name string) error {
	all, err := hostHierarchies()
	if err != nil {
		return err
	}
	var errs []error
	deadline := time.Now().Add(cgroupTimeout)
	for _, h := range all {
		top := filepath.Join(h.path, name)
		for {
			err := removeTree(top)
			if err == nil {
				break
			}
			if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
				errs = append(errs, fmt.Errorf("remove cgroup (processes in it: see %s/cgroup.procs): %w", top, err))
				break
			}
			time.Sleep(cgroupInterval)
		}
	}
	return errors.Join(errs...)
}

// removeTree removes the directories of a cgroup, the deepest first.
func removeTree(top string) error {
	entries, err := os.ReadDir(top)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(top, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(top); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "rmdir", Path: top, Err: err}
	}
	return nil
}
