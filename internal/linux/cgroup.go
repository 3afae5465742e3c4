// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// Cgroups is the hierarchy of cgroup v2 as the node's first process sees it: a process in a cgroup namespace of its own, as
// those of containers are, sees its own part only.
type Cgroups struct {
	root *os.File // a mount of ours that is attached nowhere
	// partial says that it is what is below this process's own cgroup.
	partial bool
}

// OpenCgroups opens the hierarchy. In a container it needs to see the node's first process (hostPID: true, CAP_SYS_PTRACE). It mounts
// (CAP_SYS_ADMIN).
func OpenCgroups() (*Cgroups, error) {
	var c Cgroups
	err := inNodesCgroups(func() (err error) {
		if c.root, err = mountCgroups(); err != nil {
			return err
		}
		c.partial, err = isOwnPart(c.root)
		return err
	})
	if err != nil {
		return nil, feature("cgroup v2 of the node", "use a kernel with cgroup v2 (CONFIG_CGROUPS)", err)
	}
	return &c, nil
}

// isOwnPart tells whether the root of a mount, which is that of the thread's cgroup namespace, is the thread's own cgroup, and not that of
// the whole hierarchy.
func isOwnPart(root *os.File) (bool, error) {
	const ofAll = 1 // the ID
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return false, os.NewSyscallError("fstat", err)
	}
	text, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return st.Ino != ofAll && (name == "/" || strings.HasPrefix(name, "/..")), nil
		}
	}
	return false, nil
}

// Close closes the hierarchy, and cgroups that were opened in it are of no more use.
func (c *Cgroups) Close() error { return c.root.Close() }

// mountCgroups mounts cgroup v2 without attaching it anywhere. Its root is that of the thread's cgroup namespace.
func mountCgroups() (*os.File, error) {
	fd, err := unix.Fsopen("cgroup2", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fd)
	if err := unix.FsconfigCreate(fd); err != nil {
		return nil, os.NewSyscallError("fsconfig", err)
	}
	mount, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	return os.NewFile(uintptr(mount), "cgroup2"), nil
}

// inNodesCgroups calls f on a thread that is in the cgroup namespace of the node's first process, or in its own if it may not
// look at that one: then it finds what is below its own cgroup.
func inNodesCgroups(f func() error) error {
	own, err := os.Stat("/proc/thread-self/ns/cgroup")
	if err != nil {
		return err
	}
	nodes, err := os.Stat("/proc/1/ns/cgroup")
	if errors.Is(err, fs.ErrPermission) || err == nil && os.SameFile(nodes, own) {
		return f()
	}
	if err != nil {
		return err
	}
	onDisposableThread(func() {
		var ns *os.File
		if ns, err = os.Open("/proc/1/ns/cgroup"); err != nil {
			return
		}
		defer func() { _ = ns.Close() }()
		if err = os.NewSyscallError("setns", unix.Setns(int(ns.Fd()), unix.CLONE_NEWCGROUP)); err == nil {
			err = f()
		}
	})
	return err
}

// A Cgroup is one of the hierarchy: that of a pod in the node's network.
type Cgroup struct {
	all  *Cgroups
	path string
	id   uint64
}

// Open opens the cgroup at a path from the root, as "/system.slice/redis.service". The error is [ErrGone] if there is none.
func (c *Cgroups) Open(name string) (*Cgroup, error) {
	if name == "/" || path.Clean(name) != name || !path.IsAbs(name) {
		return nil, fmt.Errorf("open cgroup %q: want the path of one below the root, as /system.slice/redis.service", name)
	}
	g := &Cgroup{all: c, path: name}
	st, err := g.stat()
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("open cgroup %s: %w", name, err)
	}
	g.id = st.Ino
	return g, nil
}

// dir is the path of a cgroup's directory.
func (c *Cgroups) dir(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d%s", c.root.Fd(), name)
}

func (g *Cgroup) stat() (st unix.Stat_t, err error) {
	name := g.all.dir(g.path)
	if err := unix.Stat(name, &st); err != nil {
		return st, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return st, fmt.Errorf("%s is a file of a cgroup, and none itself", g.path)
	}
	return st, nil
}

// ID is the number by which the kernel knows the cgroup. No other one gets it.
func (g *Cgroup) ID() uint64 { return g.id }

// Path is that of the cgroup from the root.
func (g *Cgroup) Path() string { return g.path }

// String names the cgroup for messages.
func (g *Cgroup) String() string { return "cgroup " + g.path }

// level is how many cgroups it is below the root.
func (g *Cgroup) level() uint32 { return uint32(strings.Count(g.path, "/")) }

// Gone tells whether the cgroup was removed.
func (g *Cgroup) Gone() bool {
	st, err := g.stat()
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	return st.Ino != g.id
}

