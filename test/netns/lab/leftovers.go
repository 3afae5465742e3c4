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

	"github.com/vishvananda/netns"
)

const (
	// namePrefix begins the names of all labs; the process id follows.
	namePrefix = "ks-"
	// nsDir is where named namespaces are.
	nsDir = "/run/netns"
)

// Leftovers lists what is still there of a closed lab: namespaces, its
// directory, and processes in the lab's directory.
func (l *Lab) Leftovers() ([]string, error) {
	var out []string
	names, err := namespaces()
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		if strings.HasPrefix(n, l.Prefix) {
			out = append(out, "network namespace "+n)
		}
	}
	if _, err := os.Lstat(l.Dir); l.Dir != "" && err == nil {
		out = append(out, "directory "+l.Dir)
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		return nil, err
	}
	for _, p := range procs {
		// A process may end while we look.
		cwd, err := os.Readlink(p)
		if err == nil && l.Dir != "" && strings.HasPrefix(cwd, l.Dir) {
			comm, _ := os.ReadFile(filepath.Join(filepath.Dir(p), "comm"))
			out = append(out, fmt.Sprintf("process %s (%s)", filepath.Base(filepath.Dir(p)), strings.TrimSpace(string(comm))))
		}
	}
	return out, nil
}

// Sweep removes the namespaces and directories of labs whose process was
// killed before it could. It returns what it removed.
func Sweep() ([]string, error) {
	names, err := namespaces()
	if err != nil {
		return nil, err
	}
	var (
		out  []string
		errs []error
	)
	for _, n := range names {
		if !dead(n) {
			continue
		}
		if err := netns.DeleteNamed(n); err != nil {
			errs = append(errs, fmt.Errorf("remove network namespace %s: %w", n, err))
			continue
		}
		out = append(out, "network namespace "+n)
	}
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), namePrefix+"*"))
	errs = append(errs, err)
	for _, d := range dirs {
		if !dead(filepath.Base(d)) {
			continue
		}
		if err := os.RemoveAll(d); err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, "directory "+d)
	}
	return out, errors.Join(errs...)
}

// dead says whether a name is of a lab whose process is not there any more.
func dead(name string) bool {
	pid, ok := labPID(name)
	return ok && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
}

// labPID reads the process id from a name such as ks-1234-5f3a-node1.
func labPID(name string) (int, bool) {
	rest, ok := strings.CutPrefix(name, namePrefix)
	id, after, more := strings.Cut(rest, "-")
	pid, err := strconv.Atoi(id)
	if !ok || !more || err != nil || pid <= 1 || len(after) < 4 {
		return 0, false
	}
	_, err = strconv.ParseUint(after[:4], 16, 16)
	return pid, err == nil
}

func namespaces() ([]string, error) {
	entries, err := os.ReadDir(nsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out, nil
}