// Family are the IDs of the cgroup and of those below it, however deep they are: programs of all of them are the pod's.
func (g *Cgroup) Family() (map[uint64]bool, error) {
	ids := map[uint64]bool{g.id: true}
	err := g.all.walk(g.path, math.MaxInt, func(_ string, id uint64) (below, done bool) {
		ids[id] = true
		return true, false
	})
	if err != nil {
		return nil, fmt.Errorf("list what is below %s: %w", g, err)
	}
	return ids, nil
}

// FindPods looks for the cgroups that kubelet made for pods, by their UIDs, and returns their paths: "/kubepods/burstable/pod" and
// the UID, or "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" and the UID, with underscores, ".slice", perhaps
// below others. Pods that have none, or not yet, are not in the result. What was found comes also with an error: [ErrTooMuch], if
// programs made very many cgroups at the depth of those of pods, or above.
func (c *Cgroups) FindPods(uids []string) (map[string]string, error) {
	names := make(map[string]string, 2*len(uids))
	for _, uid := range uids {
		names["pod"+uid] = uid
		names["pod"+strings.ReplaceAll(uid, "-", "_")+".slice"] = uid
	}
	found := map[string]string{}
	err := c.walk("", maxCgroupDepth, func(name string, _ uint64) (below, done bool) {
		base := path.Base(name)
		if i := strings.LastIndex(base, "-pod"); i >= 0 && strings.HasPrefix(base, "kube") {
			base = base[i+1:]
		}
		if uid, ok := names[base]; ok && found[uid] == "" {
			found[uid] = name
		}
		// What runs in a pod, or in a service of the node, has no pods below it.
		below = !strings.HasPrefix(base, "pod") && !strings.HasSuffix(base, ".scope") && !strings.HasSuffix(base, ".service")
		return below, len(found) == len(uids)
	})
	if err != nil {
		err = fmt.Errorf("look for the cgroups of %d pods: %w", len(uids), err)
	}
	return found, err
}

// ErrPartial means that this process sees the cgroups below its own only, so that nobody knows whether others are gone.
var ErrPartial = errors.New("the node's cgroups are out of sight: the agent must see the node's first process (in a pod hostPID: true and CAP_SYS_PTRACE)")

// Paths returns the paths of cgroups by their IDs. Those that are gone are not in the result. With an error, which may be
// [ErrPartial], others may be missing, too.
func (c *Cgroups) Paths(ids []uint64) (map[uint64]string, error) {
	wanted := make(map[uint64]bool, len(ids))
	for _, id := range ids {
		wanted[id] = true
	}
	found := map[uint64]string{}
	err := c.walk("", maxCgroupDepth, func(name string, id uint64) (below, done bool) {
		if wanted[id] {
			found[id] = name
		}
		return true, len(found) == len(wanted)
	})
	if c.partial && len(found) < len(wanted) {
		err = errors.Join(err, ErrPartial)
	}
	if err != nil {
		err = fmt.Errorf("look for %d cgroups: %w", len(ids), err)
	}
	return found, err
}

// walk calls f for the cgroups below one, which come and go meanwhile, until f is done, and goes on below those of which f says so. It
// looks at all of one depth before it looks at deeper ones: a program that makes very many has them below its own cgroup, and those of
// pods, and what the configuration names, are rarely deeper than that.
func (c *Cgroups) walk(name string, deepest int, f func(name string, id uint64) (below, done bool)) error {
	left := maxCgroups
	for level := []string{name}; len(level) > 0; {
		var next []string
		for _, above := range level {
			done, err := c.children(above, &left, func(name string, id uint64) bool {
				below, done := f(name, id)
				if below && strings.Count(name, "/") < deepest {
					next = append(next, name)
				}
				return done
			})
			if done || err != nil {
				return err
			}
		}
		level = next
	}
	return nil
}

// children calls f for the cgroups just below one, until f is done. It looks at as many as are left.
func (c *Cgroups) children(name string, left *int, f func(name string, id uint64) bool) (done bool, err error) {
	d, err := os.Open(c.dir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = d.Close() }()
	for {
		entries, err := d.ReadDir(searchBatch)
		for _, e := range entries {
			if !e.IsDir() {
				continue
			}
			if *left--; *left < 0 {
				return false, fmt.Errorf("the hierarchy of cgroups %w", ErrTooMuch)
			}
			g := Cgroup{all: c, path: name + "/" + e.Name()}
			st, err := g.stat()
			switch {
			case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV): // it is gone
			case err != nil:
				return false, err
			case f(g.path, st.Ino):
				return true, nil
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
			return false, nil
		case err != nil:
			return false, err
		}
	}
}

// A Place is where the sockets of a pod are: in a network namespace of its own or, with a Cgroup, those of this cgroup, and of the ones
// below it, in that of the node.
type Place struct {
	NetNS  *NetNS
	Cgroup *Cgroup // nil: the whole namespace
}

// In is the whole of a namespace.
func In(ns *NetNS) Place { return Place{NetNS: ns} }

// String names the place for messages.
func (p Place) String() string {
	if p.Cgroup != nil {
		return p.Cgroup.String()
	}
	return p.NetNS.String()
}
